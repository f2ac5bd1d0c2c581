"""Validation: the metrics of each named set, over every comparison or the first so many.

    result = validate(setup, "held_out")                         # SetValidation of one set
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

from treeward.evaluation.diagnostics.perturbations import score_perturbed, summarize_perturbations
from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.gates import gate_metrics, pooled_gate_metrics, scored_comparison
from treeward.evaluation.results import Metric
from treeward.metrics import RewardMetrics
from treeward.scoring.scorer import Scorer
from treeward.training.setup import RewardModelSetup

__all__ = ["SetValidation", "pooled", "validate", "values_of"]

_COMPARISONS_AT_ONCE = 1024  # planned together; the plan is as good as for the whole set, and the rows stay on disk


@dataclass(frozen=True, slots=True)
class SetValidation:
    """The measurements of one set: sums over its pairs, the scores of each comparison in the order of the set, and
    `robust_accuracy` if it was measured.
    """

    sums: RewardMetrics
    scored: tuple[ScoredExample, ...]
    robust: Metric | None = None

    def metrics(self) -> dict[str, Metric]:
        """The metrics by name; the note of one that has no value says why."""
        robust = {} if self.robust is None else {"robust_accuracy": self.robust}
        return _of_sums(self.sums) | gate_metrics(self.scored) | robust


def pooled(sets: Sequence[SetValidation]) -> dict[str, Metric]:
    """The metrics over the comparisons of all sets; `robust_accuracy` only where it was measured in each of them."""
    if len(sets) == 1:
        return sets[0].metrics()
    sums = sum((one.sums for one in sets), RewardMetrics())
    metrics = _of_sums(sums) | pooled_gate_metrics([one.scored for one in sets])
    robust = [(one.robust.value or 0.0, one.robust.count or 0) for one in sets if one.robust is not None]
    if len(robust) == len(sets):
        count = sum(number for _, number in robust)
        value = sum(share * number for share, number in robust) / count if count else None
        metrics["robust_accuracy"] = Metric("robust_accuracy", value, count=count)
    return metrics


def values_of(metrics: dict[str, Metric]) -> dict[str, float]:
    """The metrics that have a value, as numbers."""
    return {name: metric.value for name, metric in metrics.items() if metric.value is not None}


@torch.no_grad()
def validate(
    setup: RewardModelSetup, name: str, should_stop: Callable[[], object] = lambda: False
) -> SetValidation | None:
    """Measure the validation set `name` in the precision of training; None if `should_stop` gave a reason on the way.

    A comparison that is larger than the token budget is scored in parts.
    """
    model, dataset, size = setup.model, setup.validation_sets[name], setup.validation_sizes[name]
    model.eval()
    total = RewardMetrics()
    scored: list[ScoredExample] = []
    for start in range(0, size, _COMPARISONS_AT_ONCE):
        loaded = dataset[start : min(start + _COMPARISONS_AT_ONCE, size)]
        of_loaded: dict[int, ScoredExample] = {}
        for members in setup.plan(loaded, validation=True):
            if should_stop():
                model.train()
                return None
            comparisons = [loaded[i] for i in members]
            pairs = setup.pairs_of(comparisons).to(model.device)
            groups = [comparison.token_ids for comparison in comparisons]
            parts = model.make_parts(groups, max_tokens=setup.config.policy.micro_batch_tokens)
            order = torch.tensor([i for chosen, _ in parts for i in chosen]).argsort()
            scores_S = torch.cat([model(batch) for _, batch in parts])[order.to(model.device)]
            total += RewardMetrics.of(scores_S, pairs, setup.loss_of(scores_S, pairs))
            scores = iter(scores_S.tolist())
            for i, one in zip(members, comparisons, strict=True):
                own = [next(scores) for _ in one.ranks]
                of_loaded[i] = scored_comparison(
                    one.where, one.subset, scores=own, ranks=one.ranks, lengths=one.lengths
                )
        scored += (of_loaded[i] for i in range(len(loaded)))
    robust = _robust_accuracy(setup, name, should_stop) if name in setup.perturbed else None
    model.train()
    if name in setup.perturbed and robust is None:
        return None
    return SetValidation(total, tuple(scored), robust)


def _robust_accuracy(setup: RewardModelSetup, name: str, should_stop: Callable[[], object]) -> Metric | None:
    """The share of pairs that are right and stay so under every rewrite of style; None if `should_stop` gave a reason
    on the way."""
    policy, examples = setup.config.policy, setup.perturbed[name]
    groups = setup.config.rm.val_micro_batch_size or policy.train_micro_batch_size
    scorer = Scorer(
        setup.model,
        setup.renderer,
        batch_tokens=policy.micro_batch_tokens,
        max_sequences=None if groups is None else 2 * groups,
    )
    scores = []
    for one in score_perturbed(scorer, examples):
        if should_stop():
            break
        scores.append(one)
    if len(scores) < len(examples):
        return None
    return replace(summarize_perturbations(scores).robust_accuracy, low=None, high=None)


def _of_sums(sums: RewardMetrics) -> dict[str, Metric]:
    missing = "there is no pair of a better and a worse completion"
    return {
        name: Metric(name, value, count=sums.num_pairs, note=missing if math.isnan(value) else None)
        for name, value in sums.means().items()
    }
