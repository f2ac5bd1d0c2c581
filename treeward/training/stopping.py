"""`StopRequest`: SIGTERM, Ctrl-C and the deadline ask a run to finish its step, save and leave.

    with StopRequest(deadline_seconds=None) as stop:
        while not stop.reason: ...        # "SIGTERM", "SIGINT" or "checkpoint_must_save_by"
        stop.doing = REPORTING            # the text that a signal prints from here on

A second signal is not caught: it ends the process at once, as does kill -9, and the last checkpoint stands. A signal
that the process was started to ignore (a background job of a script ignores Ctrl-C) stays ignored.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["REPORTING", "TRAINING", "StopRequest"]

TRAINING = "finishing this step, saving, then leaving. A second one leaves at once, without saving."
REPORTING = (
    "leaving the report as far as it is; the model is saved, and so are the rows that were scored. A second one leaves "
    "at once."
)
"""The text that a signal prints, while a run trains and while it writes its report."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether the run shall stop, and why.

    `deadline_seconds` counts from the construction; the deadline asks to stop `reserved_seconds` earlier, the time that
    the run expects to need until it is saved. `doing`: the text that a signal prints.
    """

    def __init__(self, *, deadline_seconds: float | None = None) -> None:
        self._deadline = None if deadline_seconds is None else time.monotonic() + deadline_seconds
        self.reserved_seconds = 0.0
        self.doing = TRAINING
        self._signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            heeded = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._receive) for number in heeded}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    @property
    def reason(self) -> str | None:
        if self._signal is not None:
            return signal.Signals(self._signal).name
        if self._deadline is not None and time.monotonic() + self.reserved_seconds >= self._deadline:
            return "checkpoint_must_save_by"
        return None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as a shell reports it; 0 where the deadline was reached."""
        return 0 if self._signal is None else 128 + self._signal

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        self._restore()
        name = signal.Signals(number).name
        text = f"\n{name}: {self.doing}\n"
        # Not by logging: a handler may run in the middle of another write to standard error.
        with contextlib.suppress(OSError):
            os.write(2, text.encode())

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
