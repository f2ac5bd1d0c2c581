"""`Batcher`: conversations of many requests, scored in common batches by a thread beside the event
loop.

    batcher = Batcher({"rm": scorer}, config, ServerMetrics())
    scores = await batcher.score("rm", conversations, deadline=time.monotonic() + 30)

One thread tokenizes the next conversations of each request in turn. Another scores the oldest
tokenized conversation together with others of its model, up to a budget of tokens, without waiting
for a full batch. Conversations with one prompt are batched together, and a conversation that fails
does not fail others.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Protocol, TypeVar

import torch
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    Summary,
    disable_created_metrics,
)

from treeward.config.server import ServerConfig
from treeward.data.conversation import AnyConversation
from treeward.errors import TreewardError
from treeward.scoring.score import Score
from treeward.scoring.scorer import Prepared, PreparedScorer
from treeward.serving.api_error import APIError, shutting_down
from treeward.serving.rendered_text import RenderedText
from treeward.tree.prefix import PrefixCache
from treeward.tree.token_tree import common_prefix_length

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")
_Result = TypeVar("_Result")

_WINDOW = 512
"""Conversations considered for one batch, so that its cost does not grow with the queue."""
_SAME_BYTES = 4 * 32  # 32 tokens, of four bytes each
"""Bytes of tokens that two conversations with one prompt have in common at least."""
_TOKENIZED_AT_ONCE = 64
"""Conversations of one request to tokenize in a turn."""
_MOST_FAILED = 8
"""Batches in a row that fail entirely before the server reports that it is not alive."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

# A `_created` series beside each counter says nothing here, and Prometheus stores it.
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class FailedScore(Score):
    """A missing score by a fault of the server, not of the conversation."""


class ServerMetrics:
    """Counters of one server, for Prometheus.

    prometheus-fastapi-instrumentator adds requests by route and status, and their time, to the same
    registry.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"treeward_{name}", what, labels or ("model",), registry=self.registry)

        self.errors = counter("refused_requests", "Requests that got no scores.", "code")
        self.scores = Summary(
            "treeward_scores",
            "Conversations that were scored.",
            ("model",),
            registry=self.registry,
        )
        self.failures = counter("failures", "Conversations without a score.", "model", "fault")
        self.tokens = counter("tokens", "Tokens of the scored conversations, as plain rows.")
        self.computed = counter("computed_tokens", "Tokens that the model computed, after sharing.")
        self.seconds = Histogram(
            "treeward_batch_seconds",
            "Time of a batch.",
            ("model",),
            buckets=_SECONDS,
            registry=self.registry,
        )

    def count(self, model: str, scores: Sequence[Score]) -> None:
        """Count the scores of a request."""
        for score in scores:
            if score.score is None:
                fault = "server" if isinstance(score, FailedScore) else "request"
                self.failures.labels(model, fault).inc()
            else:
                self.scores.labels(model).observe(score.score)
                self.tokens.labels(model).inc(score.num_tokens)

    def watch_queue(self, num_queued: Callable[[], float]) -> None:
        """Add the gauge of the waiting conversations, which is read when it is scraped."""
        gauge = Gauge(
            "treeward_queued_conversations",
            "Conversations that wait for a score.",
            registry=self.registry,
        )
        gauge.set_function(num_queued)


@dataclass(slots=True, eq=False)
class _Pending:
    """A tokenized conversation for a model, and the future of its score; its request may cancel
    it.
    """

    model: str
    item: Prepared
    future: Future[Score]

    @property
    def tokens(self) -> bytes:
        """In the order of these bytes, equal beginnings are neighbours."""
        assert self.item.ids is not None, "what has an error is not queued"
        return self.item.ids.tobytes()


class AnyBatcher(Protocol):
    """What a service needs of a batcher: `Batcher`, of models in this process, or one whose
    replicas score.
    """

    @property
    def num_queued(self) -> int:
        """Accepted conversations without a score."""

    async def check_alive(self) -> bool:
        """Whether the models score."""

    async def score(
        self,
        model: str,
        conversations: Sequence[AnyConversation | RenderedText],
        *,
        deadline: float,
    ) -> list[Score]:
        """One score for each conversation, in order. `deadline` and errors: as of
        `Batcher.score`.
        """

    def close(self) -> None:
        """Accept no more, and end what was accepted."""


class Batcher:
    """Scores for coroutines, within the limits of the server's configuration."""

    def __init__(
        self,
        scorers: Mapping[str, PreparedScorer],
        config: ServerConfig,
        metrics: ServerMetrics,
    ) -> None:
        self.scorers = dict(scorers)
        self.config = config
        self.metrics = metrics
        # Guards the queue and `_closed`. The scoring thread waits at it while nothing is queued.
        self._lock = threading.Condition()
        self._open: set[Future[Score]] = set()
        self._queue: deque[_Pending] = deque()
        self._closed = False
        self._has_scored: dict[str, Prepared] = {}
        self._failed_in_a_row: dict[str, int] = {}
        # One thread, at which requests take turns.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="treeward-tokenize")
        # A daemon: a batch that never ends does not keep the process alive.
        self._scoring = threading.Thread(target=self._run, name="treeward-score", daemon=True)
        self._scoring.start()

    @property
    def num_queued(self) -> int:
        """Accepted conversations without a score."""
        return len(self._open)

    @property
    def is_alive(self) -> bool:
        """Whether the scoring thread runs, and each model still scores what it has scored
        before.
        """
        most_failed = max(self._failed_in_a_row.values(), default=0)
        return most_failed < _MOST_FAILED and self._scoring.is_alive()

    async def check_alive(self) -> bool:
        """As `is_alive`, which for replicas needs a call."""
        return self.is_alive

    async def score(
        self,
        model: str,
        conversations: Sequence[AnyConversation | RenderedText],
        *,
        deadline: float | None = None,
    ) -> list[Score]:
        """One score for each conversation, in order; a failure of the server is a `FailedScore`.

        `model`: its name. `deadline`: of `time.monotonic`. Raises `APIError`: 429 for a full queue,
        503 after `close`, 504 at the deadline. If the caller is cancelled, pending conversations
        are dropped.
        """
        # A batch of nothing would never be scored.
        if not conversations:
            return []
        number = len(conversations)
        loop = asyncio.get_running_loop()
        seconds = None if deadline is None else deadline - time.monotonic()
        with self._lock:
            if self._closed:
                raise shutting_down()
            check_queue(self.num_queued, number, self.config.max_queued)
            # Not asyncio's, because two other threads complete them.
            futures: list[Future[Score]] = [Future() for _ in conversations]
            self._open.update(futures)
        for future in futures:
            # In the thread that ends the future: a set's `discard` is atomic, and needs no lock.
            future.add_done_callback(self._open.discard)
        try:
            async with asyncio.timeout(seconds):
                # In parts, so that a long request does not keep others from the tokenizing thread.
                for start in range(0, number, _TOKENIZED_AT_ONCE):
                    part = slice(start, start + _TOKENIZED_AT_ONCE)
                    tokenize = partial(self._tokenize, model, conversations[part], futures[part])
                    await loop.run_in_executor(self._tokenizing, tokenize)
                return await asyncio.gather(*map(asyncio.wrap_future, futures))
        except TimeoutError as error:
            # The timeout has cancelled those that were awaited and are not scored.
            scored = [future for future in futures if future.done() and not future.cancelled()]
            num_missing = number - len(scored)
            raise not_in_time(num_missing, number) from error
        finally:
            # Has no effect on those that are done.
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """Stop scoring; pending conversations fail with 503. Waits up to 20 seconds for the current
        batch.
        """
        with self._lock:
            self._closed = True
            # A copy, because a future that ends leaves the set.
            for future in list(self._open):
                is_waiting = not future.running() and not future.done()
                # False of one that its request cancels at this moment.
                if is_waiting and future.set_running_or_notify_cancel():
                    future.set_exception(shutting_down())
            self._queue.clear()
            self._lock.notify_all()
        # A thread inside the model when the interpreter ends could bring it down.
        self._scoring.join(20.0)

    def _tokenize(
        self,
        model: str,
        part: Sequence[AnyConversation | RenderedText],
        futures: Sequence[Future[Score]],
    ) -> None:
        """Tokenize the next conversations of a request, in the tokenizing thread."""
        # The request is gone: it waited for this thread until its deadline or its client's end.
        if all(future.done() for future in futures):
            return
        prepared = _isolated(partial(_prepared, self.scorers[model]), list(part))
        # The scoring thread takes from the queue meanwhile.
        with self._lock:
            for item, future in zip(prepared, futures, strict=True):
                if future.done():
                    continue
                if isinstance(item, Prepared) and item.error is None:
                    self._queue.append(_Pending(model, item, future))
                elif future.set_running_or_notify_cancel():
                    if isinstance(item, FailedScore):
                        future.set_result(item)
                    else:
                        future.set_result(Score(None, item.num_tokens, error=item.error))
            self._lock.notify_all()

    def _run(self) -> None:
        """Score batches until the batcher is closed, in the scoring thread."""
        while not self._closed:
            try:
                self._score_batch()
            # A thread that dies would leave every request hanging.
            except BaseException:
                logger.exception("The scoring thread failed and goes on.")
                # So that an error that comes at once does not fill the disk with logs.
                time.sleep(0.1)

    def _score_batch(self) -> None:
        """Wait for conversations, score the next batch, and hand out the scores."""
        with self._lock:
            self._lock.wait_for(lambda: self._queue or self._closed)
            batch = self._take_batch()
        if not batch:
            return
        model = batch[0].model
        items = [pending.item for pending in batch]
        scorer = self.scorers[model]
        computed_before = scorer.num_computed_tokens
        started = time.monotonic()
        scores = []
        for score in _isolated(partial(_scored, scorer), items):
            # A model that gives no finite number has failed: JSON has no NaN either.
            if score.score is None or not math.isfinite(score.score):
                error = score.error or f"the model gave {score.score}"
                score = FailedScore(None, score.num_tokens, error=error)
            scores.append(score)
        seconds = time.monotonic() - started
        computed = scorer.num_computed_tokens - computed_before
        # Before the metrics: a request need not wait for them.
        for pending, score in zip(batch, scores, strict=True):
            # No request can cancel it: it is running since `_take_batch`.
            pending.future.set_result(score)
        self.metrics.computed.labels(model).inc(computed)
        self.metrics.seconds.labels(model).observe(seconds)
        self._check_model(model, items, scores)

    def _check_model(self, model: str, items: Sequence[Prepared], scores: Sequence[Score]) -> None:
        """If a whole batch failed, test the model with a conversation that it has scored before."""
        good = None
        for item, score in zip(items, scores, strict=True):
            if not isinstance(score, FailedScore):
                good = item
                break
        if good is not None:
            self._has_scored[model] = good
        elif model in self._has_scored:
            # The conversations may be at fault. If one fails that was scored before, the model is.
            [score] = _isolated(partial(_scored, self.scorers[model]), [self._has_scored[model]])
            if isinstance(score, FailedScore):
                self._failed_in_a_row[model] = self._failed_in_a_row.get(model, 0) + 1
                return
        # Also of a model that has scored nothing yet: the conversations may be at fault.
        self._failed_in_a_row[model] = 0

    def _take_batch(self) -> list[_Pending]:
        """The oldest conversation, and others of its model that begin alike, then the next ones, up
        to the budget.
        """
        num_considered = min(_WINDOW, len(self._queue))
        window = [self._queue.popleft() for _ in range(num_considered)]
        window = [pending for pending in window if not pending.future.cancelled()]
        groups: dict[bytes, list[_Pending]] = {}
        for pending in window:
            if pending.model == window[0].model:
                groups.setdefault(pending.tokens[:_SAME_BYTES], []).append(pending)
        ordered: list[_Pending] = []
        for first, *others in groups.values():
            # The oldest stays first, so that nothing waits for ever behind what it is sorted after.
            ordered += [first, *sorted(others, key=attrgetter("tokens"))]
        batch: list[_Pending] = []
        used = 0
        for pending in ordered:
            previous = batch[-1].item if batch else None
            used += _cost(self.scorers[pending.model], pending.item, previous)
            # A conversation above the budget is a batch of its own.
            if batch and used > self.config.batch_tokens:
                break
            batch.append(pending)
        taken = set(batch)
        # `extendleft` puts each one before the last: reversed, the window keeps its order.
        left = [pending for pending in reversed(window) if pending not in taken]
        self._queue.extendleft(left)
        # A request may have cancelled its future since the window was read.
        return [pending for pending in batch if pending.future.set_running_or_notify_cancel()]


def check_queue(num_queued: int, number: int, limit: int) -> None:
    """Raise `APIError` for more conversations than may ever wait, 413, and for a queue that is too
    long, 429.
    """
    if number > limit:
        message = f"{number} conversations in one request; at most {limit}"
        raise APIError(413, "too_many_conversations", message)
    if num_queued + number > limit:
        message = f"{num_queued} conversations are waiting, and at most {limit} may"
        raise APIError(429, "queue_full", message, retry_after=1)


def not_in_time(num_missing: int, number: int) -> APIError:
    """A request that has reached its deadline."""
    message = f"not scored in time: {num_missing} of {number} conversations were not scored yet"
    return APIError(504, "deadline_exceeded", message, retry_after=1)


def _prepared(
    scorer: PreparedScorer,
    inputs: Sequence[AnyConversation | RenderedText],
) -> list[Prepared]:
    """The tokens of conversations, in order; a conversation that cannot be scored has an error."""
    chats = [item for item in inputs if not isinstance(item, RenderedText)]
    texts = [item.text for item in inputs if isinstance(item, RenderedText)]
    prepared_chats = iter(scorer.prepare(chats, on_error="mask"))
    prepared_texts = iter(scorer.prepare_texts(texts))
    prepared = []
    for item in inputs:
        if isinstance(item, RenderedText):
            prepared.append(next(prepared_texts))
        else:
            prepared.append(next(prepared_chats))
    return prepared


def _scored(scorer: PreparedScorer, items: Sequence[Prepared]) -> list[Score]:
    """Scores in order. Passes on the model's errors; if it has run out of memory, cached prompts
    are dropped first.
    """
    try:
        return scorer.score_prepared(items, on_error="mask")
    except (torch.OutOfMemoryError, MemoryError):
        # Cached prompts are the memory that can be freed. The next batches compute them again.
        for cache in _caches(scorer):
            cache.clear()
        torch.cuda.empty_cache()
        raise


def _cost(scorer: PreparedScorer, item: Prepared, like: Prepared | None) -> int:
    """About how many tokens a conversation adds to a batch with a conversation `like` it."""
    assert item.ids is not None, "what has an error is not queued"
    caches = _caches(scorer)
    # The members of an ensemble see the same prompts, so one cache tells for all.
    cached = caches[0].match(item.ids) if caches else 0
    shared = 0
    if like is not None and like.ids is not None:
        shared = common_prefix_length(item.ids, like.ids)
    # `num_tokens` counts the tokens of all members, `ids` those of the first.
    share_computed = 1 - max(cached, shared) / len(item.ids)
    return math.ceil(item.num_tokens * share_computed)


def _caches(scorer: PreparedScorer) -> list[PrefixCache]:
    # Members with one folder are one scorer, whose cache counts once.
    members = dict.fromkeys(scorer.members)
    return [member.prefix_cache for member in members if member.prefix_cache is not None]


def _isolated(
    function: Callable[[list[_Value]], Sequence[_Result]],
    values: list[_Value],
) -> list[_Result | FailedScore]:
    """The function's results for all values; if it fails, for each value alone."""
    try:
        results = function(values)
        assert len(results) == len(values), "a result for each conversation"
        return list(results)
    except TreewardError as problem:
        error = problem.in_one_line
    # A panic in a library's native code is not an Exception.
    except BaseException as problem:
        if len(values) == 1:
            logger.exception("A conversation could not be scored.")
        error = f"the server failed: {type(problem).__name__}; its log has the details"
    if len(values) == 1:
        return [FailedScore(None, error=error)]
    logger.warning("%d conversations failed together: %a. Each is tried alone.", len(values), error)
    return [_isolated(function, [value])[0] for value in values]
