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
from dataclasses import replace

from treeward.data.preference import Completion, Preference
from treeward.evaluation.diagnostics.biases import length_strata
from treeward.evaluation.diagnostics.completions import collect_pairs
from treeward.evaluation.diagnostics.scores import orders_and_confidences
from treeward.evaluation.examples import ScoredExample, by_subset
from treeward.evaluation.results import Metric

GATE_METRICS = (
    "length_controlled_accuracy", "accuracy_longer_right", "accuracy_shorter_right", "accuracy_gap",
    "ece", "brier", "auroc", "kendall_tau", "group_accuracy", "best_of_k", "worst_subset",
)  # fmt: skip
"""The names of `gate_metrics`, in order."""


def scored_comparison(
    id: str, subset: str, *, scores: Sequence[float], ranks: Sequence[int], lengths: Sequence[int]
) -> ScoredExample:
    """A comparison of which only numbers are known: K scores, ranks (lower is better) and lengths in characters.

    A score that is not finite counts as none. There are no texts, so nothing that depends on prompts (intervals) or on
    texts may be computed from it.
    """
    completions = tuple(Completion(rank, ()) for rank in ranks)
    finite = tuple(score if math.isfinite(score) else None for score in scores)
    example = Preference((), completions, task_name=subset, id=id)
    return ScoredExample(example, finite, tuple(lengths), num_tokens=(0,) * len(ranks))


def gate_metrics(scored: Sequence[ScoredExample]) -> dict[str, Metric]:
    """The numbers of `GATE_METRICS` without intervals; the note of one that has no value says why.

    Those of length: see `diagnostics.biases`, of pairs with both scores; `ece` to `kendall_tau`: see
    `diagnostics.scores`. `worst_subset`: the lowest pair accuracy of a subset, where a missing score counts as wrong.
    """
    metrics = length_strata(scored) | orders_and_confidences(scored)
    gates = {}
    for name in GATE_METRICS[:-1]:
        note = metrics[name].note if metrics[name].value is None else None
        gates[name] = replace(metrics[name], low=None, high=None, note=note)
    return gates | {"worst_subset": _worst_subset(scored)}


def pooled_gate_metrics(sets: Sequence[Sequence[ScoredExample]]) -> dict[str, Metric]:
    """`gate_metrics` of several sets together; subsets of one name in two sets stay two for `worst_subset`."""
    pooled = gate_metrics([example for scored in sets for example in scored])
    subsets = [worst for worst in map(_worst_subset, sets) if worst.value is not None]
    worst = min(subsets, key=lambda subset: subset.value or 0.0, default=pooled["worst_subset"])
    return pooled | {"worst_subset": worst}


def _worst_subset(scored: Sequence[ScoredExample]) -> Metric:
    outcomes = {name: collect_pairs(examples).outcomes for name, examples in by_subset(scored).items()}
    accuracies = [
        (float(of_subset.mean()), name, len(of_subset)) for name, of_subset in outcomes.items() if len(of_subset)
    ]
    if not accuracies:
        return Metric("worst_subset", None, count=0, note="There is no pair of a better and a worse completion.")
    value, name, count = min(accuracies)
    return Metric("worst_subset", value, count=count, note=name)
