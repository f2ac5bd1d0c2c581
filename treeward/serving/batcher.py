"""`Batcher`: conversations of many requests, scored in common batches by two threads beside the event loop.

    batcher = Batcher(config, metrics)
    scores = await batcher.score(served_model, conversations, deadline=time.monotonic() + 30)

One thread tokenizes new conversations. The other takes what is ready, up to a budget of tokens, and scores it: nothing
waits for a batch to fill. Requests take turns (`RequestQueue`). Conversations with one prompt are batched together,
and each is scored as if it were alone: one that fails does not fail others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from treeward.config.server import ServerConfig
from treeward.errors import TreewardError
from treeward.scoring.score import Conversation, Score
from treeward.serving.api_error import APIError, in_words
from treeward.serving.metrics import ServerMetrics
from treeward.serving.models import Item, ServedModel, check_length
from treeward.serving.rendered_text import RenderedText
from treeward.serving.request_queue import TURN, PendingRequest, RequestQueue

__all__ = ["Batcher", "FailedScore"]

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")
_Result = TypeVar("_Result")

_TOKENIZED_AT_ONCE = 64
_BATCHES_AHEAD = 32
"""Conversations are tokenized for about so many batches ahead: tokens need more memory than text."""


@dataclass(frozen=True, slots=True)
class FailedScore(Score):
    """A missing score that is the server's fault, not the conversation's."""


class Batcher:
    """Scores for coroutines, within the limits of the server's configuration."""

    def __init__(self, config: ServerConfig, metrics: ServerMetrics) -> None:
        self.config, self.metrics = config, metrics
        self.num_queued = 0
        """Conversations that were accepted and have no score yet."""
        self._lock = threading.Condition()
        self._new = RequestQueue(lambda request: request.num_prepared)
        self._ready = RequestQueue(lambda request: request.num_taken)
        self._open: set[PendingRequest] = set()
        self._ready_tokens = 0
        self._closed = False
        self._per_second = 0.0
        self._last_good: dict[str, Item] = {}
        self._broken: set[str] = set()
        self._threads = [
            threading.Thread(target=self._run, args=(step,), name=f"treeward-{name}", daemon=True)
            for name, step in (("tokenize", self._tokenize_some), ("score", self._score_some))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether both threads run, and no model fails at what it has scored before."""
        return not self._broken and all(thread.is_alive() for thread in self._threads)

    @property
    def seconds_of_queue(self) -> float:
        """About how long what is queued will take, from 1 to 60."""
        return min(max(math.ceil(self.num_queued / self._per_second), 1), 60) if self._per_second else 1

    async def score(
        self, model: ServedModel, conversations: Sequence[Conversation | RenderedText], *, deadline: float | None = None
    ) -> list[Score]:
        """One score for each conversation, in order; a failure of the server is a `FailedScore`.

        `deadline`: of `time.monotonic`. Raises `APIError`: 429 where too many wait, 503 after `close`, 504 at the
        deadline. If the caller is cancelled, what was not scored yet is forgotten.
        """
        if not conversations:
            return []
        number = len(conversations)
        future: asyncio.Future[list[Score]] = asyncio.get_running_loop().create_future()
        request = PendingRequest(model, conversations, future, [None] * number, num_missing=number)
        self._accept(request)
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                return await future
        except TimeoutError as error:
            message = f"not scored in time: {request.num_missing} of {number} conversations were not scored yet"
            raise APIError(504, "deadline_exceeded", message, retry_after=self.seconds_of_queue) from error
        finally:
            self._forget(request)

    def close(self, *, join_seconds: float = 20.0) -> None:
        """Stop the threads; what was not scored is refused with 503. Waits so long for a batch that is being scored."""
        error = APIError(503, "shutting_down", "the server has shut down before this was scored", retry_after=5)
        with self._lock:
            self._closed = True
            left = list(self._open)
            self._lock.notify_all()
        for request in left:
            self._forget(request)
            _tell(request, lambda future: future.set_exception(error))
        end = time.monotonic() + join_seconds
        for thread in self._threads:  # one inside the model when the interpreter ends could bring it down
            thread.join(max(end - time.monotonic(), 0.0))

    def _accept(self, request: PendingRequest) -> None:
        with self._lock:
            if self._closed:
                raise APIError(503, "shutting_down", "the server is shutting down", retry_after=5)
            limit = self.config.max_queued
            if self.num_queued and self.num_queued + request.num_missing > limit:
                message = f"{self.num_queued} conversations are waiting, and at most {limit} may"
                raise APIError(429, "queue_full", message, retry_after=self.seconds_of_queue)
            self.num_queued += request.num_missing
            self._open.add(request)
            self._new.add(request)
            self._lock.notify_all()

    def _forget(self, request: PendingRequest) -> None:
        """Drop what has no score yet; a complete request has nothing to drop."""
        with self._lock:
            if request.is_over:
                return
            self._end(request)
            self.num_queued -= request.num_missing
            self._lock.notify_all()
        self.metrics.forgotten.labels(request.model.name).inc(request.num_missing)

    def _end(self, request: PendingRequest) -> None:
        request.is_over = True
        self._open.discard(request)
        self._new.discard(request)
        self._ready.discard(request)
        self._ready_tokens -= sum(item.num_tokens for _, item in request.ready)
        request.ready.clear()

    def _run(self, step: Callable[[], None]) -> None:
        while not self._closed:
            try:
                step()
            except BaseException:  # a thread that dies would leave every request hanging
                logger.exception("A scoring thread failed and goes on.")
                time.sleep(0.1)

    def _tokenize_some(self) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self._closed or self._new.any(self._has_room))
            taken = self._take_new()
        if not taken:
            return
        model, limit = taken[0][0].model, self.config.max_conversation_characters
        too_long = [check_length(request.conversations[i], limit) for request, i in taken]
        short = [request.conversations[i] for (request, i), error in zip(taken, too_long, strict=True) if error is None]
        prepared = iter(_isolated(model.prepare, short) if short else [])
        failed: list[tuple[PendingRequest, int, Score]] = []
        with self._lock:
            for (request, i), error in zip(taken, too_long, strict=True):
                item = next(prepared) if error is None else Score(None, error=error)
                if isinstance(item, Item) and item.error is not None:
                    item = Score(None, item.num_tokens, error=item.error)
                if isinstance(item, Score):
                    failed.append((request, i, item))
                elif not request.is_over:
                    request.ready.append((i, item))
                    self._ready_tokens += item.num_tokens
                    self._ready.add(request)
            self._lock.notify_all()
        self._settle(failed)

    def _has_room(self, request: PendingRequest) -> bool:
        """Whether more may be tokenized: twice as much for a request that has nothing ready, so it need not wait."""
        limit = _BATCHES_AHEAD * self.config.batch_tokens
        return self._ready_tokens < (limit if request.ready else 2 * limit)

    def _take_new(self) -> list[tuple[PendingRequest, int]]:
        """The conversations of one model that are tokenized next, as their request and their place in it."""
        taken: list[tuple[PendingRequest, int]] = []
        queue = deque(self._new.next_requests(self._has_room))
        while queue and len(taken) < _TOKENIZED_AT_ONCE:
            request = queue.popleft()
            start = request.num_prepared
            request.num_prepared = min(start + TURN, len(request.conversations))
            taken += [(request, i) for i in range(start, request.num_prepared)]
            if request.num_prepared == len(request.conversations):
                self._new.discard(request)
            else:
                queue.append(request)
        return taken

    def _score_some(self) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self._ready or self._closed)
            batch = self._take_batch()
        if not batch:
            return
        model, items = batch[0][0].model, [item for _, _, item in batch]
        started, computed = time.monotonic(), model.num_computed_tokens
        scores = [_finite(score) for score in _isolated(model.score, items)]
        seconds, computed = time.monotonic() - started, model.num_computed_tokens - computed
        rate = len(batch) / max(seconds, 1e-6)
        self._per_second = rate if not self._per_second else 0.9 * self._per_second + 0.1 * rate
        self._settle([(request, i, score) for (request, i, _), score in zip(batch, scores, strict=True)])
        self.metrics.batch(model.name, sum(item.num_tokens for item in items), computed, seconds)
        self._check_model(model, items, scores)

    def _take_batch(self) -> list[tuple[PendingRequest, int, Item]]:
        """What one forward pass holds: of one model, a few conversations of each request in turn."""
        queue = deque(_prompts_together(self._ready.next_requests()))
        batch: list[tuple[PendingRequest, int, Item]] = []
        prompts: set[int] = set()
        used, is_full = 0, False
        while queue and not is_full:
            request = queue.popleft()
            for _ in range(min(TURN, len(request.ready))):
                i, item = request.ready[0]
                cost = request.model.cost(item, prompts)
                if batch and used + cost > self.config.batch_tokens:
                    is_full = True
                    break
                request.ready.popleft()
                request.num_taken += 1
                self._ready_tokens -= item.num_tokens
                prompts.add(item.prompt)
                used += cost
                batch.append((request, i, item))
            if request.ready:
                queue.append(request)
            else:
                self._ready.discard(request)
        self._lock.notify_all()  # there is room for more tokens
        return batch

    def _check_model(self, model: ServedModel, items: Sequence[Item], scores: Sequence[Score]) -> None:
        """If nothing of a batch could be scored, see whether the model still scores what it has scored before."""
        good = next((item for item, one in zip(items, scores, strict=True) if not isinstance(one, FailedScore)), None)
        last = self._last_good.get(model.name)
        if good is None and last is not None:
            if isinstance(_isolated(model.score, [last])[0], FailedScore):
                logger.error("%s fails at what it has scored before: it is broken.", model.name)
                self._broken.add(model.name)
                return
            good = last
        if good is not None:
            self._last_good[model.name] = good
            self._broken.discard(model.name)

    def _settle(self, scored: Sequence[tuple[PendingRequest, int, Score]]) -> None:
        """Hand scores to their requests; those that are complete wake up."""
        complete: list[PendingRequest] = []
        wanted: list[tuple[str, Score]] = []
        with self._lock:
            for request, i, score in scored:
                if request.is_over:
                    continue
                wanted.append((request.model.name, score))
                request.scores[i] = score
                request.num_missing -= 1
                self.num_queued -= 1
                if not request.num_missing:
                    self._end(request)
                    complete.append(request)
        for name, score in wanted:  # counted before anyone hears of it
            self.metrics.score(name, score.score, by_server=isinstance(score, FailedScore))
        for request in complete:
            _tell(request, lambda future, scores=request.scores: future.set_result(scores))  # type: ignore[misc]


def _tell(request: PendingRequest, what: Callable[[asyncio.Future[list[Score]]], None]) -> None:
    """Do something with a request's future in its event loop, where alone it is allowed."""

    def wake() -> None:
        if not request.future.done():
            what(request.future)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        request.future.get_loop().call_soon_threadsafe(wake)


def _prompts_together(requests: Sequence[PendingRequest]) -> list[PendingRequest]:
    """The same requests; those whose next conversation has the prompt of an earlier one's come right after it."""
    groups: dict[object, list[PendingRequest]] = {}
    for request in requests:
        item = request.ready[0][1]
        groups.setdefault(item.prompt if item.shared_tokens else request, []).append(request)
    return [request for group in groups.values() for request in group]


def _finite(score: Score) -> Score:
    if score.score is not None and not math.isfinite(score.score):
        return FailedScore(None, score.num_tokens, error=f"the model gave {score.score}")
    return FailedScore(None, score.num_tokens, error=score.error) if score.score is None else score


def _isolated(
    function: Callable[[list[_Value]], Sequence[_Result]], values: list[_Value]
) -> list[_Result | FailedScore]:
    """What the function makes of all values; if it fails, of each half, until what fails is alone."""
    try:
        results = function(values)
        if len(results) == len(values):
            return list(results)
        error = f"the server failed: {len(results)} results for {len(values)} conversations"
    except TreewardError as problem:
        error = in_words(problem)
    except BaseException as problem:  # a panic in a library's native code is no Exception
        if len(values) == 1:
            logger.exception("A conversation could not be scored.")
        error = f"the server failed: {type(problem).__name__}; its log has the details"
    if len(values) == 1:
        return [FailedScore(None, error=error)]
    logger.warning("%d conversations failed together: %s; they are tried apart.", len(values), error)
    middle = len(values) // 2
    return [*_isolated(function, values[:middle]), *_isolated(function, values[middle:])]
