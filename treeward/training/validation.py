"""`ValidationSet` and `SetValidation`: the comparisons of a validation, and its metrics, for each named set.

    result = run.validate_set("held_out")                        # SetValidation of one set
    pooled([result, of_another_set])                             # metrics over all of them

Shapes: H attributes; 6 sums of `GradeSums`.
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
from treeward.data.preference import Completion, Preference
from treeward.data.rendering import Renderer
from treeward.errors import DataError
from treeward.evaluation.diagnostics.perturbations import diagnose_perturbations, perturbed, sample_examples
from treeward.evaluation.diagnostics.scores import gate_metrics, pooled_gate_metrics
from treeward.evaluation.results import Metric, ScoredExample, score_examples
from treeward.evaluation.suites import PreferenceSuite
from treeward.metrics import RewardMetrics, grade_metrics
from treeward.scoring.scorer import Scorer

_DIGESTS_AT_ONCE = 1_000_000


@dataclass(frozen=True, slots=True)
class ValidationSet:
    """A named set. A validation measures the first `size` of its `comparisons`; `num_trained_on` of these are in the
    training data too. `perturbed`: the examples to rewrite for `robust_accuracy`."""

    comparisons: EncodedDataset
    size: int
    num_trained_on: int = 0
    perturbed: Sequence[Preference] = ()


def num_shared(dataset: EncodedDataset, training_sets: Iterable[EncodedDataset], *, limit: int | None = None) -> int:
    """How many of the first `limit` comparisons (None: all) have the same conversations and ranks as one of the
    training data, in any order. Completions of other prompts, which training may add, do not count."""
    distinct, counts = np.unique(dataset.digests(0, limit), return_counts=True)
    is_shared = np.zeros(len(distinct), dtype=bool)
    for training in training_sets:
        for start in range(0, len(training), _DIGESTS_AT_ONCE):  # so that memory does not grow with the training data
            digests = training.digests(start, start + _DIGESTS_AT_ONCE)
            places = np.searchsorted(distinct, digests).clip(max=len(distinct) - 1)
            is_shared[places[distinct[places] == digests]] = True
    return int(counts[is_shared].sum())


def examples_to_perturb(
    comparisons: Sequence[Comparison], config: DatasetConfig, num_examples: int, renderer: Renderer
) -> list[Preference]:
    """At most `num_examples` of a validation's comparisons, with their texts, drawn as in `treeward eval
    --perturbations`. Raises `DataError` if no comparison has a better and a worse completion that are text."""
    examples = as_measured(PreferenceSuite(str(config.name), config).load(), comparisons, renderer)
    sampled = sample_examples(examples, num_examples)
    if not sampled:
        got = f"{len(examples)} comparisons, none with a better and a worse completion that are text"
        fix = "set rm.val_perturbations=null, and another checkpointing.metric_name"
        where = str(config.name)
        raise DataError("robust_accuracy cannot be measured: nothing can be rewritten", where=where, got=got, fix=fix)
    return sampled


def as_measured(
    examples: Iterable[Preference], comparisons: Iterable[Comparison], renderer: Renderer
) -> list[Preference]:
    """The examples of the comparisons, in the same order, with the completions that a validation measures: without
    those that are too long or have the tokens of an earlier one. Raises `DataError` for data that has changed since."""
    remaining, measured = iter(examples), []
    for comparison in comparisons:
        place = place_of(comparison.where)
        example = next((candidate for candidate in remaining if place_of(candidate.where) == place), None)
        if example is None or len(example.completions) < len(comparison.ranks):
            need = "the data as it was when the run was set up"
            summary = "the validation set is not what the run has read"
            raise DataError(summary, where=comparison.where, got="other rows", need=need)
        if len(example.completions) > len(comparison.ranks):
            firsts: dict[tuple[int, ...], Completion] = {}
            for completion, conversation in zip(example.completions, example.conversations, strict=True):
                if fitted := renderer.fit(conversation, where=example.where):
                    firsts.setdefault(tuple(fitted.token_ids), completion)
            pairs = zip(firsts.values(), comparison.ranks, strict=True)
            example = replace(example, completions=tuple(replace(item, rank=rank) for item, rank in pairs))
        measured.append(example)
    return measured


def place_of(where: str | None) -> str:
    """A row's file and number without the folder: data that has moved is read from the cache, with its old path."""
    return (where or "").rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class SetValidation:
    """The measurements of one set: sums over its pairs, the scores of each comparison in the order of the set,
    `robust_accuracy` if it was measured, and the sums of `GradeSums` over the grades of `attributes`."""

    sums: RewardMetrics
    scored: tuple[ScoredExample, ...]
    robust: Metric | None = None
    grades_6H: Tensor | None = None
    attributes: tuple[str, ...] = ()

    def metrics(self) -> dict[str, Metric]:
        """The metrics by name; without a value a metric's note says why."""
        robust = {} if self.robust is None else {"robust_accuracy": self.robust}
        return _of_sums(self.sums) | gate_metrics(self.scored) | robust | _of_grades([self])


def pooled(sets: Sequence[SetValidation]) -> dict[str, Metric]:
    """The metrics over the comparisons of all sets; `robust_accuracy` only if every set has it."""
    if len(sets) == 1:
        return sets[0].metrics()
    sums = sum((result.sums for result in sets), RewardMetrics())
    metrics = _of_sums(sums) | pooled_gate_metrics([result.scored for result in sets]) | _of_grades(sets)
    robust = [(result.robust.value or 0.0, result.robust.count or 0) for result in sets if result.robust is not None]
    if len(robust) == len(sets):
        count = sum(number for _, number in robust)
        value = sum(share * number for share, number in robust) / count if count else None
        metrics["robust_accuracy"] = Metric("robust_accuracy", value, count=count)
    return metrics


def values_of(metrics: dict[str, Metric]) -> dict[str, float]:
    """The metrics that have a value, as numbers."""
    return {name: metric.value for name, metric in metrics.items() if metric.value is not None}


def robust_accuracy(scorer: Scorer, examples: Sequence[Preference], should_stop: Callable[[], object]) -> Metric | None:
    """The share of pairs that are right and stay so under every rewrite of style; None if `should_stop` gave a reason
    on the way."""
    scores = []
    for example_scores in score_examples(scorer, map(perturbed, examples), at_once=16):
        if should_stop():
            return None
        scores.append(example_scores)
    return replace(diagnose_perturbations(examples, scores).robust_accuracy, low=None, high=None)


def _of_sums(sums: RewardMetrics) -> dict[str, Metric]:
    missing = "There is no pair of a better and a worse completion."
    return {
        name: Metric(name, value, count=sums.num_pairs, note=missing if math.isnan(value) else None)
        for name, value in sums.means().items()
    }


def _of_grades(sets: Sequence[SetValidation]) -> dict[str, Metric]:
    sums = [result.grades_6H for result in sets if result.grades_6H is not None]
    if not sums:
        return {}
    sums_6H = torch.stack(sums).sum(dim=0)
    metrics, count = grade_metrics(sums_6H, sets[0].attributes), int(sums_6H[0].sum())
    return {name: Metric(name, value, count=count) for name, value in metrics.items() if math.isfinite(value)}
