"""`stratify`: accuracy where the better completion has more of a trait (length, markdown) and where it has less.

    by_length = stratify(pairs, pairs.better, pairs.worse, LENGTH_NAMES)
    by_length["accuracy_gap"].value                              # 1.0 for a model that only likes length
    more, less, similar = strata_of(pairs.better, pairs.worse)   # the strata as masks (P,)

A bias lifts one of the two and lowers the other, whatever share of the data each has. Pairs that have about the same
amount are a stratum of their own. A pair with a missing score is left out and counted: a missing score is no judgement,
and the longest completions are those that lack one, so counting them as wrong would look like a bias.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from treeward.evaluation.diagnostics.completions import Floats, Pairs
from treeward.evaluation.results import Metric
from treeward.evaluation.statistics import accuracy_metric, cluster_bootstrap

__all__ = ["SIMILAR", "left_out_note", "strata_of", "stratify"]

SIMILAR = 0.1
"""Completions that differ by no more than this part of the larger amount are similar."""

Mask = NDArray[np.bool_]


def strata_of(better: Floats, worse: Floats) -> tuple[Mask, Mask, Mask]:
    """Disjoint masks (P,) of the pairs whose better completion has clearly more, clearly less, or about as much."""
    differences = better - worse
    similar = np.abs(differences) <= SIMILAR * np.maximum(better, worse)
    return (differences > 0) & ~similar, (differences < 0) & ~similar, similar


def stratify(pairs: Pairs, better: Floats, worse: Floats, names: Sequence[str]) -> dict[str, Metric]:
    """Accuracies by an amount, not negative, that the better (P,) and the worse (P,) completion of each pair have.

    `names` of the results, in this order: the share of pairs whose better completion has more (of the data, whatever
    the scores); the accuracy where it has clearly more, clearly less, about as much; the first accuracy less the
    second (the gap); the mean of the two (the controlled accuracy). A tie counts as wrong.

    The intervals of gap and controlled accuracy are made from those of the two strata by the method of variance
    estimates recovery (Zou and Donner 2008, Statistics in Medicine 27, page 1693; for a difference of proportions
    Newcombe 1998, method 10), which takes them for independent. Where a prompt has pairs in both they are not: then
    prompts are drawn anew too, and each end is the wider one (a stratum that is all right has nothing to resample).
    Where both strata have as many pairs, the controlled accuracy is the accuracy of all these pairs, with its interval.
    """
    of_share, of_more, of_less, of_similar, of_gap, of_mean = names
    differ = better != worse
    shares = (better > worse)[differ].astype(np.float64).tolist()
    there, left_out = ~np.isnan(pairs.margins), left_out_note(pairs.num_failed)
    found = {of_share: accuracy_metric(shares, of_share, pairs.prompts[differ].tolist(), of="pairs")}
    pairs, better, worse = pairs.with_scores, better[there], worse[there]
    more, less, similar = strata_of(better, worse)
    for name, inside in ((of_more, more), (of_less, less), (of_similar, similar)):
        found[name] = _accuracy(pairs, inside, name)
    for name, weights in ((of_gap, (1.0, -1.0)), (of_mean, (0.5, 0.5))):
        metric = _combined(pairs, (more, less), (found[of_more], found[of_less]), weights, name)
        found[name] = replace(metric, note=" ".join(filter(None, (metric.note, left_out))) or None)
    return found


def left_out_note(num_pairs: int) -> str | None:
    """The sentence that says how many pairs without a score are left out; None where none is."""
    if not num_pairs:
        return None
    return f"{num_pairs:,} pair{' has no score and is' if num_pairs == 1 else 's have no score and are'} left out."


def _accuracy(pairs: Pairs, inside: Mask, name: str) -> Metric:
    return accuracy_metric(pairs.outcomes[inside].tolist(), name, pairs.prompts[inside].tolist(), of="pairs")


def _combined(
    pairs: Pairs, masks: tuple[Mask, Mask], parts: tuple[Metric, Metric], weights: tuple[float, float], name: str
) -> Metric:
    """The weighted sum of the accuracies of two strata."""
    of_more, of_less = parts
    count = (of_more.count or 0) + (of_less.count or 0)
    if of_more.value is None or of_less.value is None:
        which = "more" if of_more.value is None else "less"
        return Metric(
            name, None, count=count, note=f"There is no scored pair whose better completion clearly has {which}."
        )
    value = weights[0] * of_more.value + weights[1] * of_less.value
    note = f"{of_more.count} pairs whose better completion has more, {of_less.count} whose better completion has less."
    if weights == (0.5, 0.5) and of_more.count == of_less.count:
        return replace(_accuracy(pairs, masks[0] | masks[1], name), note=note)
    below, above = _recovered(parts, weights)
    low, high = value - below, value + above
    if np.intersect1d(pairs.prompts[masks[0]], pairs.prompts[masks[1]]).size:
        drawn_low, drawn_high = _bootstrapped(pairs, masks, weights)
        low = low if drawn_low is None else min(low, drawn_low)
        high = high if drawn_high is None else max(high, drawn_high)
    return Metric(name, value, low, high, count, note)


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
