"""`stratify`: accuracy where the better completion has more of a trait (length, markdown) and where it has less.

    by_length = stratify(pairs, pairs.better, pairs.worse, LENGTH_NAMES)
    by_length["accuracy_gap"].value                              # 1.0 for a model that only likes length
    more, less, similar = strata_of(pairs.better, pairs.worse)   # the strata as masks (P,)

A bias lifts one of the two and lowers the other, whatever share of the data each has. Pairs that have about the same
amount are a stratum of their own. A pair with a missing score is left out and counted: a missing score is no judgement,
and the longest completions are those that lack one, so counting them as wrong would look like a bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from treeward.evaluation.diagnostics.completions import Floats, Pairs
from treeward.evaluation.parts import Part, combined
from treeward.evaluation.results import Metric
from treeward.evaluation.statistics import accuracy_metric

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

    The intervals of gap and controlled accuracy are those of `combined`, the method of variance estimates recovery, and
    a bootstrap over prompts where the two strata share prompts. Where both strata have as many pairs, the controlled
    accuracy is the accuracy of all these pairs, with its interval.
    """
    of_share, of_more, of_less, of_similar, of_gap, of_mean = names
    differ = better != worse
    shares = (better > worse)[differ].astype(np.float64).tolist()
    there, left_out = ~np.isnan(pairs.margins), left_out_note(pairs.num_failed)
    found = {of_share: accuracy_metric(shares, of_share, pairs.prompts[differ].tolist(), of="pairs")}
    pairs, better, worse = pairs.with_scores, better[there], worse[there]
    more, less, similar = strata_of(better, worse)
    parts = {name: _part(pairs, inside, name) for name, inside in zip(names[1:4], (more, less, similar), strict=True)}
    found |= {name: part.metric for name, part in parts.items()}
    count = int(more.sum() + less.sum())
    if not more.any() or not less.any():
        which = "less" if more.any() else "more"
        note = f"There is no scored pair whose better completion clearly has {which}."
        gap, mean = (Metric(name, None, count=count, note=note) for name in (of_gap, of_mean))
    else:
        note = f"{more.sum()} pairs whose better completion has more, {less.sum()} whose better completion has less."
        # p - q is twice the mean of p and 1 - q, less 1.
        half = combined(of_gap, [parts[of_more], _part(pairs, less, of_less, flipped=True)])
        value, low, high = (None if end is None else 2 * end - 1 for end in (half.value, half.low, half.high))
        gap = Metric(of_gap, value, low, high, count, note)
        both = combined(of_mean, [parts[of_more], parts[of_less]])
        both = _part(pairs, more | less, of_mean).metric if more.sum() == less.sum() else both
        mean = replace(both, note=note)
    return found | {
        metric.name: replace(metric, note=" ".join(filter(None, (metric.note, left_out)))) for metric in (gap, mean)
    }


def left_out_note(num_pairs: int) -> str | None:
    """The sentence that says how many pairs without a score are left out; None where none is."""
    if not num_pairs:
        return None
    return f"{num_pairs:,} pair{' has no score and is' if num_pairs == 1 else 's have no score and are'} left out."


def _part(pairs: Pairs, inside: Mask, name: str, *, flipped: bool = False) -> Part:
    outcomes = 1 - pairs.outcomes if flipped else pairs.outcomes
    return Part.of(name, outcomes[inside].tolist(), pairs.prompts[inside].tolist(), "pairs")
