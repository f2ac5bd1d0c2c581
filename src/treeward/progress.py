"""`ShownProgress`: what a person sees while something long runs, a bar on a terminal and lines in a
log elsewhere.

    with ShownProgress(unit="rows") as shown:
        shown.show("scoring", 3, 10)                        # scoring: 3 of 10 rows

    with ShownProgress(unit="steps") as shown:
        shown.show("training", resumed_at, total_steps)     # rate and time left count from here
        shown.show("training", step, total_steps, {"loss": 0.41}, tokens=16_384)
        with shown.paused("validating"):        # validation does not lower tokens per second
            shown.message(validate())
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from treeward.formatting import metric_text

if TYPE_CHECKING:
    from rich.progress import Progress

logger = logging.getLogger(__name__)

_HUB_RETRIES = "huggingface_hub.utils._http"
"""The logger by which huggingface_hub tells of each attempt at a request."""
_SAID_ONCE = (_HUB_RETRIES, "treeward.config.load")
"""Loggers that repeat themselves: there are five attempts, and a command reads its configuration
once more with what it has chosen."""


class ShownProgress:
    """Progress of one task after the other, on standard error or, without a terminal, in the log.

    `unit`: what is counted. `enabled`: False shows nothing. `line_seconds`: least time between two
    lines of the log.
    """

    def __init__(
        self, *, unit: str = "examples", enabled: bool = True, line_seconds: float = 10.0
    ) -> None:
        self._unit = unit
        self._enabled = enabled
        self._line_seconds = line_seconds
        self._what: str | None = None
        self._bar: Progress | None = None
        # These are the current task's; `_begin` sets them.
        self._started = 0.0
        self._last_line = 0.0
        self._paused_seconds = 0.0
        self._first = 0
        self._tokens = 0

    def __enter__(self) -> ShownProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._what = None  # a later task of the same name begins anew
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def show(
        self,
        what: str,
        done: int,
        total: int,
        numbers: Mapping[str, float] | None = None,
        *,
        tokens: int = 0,
    ) -> None:
        """`done` of `total` (0: unknown) of the task `what`; `tokens` were computed since the last
        call."""
        if not self._enabled:
            return
        if what != self._what:
            self._begin(what, done, total)
        self._tokens += tokens
        now = time.monotonic()
        numbers = numbers or {}
        texts = [f"{name} {metric_text(name, value)}" for name, value in numbers.items()]
        computing_seconds = now - self._started - self._paused_seconds
        if self._tokens and computing_seconds > 0:
            texts.append(f"{self._tokens / computing_seconds:,.0f} tokens/s")
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, note="  ".join(texts))
        else:
            # The first step and the last are logged at once: somebody waits for these.
            is_due = now - self._last_line >= self._line_seconds
            is_first_or_last = done in (self._first + 1, total)
            if is_due or (numbers and is_first_or_last):
                self._last_line = now
                count = f"{done:,}"
                if total:
                    count += f" of {total:,}"
                if numbers and total:
                    # Validations count here: the user wants to know when the run is over.
                    seconds_for_each = (now - self._started) / max(done - self._first, 1)
                    seconds_left = round(seconds_for_each * (total - done))
                    texts.append(f"{timedelta(seconds=seconds_left)} left")
                logger.info("%s", "  ".join([f"{what}: {count} {self._unit}", *texts]))
        if total and done == total:
            self.__exit__()

    def message(self, text: str) -> None:
        """Print `text` above the bar, or log it line by line."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        for line in text.splitlines():
            logger.info("%s", line)

    @contextlib.contextmanager
    def paused(self, what: str) -> Iterator[None]:
        """The time spent inside does not lower tokens per second; the time left does count it.
        Meanwhile "WHAT ..." is shown every `line_seconds`."""
        is_over = threading.Event()
        start = time.monotonic()

        def tell() -> None:
            while not is_over.wait(self._line_seconds):
                self.message(f"{what} ...")

        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            self._paused_seconds += time.monotonic() - start

    def _begin(self, what: str, done: int, total: int) -> None:
        self.__exit__()
        self._what = what
        # A resumed run begins at the step of its checkpoint: earlier steps took no time of this
        # one.
        self._first = done
        self._tokens = 0
        self._paused_seconds = 0.0
        self._started = time.monotonic()
        self._last_line = self._started
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            # The import takes a tenth of a second, which `treeward --help` would take too.
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._bar.add_task(what, total=total or None, completed=done, note="")
            self._bar.start()


def configure_logging(*, debug: bool = False) -> None:
    """Send log records and Python warnings to standard error, above a progress bar if there is one.

    treeward's messages show from INFO on, other libraries' from WARNING on; with `debug` from DEBUG
    and INFO on. Those of `_SAID_ONCE` show once. A second call replaces the first; handlers that
    others have installed stay. Of the processes of torchrun only the first one shows what all would
    say.
    """
    root = logging.getLogger()
    ours = logging.getLogger("treeward")
    others = [old for old in root.handlers if not isinstance(old, StandardErrorHandler)]
    root.handlers = others
    handler = StandardErrorHandler()
    handler.setFormatter(_Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    if os.environ.get("RANK", "0") != "0":
        handler.setLevel(logging.CRITICAL)
    root.addHandler(handler)
    if debug:
        root.setLevel(logging.INFO)
        ours.setLevel(logging.DEBUG)
        verbosity = "info"
    else:
        root.setLevel(logging.WARNING)
        ours.setLevel(logging.INFO)
        verbosity = "error"
    logging.captureWarnings(True)
    handler.addFilter(_Once())
    # huggingface_hub has a handler too, and would show each message twice.
    hub = logging.getLogger(_HUB_RETRIES)
    hub.handlers = [handler]
    hub.propagate = False
    # In the environment, because the processes that the run starts read it too.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", verbosity)


class _Once(logging.Filter):
    """Lets a message of `_SAID_ONCE` through once; messages that differ in numbers alone are the
    same."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name not in _SAID_ONCE:
            return True
        message = re.sub(r"\d+", "#", record.getMessage())
        is_new = message not in self._seen
        self._seen.add(message)
        return is_new


class _Formatter(logging.Formatter):
    """`HH:MM:SS message`; before the message the level, when it is not INFO."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        clock = self.formatTime(record, self.datefmt)
        if record.levelno == logging.INFO:
            return f"{clock} {record.message}"
        return f"{clock} {record.levelname} {record.message}"


def show_logs() -> None:
    """`configure_logging`, if nobody has configured logging: Python alone shows no message below
    WARNING."""
    if not logging.getLogger("treeward").hasHandlers():
        configure_logging()


class StandardErrorHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Looks standard error up at every message: a bar puts itself in its place, and so does a
    notebook."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)
