"""`StopRequest`: SIGTERM, Ctrl-C, SIGHUP and the deadline ask a run to finish its step, save and
leave.

    with StopRequest(deadline_seconds=None) as stop:
        while not stop.agree(): ...
        stop.reason         # "SIGTERM", "SIGINT", "SIGHUP" or "checkpoint_must_save_by"

`agree` says the same on all processes.
A second SIGTERM or Ctrl-C ends the process at once; with several processes later ones are ignored,
as a terminal and the launcher may both pass on one request. SIGHUP is what a process gets when its
terminal closes. A signal that the process was started to ignore stays ignored.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any, Self

from treeward import processes

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

seconds_before = 0.0
"""How long the command ran before this process, one of its workers."""


class StopRequest:
    """Whether the run shall stop, and why. `deadline_seconds` counts from the construction, less
    `seconds_before`; the deadline asks to stop `reserved_seconds` earlier, the time until the run
    is saved."""

    def __init__(self, *, deadline_seconds: float | None = None) -> None:
        self._deadline: float | None = None
        if deadline_seconds is not None:
            self._deadline = time.monotonic() + deadline_seconds - seconds_before
        self.reserved_seconds = 0.0
        self._signal: int | None = None
        self._agreed: tuple[str, int | None] | None = None
        # What Python does at each signal when nobody waits for it, to be put back in the end.
        self._before: dict[int, Any] = {}
        # Standard output and error, where a person sees them.
        self._terminals: list[int] = []

    def __enter__(self) -> Self:
        # elsewhere Python allows no handlers
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # nohup starts a command with SIGHUP ignored, and the run is to outlive its terminal
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)
            self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @property
    def reason(self) -> str | None:
        """Why the run shall stop; with several processes only the agreed reason."""
        if processes.size() == 1:
            return self._own_reason
        # A process that stopped by its own would leave the others in a collective call.
        if self._agreed is None:
            return None
        return self._agreed[0]

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as a shell reports it; 0 where the deadline was reached."""
        number = self._signal
        if self._agreed is not None:
            number = self._agreed[1]
        if number is None:
            return 0
        return 128 + number

    def agree(self) -> str | None:
        """The reason of any process, on all of them; all call it at the same points. A small
        collective call."""
        if processes.size() > 1 and self._agreed is None:
            for reason, number in processes.gather((self._own_reason, self._signal)):
                if reason is not None:
                    self._agreed = (reason, number)
                    break
        return self.reason

    @property
    def _own_reason(self) -> str | None:
        if self._signal is not None:
            return signal.Signals(self._signal).name
        if (
            self._deadline is not None
            and time.monotonic() + self.reserved_seconds >= self._deadline
        ):
            return "checkpoint_must_save_by"
        return None

    def _receive(self, number: int, frame: object) -> None:
        if self._signal is not None:
            return
        self._signal = number
        # A terminal that was closed gives way to nowhere: each message to it would be an error.
        for descriptor in self._terminals:
            if not os.isatty(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
        text = f"\n{signal.Signals(number).name}: finishing this step, then leaving; "
        text += "what is done is saved."
        if processes.size() == 1:
            # Another SIGTERM or SIGINT now ends the process at once. Not another SIGHUP: for one
            # closed terminal both the shell and the kernel send it, and systemd sends one after
            # its SIGTERM.
            for again in (signal.SIGTERM, signal.SIGINT):
                if again in self._before:
                    signal.signal(again, self._before.pop(again))
            text += " A second one leaves at once."
        # Not by logging: a handler may run in the middle of another write to standard error.
        if processes.is_main():
            with contextlib.suppress(OSError):
                os.write(2, f"{text}\n".encode())
