"""`ServerMetrics`: the server's metrics of scoring, for Prometheus.

    metrics = ServerMetrics(batch_tokens=4096)
    metrics.batch("rm", num_tokens=2000, num_computed_tokens=900, seconds=0.03)

prometheus-fastapi-instrumentator adds requests by route and status, and their time, to the same registry.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    Summary,
    disable_created_metrics,
)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_FILL = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 2.0)

disable_created_metrics()  # type: ignore[no-untyped-call]


class ServerMetrics:
    """Counters of one server. `batch_tokens`: of a full batch. `registry`: None makes one."""

    def __init__(self, *, batch_tokens: int = 4096, registry: CollectorRegistry | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        ProcessCollector(registry=self.registry)
        self._batch_tokens = batch_tokens
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

    def watch(self, name: str, what: str, value: Callable[[], float], **labels: str) -> None:
        """Add a gauge that calls `value` when it is scraped."""
        if name not in self._gauges:
            self._gauges[name] = Gauge(f"treeward_{name}", what, tuple(labels), registry=self.registry)
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set_function(value)

    def batch(self, model: str, num_tokens: int, num_computed_tokens: int, seconds: float) -> None:
        """Count a scored batch."""
        self.tokens.labels(model).inc(num_tokens)
        self.computed.labels(model).inc(num_computed_tokens)
        self.fill.labels(model).observe(num_computed_tokens / self._batch_tokens)
        self.seconds.labels(model).observe(seconds)

    def score(self, model: str, value: float | None, *, by_server: bool = False) -> None:
        """Count a score, or a failure (None): `by_server` says whether it is the server's fault."""
        if value is None:
            self.failures.labels(model, "server" if by_server else "request").inc()
            return
        self.scores.labels(model).observe(value)
