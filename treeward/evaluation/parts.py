"""`Part`: the outcomes of one subset, and how subsets make up a section with an interval.

parts = [Part.of("hep-go", [1, 1, 0], prompts), Part.of("math-prm", [1, 0], others)]
combined("Reasoning", parts, weights=[164, 984])         # a Metric
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.results import Metric, Unit
from treeward.evaluation.statistics import accuracy_metric, cluster_bootstrap


@dataclass(frozen=True, slots=True)
class Part:
    """Outcomes (N,) whose mean is `metric.value`, and the prompt of each, (N,); empty where none is shared."""

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
    """sum w_i p_i / sum w_i over parts that have a value, with a 95 % interval from theirs; weights of None are equal.

        p - sqrt(sum w_i^2 (p_i - low_i)^2),  p + sqrt(sum w_i^2 (high_i - p_i)^2)     with weights that sum to 1

    The method of variance estimates recovery, Zou and Donner 2008, Statistics in Medicine 27, page 1693. A part that is
    all right reaches nowhere above itself, so that with many of them the upper end would be too low: each end is at
    least sqrt(sum w_i^2 (p_i - low_i) (high_i - p_i)) away, but not beyond the weighted sum of the parts' own ends. For
    Wilson's intervals that product is z^2 p_i (1 - p_i) / (n_i + z^2), the variance itself. With parts of fewer than
    five examples the interval may be too narrow (of four parts of two it held the truth in 86 to 93 of 100
    simulations, of four parts of five in 92 to 96).

    That is for independent parts. Where parts share prompts, prompts are drawn anew too (`cluster_bootstrap`), and each
    end is the wider one. The drawn average is of p + N w_i / n_i (y_i - p_i) for an outcome y_i of part i, which keeps
    the parts' sizes and weights fixed as the sum over the drawn examples changes.
    """
    if not parts:
        return Metric(name, None, count=0, note="There are no examples.")
    shares = np.ones(len(parts)) if weights is None else np.array(weights, dtype=np.float64)
    shares = shares / shares.sum()
    metrics = [part.metric for part in parts]
    p, lows, highs = np.array([(one.value, one.low, one.high) for one in metrics], dtype=np.float64).T
    value, count = float(shares @ p), sum(one.count or 0 for one in metrics)
    least = math.sqrt(float(shares**2 @ ((p - lows) * (highs - p)).clip(0.0)))
    low = max(value - max(float(np.linalg.norm(shares * (p - lows))), least), float(shares @ lows))
    high = min(value + max(float(np.linalg.norm(shares * (highs - p))), least), float(shares @ highs))
    metric = Metric(name, value, low, high, count)
    prompts = [prompt for part in parts for prompt in part.prompts]
    if len(set(prompts)) == sum(len(set(part.prompts)) for part in parts):
        return metric
    drawn = [
        value + len(prompts) * share / len(part.outcomes) * (np.array(part.outcomes) - np.mean(part.outcomes))
        for share, part in zip(shares, parts, strict=True)
        if part.outcomes
    ]
    ends = cluster_bootstrap(np.concatenate(drawn), prompts)
    low, high = (low, high) if ends[0] is None or ends[1] is None else (min(low, ends[0]), max(high, ends[1]))
    note = f"The interval allows for the {len(set(prompts))} prompts that {len(prompts)} examples share."
    return replace(metric, low=low, high=high, note=note)


def with_notes(metric: Metric, *notes: str | None) -> Metric:
    """The metric with further sentences in its note."""
    return replace(metric, note=" ".join(filter(None, (metric.note, *notes))) or None)
