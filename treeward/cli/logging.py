"""Logging of the commands: one handler on standard error that never breaks a progress bar.

    configure_logging("INFO")
    logging.getLogger("treeward.training").warning("3 pairs dropped")      # 12:03:04 WARNING 3 pairs dropped

treeward's own messages show from the chosen level on, other libraries' from WARNING on (from INFO when treeward's are
shown from DEBUG on). Colour is used on a terminal only, and not if NO_COLOR is set (https://no-color.org).
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

from tqdm import tqdm

__all__ = ["configure_logging"]

_RESET, _DIM, _YELLOW, _RED = "\x1b[0m", "\x1b[2m", "\x1b[33m", "\x1b[31m"


def configure_logging(level: int | str = logging.INFO, *, stream: TextIO | None = None) -> None:
    """Send log records and Python warnings to `stream` (default: standard error at the time of each message).

    Calling it again replaces what it set up before. Handlers that others have installed stay. Raises `ValueError` for
    the name of a level that logging does not know.
    """
    logging.getLogger("treeward").setLevel(level)
    number = logging.getLogger("treeward").level
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _BarHandler)]:
        root.removeHandler(handler)
    root.addHandler(_BarHandler(stream))
    root.setLevel(logging.INFO if number <= logging.DEBUG else max(number, logging.WARNING))
    logging.captureWarnings(True)


class _BarHandler(logging.Handler):
    """Writes through tqdm, which takes a bar off the screen, writes, and draws the bar again."""

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if self._stream is None else self._stream
        try:
            # Made anew: both standard error and the level may have changed since the last record.
            debugging = logging.getLogger("treeward").isEnabledFor(logging.DEBUG)
            tqdm.write(_ShortFormatter(colour=_wants_colour(stream), names=debugging).format(record), file=stream)
        except Exception:  # the contract of logging: a record that cannot be written must not stop the program
            self.handleError(record)


class _ShortFormatter(logging.Formatter):
    """`HH:MM:SS message`; the level when it is not INFO, and the logger's name while debugging."""

    def __init__(self, *, colour: bool, names: bool) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._colour, self._names = colour, names

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        name = f"{record.name}: " if self._names else ""
        paint = _YELLOW if record.levelno == logging.WARNING else _RED if record.levelno > logging.WARNING else ""
        time = self.formatTime(record, self.datefmt)
        if not self._colour:
            return f"{time} {level}{name}{record.message}"
        return f"{_DIM}{time}{_RESET} {paint}{level}{_RESET if paint else ''}{name}{record.message}"


def _wants_colour(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
