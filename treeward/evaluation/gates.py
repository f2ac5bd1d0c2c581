"""`gate_metrics`: the diagnostics of a validation by which a checkpoint may be chosen.

    scored = [scored_comparison("7", "chat", scores=[1.5, 0.25], ranks=[0, 1], lengths=[120, 80]), ...]
    gate_metrics(scored)["length_controlled_accuracy"].value      # as `treeward eval` says it of the same scores
    pooled_gate_metrics([scored, scored_of_another_set])

They are the numbers of the same names in `results.json`, by the same functions, but for the intervals: those are over
prompts, which a validation on token ids does not know, and cost more than the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from treeward.data.preference import Message
from treeward.evaluation.diagnostics.replies import Pairs, collect_pairs
from treeward.evaluation.diagnostics.strata import stratify
from treeward.evaluation.examples import EvalExample, ScoredExample
from treeward.evaluation.results import Metric
from treeward.evaluation.statistics import auroc, brier, expected_calibration_error, kendall_tau_b, pair_confidences

__all__ = [
    "GATE_METRICS",
    "auroc_of_best",
    "gate_metrics",
    "kendall_taus",
    "pooled_gate_metrics",
    "scored_comparison",
]

GATE_METRICS = (
    "length_controlled_accuracy",
    "accuracy_longer_right",
    "accuracy_shorter_right",
    "accuracy_gap",
    "ece",
    "brier",
    "auroc",
    "kendall_tau",
    "worst_subset",
)
"""The names of `gate_metrics`, in order."""

_NO_TEXT: tuple[Message, ...] = ()


def scored_comparison(
    id: str, subset: str, *, scores: Sequence[float], ranks: Sequence[int], lengths: Sequence[int]
) -> ScoredExample:
    """A comparison of which only numbers are known: K scores, ranks (lower is better) and lengths in characters.

    A score that is not finite counts as none. There are no texts, so whatever goes by prompts (intervals) or by what
    replies say must not be computed of it.
    """
    known = tuple(score if math.isfinite(score) else None for score in scores)
    example = EvalExample(id, subset, _NO_TEXT, (_NO_TEXT,) * len(ranks), tuple(ranks))
    return ScoredExample(example, known, tuple(lengths), num_tokens=(0,) * len(ranks))


def gate_metrics(scored: Sequence[ScoredExample]) -> dict[str, Metric]:
    """The numbers of `GATE_METRICS` without intervals; the note of one that has no value says why.

    `length_controlled_accuracy` and the next three: see `diagnostics.length`, of pairs with both scores. `ece`,
    `brier`: of sigma(|margin|) as the chance that the higher score is right, of the same pairs. `auroc`: best-ranked
    replies against the others, over all prompts. `kendall_tau`: mean over comparisons of more than two.
    `worst_subset`: the lowest pair accuracy of a subset, where a pair without a score counts as wrong.
    """
    pairs = collect_pairs(scored)
    strata = stratify(pairs, pairs.better, pairs.worse)
    missing = [
        f"there is no pair whose better reply is clearly the {which}"
        for which, part in (("longer", strata.better_has_more), ("shorter", strata.better_has_less))
        if part.value is None
    ]
    margins = pairs.margins[np.isfinite(pairs.margins)]
    confidences, outcomes = pair_confidences(margins)
    taus = kendall_taus(scored)
    no_pairs = "there is no pair of a better and a worse reply that both have a score"
    found = (
        _without_interval("length_controlled_accuracy", strata.controlled, " and ".join(missing)),
        _without_interval("accuracy_longer_right", strata.better_has_more, " and ".join(missing)),
        _without_interval("accuracy_shorter_right", strata.better_has_less, " and ".join(missing)),
        _without_interval("accuracy_gap", strata.gap, " and ".join(missing)),
        _metric("ece", expected_calibration_error(confidences, outcomes), len(margins), no_pairs),
        _metric("brier", brier(confidences, outcomes), len(margins), no_pairs),
        _metric("auroc", *auroc_of_best(scored), no_pairs),
        _metric(
            "kendall_tau",
            float(np.mean(taus)) if taus else None,
            len(taus),
            "there is no comparison of more than two replies with different scores",
        ),
        _worst_subset(scored, pairs),
    )
    return {metric.name: metric for metric in found}


def pooled_gate_metrics(sets: Sequence[Sequence[ScoredExample]]) -> dict[str, Metric]:
    """`gate_metrics` of several sets together; subsets of one name in two sets stay two for `worst_subset`."""
    pooled = gate_metrics([one for scored in sets for one in scored])
    worst = [_worst_subset(scored, collect_pairs(scored)) for scored in sets]
    known = [one for one in worst if one.value is not None]
    return pooled | {"worst_subset": min(known, key=_value) if known else pooled["worst_subset"]}


def auroc_of_best(scored: Sequence[ScoredExample]) -> tuple[float | None, int]:
    """AUROC of best-ranked replies against the others of all examples with an order, and of how many replies."""
    right: list[float] = []
    wrong: list[float] = []
    for one in scored:
        best = min(one.example.ranks, default=0)
        if max(one.example.ranks, default=0) == best:
            continue
        for score, rank in zip(one.scores, one.example.ranks, strict=True):
            if score is not None:
                (right if rank == best else wrong).append(score)
    return auroc(right, wrong), len(right) + len(wrong)


def kendall_taus(scored: Sequence[ScoredExample]) -> list[float]:
    """Kendall's tau-b of each example with more than two scores, where it has one."""
    taus: list[float] = []
    for one in scored:
        known = [(s, r) for s, r in zip(one.scores, one.example.ranks, strict=True) if s is not None]
        tau = kendall_tau_b([s for s, _ in known], [r for _, r in known]) if len(known) > 2 else None
        if tau is not None:
            taus.append(tau)
    return taus


def _worst_subset(scored: Sequence[ScoredExample], pairs: Pairs) -> Metric:
    numbers: dict[str, int] = {}
    codes = np.array([numbers.setdefault(one.example.subset, len(numbers)) for one in scored], dtype=np.int64)
    of_pairs = codes[pairs.examples] if len(scored) else codes
    counts = np.bincount(of_pairs, minlength=len(numbers))
    right = np.bincount(of_pairs, weights=pairs.outcomes, minlength=len(numbers))
    found: Mapping[str, Metric] = {
        name: Metric("worst_subset", float(right[i] / counts[i]), count=int(counts[i]), note=name)
        for name, i in numbers.items()
        if counts[i]
    }
    if not found:
        return Metric("worst_subset", None, count=0, note="there is no pair of a better and a worse reply")
    return found[min(found, key=lambda name: (_value(found[name]), name))]


def _without_interval(name: str, metric: Metric, missing: str) -> Metric:
    return _metric(name, metric.value, metric.count or 0, missing)


def _metric(name: str, value: float | None, count: int, missing: str) -> Metric:
    return Metric(name, value, count=count, note=missing if value is None else None)


def _value(metric: Metric) -> float:
    assert metric.value is not None
    return metric.value
