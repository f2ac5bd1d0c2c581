"""`Strata`: accuracy where the better reply has more of a trait (length, markdown) and where it has less.

    strata = stratify(pairs, pairs.better, pairs.worse)      # by length in characters
    strata.better_has_more, strata.better_has_less           # Metric 1.0 and 0.0 for a model that only likes length
    strata.controlled                                        # Metric 0.5: their mean
    strata.gap                                               # Metric 1.0: their difference

A bias lifts one of the two and lowers the other, whatever the data's own share of them is. Pairs that have about the
same of it are a stratum of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from treeward.evaluation.diagnostics.replies import Floats, Pairs
from treeward.evaluation.results import Metric
from treeward.evaluation.statistics import accuracy_metric, cluster_bootstrap

__all__ = ["SIMILAR", "Strata", "stratify"]

SIMILAR = 0.1
"""Replies that differ by no more than this part of the larger amount are similar."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Strata:
    """Accuracies of a model, pairs as examples; a reply without a score and a tie count as wrong.

    `better_has_more`, `better_has_less`, `similar`: of the disjoint strata. `controlled`: the mean of the first two,
    `gap` the first less the second. `share_more`: of the data alone, in how many pairs that differ at all the better
    reply has more.
    """

    better_has_more: Metric
    better_has_less: Metric
    similar: Metric
    controlled: Metric
    gap: Metric
    share_more: Metric


def stratify(pairs: Pairs, better: Floats, worse: Floats) -> Strata:
    """Strata by an amount that the better (P,) and the worse (P,) reply of each pair have; amounts are not negative.

    The intervals of `controlled` and `gap` are made from those of the two strata by the method of variance estimates
    recovery (Zou and Donner 2008, Statistics in Medicine 27, page 1693; for a difference of proportions Newcombe 1998,
    method 10), which takes them for independent. Where a prompt has pairs in both they are not: then prompts are drawn
    anew too, and of both intervals each end is the wider one (a stratum that is all right has nothing to resample).
    """
    differences = better - worse
    similar = np.abs(differences) <= SIMILAR * np.maximum(better, worse)
    more, less = (differences > 0) & ~similar, (differences < 0) & ~similar
    of_more, of_less = _accuracy(pairs, more, "better_has_more"), _accuracy(pairs, less, "better_has_less")
    differ = differences != 0
    shares = (differences[differ] > 0).astype(np.float64)
    return Strata(
        better_has_more=of_more,
        better_has_less=of_less,
        similar=_accuracy(pairs, similar, "similar"),
        controlled=_combined(pairs, (more, less), (of_more, of_less), (0.5, 0.5), "controlled"),
        gap=_combined(pairs, (more, less), (of_more, of_less), (1.0, -1.0), "gap"),
        share_more=accuracy_metric(shares.tolist(), "share_more", pairs.prompts[differ].tolist()),
    )


def _accuracy(pairs: Pairs, inside: Mask, name: str) -> Metric:
    return accuracy_metric(pairs.outcomes[inside].tolist(), name, pairs.prompts[inside].tolist())


def _combined(
    pairs: Pairs,
    masks: tuple[Mask, Mask],
    parts: tuple[Metric, Metric],
    weights: tuple[float, float],
    name: str,
) -> Metric:
    """The weighted sum of the accuracies of two strata."""
    of_more, of_less = parts
    count = (of_more.count or 0) + (of_less.count or 0)
    if of_more.value is None or of_less.value is None:
        which = "more" if of_more.value is None else "less"
        return Metric(name, None, count=count, note=f"There is no pair whose better reply clearly has {which}.")
    value = weights[0] * of_more.value + weights[1] * of_less.value
    below, above = _recovered(parts, weights)
    metric = Metric(
        name, value, value - below, value + above, count,
        f"Of {of_more.count} pairs whose better reply has more and {of_less.count} whose better reply has less.",
    )  # fmt: skip
    if not np.intersect1d(pairs.prompts[masks[0]], pairs.prompts[masks[1]]).size:
        return metric
    low, high = _bootstrapped(pairs, masks, weights)
    if low is None or high is None:
        return metric
    return replace(metric, low=min(low, value - below), high=max(high, value + above))


def _recovered(parts: tuple[Metric, Metric], weights: tuple[float, float]) -> tuple[float, float]:
    """How far the interval of the weighted sum of independent parts reaches below and above it."""
    below = above = 0.0
    for part, weight in zip(parts, weights, strict=True):
        assert part.value is not None and part.low is not None and part.high is not None
        reaches = (part.value - part.low, part.high - part.value)
        down, up = reaches if weight > 0 else reaches[::-1]
        below, above = math.hypot(below, weight * down), math.hypot(above, weight * up)
    return below, above


def _bootstrapped(
    pairs: Pairs, masks: tuple[Mask, Mask], weights: tuple[float, float]
) -> tuple[float | None, float | None]:
    first, second = masks
    inside = first | second

    def combined(rows: Floats) -> float | None:
        is_first = rows[:, 1] > 0
        if is_first.all() or not is_first.any():
            return None
        return float(weights[0] * rows[is_first, 0].mean() + weights[1] * rows[~is_first, 0].mean())

    rows = np.column_stack([pairs.outcomes[inside], first[inside]])
    return cluster_bootstrap(rows, pairs.prompts[inside].tolist(), statistic=combined)
