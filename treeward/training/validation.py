"""What a validation measures: the metrics of each named set, over every comparison or the first so many.

    result = run.validate_set("held_out")                        # SetValidation of one set
    result.metrics()["loss"].value, result.metrics()["length_controlled_accuracy"].value
    pooled([result, of_another_set])                             # metrics over all of them

Loss and accuracy are sums over pairs. The diagnostics (`treeward.evaluation.gates`) need the scores themselves, which
are kept: K floats and a few small objects for each comparison, no texts and no token ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from treeward.evaluation.diagnostics.perturbations import score_perturbed, summarize_perturbations
from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.gates import gate_metrics, pooled_gate_metrics
from treeward.evaluation.results import Metric
from treeward.metrics import RewardMetrics, grade_metrics
from treeward.scoring.scorer import Scorer
from treeward.training.setup import RewardModelSetup


@dataclass(frozen=True, slots=True)
class SetValidation:
    """The measurements of one set: sums over its pairs, the scores of each comparison in the order of the set,
    `robust_accuracy` if it was measured, and the sums of `GradeSums` over the grades of `attributes`.
    """

    sums: RewardMetrics
    scored: tuple[ScoredExample, ...]
    robust: Metric | None = None
    grades_6H: Tensor | None = None
    attributes: tuple[str, ...] = ()

    def metrics(self) -> dict[str, Metric]:
        """The metrics by name; the note of one that has no value says why."""
        robust = {} if self.robust is None else {"robust_accuracy": self.robust}
        return _of_sums(self.sums) | gate_metrics(self.scored) | robust | _of_grades([self])


def pooled(sets: Sequence[SetValidation]) -> dict[str, Metric]:
    """The metrics over the comparisons of all sets; `robust_accuracy` only where it was measured in each of them."""
    if len(sets) == 1:
        return sets[0].metrics()
    sums = sum((one.sums for one in sets), RewardMetrics())
    metrics = _of_sums(sums) | pooled_gate_metrics([one.scored for one in sets]) | _of_grades(sets)
    robust = [(one.robust.value or 0.0, one.robust.count or 0) for one in sets if one.robust is not None]
    if len(robust) == len(sets):
        count = sum(number for _, number in robust)
        value = sum(share * number for share, number in robust) / count if count else None
        metrics["robust_accuracy"] = Metric("robust_accuracy", value, count=count)
    return metrics


def values_of(metrics: dict[str, Metric]) -> dict[str, float]:
    """The metrics that have a value, as numbers."""
    return {name: metric.value for name, metric in metrics.items() if metric.value is not None}


def robust_accuracy(setup: RewardModelSetup, name: str, should_stop: Callable[[], object]) -> Metric | None:
    """The share of pairs that are right and stay so under every rewrite of style; None if `should_stop` gave a reason
    on the way."""
    policy, scores = setup.config.policy, []
    groups = setup.config.rm.val_micro_batch_size or policy.train_micro_batch_size
    limit = None if groups is None else 2 * groups
    scorer = Scorer(
        *(setup.model, setup.renderer),
        batch_tokens=policy.micro_batch_tokens,
        max_sequences=limit,
        head_weights=setup.heads.weights,
    )
    for one in score_perturbed(scorer, setup.perturbed[name]):
        if should_stop():
            return None
        scores.append(one)
    return replace(summarize_perturbations(scores).robust_accuracy, low=None, high=None)


def _of_sums(sums: RewardMetrics) -> dict[str, Metric]:
    missing = "There is no pair of a better and a worse completion."
    return {
        name: Metric(name, value, count=sums.num_pairs, note=missing if math.isnan(value) else None)
        for name, value in sums.means().items()
    }


def _of_grades(sets: Sequence[SetValidation]) -> dict[str, Metric]:
    known = [one.grades_6H for one in sets if one.grades_6H is not None]
    if not known:
        return {}
    sums_6H = torch.stack(known).sum(dim=0)
    metrics, count = grade_metrics(sums_6H, sets[0].attributes), int(sums_6H[0].sum())
    return {name: Metric(name, value, count=count) for name, value in metrics.items() if math.isfinite(value)}
