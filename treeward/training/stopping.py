"""`StopRequest`: SIGTERM, Ctrl-C and the deadline ask a run to finish its step, save and leave.

    with StopRequest(deadline_seconds=None) as stop:
        while not stop.reason: ...        # "SIGTERM", "SIGINT" or "checkpoint_must_save_by"

A second signal is not caught: it ends the process at once, as does kill -9, and the last checkpoint stands. A signal
that the process was started to ignore (a background job of a script ignores Ctrl-C) stays ignored.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any, Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether the run shall stop, and why.

    `deadline_seconds` counts from the construction; the deadline asks to stop `reserved_seconds` earlier, the time that
    the run expects to need until it is saved.
    """

    def __init__(self, *, deadline_seconds: float | None = None) -> None:
        self._deadline = None if deadline_seconds is None else time.monotonic() + deadline_seconds
        self.reserved_seconds = 0.0
        self._signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            heeded = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._receive) for number in heeded}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

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

    def _receive(self, number: int, frame: object) -> None:
        self._signal = number
        self.__exit__()
        name = signal.Signals(number).name
        text = f"\n{name}: finishing this step, then leaving; what is done is saved. A second one leaves at once.\n"
        # Not by logging: a handler may run in the middle of another write to standard error.
        with contextlib.suppress(OSError):
            os.write(2, text.encode())
