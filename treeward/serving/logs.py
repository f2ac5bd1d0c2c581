"""The server's log: a line for each record on standard error, as text or as JSON.

configure("json")
{"time": "2026-11-20T12:00:00.123+00:00", "level": "info", "logger": "treeward.requests", "message": "POST ...",
 "request_id": "3f2a...", "bytes": 512}
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

__all__ = ["configure"]

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(form: Literal["text", "json"], *, debug: bool = False) -> None:
    """Send all records there, and nowhere else: treeward's from INFO on, those of libraries from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO if debug else logging.WARNING)
    logging.getLogger("treeward").setLevel(logging.DEBUG if debug else logging.INFO)
    logging.captureWarnings(True)


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    # what begins with an underscore is other libraries' own, as Ray's time stamps
    return {key: value for key, value in vars(record).items() if key not in _STANDARD and not key.startswith("_")}


class _TextFormatter(logging.Formatter):
    """`HH:MM:SS message key=value ...`; the level when it is not INFO."""

    def __init__(self) -> None:
        super().__init__(datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        extras = "".join(f" {key}={value}" for key, value in _extras(record).items())
        return f"{self.formatTime(record, self.datefmt)} {level}{_printable(record.message + extras)}"


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(line, default=str).decode()
        except TypeError:  # a lone surrogate, a number of more than 64 bits
            return json.dumps(line, default=str)


def _printable(text: str) -> str:
    """A message may hold what a client sent: it stays one line, and says nothing to the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
