"""Validation: the metrics of each named set, over every comparison or the first so many.

    result = validate(model, dataset, pairs_of, loss_of, plan, limit=None)     # SetValidation of one set
    result.metrics()["loss"].value, result.metrics()["length_controlled_accuracy"].value
    pooled([result, of_another_set])                                           # metrics over all of them

Loss and accuracy are sums over pairs. The diagnostics (`treeward.evaluation.gates`) need the scores themselves, which
are kept: K floats and a few small objects for each comparison, no texts and no token ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from treeward.config.data import DatasetConfig
from treeward.data.encoding import Comparison, EncodedDataset
from treeward.data.rendering import Renderer
from treeward.errors import DataError
from treeward.evaluation.diagnostics.perturbations import sample_examples, score_perturbed, summarize_perturbations
from treeward.evaluation.examples import EvalExample, ScoredExample
from treeward.evaluation.gates import gate_metrics, pooled_gate_metrics, scored_comparison
from treeward.evaluation.results import Metric
from treeward.evaluation.suites.preferences import PreferenceSuite
from treeward.losses import Pairs
from treeward.metrics import RewardMetrics
from treeward.model.reward_model import RewardModel
from treeward.scoring.scorer import Scorer

__all__ = [
    "LossFunction",
    "PairsFunction",
    "PlanFunction",
    "SetValidation",
    "examples_to_perturb",
    "num_shared",
    "pooled",
    "robust_accuracy",
    "validate",
    "values_of",
]

PairsFunction = Callable[[Sequence[Comparison]], Pairs]
PlanFunction = Callable[[Sequence[Comparison]], list[list[int]]]
LossFunction = Callable[[Tensor, Pairs], Tensor]

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
    robust = [one.robust for one in sets if one.robust is not None]
    if len(robust) == len(sets):
        counts = [one.count or 0 for one in robust]
        right = math.fsum((one.value or 0.0) * count for one, count in zip(robust, counts, strict=True))
        value = right / sum(counts) if sum(counts) else None
        metrics["robust_accuracy"] = Metric("robust_accuracy", value, count=sum(counts))
    return metrics


def values_of(metrics: dict[str, Metric]) -> dict[str, float]:
    """The metrics that have a value, as numbers."""
    return {name: metric.value for name, metric in metrics.items() if metric.value is not None}


@torch.no_grad()
def validate(
    model: RewardModel,
    dataset: EncodedDataset,
    pairs_of: PairsFunction,
    loss_of: LossFunction,
    plan: PlanFunction,
    *,
    max_tokens: int | None = None,
    limit: int | None = None,
    should_stop: Callable[[], object] = lambda: False,
) -> SetValidation | None:
    """Measure a set; None if `should_stop` gave a reason on the way.

    `plan` says which comparisons share a forward pass; one of more than `max_tokens` alone is scored in parts. `limit`:
    only the first so many comparisons.
    """
    training = model.training
    model.eval()
    total = RewardMetrics()
    size = len(dataset) if limit is None else min(limit, len(dataset))
    scored: list[ScoredExample] = []
    for start in range(0, size, _COMPARISONS_AT_ONCE):
        loaded = dataset[start : min(start + _COMPARISONS_AT_ONCE, size)]
        of_loaded: dict[int, ScoredExample] = {}
        for members in plan(loaded):
            if should_stop():
                model.train(training)
                return None
            comparisons = [loaded[i] for i in members]
            pairs = pairs_of(comparisons).to(model.device)
            parts = model.make_parts([comparison.token_ids for comparison in comparisons], max_tokens=max_tokens)
            order = torch.tensor([i for chosen, _ in parts for i in chosen]).argsort()
            scores_S = torch.cat([model(batch) for _, batch in parts])[order.to(model.device)]
            total += RewardMetrics.of(scores_S, pairs, loss_of(scores_S, pairs))
            scores = iter(scores_S.tolist())
            for i, comparison in zip(members, comparisons, strict=True):
                of_loaded[i] = _scored(comparison, [next(scores) for _ in comparison.ranks])
        scored += (of_loaded[i] for i in range(len(loaded)))
    model.train(training)
    return SetValidation(total, tuple(scored))


def examples_to_perturb(
    dataset: EncodedDataset, config: DatasetConfig, num_examples: int, *, limit: int | None
) -> tuple[EvalExample, ...]:
    """At most `num_examples` of the comparisons that a validation of `limit` measures, with their texts.

    They are those that `treeward eval --perturbations` draws. Raises `DataError` if no comparison has a better and a
    worse completion that are text.
    """
    size = len(dataset) if limit is None else min(limit, len(dataset))
    validated = {dataset[i].where for i in range(size)}
    name = config.name or dataset.name
    examples = [example for example in PreferenceSuite(name, config).load() if example.where in validated]
    sampled = sample_examples(examples, num_examples)
    if not sampled:
        raise DataError(
            "robust_accuracy cannot be measured: there is nothing to rewrite",
            where=name,
            got=f"{len(examples)} comparisons, none with a better and a worse completion that are text",
            fix="set rm.val_perturbations=null, and another checkpointing.metric_name",
        )
    return tuple(sampled)


def robust_accuracy(
    model: RewardModel,
    renderer: Renderer,
    examples: Sequence[EvalExample],
    *,
    batch_tokens: int | None,
    max_sequences: int | None = None,
    should_stop: Callable[[], object] = lambda: False,
) -> Metric | None:
    """The share of pairs that are right and stay so under every rewrite of style; None if `should_stop` gave
    a reason.

    Scores are in the precision of training, as those of `validate`.
    """
    training, counters = model.training, (model.num_computed_tokens, model.num_row_tokens)
    scorer = Scorer(model, renderer, batch_tokens=batch_tokens, max_sequences=max_sequences)
    scores = []
    for one in score_perturbed(scorer, examples):
        if should_stop():
            break
        scores.append(one)
    model.train(training)
    model.num_computed_tokens, model.num_row_tokens = counters
    if len(scores) < len(examples):
        return None
    found = summarize_perturbations(examples, scores).robust_accuracy
    return replace(found, low=None, high=None)


def _scored(comparison: Comparison, scores: Sequence[float]) -> ScoredExample:
    return scored_comparison(
        comparison.where, comparison.subset, scores=scores, ranks=comparison.ranks, lengths=comparison.lengths
    )


def _of_sums(sums: RewardMetrics) -> dict[str, Metric]:
    missing = "there is no pair of a better and a worse completion"
    return {
        name: Metric(name, value, count=sums.num_pairs, note=missing if math.isnan(value) else None)
        for name, value in sums.means().items()
    }


def num_shared(dataset: EncodedDataset, training_sets: Iterable[EncodedDataset], *, limit: int | None = None) -> int:
    """How many of the first `limit` comparisons (None: all) have the same conversations and ranks as one of the
    training data, in any order. Completions of other prompts, which training may add, do not count."""
    trained_on = np.concatenate([np.zeros(0, np.int64), *(training.digests for training in training_sets)])
    return int(np.isin(dataset.digests[:limit], trained_on).sum())
