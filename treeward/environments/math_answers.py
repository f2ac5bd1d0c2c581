r"""`MathChecker`: whether a completion's answer is mathematically equal to a ground truth.

    with MathChecker() as checker:
        checker.check([(["1/2"], r"So it is \boxed{0.5}."), (["1/2"], "I do not know.")])    # correct, wrong

math-verify extracts the answer from the completion (in `\boxed{}`, after "the answer is", else the last expression),
parses it (LaTeX, fractions, percentages, units, sets, intervals, matrices) and compares it by algebra. Algebra can take
for ever or fill the memory, and math-verify's own timeouts work in a main thread only. So it runs in processes of its
own: each item has a time limit, first by an alarm inside the process, then by the end of the process.

Those processes import this module: it stays light.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import multiprocessing
import multiprocessing.context
import resource
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from treeward.errors import ConfigError, ModelError

__all__ = ["MathChecker", "MathVerdict", "marked", "number_text"]

logger = logging.getLogger(__name__)

_Finding = Literal["correct", "wrong", "unparsed", "gold_unparsed", "gold_timeout", "timeout", "memory"]

_GRACE_SECONDS = 2.0
_MEMORY_BYTES = 4 * 2**30
_MOST_POOLS = 3
_MATHEMATICS = ("$", "\\boxed", "\\(", "\\[")

_ERRORS: dict[str, str] = {
    "gold_unparsed": "the ground truth is not mathematics that can be parsed",
    "gold_timeout": "the ground truth could not be parsed in time",
    "timeout": "the answer could not be compared in time",
    "memory": "comparing the answer took too much memory",
}


@dataclass(frozen=True, slots=True)
class MathVerdict:
    """`correct`: None if it is not known, and `error` says why. `parsed`: the completion has an answer."""

    correct: bool | None
    parsed: bool = True
    error: str | None = None


class MathChecker:
    """Compares answers in processes, which start with the first comparison and end with `close`.

    `timeout_seconds`: for one item. Raises `ConfigError` where math-verify or pebble is not installed.
    """

    def __init__(self, *, workers: int = 2, timeout_seconds: float = 5.0) -> None:
        missing = [name for name in ("math_verify", "pebble") if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"the rule math needs the package {missing[0]}",
                field="rule",
                got="math",
                fix="pip install 'treeward[math]'",
            )
        self.workers, self.timeout_seconds = workers, timeout_seconds
        self._pool: Any = None
        self._lock = threading.Lock()

    def __enter__(self) -> MathChecker:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def check(self, items: Sequence[tuple[Sequence[str], str]]) -> list[MathVerdict]:
        """Compare each (accepted ground truths, completion), in order; one equal ground truth is enough.

        Ground truths may be bare (`1/2`, `50%`) or marked as mathematics (`$...$`, `\\boxed{...}`). Processes that die
        are replaced. Raises `ModelError` if they keep dying.
        """
        with self._lock:
            verdicts: list[MathVerdict | None] = [None] * len(items)
            for _ in range(_MOST_POOLS):
                self._check_open(items, verdicts)
                finished = [verdict for verdict in verdicts if verdict is not None]
                if len(finished) == len(items):
                    return finished
                logger.warning("the processes of the math rule died; they are started again")
                self._stop()
        raise ModelError(
            "the processes of the math rule do not stay alive",
            got=f"{_MOST_POOLS} pools that died",
            need="room for processes and memory",
            fix="read their messages on stderr; fewer workers need less memory",
        )

    def close(self) -> None:
        """End the processes. The next comparison would start new ones."""
        with self._lock:
            self._stop()

    def _check_open(self, items: Sequence[tuple[Sequence[str], str]], verdicts: list[MathVerdict | None]) -> None:
        """Fill in the verdicts that are still None, until the pool dies."""
        futures: list[tuple[int, Future[_Finding]]] = []
        try:
            if self._pool is None and items:
                self._pool = self._start()
            for i, (golds, reply) in enumerate(items):
                if verdicts[i] is None:
                    limit = self.timeout_seconds + _GRACE_SECONDS
                    arguments = (tuple(golds), reply, self.timeout_seconds)
                    futures.append((i, self._pool.schedule(_compare, args=arguments, timeout=limit)))
        except (BrokenProcessPool, RuntimeError):  # pebble says with a RuntimeError that its pool has failed
            pass
        from pebble import ProcessExpired

        for i, future in futures:
            try:
                verdicts[i] = _verdict(future.result())
            except TimeoutError:
                verdicts[i] = MathVerdict(None, error=_ERRORS["timeout"])
            except ProcessExpired:
                verdicts[i] = MathVerdict(None, error="the process that compared the answer died")
            except BrokenProcessPool:
                continue

    def _start(self) -> Any:
        from pebble import ProcessPool

        return ProcessPool(max_workers=self.workers, initializer=_prepare, context=_Context())

    def _stop(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            pool.join()


def number_text(value: float | int) -> str:
    """A number without an exponent, in which math-verify would read Euler's e."""
    return format(Decimal(repr(value)), "f")


def _verdict(finding: _Finding) -> MathVerdict:
    if finding in _ERRORS:
        return MathVerdict(None, error=_ERRORS[finding])
    return MathVerdict(finding == "correct", parsed=finding != "unparsed")


# What follows runs in the processes.


class _OutOfTime(BaseException):
    """Not an `Exception`: algebra catches those."""


def _prepare() -> None:
    """Import and warm up, which takes a second, outside the time limit of the first item."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs whole completions
    import math_verify

    one, two = (math_verify.parse(text, parsing_timeout=None) for text in (r"\boxed{\frac{1}{2}}", "It is 0.5"))
    math_verify.verify(one, two, timeout_seconds=None)
    with contextlib.suppress(ValueError, OSError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _compare(golds: Sequence[str], reply: str, seconds: float) -> _Finding:
    import math_verify

    def parsed(text: str) -> list[Any]:
        # No limit here: math-verify's alarm would replace ours.
        found: list[Any] = math_verify.parse(text, parsing_timeout=None)
        return found

    stage: _Finding = "gold_timeout"
    try:
        with _alarm(seconds):
            parsed_golds = [each for each in (parsed(marked(gold)) for gold in golds) if each]
            if not parsed_golds:
                return "gold_unparsed"
            stage = "timeout"
            answer = parsed(reply)
            if not answer:
                return "unparsed"
            equal = any(math_verify.verify(gold, answer, timeout_seconds=None) for gold in parsed_golds)
            return "correct" if equal else "wrong"
    except _OutOfTime:
        return stage
    except MemoryError:
        return "memory"


def marked(text: str) -> str:
    """A bare ground truth, marked as mathematics as a whole: otherwise only its last number would be read."""
    return text if any(mark in text for mark in _MATHEMATICS) else f"\\boxed{{{text}}}"


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: object) -> None:
        raise _OutOfTime

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


# A new process would first run the main script again, as far as it is not under `if __name__ == "__main__"`. These
# processes need nothing of it.


class _Process(multiprocessing.context.SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802
        with _hidden_main_script():
            return multiprocessing.context.SpawnProcess._Popen(process_obj)


class _Context(multiprocessing.context.SpawnContext):
    Process = _Process


@contextlib.contextmanager
def _hidden_main_script() -> Iterator[None]:
    main = sys.modules["__main__"]
    with _HIDING:
        hidden = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
        for name in hidden:
            setattr(main, name, None)
        try:
            yield
        finally:
            for name, value in hidden.items():
                setattr(main, name, value)


_HIDING = threading.Lock()
