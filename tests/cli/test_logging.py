import io
import logging
import re
import warnings

import pytest

from treeward.cli.logging import configure_logging


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def restored_logging():
    root, ours = logging.getLogger(), logging.getLogger("treeward")
    before = root.handlers[:], root.level, ours.level
    yield
    logging.captureWarnings(False)
    root.handlers[:], root.level, ours.level = before[0], before[1], before[2]
    logging.getLogger("py.warnings").handlers.clear()


def test_log_lines(restored_logging):
    stream = io.StringIO()
    logging.captureWarnings(False)  # an earlier test may have left it on, with pytest's own capture in between
    configure_logging("INFO", stream=stream)
    configure_logging("INFO", stream=stream)  # replaces, does not double
    ours = logging.getLogger("treeward.training")
    ours.info("step %d", 3)
    ours.debug("hidden")
    ours.warning("odd")
    logging.getLogger("other").info("hidden")
    logging.getLogger("other").warning("heard")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("from warnings", stacklevel=1)
    lines = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in stream.getvalue().splitlines()]
    assert lines[:3] == ["step 3", "WARNING odd", "WARNING heard"]
    assert "UserWarning: from warnings" in lines[3] and "hidden" not in stream.getvalue()


def test_debugging_shows_names_and_tracebacks(restored_logging):
    stream = io.StringIO()
    configure_logging("DEBUG", stream=stream)
    try:
        raise RuntimeError("cause")
    except RuntimeError:
        logging.getLogger("treeward.x").debug("oh", exc_info=True)
    assert "DEBUG treeward.x: oh\nTraceback" in stream.getvalue()


@pytest.mark.parametrize(("no_color", "coloured"), [(None, True), ("", True), ("1", False)])
def test_colour_only_on_a_terminal_and_without_no_color(restored_logging, monkeypatch, no_color, coloured):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        configure_logging("INFO", stream=stream)
        logging.getLogger("treeward").error("bad")
    assert ("\x1b[" in terminal.getvalue()) is coloured
    assert "\x1b[" not in pipe.getvalue()


def test_an_unknown_level_is_refused(restored_logging):
    with pytest.raises(ValueError, match="LOUD"):
        configure_logging("LOUD")
