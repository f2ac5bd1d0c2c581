"""`Part`: the outcomes of one subset, and how subsets make up a section with an interval.

parts = [Part.of("hep-go", [1, 1, 0], prompts), Part.of("math-prm", [1, 0], others)]
combined("Reasoning", parts, weights=[164, 984])         # a Metric
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.results import Metric, Unit
from treeward.evaluation.statistics import accuracy_metric, cluster_bootstrap, weighted_mean_metric


@dataclass(frozen=True, slots=True)
class Part:
    """Outcomes (N,) whose mean is `metric.value`, and the prompt of each, (N,)."""

    metric: Metric
    outcomes: tuple[float, ...]
    prompts: tuple[Hashable, ...]

    @classmethod
    def of(cls, name: str, outcomes: Iterable[float], prompts: Iterable[Hashable], unit: Unit = "examples") -> Part:
        """Outcomes in [0, 1] of pairs or examples; those of one prompt count as dependent."""
        values, clusters = tuple(outcomes), tuple(prompts)
        return cls(accuracy_metric(values, name, clusters=clusters, of=unit), values, clusters)


def by_subset(scored: Iterable[ScoredExample]) -> dict[str, list[ScoredExample]]:
    """The examples of each subset, subsets in order of appearance."""
    groups: dict[str, list[ScoredExample]] = {}
    for one in scored:
        groups.setdefault(one.example.subset, []).append(one)
    return groups


def combined(name: str, parts: Sequence[Part], weights: Sequence[float] | None = None) -> Metric:
    """sum_s w_s p_s / sum_s w_s over the parts that have a value, with a 95 % interval; weights of None are equal.

    The interval is that of `weighted_mean_metric`, for which parts are independent. Where parts share prompts they are
    not: then prompts are drawn anew too (`cluster_bootstrap`), and each end is the wider one. The drawn average is of
    p + N w_s / n_s (y_i - p_s) for outcome y_i of part s, which keeps the parts' sizes and weights fixed as the sum
    over the drawn examples changes.
    """
    weights = [1.0] * len(parts) if weights is None else weights
    metric = weighted_mean_metric([part.metric for part in parts], weights, name)
    known = [(part, weight) for part, weight in zip(parts, weights, strict=True) if part.metric.value is not None]
    all_prompts = [prompt for part, _ in known for prompt in part.prompts]
    distinct = sum(len(set(part.prompts)) for part, _ in known)
    if metric.value is None or len(set(all_prompts)) == distinct:
        return metric
    total, count = sum(weight for _, weight in known), len(all_prompts)
    spread = [np.asarray(part.outcomes) - np.mean(part.outcomes) if part.outcomes else np.zeros(0) for part, _ in known]
    scale = [count * weight / total / max(1, len(part.outcomes)) for part, weight in known]
    values = metric.value + np.concatenate([s * d for s, d in zip(scale, spread, strict=True)])
    low, high = cluster_bootstrap(values, all_prompts)
    widened = replace(
        metric,
        low=low if metric.low is None or (low is not None and low < metric.low) else metric.low,
        high=high if metric.high is None or (high is not None and high > metric.high) else metric.high,
    )
    return with_notes(
        widened, f"The interval allows for the {len(set(all_prompts))} prompts that {count} examples share."
    )


def with_notes(metric: Metric, *notes: str | None) -> Metric:
    """The metric with further sentences in its note."""
    return replace(metric, note=" ".join(filter(None, (metric.note, *notes))) or None)
