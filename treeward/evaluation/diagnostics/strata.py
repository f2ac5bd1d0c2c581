"""`Strata`: accuracy where the better reply has more of a trait (length, markdown) and where it has less.

    strata = stratify(pairs, pairs.better, pairs.worse)      # by length in characters
    strata.better_has_more, strata.better_has_less           # Metric 1.0 and 0.0 for a model that only likes length
    strata.controlled                                        # Metric 0.5: their mean
    strata.gap                                               # Metric 1.0: their difference
    more, less, similar = strata_of(pairs.better, pairs.worse)   # which pairs they are, as masks (P,)

A bias lifts one of the two and lowers the other, whatever the data's own share of them is. Pairs that have about the
same of it are a stratum of their own. A pair of which a reply has no score is left out and counted: no score is no
judgement, and the longest replies are those that lack one, so counted as wrong it would look like a bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from treeward.evaluation.diagnostics.replies import Floats, Pairs
from treeward.evaluation.results import Metric
from treeward.evaluation.statistics import accuracy_metric, cluster_bootstrap

__all__ = ["SIMILAR", "Strata", "left_out_note", "strata_of", "stratify"]

SIMILAR = 0.1
"""Replies that differ by no more than this part of the larger amount are similar."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Strata:
    """Accuracies of a model over the pairs whose replies both have a score; a tie counts as wrong.

    `better_has_more`, `better_has_less`, `similar`: of the disjoint strata. `controlled`: the mean of the first two,
    `gap` the first less the second. `share_more`: of the data alone, in how many pairs that differ at all the better
    reply has more, those without a score among them. `num_left_out`: pairs without a score.
    """

    better_has_more: Metric
    better_has_less: Metric
    similar: Metric
    controlled: Metric
    gap: Metric
    share_more: Metric
    num_left_out: int


def strata_of(better: Floats, worse: Floats) -> tuple[Mask, Mask, Mask]:
    """In which pairs the better reply has clearly more, clearly less, or about as much (`SIMILAR`) as the worse; (P,)
    each, and every pair is in one of them."""
    differences = better - worse
    similar = np.abs(differences) <= SIMILAR * np.maximum(better, worse)
    return (differences > 0) & ~similar, (differences < 0) & ~similar, similar


def stratify(pairs: Pairs, better: Floats, worse: Floats) -> Strata:
    """Strata by an amount that the better (P,) and the worse (P,) reply of each pair have; amounts are not negative.

    The intervals of `controlled` and `gap` are made from those of the two strata by the method of variance estimates
    recovery (Zou and Donner 2008, Statistics in Medicine 27, page 1693; for a difference of proportions Newcombe 1998,
    method 10), which takes them for independent. Where a prompt has pairs in both they are not: then prompts are drawn
    anew too, and of both intervals each end is the wider one (a stratum that is all right has nothing to resample).
    Where both strata have as many pairs, `controlled` is the accuracy of all these pairs, and has the interval of that:
    one number has one interval, whatever it is called.
    """
    differ = better != worse
    shares = (better > worse)[differ].astype(np.float64)
    share_more = accuracy_metric(shares.tolist(), "share_more", pairs.prompts[differ].tolist(), of="pairs")
    there = ~np.isnan(pairs.margins)
    num_left_out = pairs.num_failed
    pairs, better, worse = pairs.with_scores, better[there], worse[there]
    more, less, similar = strata_of(better, worse)
    of_more, of_less = _accuracy(pairs, more, "better_has_more"), _accuracy(pairs, less, "better_has_less")
    both, masks, parts = left_out_note(num_left_out), (more, less), (of_more, of_less)
    return Strata(
        better_has_more=of_more,
        better_has_less=of_less,
        similar=_accuracy(pairs, similar, "similar"),
        controlled=_with_note(_combined(pairs, masks, parts, (0.5, 0.5), "controlled"), both),
        gap=_with_note(_combined(pairs, masks, parts, (1.0, -1.0), "gap"), both),
        share_more=share_more,
        num_left_out=num_left_out,
    )


def left_out_note(num_pairs: int) -> str | None:
    """The sentence that says how many pairs without a score are left out; None where none is."""
    if not num_pairs:
        return None
    return f"{num_pairs:,} pair{' has no score and is' if num_pairs == 1 else 's have no score and are'} left out."


def _accuracy(pairs: Pairs, inside: Mask, name: str) -> Metric:
    return accuracy_metric(pairs.outcomes[inside].tolist(), name, pairs.prompts[inside].tolist(), of="pairs")


def _with_note(metric: Metric, sentence: str | None) -> Metric:
    return replace(metric, note=" ".join(filter(None, (metric.note, sentence))) or None)


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
        return Metric(name, None, count=count, note=f"There is no scored pair whose better reply clearly has {which}.")
    value = weights[0] * of_more.value + weights[1] * of_less.value
    note = f"Of {of_more.count} pairs whose better reply has more and {of_less.count} whose better reply has less."
    if weights == (0.5, 0.5) and of_more.count == of_less.count:
        return replace(_accuracy(pairs, masks[0] | masks[1], name), note=note)
    below, above = _recovered(parts, weights)
    metric = Metric(name, value, value - below, value + above, count, note)
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
