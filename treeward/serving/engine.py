"""`Engine`: conversations of many requests at a time, scored in common batches, in threads beside the event loop.

    engine = Engine([served_model], batch_tokens=4096, max_queued=20_000)
    outcomes = await engine.score(engine.model("rm"), conversations, deadline=time.monotonic() + 30)

One thread makes tokens of what has arrived, another takes whatever is ready, up to a budget of tokens, and scores it:
nothing waits for a batch to fill. Requests take turns (`treeward.serving.queueing`). Conversations with one prompt are
batched together, and each is scored as if it were alone.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from treeward.errors import TreewardError
from treeward.scoring.score import Score
from treeward.serving.models import Asked, Item, ServedModel, too_long, weight
from treeward.serving.queueing import TURN, Line, Outcome, Work, prompts_together
from treeward.serving.refusals import Refusal, in_words

__all__ = ["Engine", "Observer", "Outcome"]

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")
_Result = TypeVar("_Result")

_PREPARED_AT_ONCE = 64
_CHARACTERS_AT_ONCE = 2**19
"""Tokens are made of so much text, or of one conversation, before the next request has its turn."""
_BATCHES_AHEAD = 32
"""Tokens are made of conversations for about so many batches ahead: they need more memory than the text."""
_LONGEST_NAME = 100


class Observer(Protocol):
    """Is told, in the threads of the engine, what was scored, and by the event loop what is not wanted any more."""

    def batch(
        self, model: str, num_conversations: int, num_tokens: int, num_computed_tokens: int, seconds: float
    ) -> None: ...

    def outcome(self, model: str, outcome: Outcome) -> None: ...

    def forgotten(self, model: str, num_conversations: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Failure:
    """An exception, in words. Not the exception itself: that would hold on to the memory of the frames it passed."""

    error: str


class Engine:
    """Scores for coroutines. `max_queued`: conversations that may wait; a larger request is taken if nothing waits.
    `max_characters`: of a conversation (`treeward.serving.models.weight`); a longer one is refused.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        batch_tokens: int = 4096,
        max_queued: int = 20_000,
        max_characters: int = 1_000_000,
        observer: Observer | None = None,
    ) -> None:
        self.models: Mapping[str, ServedModel] = {model.name: model for model in models}
        self.batch_tokens, self.max_queued, self.max_characters = batch_tokens, max_queued, max_characters
        self.observer = observer
        self.num_queued = 0
        """Conversations that were accepted and have no outcome yet."""
        self._lock = threading.Condition()
        self._arrived, self._waiting = Line(), Line()  # for their tokens, and for a batch
        self._open: set[Work] = set()
        self._ready_tokens = 0
        self._closing = self._stopped = False
        self._per_second = 0.0
        self._last_good: dict[str, Item] = {}
        self._broken: set[str] = set()
        self._threads = [
            threading.Thread(target=self._run, args=(step,), name=f"treeward-{step.__name__.strip('_')}", daemon=True)
            for step in (self._prepare_some, self._score_some)
        ]
        for thread in self._threads:
            thread.start()

    def model(self, name: str | None) -> ServedModel:
        """The model of this name, the first for None. Raises `Refusal` 404."""
        if name is None:
            return next(iter(self.models.values()))
        found = self.models.get(name)
        if found is None:
            shown = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
            served = ", ".join(self.models)
            raise Refusal(404, "model_not_found", f"no model is called {shown!r}; here are: {served}", param="model")
        return found

    @property
    def is_alive(self) -> bool:
        """Whether both threads run, and no model fails at what it has scored before."""
        return not self._broken and all(thread.is_alive() for thread in self._threads)

    @property
    def is_closing(self) -> bool:
        """Whether nothing more is accepted."""
        return self._closing

    async def score(
        self, model: ServedModel, conversations: Sequence[Asked], *, deadline: float | None = None
    ) -> list[Outcome]:
        """One outcome for each conversation, in order.

        `deadline`: of `time.monotonic`. Raises `Refusal`: 429 where too many wait, 503 where it closes, 504 at the
        deadline. If the caller is cancelled, what was not scored yet is forgotten.
        """
        if not conversations:
            return []
        seconds = None if deadline is None else deadline - time.monotonic()
        future: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()
        work = Work(model, conversations, future, [None] * len(conversations), missing=len(conversations))
        if seconds is not None and seconds <= 0:
            raise self._too_late(work)
        self._accept(work)
        try:
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError as error:
            raise self._too_late(work) from error
        finally:
            self._give_up(work)

    @property
    def seconds_of_queue(self) -> float:
        """About how long what is queued will take, from 1 to 60."""
        return min(max(math.ceil(self.num_queued / self._per_second), 1), 60) if self._per_second else 1

    async def close(self, timeout: float = 0.0, *, join_seconds: float = 20.0) -> bool:
        """Accept nothing more, finish what was accepted, and stop; whether all was finished in time.

        What was not is refused with 503. `join_seconds`: how long to wait for the threads after that, which end when
        what they are at is done.
        """
        end = time.monotonic() + timeout
        with self._lock:
            self._closing = True
        while self.num_queued and time.monotonic() < end:
            await asyncio.sleep(0.02)
        with self._lock:
            self._stopped = True
            left = list(self._open)
            self._lock.notify_all()
        for work in left:
            self._give_up(work)
        refusal = Refusal(503, "shutting_down", "the server has shut down before this was scored", retry_after=5)
        _tell(left, lambda work: work.future.set_exception(refusal))
        # A thread inside the model when the interpreter ends could bring it down.
        end = time.monotonic() + join_seconds
        while any(thread.is_alive() for thread in self._threads) and time.monotonic() < end:
            await asyncio.sleep(0.01)
        return not left

    def _accept(self, work: Work) -> None:
        with self._lock:
            if self._closing:
                raise Refusal(503, "shutting_down", "the server is shutting down", retry_after=5)
            if self.num_queued and self.num_queued + work.missing > self.max_queued:
                raise Refusal(
                    429,
                    "queue_full",
                    f"{self.num_queued} conversations are waiting, and at most {self.max_queued} may",
                    retry_after=self.seconds_of_queue,
                )
            self.num_queued += work.missing
            self._open.add(work)
            self._arrived.add(work)
            self._lock.notify_all()

    def _give_up(self, work: Work) -> None:
        """Forget what has no outcome yet; of a request that is complete there is nothing to forget."""
        with self._lock:
            if work.over:
                return
            self._end(work)
            self.num_queued -= work.missing
            self._lock.notify_all()
        self._observe(lambda observer: observer.forgotten(work.model.name, work.missing))

    def _end(self, work: Work) -> None:
        work.over = True
        self._open.discard(work)
        self._arrived.discard(work)
        self._waiting.discard(work)
        self._ready_tokens -= sum(item.num_tokens for _, item in work.ready)
        work.ready.clear()

    def _too_late(self, work: Work) -> Refusal:
        message = f"not answered in time: {work.missing} of {len(work.conversations)} conversations were not scored yet"
        return Refusal(504, "deadline_exceeded", message, retry_after=self.seconds_of_queue)

    def _run(self, step: Callable[[], None]) -> None:
        while not self._stopped:
            try:
                step()
            except BaseException:  # a thread that dies would leave every request hanging
                logger.exception("A scoring thread failed and goes on.")
                time.sleep(0.1)

    def _prepare_some(self) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self._stopped or self._arrived.any(self._has_room))
            taken = self._take_unprepared()
        if not taken:
            return
        model = taken[0][0].model
        limit = self.max_characters
        within = [i for i, (_, _, size) in enumerate(taken) if size <= limit]
        prepared = _isolated(model.prepare, [taken[i][0].conversations[taken[i][1]] for i in within]) if within else []
        items: list[Item | _Failure] = [too_long(limit)] * len(taken)
        for i, item in zip(within, prepared, strict=True):
            items[i] = item
        failed: list[tuple[Work, int, Outcome]] = []
        with self._lock:
            for (work, i, _), item in zip(taken, items, strict=True):
                if isinstance(item, _Failure):
                    failed.append((work, i, Outcome(Score(None, error=item.error))))
                elif item.error is not None:
                    score = Score(None, item.num_tokens, error=item.error)
                    failed.append((work, i, Outcome(score, by_request=True)))
                elif not work.over:
                    work.ready.append((i, item))
                    self._ready_tokens += item.num_tokens
                    self._waiting.add(work)
            self._lock.notify_all()
        self._settle(failed)

    def _has_room(self, work: Work) -> bool:
        """Whether more tokens may be made of a request; twice as many of one that has none ready, so that it does not
        wait for those before it.
        """
        limit = _BATCHES_AHEAD * self.batch_tokens
        return self._ready_tokens < (limit if work.ready else 2 * limit)

    def _take_unprepared(self) -> list[tuple[Work, int, int]]:
        """Conversations of which tokens are made next, as their request, their place in it and their weight."""
        taken: list[tuple[Work, int, int]] = []
        queue = deque(self._arrived.next_works(lambda work: work.num_prepared, self._has_room))
        used, full = 0, False
        while queue and not full and len(taken) < _PREPARED_AT_ONCE:
            work = queue.popleft()
            for i in range(work.num_prepared, min(work.num_prepared + TURN, len(work.conversations))):
                size = weight(work.conversations[i], self.max_characters)
                # What is too long is only refused, which takes no time.
                cost = size if size <= self.max_characters else 0
                if taken and used + cost > _CHARACTERS_AT_ONCE:
                    full = True
                    break
                used += cost
                taken.append((work, i, size))
                work.num_prepared = i + 1
            if work.num_prepared == len(work.conversations):
                self._arrived.discard(work)
            else:
                queue.append(work)
        return taken

    def _score_some(self) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self._waiting or self._stopped)
            batch = self._take_batch()
        if not batch:
            return
        model, items = batch[0][0].model, [item for _, _, item in batch]
        started, computed = time.monotonic(), model.num_computed_tokens
        scores = _isolated(model.score, items)
        seconds = time.monotonic() - started
        rate = len(batch) / max(seconds, 1e-6)
        self._per_second = rate if not self._per_second else 0.9 * self._per_second + 0.1 * rate
        tokens, computed = sum(item.num_tokens for item in items), model.num_computed_tokens - computed
        self._observe(lambda observer: observer.batch(model.name, len(batch), tokens, computed, seconds))
        self._settle([(work, i, _outcome(item, s)) for (work, i, item), s in zip(batch, scores, strict=True)])
        self._check_model(model, items, scores)

    def _take_batch(self) -> list[tuple[Work, int, Item]]:
        """What one forward pass holds: of one model, a few conversations of each request in turn."""
        queue = deque(prompts_together(self._waiting.next_works(lambda work: work.num_taken)))
        batch: list[tuple[Work, int, Item]] = []
        prompts: set[int] = set()
        used, full = 0, False
        while queue and not full:
            work = queue.popleft()
            for _ in range(min(TURN, len(work.ready))):
                i, item = work.ready[0]
                cost = work.model.cost(item, prompts)
                if batch and used + cost > self.batch_tokens:
                    full = True
                    break
                work.ready.popleft()
                work.num_taken += 1
                self._ready_tokens -= item.num_tokens
                prompts.add(item.prompt)
                used += cost
                batch.append((work, i, item))
            if work.ready:
                queue.append(work)
            else:
                self._waiting.discard(work)
        if batch:
            self._lock.notify_all()  # there is room for more tokens
        return batch

    def _check_model(self, model: ServedModel, items: Sequence[Item], scores: Sequence[Score | _Failure]) -> None:
        """If nothing of a batch could be scored, see whether the model still scores what it has scored before."""
        good = next((item for item, score in zip(items, scores, strict=True) if not isinstance(score, _Failure)), None)
        if good is None:
            last = self._last_good.get(model.name)
            good = last if last is not None and not isinstance(_isolated(model.score, [last])[0], _Failure) else None
            if last is not None and good is None:
                logger.error("%s fails at what it has scored before: it is broken.", model.name)
                self._broken.add(model.name)
        if good is not None:
            self._last_good[model.name] = good
            self._broken.discard(model.name)

    def _settle(self, outcomes: Sequence[tuple[Work, int, Outcome]]) -> None:
        """Hand outcomes to their requests; those that are complete wake up, all by one call of their event loop."""
        complete: list[Work] = []
        wanted: list[tuple[str, Outcome]] = []
        with self._lock:
            for work, i, outcome in outcomes:
                if work.over:
                    continue
                wanted.append((work.model.name, outcome))
                work.outcomes[i] = outcome
                work.missing -= 1
                self.num_queued -= 1
                if not work.missing:
                    self._end(work)
                    complete.append(work)
        for name, outcome in wanted:
            self._observe(partial(_count, name=name, outcome=outcome))
        _tell(complete, lambda work: work.future.set_result([one for one in work.outcomes if one is not None]))

    def _observe(self, tell: Callable[[Observer], None]) -> None:
        if self.observer is not None:
            try:
                tell(self.observer)
            except Exception:  # counting is no reason to lose a score
                logger.exception("The observer of the engine failed.")


def _count(observer: Observer, name: str, outcome: Outcome) -> None:
    observer.outcome(name, outcome)


def _tell(works: Sequence[Work], what: Callable[[Work], None]) -> None:
    """Do something with futures where it is allowed: in their event loops; those that are done stay as they are."""

    def wake(of_loop: Sequence[Work]) -> None:
        for work in of_loop:
            if not work.future.done():
                what(work)

    by_loop: dict[asyncio.AbstractEventLoop, list[Work]] = {}
    for work in works:
        by_loop.setdefault(work.future.get_loop(), []).append(work)
    for loop, of_loop in by_loop.items():
        try:
            loop.call_soon_threadsafe(wake, of_loop)
        except RuntimeError:  # the loop is closed: nobody waits any more
            logger.debug("Scores of %d requests came after the end.", len(of_loop))


def _outcome(item: Item, score: Score | _Failure) -> Outcome:
    if isinstance(score, _Failure):
        return Outcome(Score(None, item.num_tokens, error=score.error))
    if score.score is not None and not math.isfinite(score.score):
        return Outcome(replace(score, score=None, error=f"the model gave {score.score}"))
    return Outcome(score)


def _isolated(function: Callable[[list[_Value]], Sequence[_Result]], values: list[_Value]) -> list[_Result | _Failure]:
    """What the function makes of all values; if it fails, of each half, until what fails is alone."""
    results = _attempt(function, values)
    if not isinstance(results, _Failure):
        return list(results)
    if len(values) == 1:
        return [results]
    logger.warning("%d conversations failed together: %s; they are tried apart.", len(values), results.error)
    middle = len(values) // 2
    return [*_isolated(function, values[:middle]), *_isolated(function, values[middle:])]


def _attempt(
    function: Callable[[list[_Value]], Sequence[_Result]], values: list[_Value]
) -> Sequence[_Result] | _Failure:
    try:
        results = function(values)
        if len(results) == len(values):
            return results
        return _Failure(f"the server failed: {len(results)} results for {len(values)} conversations")
    except TreewardError as error:
        return _Failure(in_words(error))
    except BaseException as error:  # a panic in a library's native code is no Exception
        if len(values) == 1:
            logger.exception("A conversation could not be scored.")
        return _Failure(f"the server failed: {type(error).__name__}; its log has the details")
