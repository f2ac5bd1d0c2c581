r"""`MathChecker`: whether a completion's answer is mathematically equal to a ground truth.

    with closing(MathChecker()) as checker:
        right = (["1/2"], r"So it is \boxed{0.5}.")
        wrong = (["1/2"], "I do not know.")
        checker.check([right, wrong])

The answer is the content of the last `\boxed{}` or `\fbox{}`. Without a box math-verify looks for
it after "the answer is", else it takes the last expression. It parses LaTeX, fractions,
percentages, units, sets, intervals and matrices, and compares by algebra. Algebra can take for ever
or fill the memory, and math-verify's timeouts work in a main thread only. So it runs in processes
of its own, which get one item at a time as JSON. An alarm ends a process that takes too long, even
if its parent is dead.

These processes import this module, which therefore stays light.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import queue
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from treeward.errors import ConfigError, ModelError, pip_install

_MEMORY_BYTES = 4 * 2**30
_MATHEMATICS = ("$", "\\boxed", "\\(", "\\[")
_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
"""A box, or a brace that TeX pairs; a backslash takes what it escapes."""


@dataclass(frozen=True, slots=True)
class MathVerdict:
    """`correct`: None if unknown, with the reason in `error`. `parsed`: the completion has an
    answer."""

    correct: bool | None
    parsed: bool = True
    error: str | None = None


class MathChecker:
    """Compares answers in processes, which start when needed and end with `close`.

    `timeout_seconds`: for one item. Raises `ConfigError` if math-verify is not installed.
    """

    def __init__(self, *, workers: int = 2, timeout_seconds: float = 5.0) -> None:
        if importlib.util.find_spec("math_verify") is None:
            summary = "the rule math needs the package math_verify"
            raise ConfigError(summary, field="rule", got="math", fix=pip_install("math"))
        self.workers = workers
        self.timeout_seconds = timeout_seconds
        # One place for each process, None until it is needed. The last one that was used comes
        # first: for few items few are started.
        self._processes: queue.LifoQueue[subprocess.Popen[str] | None] = queue.LifoQueue()
        for _ in range(workers):
            self._processes.put(None)

    def check(self, items: Sequence[tuple[Sequence[str], str]]) -> list[MathVerdict]:
        """Compare each (accepted ground truths, completion), in order; one equal ground truth is
        enough.

        Ground truths may be bare (`1/2`, `50%`) or marked as mathematics (`$...$`, `\\boxed{...}`).
        Raises `ModelError` if the processes do not start.
        """
        with ThreadPoolExecutor(self.workers) as threads:
            return list(threads.map(self._check, items))

    def close(self) -> None:
        """End the processes. The next comparison starts new ones."""
        # `get` waits for those that are comparing.
        for _ in range(self.workers):
            _end(self._processes.get())
        for _ in range(self.workers):
            self._processes.put(None)

    def _check(self, item: tuple[Sequence[str], str]) -> MathVerdict:
        golds, completion = item
        process = self._processes.get()
        try:
            if process is None or process.poll() is not None:
                process = _start()
            assert process.stdin is not None and process.stdout is not None
            verdict = ""  # as of a process that has died
            with contextlib.suppress(BrokenPipeError):
                request = json.dumps([self.timeout_seconds, list(golds), completion])
                # JSON escapes the line ends of texts: an item is one line.
                process.stdin.write(request + "\n")
                process.stdin.flush()
                verdict = process.stdout.readline().strip()
            if verdict:
                return MathVerdict(*json.loads(verdict))
            reason = "the process that compared the answer died"
            if process.wait() == -signal.SIGALRM:
                reason = "the answer could not be compared in time"
            _end(process)
            process = None
            return MathVerdict(None, error=reason)
        finally:
            self._processes.put(process)


def marked(text: str) -> str:
    """A bare ground truth marked as mathematics: otherwise math-verify would read only its last
    number."""
    if any(mark in text for mark in _MATHEMATICS):
        return text
    return f"\\boxed{{{text}}}"


def last_box(text: str) -> str | None:
    """The content of the last `\\boxed{}` or `\\fbox{}` that is closed; None without one."""
    last: tuple[int, int] | None = None
    # Where the content of each open box begins; None for another brace.
    opened: list[int | None] = []
    for match in _BRACE.finditer(text):
        if match["box"]:
            opened.append(match.end())
        elif match["open"]:
            opened.append(None)
        elif match["close"] and opened:
            start = opened.pop()
            # A box within a box closes first and begins later: it is the last.
            if start is not None and (last is None or start > last[0]):
                last = start, match.start()
    if last is None:
        return None
    start, end = last
    return text[start:end]


def number_text(value: float | int) -> str:
    """A number without an exponent, in which math-verify would read Euler's e."""
    return format(Decimal(repr(value)), "f")


def _start() -> subprocess.Popen[str]:
    # As this process finds treeward: "" stands for its working folder.
    python_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import serve; serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": python_path},
    )
    assert process.stdout is not None
    if not process.stdout.readline():
        raise ModelError(
            "the processes of the math rule failed to start",
            got=f"exit code {process.wait()}",
            fix="read their messages on stderr",
        )
    return process


def _end(process: subprocess.Popen[str] | None) -> None:
    if process is None:
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # of what was not read
            pipe.close()  # type: ignore[union-attr]


# The functions below run in the processes.


def serve() -> None:
    """Compare items from standard input, one a line, and print the verdict on each as a line."""
    out = sys.stdout
    sys.stdout = sys.stderr  # libraries may print, too
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it ends the process
    # Ctrl-C and a closed terminal are the parent's, which may go on to save.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs whole completions
    # Its imports take a second, which is not of the time limit of the first item.
    _compare(["1/2"], "It is 0.5")
    with contextlib.suppress(ValueError, OSError):  # not every system has this limit
        _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, hard_limit))
    print("ready", file=out, flush=True)  # noqa: T201
    for line in sys.stdin:
        seconds, golds, completion = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        verdict = json.dumps(_compare(golds, completion))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(verdict, file=out, flush=True)  # noqa: T201


def _answer(text: str) -> str:
    """The last box alone, or the whole text without one."""
    # math-verify joins boxes that are near each other into a set, and knows no fbox.
    box = last_box(text)
    return text if box is None else f"\\boxed{{{box}}}"


def _compare(golds: Sequence[str], completion: str) -> tuple[bool | None, bool, str | None]:
    """The fields of a `MathVerdict`."""
    import math_verify

    try:
        # Without the timeouts of math-verify: the alarm of `serve` is the only one.
        parsed: list[Any] = []
        for gold in golds:
            expressions = math_verify.parse(marked(_answer(gold)), parsing_timeout=None)
            if expressions:
                parsed.append(expressions)
        if not parsed:
            return None, True, "the ground truth is not mathematics that can be parsed"
        answer = math_verify.parse(_answer(completion), parsing_timeout=None)
        if not answer:
            return False, False, None
        # The ground truth comes first: verify is not symmetric.
        for gold in parsed:
            if math_verify.verify(gold, answer, timeout_seconds=None):
                return True, True, None
        return False, True, None
    except MemoryError:
        return None, True, "comparing the answer took too much memory"
