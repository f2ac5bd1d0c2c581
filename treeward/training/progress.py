"""`TrainingProgress`: what a person sees while a model trains, one bar on a terminal or plain lines in a log.

    with TrainingProgress(total_steps, initial_step=resumed_at, enabled=rank == 0) as progress:
        for step in range(resumed_at + 1, total_steps + 1):
            ...
            progress.update(step, {"loss": 0.41, "accuracy": 0.83}, tokens=16_384)
            with progress.paused():                     # validation and checkpoints do not lower tokens per second
                progress.message(validate())

A step's number is that of the steps that are done after it. After a resume the bar starts where the run was, and the
rate and the time left are those of this session alone. On a terminal the bar is drawn on standard error; elsewhere one
line at most every `line_seconds` seconds goes to `logging`, with the same numbers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import NoReturn, Self, TextIO

from tqdm import tqdm

__all__ = ["TrainingProgress"]

_logger = logging.getLogger(__name__)
_DEFAULT_COLUMNS, _DEFAULT_ROWS = 80, 24


class TrainingProgress:
    """Progress of a run of `total_steps` optimizer steps, of which `initial_step` were done before this session.

    `enabled=False` shows nothing (ranks other than the first). `line_seconds` is the least time between two plain
    lines; the first and the last step always have one. `stream` (default: standard error) decides whether there is a
    terminal; `clock` returns seconds.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        initial_step: int = 0,
        enabled: bool = True,
        line_seconds: float = 10.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 <= initial_step <= total_steps:
            raise ValueError(f"initial_step must lie in [0, {total_steps}], got {initial_step}")
        self.total_steps = total_steps
        self._step = self._initial_step = initial_step
        self._enabled = enabled
        self._line_seconds = line_seconds
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._bar: tqdm[NoReturn] | None = None
        self._started = 0.0
        self._paused_seconds = 0.0
        self._tokens = 0
        self._last_line: float | None = None

    def __enter__(self) -> Self:
        self._started = self._clock()
        if self._enabled and _is_terminal(self._stream):
            measurable = _columns(self._stream) > 0
            self._bar = tqdm(
                total=self.total_steps,
                initial=self._initial_step,
                file=self._stream,
                dynamic_ncols=measurable,
                ncols=None if measurable else _DEFAULT_COLUMNS,
                nrows=None if measurable else _DEFAULT_ROWS,
                miniters=1,  # else tqdm guesses how many steps to skip, and a slow step shows late
                # The rate and the time left are ours: tqdm's would count validation as training.
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}  {desc}",
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def update(self, step: int, numbers: Mapping[str, float], tokens: int) -> None:
        """Report that `step` steps are done; `tokens` are those that this step has trained on, as plain rows."""
        now = self._clock()
        advance, self._step = step - self._step, step
        self._tokens += tokens
        if not self._enabled:
            return
        rate, left = self._tokens_per_second(now), self._seconds_left(now)
        speed, remaining = "?" if rate is None else _short_count(rate), "?" if left is None else _duration(left)
        if self._bar is not None:
            text = f"{_shown(numbers, 3)}  {speed} tok/s  {remaining} left"
            self._bar.set_description_str(text, refresh=False)
            self._bar.update(advance)
            if step >= self.total_steps:
                self._bar.refresh()  # tqdm draws at most ten times a second; the last step must not be left out
        elif self._last_line is None or now - self._last_line >= self._line_seconds or step >= self.total_steps:
            self._last_line = now
            text = _shown(numbers, 4)
            _logger.info("step %d/%d  %s  %s tokens/s  %s left", step, self.total_steps, text, speed, remaining)

    def message(self, text: str) -> None:
        """Print `text` above the bar, or log it line by line where there is no terminal."""
        if not self._enabled:
            return
        if self._bar is not None:
            tqdm.write(text, file=self._stream)
            return
        for line in text.splitlines():
            _logger.info("%s", line)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside is no training time: it does not lower tokens per second. The time left does count it."""
        start = self._clock()
        try:
            yield
        finally:
            self._paused_seconds += self._clock() - start

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of this session by its seconds of training; None before the first step."""
        return self._tokens_per_second(self._clock())

    @property
    def seconds_left(self) -> float | None:
        """Wall-clock seconds to the last step at this session's pace, pauses included; None before the first step."""
        return self._seconds_left(self._clock())

    def _tokens_per_second(self, now: float) -> float | None:
        seconds = now - self._started - self._paused_seconds
        return self._tokens / seconds if self._tokens and seconds > 0 else None

    def _seconds_left(self, now: float) -> float | None:
        done = self._step - self._initial_step
        return (now - self._started) / done * (self.total_steps - self._step) if done > 0 else None


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _columns(stream: TextIO) -> int:
    """Columns of the terminal; 0 if it does not say (some containers and CI), where tqdm would draw nothing."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except OSError:
        return 0


def _shown(numbers: Mapping[str, float], digits: int) -> str:
    return "  ".join(f"{name} {value:.{digits}f}" for name, value in numbers.items())


def _short_count(value: float) -> str:
    """Three figures and a unit: 950, 12.3k, 1.20M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{unit}"
    return f"{value:.0f}"


def _duration(seconds: float) -> str:
    """As a clock shows it: 4:05, 1:02:03, 2d 03:04:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
