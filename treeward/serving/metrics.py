"""`ServerMetrics`: what the server counts, in Prometheus' terms.

    metrics = ServerMetrics(batch_tokens=4096)
    metrics.request("/v1/rewards", 200, seconds=0.012, num_bytes=512)
    metrics.exposition()        # bytes for /metrics

The engine tells it of batches and outcomes (`Observer`), from its own threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from treeward.scoring.shaping import RunningStatistics
from treeward.serving.queueing import Outcome

__all__ = ["ServerMetrics"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_FILL = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 2.0)

disable_created_metrics()  # type: ignore[no-untyped-call]


class ServerMetrics:
    """Counters of one server. `batch_tokens`: what a full batch has."""

    def __init__(self, *, batch_tokens: int = 4096) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._batch_tokens = batch_tokens
        self._scores: dict[str, RunningStatistics] = {}
        self._watched: dict[str, Gauge] = {}
        self._read_counters: dict[str, _ReadCounter] = {}
        self.requests = self._counter("requests", "Requests by route and status.", "route", "status")
        self.seconds = self._histogram(
            "request_seconds", "Time from a request's headers to its answer.", _SECONDS, "route"
        )
        self.body_bytes = self._counter("request_body_bytes", "Bytes of request bodies.")
        self.refused = self._counter("refused_requests", "Requests that were not answered with scores.", "code")
        self.conversations = self._counter("conversations", "Conversations that were scored.", "model")
        self.failures = self._counter("failures", "Conversations without a score.", "model", "fault")
        self.forgotten_conversations = self._counter(
            "forgotten_conversations", "Conversations whose request had ended before they were scored.", "model"
        )
        self.tokens = self._counter("tokens", "Tokens of the conversations that were scored, as plain rows.", "model")
        self.computed_tokens = self._counter(
            "computed_tokens", "Tokens that went through the model, after sharing.", "model"
        )
        self.odd_texts = self._counter(
            "odd_texts", "Rendered texts that do not begin or end as the model's conversations do.", "model", "where"
        )
        self.batches = self._counter("batches", "Batches that were scored.", "model")
        self.fill = self._histogram(
            "batch_fill_ratio", "Computed tokens of a batch by the budget of a batch.", _FILL, "model"
        )
        self.batch_seconds = self._histogram("batch_seconds", "Time of a batch.", _SECONDS, "model")
        self.mean = self._gauge("score_mean", "Mean of all scores so far.", "model")
        self.std = self._gauge("score_std", "Standard deviation of all scores so far.", "model")

    def watch(self, name: str, what: str, value: Callable[[], float], **labels: str) -> None:
        """A gauge that is read when it is asked for."""
        if name not in self._watched:
            self._watched[name] = self._gauge(name, what, *labels)
        gauge = self._watched[name]
        (gauge.labels(**labels) if labels else gauge).set_function(value)

    def watch_counter(self, name: str, what: str, value: Callable[[], float], **labels: str) -> None:
        """A counter that something else counts, which is read when it is asked for."""
        if name not in self._read_counters:
            self._read_counters[name] = _ReadCounter(f"treeward_{name}", what, list(labels))
            self.registry.register(self._read_counters[name])
        self._read_counters[name].values[tuple(labels.values())] = value

    def request(self, route: str, status: int, seconds: float, num_bytes: int) -> None:
        """A request was answered."""
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)
        self.body_bytes.inc(num_bytes)

    def batch(
        self, model: str, num_conversations: int, num_tokens: int, num_computed_tokens: int, seconds: float
    ) -> None:
        """The engine has scored a batch."""
        self.batches.labels(model).inc()
        self.tokens.labels(model).inc(num_tokens)
        self.computed_tokens.labels(model).inc(num_computed_tokens)
        self.fill.labels(model).observe(num_computed_tokens / self._batch_tokens)
        self.batch_seconds.labels(model).observe(seconds)

    def outcome(self, model: str, outcome: Outcome) -> None:
        """A conversation has a score, or has none."""
        value = outcome.score.score
        if value is None:
            self.failures.labels(model, "request" if outcome.by_request else "server").inc()
            return
        self.conversations.labels(model).inc()
        statistics = self._scores.setdefault(model, RunningStatistics())
        statistics.update([value])
        self.mean.labels(model).set(statistics.mean)
        self.std.labels(model).set(statistics.std)

    def forgotten(self, model: str, num_conversations: int) -> None:
        """A request has ended before these had a score."""
        self.forgotten_conversations.labels(model).inc(num_conversations)

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"treeward_{name}", what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(f"treeward_{name}", what, labels, registry=self.registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"treeward_{name}", what, labels, buckets=buckets, registry=self.registry)


class _ReadCounter(Collector):
    def __init__(self, name: str, what: str, labels: list[str]) -> None:
        self._name, self._what, self._labels = name, what, labels
        self.values: dict[tuple[str, ...], Callable[[], float]] = {}

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._what, labels=self._labels)
        for labels, value in self.values.items():
            family.add_metric(list(labels), value())
        return [family]
