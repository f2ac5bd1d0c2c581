"""The server's log: a line for each record on standard error, as text or as JSON.

configure("json")
{"time": "2026-11-20T12:00:00.123+00:00", "level": "info", "logger": "treeward.requests", "message": "POST ...",
 "request_id": "3f2a...", "bytes": 512}

Further fields of a record are in `extra={"facts": {...}}`.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal


def configure(form: Literal["text", "json"], *, debug: bool = False) -> None:
    """Send all records to standard error only: treeward's from INFO on, libraries' from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter(datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO if debug else logging.WARNING)
    logging.getLogger("treeward").setLevel(logging.DEBUG if debug else logging.INFO)
    logging.captureWarnings(True)


class _TextFormatter(logging.Formatter):
    """`HH:MM:SS message key=value ...`; the level when it is not INFO."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        text = record.message + "".join(f" {key}={value}" for key, value in vars(record).get("facts", {}).items())
        # It may hold a client's text: escape line breaks and control characters.
        printable = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
        return f"{self.formatTime(record, self.datefmt)} {level}{printable}"


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **vars(record).get("facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
