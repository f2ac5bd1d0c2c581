"""`gate_metrics`: the diagnostics of a validation by which a checkpoint may be chosen.

    scored = [scored_comparison("7", "chat", scores=[1.5, 0.25], ranks=[0, 1], lengths=[120, 80]), ...]
    gate_metrics(scored)["length_controlled_accuracy"].value      # as `treeward eval` says it of the same scores
    pooled_gate_metrics([scored, scored_of_another_set])

They are the numbers of the same names in `results.json`, by the same functions, but for the intervals: those are over
prompts, which a validation on token ids does not know, and cost more than the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from treeward.data.preference import Message
from treeward.evaluation.diagnostics.biases import LENGTH_STRATA, stratify
from treeward.evaluation.diagnostics.completions import Pairs, collect_pairs
from treeward.evaluation.diagnostics.scores import auroc_of_best, kendall_taus
from treeward.evaluation.examples import EvalExample, ScoredExample
from treeward.evaluation.results import Metric
from treeward.evaluation.statistics import brier, expected_calibration_error, pair_confidences

__all__ = ["GATE_METRICS", "gate_metrics", "pooled_gate_metrics", "scored_comparison"]

_OF_LENGTH = ("length_controlled_accuracy", "accuracy_longer_right", "accuracy_shorter_right", "accuracy_gap")

GATE_METRICS = (*_OF_LENGTH, "ece", "brier", "auroc", "kendall_tau", "worst_subset")
"""The names of `gate_metrics`, in order."""

_NO_TEXT: tuple[Message, ...] = ()


def scored_comparison(
    id: str, subset: str, *, scores: Sequence[float], ranks: Sequence[int], lengths: Sequence[int]
) -> ScoredExample:
    """A comparison of which only numbers are known: K scores, ranks (lower is better) and lengths in characters.

    A score that is not finite counts as none. There are no texts, so nothing that depends on prompts (intervals) or on
    texts may be computed from it.
    """
    known = tuple(score if math.isfinite(score) else None for score in scores)
    example = EvalExample(id, subset, _NO_TEXT, (_NO_TEXT,) * len(ranks), tuple(ranks))
    return ScoredExample(example, known, tuple(lengths), num_tokens=(0,) * len(ranks))


def gate_metrics(scored: Sequence[ScoredExample]) -> dict[str, Metric]:
    """The numbers of `GATE_METRICS` without intervals; the note of one that has no value says why.

    `length_controlled_accuracy` and the next three: see `diagnostics.biases`, of pairs with both scores. `ece`,
    `brier`: of sigma(|margin|) as the chance that the higher score is right, of the same pairs. `auroc`: best-ranked
    completions against the others, over all prompts. `kendall_tau`: mean over comparisons of more than two.
    `worst_subset`: the lowest pair accuracy of a subset, where a pair without a score counts as wrong.
    """
    pairs = collect_pairs(scored)
    strata = stratify(pairs, pairs.better, pairs.worse, list(LENGTH_STRATA))
    empty = [
        f"there is no pair whose better completion is clearly the {which}"
        for which in ("longer", "shorter")
        if strata[f"accuracy_{which}_right"].value is None
    ]
    margins = pairs.margins[np.isfinite(pairs.margins)]
    confidences, outcomes = pair_confidences(margins)
    taus = kendall_taus(scored)
    no_pairs = "there is no pair of a better and a worse completion that both have a score"
    no_taus = "there is no comparison of more than two completions with different scores"
    found = (
        *(_metric(name, strata[name].value, strata[name].count or 0, " and ".join(empty)) for name in _OF_LENGTH),
        _metric("ece", expected_calibration_error(confidences, outcomes), len(margins), no_pairs),
        _metric("brier", brier(confidences, outcomes), len(margins), no_pairs),
        _metric("auroc", *auroc_of_best(scored), no_pairs),
        _metric("kendall_tau", float(np.mean(taus)) if taus else None, len(taus), no_taus),
        _worst_subset(scored, pairs),
    )
    return {metric.name: metric for metric in found}


def pooled_gate_metrics(sets: Sequence[Sequence[ScoredExample]]) -> dict[str, Metric]:
    """`gate_metrics` of several sets together; subsets of one name in two sets stay two for `worst_subset`."""
    pooled = gate_metrics([one for scored in sets for one in scored])
    worst = [_worst_subset(scored, collect_pairs(scored)) for scored in sets]
    known = [(one.value, number, one) for number, one in enumerate(worst) if one.value is not None]
    return pooled | {"worst_subset": min(known)[2] if known else pooled["worst_subset"]}


def _worst_subset(scored: Sequence[ScoredExample], pairs: Pairs) -> Metric:
    outcomes: dict[str, list[float]] = {}
    for example, outcome in zip(pairs.examples.tolist(), pairs.outcomes.tolist(), strict=True):
        outcomes.setdefault(scored[example].example.subset, []).append(outcome)
    if not outcomes:
        return Metric("worst_subset", None, count=0, note="there is no pair of a better and a worse completion")
    accuracies = {name: math.fsum(own) / len(own) for name, own in outcomes.items()}
    worst = min(accuracies, key=lambda name: (accuracies[name], name))
    return Metric("worst_subset", accuracies[worst], count=len(outcomes[worst]), note=worst)


def _metric(name: str, value: float | None, count: int, missing: str) -> Metric:
    return Metric(name, value, count=count, note=missing if value is None else None)
