import fcntl
import io
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap
import warnings

import pytest

from treeward.cli.logging import configure_logging
from treeward.training.progress import TrainingProgress, _duration, _short_count


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def restored_logging():
    root, ours = logging.getLogger(), logging.getLogger("treeward")
    before = root.handlers[:], root.level, ours.level
    yield
    logging.captureWarnings(False)
    root.handlers[:], root.level, ours.level = before[0], before[1], before[2]
    logging.getLogger("py.warnings").handlers.clear()


def test_lines_without_a_terminal(clock, caplog):
    caplog.set_level(logging.INFO)
    with TrainingProgress(100, line_seconds=10, stream=io.StringIO(), clock=clock) as progress:
        for step in range(1, 101):
            clock.now += 2.0
            progress.update(step, {"loss": 0.5, "accuracy": 0.75}, 4000)
    assert caplog.messages[0] == "step 1/100  loss 0.5000  accuracy 0.7500  2.00k tokens/s  3:18 left"
    assert [int(re.match(r"step (\d+)/100", line)[1]) for line in caplog.messages] == [1, *range(6, 100, 5), 100]
    assert caplog.messages[-1].endswith("2.00k tokens/s  0:00 left")


def test_after_a_resume_the_rate_and_the_time_left_are_those_of_this_session(clock, caplog):
    caplog.set_level(logging.INFO)
    with TrainingProgress(1000, initial_step=900, stream=io.StringIO(), clock=clock) as progress:
        assert progress.tokens_per_second is None and progress.seconds_left is None
        clock.now += 10.0
        progress.update(910, {"loss": 0.5, "accuracy": 0.75}, 5000)
        assert progress.tokens_per_second == 500.0
        assert progress.seconds_left == 90.0
    assert caplog.messages[0].startswith("step 910/1000 ")


def test_pauses_lower_the_time_left_but_not_the_rate(clock):
    with TrainingProgress(20, stream=io.StringIO(), clock=clock) as progress:
        clock.now += 10.0
        progress.update(10, {"loss": 0.5, "accuracy": 0.75}, 5000)
        with progress.paused():
            clock.now += 30.0
        assert progress.tokens_per_second == 500.0
        assert progress.seconds_left == 40.0


def test_messages_without_a_terminal_are_logged_line_by_line(caplog):
    caplog.set_level(logging.INFO)
    with TrainingProgress(1, stream=io.StringIO()) as progress:
        progress.message("set  accuracy\nplain  0.9")
    assert caplog.messages == ["set  accuracy", "plain  0.9"]


def test_disabled_shows_nothing(caplog):
    caplog.set_level(logging.INFO)
    terminal = Terminal()
    with TrainingProgress(2, enabled=False, stream=terminal) as progress:
        progress.update(1, {"loss": 0.5, "accuracy": 0.5}, 10)
        progress.message("text")
    assert terminal.getvalue() == "" and caplog.messages == []


def test_the_bar_on_a_terminal(clock, caplog, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    caplog.set_level(logging.INFO)
    terminal = Terminal()
    with TrainingProgress(10, initial_step=4, stream=terminal, clock=clock) as progress:
        for step in range(5, 11):
            clock.now += 1.0
            progress.update(step, {"loss": 0.51, "accuracy": 0.752}, 12_300)
        assert "10/10" in terminal.getvalue()  # although six steps came at once
        progress.message("validation-default: accuracy 0.9")
    shown = terminal.getvalue()
    assert " 40%|" in shown and "4/10" in shown  # the start is where the run was
    assert shown.rstrip().endswith("10/10  loss 0.510  accuracy 0.752  12.3k tok/s  0:00 left")
    assert "\rvalidation-default: accuracy 0.9\n" in shown
    assert caplog.messages == []


def test_a_dumb_terminal_gets_lines(monkeypatch, caplog):
    monkeypatch.setenv("TERM", "dumb")
    caplog.set_level(logging.INFO)
    terminal = Terminal()
    with TrainingProgress(1, stream=terminal) as progress:
        progress.update(1, {"loss": 0.5, "accuracy": 0.5}, 10)
    assert terminal.getvalue() == "" and len(caplog.messages) == 1


def test_wrong_steps_are_refused():
    with pytest.raises(ValueError, match="initial_step"):
        TrainingProgress(10, initial_step=11)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999.4, "999"),
        (999.6, "1.00k"),
        (12345, "12.3k"),
        (99_960, "100k"),
        (999_900, "1.00M"),
        (2.5e9, "2.50G"),
    ],
)
def test_short_counts(value, text):
    assert _short_count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3599.4, "59:59"), (3723, "1:02:03"), (184_000, "2d 03:06:40")]
)
def test_durations(seconds, text):
    assert _duration(seconds) == text


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


@pytest.mark.parametrize("size", [(0, 0), (24, 70), (24, 120)])
def test_bar_and_log_share_a_real_terminal(size):
    """In a pseudo-terminal, also one of unknown size: logged text has its lines alone and one bar is left."""
    script = textwrap.dedent("""
        import logging, time
        from treeward.cli.logging import configure_logging
        from treeward.training.progress import TrainingProgress
        configure_logging("INFO")
        with TrainingProgress(4, initial_step=1) as progress:
            for step in (2, 3, 4):
                time.sleep(0.02)
                progress.update(step, {"loss": 0.5, "accuracy": 0.5}, 100)
                logging.getLogger("treeward").info("logged %d", step)
            progress.message("said")
    """)
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    environment = os.environ | {"TERM": "xterm", "NO_COLOR": "1"}
    with subprocess.Popen([sys.executable, "-c", script], stderr=child, env=environment) as process:
        os.close(child)
        output = b""
        while chunk := _read(parent):
            output += chunk
    os.close(parent)
    assert process.returncode == 0, output
    lines = [line.rsplit("\r", 1)[-1] for line in output.decode().rstrip().replace("\r\n", "\n").split("\n")]
    logged = [line for line in lines if "logged" in line or "said" in line]
    assert [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in logged] == ["logged 2", "logged 3", "logged 4", "said"]
    assert len([line for line in lines if "%|" in line]) == 1, output
    assert "4/4" in lines[-1] and lines[-1].endswith(" left")


def _read(descriptor):
    try:
        return os.read(descriptor, 4096)
    except OSError:  # Linux: the other end is closed
        return b""
