"""`Batcher`: conversations of many requests, scored in common batches by a thread beside the event loop.

    batcher = Batcher([loaded_model], config, ServerMetrics())
    scores = await batcher.score("rm", conversations, deadline=time.monotonic() + 30)

One thread tokenizes the next conversations of each request in turn. Another scores tokenized conversations, up to a
budget of tokens, without waiting for a full batch. Requests and models take turns in both. Conversations with one
prompt are batched together, and a conversation that fails does not fail others.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

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
from treeward.errors import TreewardError
from treeward.scoring.score import Conversation, Score
from treeward.scoring.scorer import Prepared
from treeward.serving.api_error import APIError, in_words
from treeward.serving.models import LoadedModel
from treeward.serving.rendered_text import RenderedText

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")
_Result = TypeVar("_Result")

_TURN = 8
"""Conversations of one request in a turn."""
_WINDOW = 512
"""Requests considered for one batch, so that its cost does not grow with the queue."""
_SAME_BYTES = 4 * 32
"""Bytes of tokens that two conversations with one prompt have in common at least."""
_TOKENIZED_AT_ONCE = 64
"""Conversations of one request to tokenize in a turn."""
_MOST_FAILED = 8
"""Batches in a row that fail entirely before the server reports that it is not alive."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_FILL = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 2.0)

disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class FailedScore(Score):
    """A missing score by a fault of the server, not of the conversation."""


class ServerMetrics:
    """Counters of one server, for Prometheus.

    prometheus-fastapi-instrumentator adds requests by route and status, and their time, to the same registry.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._gauges: dict[str, Gauge] = {}

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"treeward_{name}", what, labels or ("model",), registry=self.registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"treeward_{name}", what, ("model",), buckets=buckets, registry=self.registry)

        self.errors = counter("refused_requests", "Requests that got no scores.", "code")
        self.scores = Summary("treeward_scores", "Conversations that were scored.", ("model",), registry=self.registry)
        self.failures = counter("failures", "Conversations without a score.", "model", "fault")
        self.forgotten = counter("forgotten_conversations", "Those whose request had ended before they were scored.")
        self.tokens = counter("tokens", "Tokens of the conversations that were scored, as plain rows.")
        self.computed = counter("computed_tokens", "Tokens that went through the model, after sharing.")
        self.fill = histogram("batch_fill_ratio", "Computed tokens of a batch by the budget of a batch.", _FILL)
        self.seconds = histogram("batch_seconds", "Time of a batch.", _SECONDS)

    def count(self, model: str, scores: Sequence[Score]) -> None:
        """Count the scores of a request."""
        for score in scores:
            if score.score is None:
                self.failures.labels(model, "server" if isinstance(score, FailedScore) else "request").inc()
            else:
                self.scores.labels(model).observe(score.score)
                self.tokens.labels(model).inc(score.num_tokens)

    def watch(self, name: str, what: str, value: Callable[[], float], **labels: str) -> None:
        """Add a gauge that calls `value` when it is scraped."""
        if name not in self._gauges:
            self._gauges[name] = Gauge(f"treeward_{name}", what, tuple(labels), registry=self.registry)
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set_function(value)


@dataclass(slots=True, eq=False)
class _Request:
    """The conversations of one request: `ready` are tokenized, with their place in `scores`.

    `is_over`: it is complete, or its caller has given up.
    """

    model: LoadedModel
    scores: list[Score | None]
    num_missing: int
    future: Future[list[Score]] = field(default_factory=Future)
    ready: deque[tuple[int, Prepared]] = field(default_factory=deque)
    is_over: bool = False


class Batcher:
    """Scores for coroutines, within the limits of the server's configuration."""

    def __init__(self, models: Sequence[LoadedModel], config: ServerConfig, metrics: ServerMetrics) -> None:
        self.models = {model.name: model for model in models}
        self.config, self.metrics = config, metrics
        self.num_queued = 0
        """Accepted conversations without a score."""
        self._lock = threading.Condition()
        self._open: set[_Request] = set()
        self._ready: OrderedDict[_Request, None] = OrderedDict()  # requests with tokenized conversations, by turn
        self._closed = False
        self._per_second = 0.0
        self._has_scored: dict[str, Prepared] = {}
        self._failed_in_a_row: dict[str, int] = {}
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="treeward-tokenize")
        self._scoring = threading.Thread(target=self._run, name="treeward-score", daemon=True)
        self._scoring.start()

    @property
    def is_alive(self) -> bool:
        """Whether the scoring thread runs, and each model still scores what it has scored before."""
        return max([0, *self._failed_in_a_row.values()]) < _MOST_FAILED and self._scoring.is_alive()

    @property
    def seconds_of_queue(self) -> float:
        """The estimated time to score the queue, from 1 to 60."""
        return min(max(math.ceil(self.num_queued / self._per_second), 1), 60) if self._per_second else 1

    async def check_alive(self) -> bool:
        """As `is_alive`, which for replicas needs a call."""
        return self.is_alive

    async def score(
        self, model: str, conversations: Sequence[Conversation | RenderedText], *, deadline: float | None = None
    ) -> list[Score]:
        """One score for each conversation, in order; a failure of the server is a `FailedScore`.

        `model`: its name. `deadline`: of `time.monotonic`. Raises `APIError`: 429 for a full queue, 503 after `close`,
        504 at the deadline. If the caller is cancelled, pending conversations are dropped.
        """
        if not conversations:
            return []
        number, loop = len(conversations), asyncio.get_running_loop()
        request = _Request(self.models[model], [None] * number, number)
        with self._lock:
            if self._closed:
                raise _shut_down()
            check_room(self.num_queued, number, self.config.max_queued, self.seconds_of_queue)
            self.num_queued += number
            self._open.add(request)
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                for start in range(0, number, _TOKENIZED_AT_ONCE):
                    part = conversations[start : start + _TOKENIZED_AT_ONCE]
                    await loop.run_in_executor(self._tokenizing, self._tokenize, request, start, part)
                return await asyncio.wrap_future(request.future)
        except TimeoutError as error:
            raise not_in_time(request.num_missing, number, self.seconds_of_queue) from error
        finally:
            self._end(request)

    def close(self) -> None:
        """Stop scoring; pending requests fail with 503. Waits up to 20 seconds for the current batch."""
        with self._lock:
            self._closed = True
            open_requests = list(self._open)
            self._lock.notify_all()
        for request in open_requests:
            if self._end(request) and request.future.set_running_or_notify_cancel():
                request.future.set_exception(_shut_down())
        # A thread inside the model when the interpreter ends could bring it down.
        self._scoring.join(20.0)

    def _end(self, request: _Request) -> bool:
        """Drop a request and its pending conversations. Returns False if it was over already."""
        with self._lock:
            if request.is_over:
                return False
            request.is_over = True
            self._open.discard(request)
            self._ready.pop(request, None)
            request.ready.clear()
            self.num_queued -= request.num_missing
            self._lock.notify_all()
        self.metrics.forgotten.labels(request.model.name).inc(request.num_missing)
        return True

    def _tokenize(self, request: _Request, start: int, part: Sequence[Conversation | RenderedText]) -> None:
        """Tokenize the next conversations of a request, in the tokenizing thread."""
        if request.is_over:
            return
        prepared = _isolated(request.model.prepare, list(part))
        failed: list[tuple[_Request, int, Score]] = []
        with self._lock:
            for i, item in enumerate(prepared, start):
                if isinstance(item, Score):
                    failed.append((request, i, item))
                elif item.error is not None:
                    failed.append((request, i, Score(None, item.num_tokens, error=item.error)))
                elif not request.is_over:
                    request.ready.append((i, item))
                    self._ready[request] = None
            self._lock.notify_all()
        self._settle(failed)

    def _run(self) -> None:
        while not self._closed:
            try:
                self._score_some()
            except BaseException:  # a thread that dies would leave every request hanging
                logger.exception("The scoring thread failed and goes on.")
                time.sleep(0.1)

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
        self.metrics.computed.labels(model.name).inc(computed)
        self.metrics.fill.labels(model.name).observe(computed / self.config.batch_tokens)
        self.metrics.seconds.labels(model.name).observe(seconds)
        self._check_model(model, items, scores)

    def _check_model(self, model: LoadedModel, items: Sequence[Prepared], scores: Sequence[Score]) -> None:
        """If a whole batch failed, test the model with a conversation that it has scored before."""
        name = model.name
        good = [item for item, score in zip(items, scores, strict=True) if not isinstance(score, FailedScore)]
        if good:
            self._has_scored[name] = good[0]
        elif name in self._has_scored and isinstance(_isolated(model.score, [self._has_scored[name]])[0], FailedScore):
            self._failed_in_a_row[name] = self._failed_in_a_row.get(name, 0) + 1
            return
        self._failed_in_a_row[name] = 0

    def _take_batch(self) -> list[tuple[_Request, int, Prepared]]:
        """A forward pass: a few conversations of each request for the model whose turn it is."""
        model = next(iter(self._ready)).model if self._ready else None
        queue = deque(
            _prompts_together([request for request in islice(self._ready, _WINDOW) if request.model is model])
        )
        batch: list[tuple[_Request, int, Prepared]] = []
        used, is_full = 0, False
        last: dict[_Request, Prepared] = {}
        while queue and not is_full:
            request, start = queue.popleft(), len(batch)
            for _ in range(min(_TURN, len(request.ready))):
                i, item = request.ready[0]
                like = last.get(request, batch[-1][2] if batch else None)
                cost = request.model.cost(item, like)
                if batch and used + cost > self.config.batch_tokens:
                    is_full = True
                    break
                request.ready.popleft()
                last[request] = item
                used += cost
                batch.append((request, i, item))
            if not request.ready:
                del self._ready[request]
            elif len(batch) > start:  # a conversation that does not fit keeps its place
                queue.append(request)
                self._ready.move_to_end(request)
        return batch

    def _settle(self, scored: Sequence[tuple[_Request, int, Score]]) -> None:
        """Give scores to their requests, and wake up complete ones."""
        complete: list[_Request] = []
        with self._lock:
            for request, i, score in scored:
                if request.is_over:
                    continue
                request.scores[i] = score
                request.num_missing -= 1
                self.num_queued -= 1
                if not request.num_missing:
                    self._end(request)
                    complete.append(request)
        for request in complete:
            if request.future.set_running_or_notify_cancel():
                request.future.set_result([score for score in request.scores if score is not None])


def check_room(num_queued: int, number: int, limit: int, retry_after: float) -> None:
    """Raise `APIError` for more conversations than may ever wait, 413, and for a queue that is too long, 429."""
    if number > limit:
        raise APIError(413, "too_many_conversations", f"{number} conversations in one request; at most {limit}")
    if num_queued + number > limit:
        message = f"{num_queued} conversations are waiting, and at most {limit} may"
        raise APIError(429, "queue_full", message, retry_after=retry_after)


def not_in_time(num_missing: int, number: int, retry_after: float) -> APIError:
    """A request that has reached its deadline."""
    message = f"not scored in time: {num_missing} of {number} conversations were not scored yet"
    return APIError(504, "deadline_exceeded", message, retry_after=retry_after)


def _shut_down() -> APIError:
    return APIError(503, "shutting_down", "the server is shutting down", retry_after=5)


def _prompts_together(requests: Sequence[_Request]) -> list[_Request]:
    """The same requests, reordered: requests whose next conversations begin alike are neighbours."""
    groups: dict[bytes, list[_Request]] = {}
    for request in requests:
        groups.setdefault(_tokens(request)[:_SAME_BYTES], []).append(request)
    ordered = []
    for first, *others in groups.values():
        ordered += [first, *sorted(others, key=lambda request: (_tokens(request) < _tokens(first), _tokens(request)))]
    return ordered


def _tokens(request: _Request) -> bytes:
    """The tokens of the next conversation; in the order of these bytes, equal beginnings are neighbours."""
    ids = request.ready[0][1].ids
    assert ids is not None, "what has an error is not queued"
    return ids.tobytes()


def _finite(score: Score) -> Score:
    if score.score is not None and math.isfinite(score.score):
        return score
    return FailedScore(None, score.num_tokens, error=score.error or f"the model gave {score.score}")


def _isolated(
    function: Callable[[list[_Value]], Sequence[_Result]], values: list[_Value]
) -> list[_Result | FailedScore]:
    """The function's results for all values; if it fails, for each half, until a failing value is alone."""
    try:
        results = function(values)
        assert len(results) == len(values), f"{len(results)} results for {len(values)} conversations"
        return list(results)
    except TreewardError as problem:
        error = in_words(problem)
    except BaseException as problem:  # a panic in a library's native code is not an Exception
        if len(values) == 1:
            logger.exception("A conversation could not be scored.")
        error = f"the server failed: {type(problem).__name__}; its log has the details"
    if len(values) == 1:
        return [FailedScore(None, error=error)]
    logger.warning("%d conversations failed together: %a; they are tried apart.", len(values), error)
    middle = len(values) // 2
    return [*_isolated(function, values[:middle]), *_isolated(function, values[middle:])]
