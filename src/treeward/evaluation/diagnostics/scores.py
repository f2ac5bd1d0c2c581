"""`statistics_of`: the numbers of any scored comparisons; `gate_metrics`: those by which a checkpoint may be chosen.

    statistics = statistics_of(scored, suite.summarize(scored))
    statistics.pair_accuracy, statistics.kendall_tau, statistics.ece, statistics.temperature
    gate_metrics(scored)["length_controlled_accuracy"].value      # as `treeward eval` says it of the same scores

Bradley and Terry's model reads a margin m as the probability sigma(m / T). Gates have no intervals, because a run
compares their values alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from treeward.data.preference import Completion, Preference
from treeward.evaluation.diagnostics.biases import collect_pairs, diagnose_length
from treeward.evaluation.results import Diagnostic, Metric, ScoredExample, SuiteResult, by_subset
from treeward.evaluation.statistics import (
    accuracy_metric,
    expected_calibration_error,
    pair_confidences,
    reliability_curve,
)
from treeward.losses import GradeSums, grade_metrics, graded
from treeward.scoring.calibration import fit_temperature


def statistics_of(
    scored: Sequence[ScoredExample], result: SuiteResult | None = None, *, name: str | None = None
) -> Diagnostic:
    """The numbers of any scored comparisons; ties and failures count as wrong in `pair_accuracy`.

    `temperature`: the T for which sigma(margin / T) predicts these pairs best; no value where none does. `ece_fitted`:
    at that temperature. `worst_subset`: of `result`. The others are those of `orders_and_confidences` and
    `grade_errors`. `name`: for the log.
    """
    pairs = collect_pairs(scored)
    outcomes = [pair.outcome for pair in pairs]
    prompts = [pair.prompt for pair in pairs]
    with_scores = [pair for pair in pairs if not math.isnan(pair.margin)]
    prompts_with_scores = [pair.prompt for pair in with_scores]
    margins = np.array([pair.margin for pair in with_scores], dtype=np.float64)
    is_tie = (margins == 0).astype(float)
    numbers = [
        accuracy_metric(outcomes, "pair_accuracy", prompts),
        accuracy_metric(is_tie.tolist(), "ties", prompts_with_scores),
        *orders_and_confidences(scored).values(),
        *grade_errors(scored).values(),
        *_fitted_temperature(margins, name),
        _worst_subset(result),
        *_score_moments(scored),
    ]
    return Diagnostic({metric.name: metric for metric in numbers})


def _fitted_temperature(margins: NDArray[np.float64], name: str | None) -> tuple[Metric, Metric]:
    """`ece_fitted` and `temperature`."""
    count = len(margins)
    # The log has a warning of an empty set, which needs none here.
    fitted = fit_temperature(margins, name=name) if count else None
    if fitted is None:
        missing = "There is none: the better completions do not score higher on average."
        return (
            Metric("ece_fitted", None, count=count),
            Metric("temperature", None, count=count, note=missing),
        )
    ece = expected_calibration_error(*pair_confidences(margins, fitted.value))
    return (
        Metric("ece_fitted", ece, count=count),
        Metric("temperature", fitted.value, count=count),
    )


def _worst_subset(result: SuiteResult | None) -> Metric:
    """The subset of the lowest value, which its note names."""
    subsets = []
    if result is not None:
        subsets = [subset for subset in result.subsets if subset.value is not None]
    if not subsets:
        return Metric("worst_subset", None)
    worst = min(subsets, key=lambda subset: (subset.value or 0.0, subset.name))
    return replace(worst, name="worst_subset", note=worst.name)


def _score_moments(scored: Sequence[ScoredExample]) -> tuple[Metric, Metric]:
    """Mean and standard deviation of all scores."""
    scores: list[float] = []
    for example in scored:
        scores += [score for score in example.scores if score is not None]
    mean = float(np.mean(scores)) if scores else None
    deviation = float(np.std(scores)) if scores else None
    return (
        Metric("score_mean", mean, count=len(scores)),
        Metric("score_std", deviation, count=len(scores)),
    )


def reliability_of(scored: Sequence[ScoredExample]) -> list[dict[str, Any]]:
    """How often the higher score was right over how sure sigma(|margin|) was: bins of `reliability_curve`."""
    margins = [pair.margin for pair in collect_pairs(scored) if not math.isnan(pair.margin)]
    return reliability_curve(*pair_confidences(margins))


def grade_errors(scored: Sequence[ScoredExample]) -> dict[str, Metric]:
    """`mse` and `pearson` of the values of heads and the grades of their names, over all of them and of each, as in
    `losses.grade_metrics`; empty where no example has both."""
    grade_names = {name for row in scored for completion in row.example.completions for name in completion.all_grades}
    names = sorted(grade_names & {name for row in scored for heads in row.heads for name in heads})
    sums = GradeSums()
    for example in scored:
        pairs = [
            (heads, completion)
            for heads, completion in zip(example.heads, example.example.completions, strict=False)
            if heads and names
        ]
        if pairs:
            grades = [[completion.all_grades.get(name) for name in names] for _, completion in pairs]
            values_SH = torch.tensor([[heads.get(name, 0.0) for name in names] for heads, _ in pairs])
            sums.add(values_SH, graded([np.array(grades, dtype=np.float64).tolist()], (1.0,) * len(names)))
    if sums.sums_6H is None:
        return {}
    values, count = grade_metrics(sums.sums_6H, names), int(sums.sums_6H[0].sum())
    return {name: Metric(name, value if math.isfinite(value) else None, count=count) for name, value in values.items()}


def orders_and_confidences(scored: Sequence[ScoredExample]) -> dict[str, Metric]:
    """The numbers that cost no resampling; the note of one that has no value says why.

    `kendall_tau`: mean of tau-b (Kendall 1945, Biometrika 33, page 239) over examples with more than two scores.
    `group_accuracy`: examples every pair of which is in the right order; `best_of_k`: those whose highest score is that
    of a best completion, and of no other; a missing score counts as wrong in both. `ece`: of sigma(|margin|) as the
    chance that the higher score is right, of pairs with both scores.
    """
    taus: list[float] = []
    all_right: list[bool] = []
    best_wins: list[bool] = []
    for example in scored:
        ranks = example.example.ranks
        ranked = [(score, rank) for score, rank in zip(example.scores, ranks, strict=True) if score is not None]
        best = min(ranks, default=0)
        if max(ranks, default=0) != best:
            all_right.append(not example.failed and all(s > t for s, a in ranked for t, b in ranked if a < b))
            highest = max((score for score, _ in ranked), default=None)
            best_wins.append(not example.failed and {rank for score, rank in ranked if score == highest} == {best})
        if len(ranked) > 2:
            scores, kept_ranks = zip(*ranked, strict=True)
            tau = float(stats.kendalltau(scores, np.negative(kept_ranks), variant="b").statistic)
            taus += [tau] if math.isfinite(tau) else []
    margins = [pair.margin for pair in collect_pairs(scored) if not math.isnan(pair.margin)]
    no_pairs = "There is no pair of a better and a worse completion that both have a score."
    no_taus = "There is no example of more than two completions with different scores."
    values = {
        "kendall_tau": (_mean(taus), len(taus), no_taus),
        "group_accuracy": (_mean(all_right), len(all_right), no_pairs),
        "best_of_k": (_mean(best_wins), len(best_wins), no_pairs),
        "ece": (expected_calibration_error(*pair_confidences(margins)), len(margins), no_pairs),
    }
    return {
        name: Metric(name, value, count=count, note=missing if value is None else None)
        for name, (value, count, missing) in values.items()
    }


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


GATE_METRICS = (
    "length_controlled_accuracy", "accuracy_longer_right", "accuracy_shorter_right", "accuracy_gap",
    "ece", "kendall_tau", "group_accuracy", "best_of_k", "worst_subset",
)  # fmt: skip
"""The names of `gate_metrics`, in order."""


def scored_comparison(
    id: str, subset: str, *, scores: Sequence[float], ranks: Sequence[int], lengths: Sequence[int], prompt: str = ""
) -> ScoredExample:
    """A comparison of which only numbers are known: K scores, ranks (lower is better) and lengths in characters.

    A score that is not finite counts as none. `prompt`: a digest of the context, which it stands in for: intervals
    treat examples of one context as dependent. Nothing else that depends on texts may be computed from it.
    """
    completions = tuple(Completion(rank, ()) for rank in ranks)
    finite = tuple(score if math.isfinite(score) else None for score in scores)
    context = ({"role": "user", "content": prompt},)
    example = Preference(context, completions, task_name=subset, id=id)
    return ScoredExample(example, finite, tuple(lengths), num_tokens=(0,) * len(ranks))


def gate_metrics(scored: Sequence[ScoredExample]) -> dict[str, Metric]:
    """The numbers of `GATE_METRICS` without intervals; the note of one that has no value says why.

    `worst_subset`: the lowest pair accuracy of a subset, where a missing score counts as wrong.
    """
    metrics = {**diagnose_length(scored).numbers, **orders_and_confidences(scored)}
    gates = {}
    for name in GATE_METRICS[:-1]:
        note = metrics[name].note if metrics[name].value is None else None
        gates[name] = replace(metrics[name], low=None, high=None, note=note)
    return gates | {"worst_subset": _lowest_subset(scored)}


def _lowest_subset(scored: Sequence[ScoredExample]) -> Metric:
    accuracies = []
    for name, examples in by_subset(scored).items():
        if outcomes := [pair.outcome for pair in collect_pairs(examples)]:
            accuracies.append((float(np.mean(outcomes)), name, len(outcomes)))
    if not accuracies:
        return Metric("worst_subset", None, count=0, note="There is no pair of a better and a worse completion.")
    value, name, count = min(accuracies)
    return Metric("worst_subset", value, count=count, note=name)
