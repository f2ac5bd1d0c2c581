"""Ctrl-C that nothing swallows: a command that was interrupted ends with 130, and replaces nothing.

    @heeding_interrupts
    def run(arguments):
        constants = work(arguments)
        check_interrupts()            # before anything is replaced
        write(constants)

Python raises `KeyboardInterrupt` wherever the program happens to be. In a `__del__`, in the callback of a weak
reference (imports have many) or below an `except:` of a library it is dropped, and the program goes on as if nobody had
asked it to stop.
"""

from __future__ import annotations

import _thread
import functools
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["check_interrupts", "heeding_interrupts"]

_interrupted = threading.Event()
_AGAIN_AFTER = 0.02  # seconds


def check_interrupts() -> None:
    """Raise `KeyboardInterrupt` if a Ctrl-C has come, in this command, that was lost on its way."""
    if _interrupted.is_set():
        raise KeyboardInterrupt


def heeding_interrupts(run: Callable[..., int]) -> Callable[..., int]:
    """Decorator of a verb's `run`: an interrupt that is dropped is raised again, at the latest where `run` returns.

    A process that was started to ignore Ctrl-C, as a background job of a script, goes on ignoring it; handlers that
    `run` installs itself count while they are there.
    """

    @functools.wraps(run)
    def heeding(*arguments: Any, **options: Any) -> int:
        ours = signal.getsignal(signal.SIGINT) == signal.default_int_handler
        if not ours or threading.current_thread() is not threading.main_thread():
            return run(*arguments, **options)  # elsewhere Python allows no handlers
        _interrupted.clear()
        report = sys.unraisablehook

        def raise_again(unraisable: sys.UnraisableHookArgs) -> None:
            if not issubclass(unraisable.exc_type, KeyboardInterrupt):
                report(unraisable)
                return
            _thread.start_new_thread(_interrupt_again, ())

        sys.unraisablehook = raise_again
        signal.signal(signal.SIGINT, _receive)
        try:
            code = run(*arguments, **options)
            check_interrupts()
        except Exception as error:  # what comes of an import that was cut short, as a ModuleNotFoundError
            if _interrupted.is_set():
                raise KeyboardInterrupt from error
            raise
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.unraisablehook = report
            _interrupted.clear()
        return code

    return heeding


def _interrupt_again() -> None:
    """Once more, when the hook that calls this has returned: raised inside of it, it would be dropped again."""
    time.sleep(_AGAIN_AFTER)
    if _interrupted.is_set():  # else the command has ended meanwhile
        _thread.interrupt_main()


def _receive(number: int, frame: FrameType | None) -> None:
    _interrupted.set()
    raise KeyboardInterrupt
