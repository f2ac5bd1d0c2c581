"""`statistics_of`: the numbers of any scored comparisons; `gate_metrics`: those by which a
checkpoint may be chosen.

    statistics = statistics_of(scored, suite.summarize(scored))
    statistics.pair_accuracy, statistics.kendall_tau, statistics.ece, statistics.temperature
    gate_metrics(scored)["length_controlled_accuracy"].value  # that of `treeward eval`

Bradley and Terry's model reads a margin m as the probability sigma(m / T). Gates have no intervals,
because a run compares their values alone.
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

    `temperature`: the T for which sigma(margin / T) predicts these pairs best; no value where none
    does. `ece_fitted`: at that temperature. `worst_subset`: of `result`. The others are those of
    `orders_and_confidences` and `grade_errors`. `name`: for the log.
    """
    pairs = collect_pairs(scored)
    outcomes = [pair.outcome for pair in pairs]
    prompts = [pair.prompt for pair in pairs]
    with_scores = [pair for pair in pairs if not math.isnan(pair.margin)]
    prompts_with_scores = [pair.prompt for pair in with_scores]
    margins = np.array([pair.margin for pair in with_scores], dtype=np.float64)
    # A pair without a score is wrong in the accuracy, and no tie.
    is_tie = (margins == 0).astype(float)
    scores: list[float] = []
    for example in scored:
        scores += [score for score in example.scores if score is not None]
    mean: float | None = None
    deviation: float | None = None
    if scores:
        mean = float(np.mean(scores))
        deviation = float(np.std(scores))
    numbers = [
        accuracy_metric(outcomes, "pair_accuracy", prompts),
        accuracy_metric(is_tie.tolist(), "ties", prompts_with_scores),
        *orders_and_confidences(scored).values(),
        *grade_errors(scored).values(),
        *_fitted_temperature(margins, name),
        _worst_subset(result),
        Metric("score_mean", mean, count=len(scores)),
        Metric("score_std", deviation, count=len(scores)),
    ]
    return Diagnostic({metric.name: metric for metric in numbers})


def _fitted_temperature(margins: NDArray[np.float64], name: str | None) -> tuple[Metric, Metric]:
    """`ece_fitted` and `temperature`."""
    count = len(margins)
    # Without pairs it would only warn that there are none.
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
    # The first by name of equal ones, so that the report is the same every time.
    worst = min(subsets, key=lambda subset: (subset.value or 0.0, subset.name))
    return replace(worst, name="worst_subset", note=worst.name)


def reliability_of(scored: Sequence[ScoredExample]) -> list[dict[str, Any]]:
    """How often the higher score was right over how sure sigma(|margin|) was: bins of
    `reliability_curve`."""
    margins = [pair.margin for pair in collect_pairs(scored) if not math.isnan(pair.margin)]
    return reliability_curve(*pair_confidences(margins))


def grade_errors(scored: Sequence[ScoredExample]) -> dict[str, Metric]:
    """`mse` and `pearson` of the values of heads and the grades of their names, over all of them
    and of each, as in `losses.grade_metrics`; empty where no example has both.
    """
    graded_names: set[str] = set()
    head_names: set[str] = set()
    for example in scored:
        for completion in example.example.completions:
            graded_names |= completion.all_grades.keys()
        for heads in example.heads:
            head_names |= heads.keys()
    names = sorted(graded_names & head_names)
    sums = GradeSums()
    for example in scored:
        grades: list[list[float | None]] = []
        values: list[list[float]] = []
        # `heads` is empty for an example without grades of such names.
        for heads, completion in zip(example.heads, example.example.completions, strict=False):
            if heads and names:
                grades.append([completion.all_grades.get(name) for name in names])
                values.append([heads.get(name, 0.0) for name in names])
        if grades:
            # An unknown grade becomes NaN, which `graded` masks.
            grades_SH = np.array(grades, dtype=np.float64).tolist()
            sums.add(torch.tensor(values), graded([grades_SH], (1.0,) * len(names)))
    if sums.sums_6H is None:
        return {}
    count = int(sums.sums_6H[0].sum())
    metrics = {}
    for name, value in grade_metrics(sums.sums_6H, names).items():
        metrics[name] = Metric(name, value if math.isfinite(value) else None, count=count)
    return metrics


def orders_and_confidences(scored: Sequence[ScoredExample]) -> dict[str, Metric]:
    """The numbers that cost no resampling; the note of one that has no value says why.

    `kendall_tau`: mean of tau-b (Kendall 1945, Biometrika 33, page 239) over examples with more
    than two scores. `group_accuracy`: examples every pair of which is in the right order;
    `best_of_k`: those whose highest score is that of a best completion, and of no other; a missing
    score counts as wrong in both. `ece`: of sigma(|margin|) as the chance that the higher score is
    right, of pairs with both scores.
    """
    taus: list[float] = []
    all_right: list[bool] = []
    best_wins: list[bool] = []
    for example in scored:
        if len(set(example.example.ranks)) > 1:
            all_right.append(_is_in_order(example))
            best_wins.append(_has_best_on_top(example))
        tau = _kendall_tau(example)
        if tau is not None:
            taus.append(tau)
    margins = [pair.margin for pair in collect_pairs(scored) if not math.isnan(pair.margin)]
    ece = expected_calibration_error(*pair_confidences(margins))
    no_pairs = "There is no pair of a better and a worse completion that both have a score."
    no_taus = "There is no example of more than two completions with different scores."
    metrics = [
        _mean_metric("kendall_tau", taus, no_taus),
        _mean_metric("group_accuracy", all_right, no_pairs),
        _mean_metric("best_of_k", best_wins, no_pairs),
        Metric("ece", ece, count=len(margins), note=no_pairs if ece is None else None),
    ]
    return {metric.name: metric for metric in metrics}


def _is_in_order(example: ScoredExample) -> bool:
    """Whether every pair is in the right order."""
    for better, worse in example.pairs():
        score = example.scores[better]
        other = example.scores[worse]
        if score is None or other is None or not score > other:
            return False
    return not example.failed


def _has_best_on_top(example: ScoredExample) -> bool:
    """Whether the highest score is that of a best completion, and of no other."""
    scores = [score for score in example.scores if score is not None]
    if len(scores) < len(example.scores):
        return False
    highest = max(scores)
    best = min(example.example.ranks)
    ranks = zip(example.example.ranks, scores, strict=True)
    return {rank for rank, score in ranks if score == highest} == {best}


def _kendall_tau(example: ScoredExample) -> float | None:
    """tau-b of more than two scores; None for fewer, and where all scores or ranks are the same."""
    scores = []
    goodness = []  # a lower rank is better
    for score, rank in zip(example.scores, example.example.ranks, strict=True):
        if score is not None:
            scores.append(score)
            goodness.append(-rank)
    if len(scores) <= 2:
        return None  # for two scores it is the pair accuracy once more
    tau = float(stats.kendalltau(scores, goodness, variant="b").statistic)
    return tau if math.isfinite(tau) else None


def _mean_metric(name: str, values: Sequence[float], missing: str) -> Metric:
    """The mean of the values; `missing`: the note where there are none."""
    if not values:
        return Metric(name, None, count=0, note=missing)
    return Metric(name, float(np.mean(values)), count=len(values))


GATE_METRICS = (
    "length_controlled_accuracy", "accuracy_longer_right", "accuracy_shorter_right", "accuracy_gap",
    "ece", "kendall_tau", "group_accuracy", "best_of_k", "worst_subset",
)  # fmt: skip
"""The names of `gate_metrics`, in order."""


def scored_comparison(
    id: str,
    subset: str,
    *,
    scores: Sequence[float],
    ranks: Sequence[int],
    lengths: Sequence[int],
    prompt: str = "",
) -> ScoredExample:
    """A comparison of which only numbers are known: K scores, ranks (lower is better) and lengths
    in characters.

    A score that is not finite counts as none. `prompt`: a digest of the context, which it stands in
    for: intervals treat examples of one context as dependent. Nothing else that depends on texts
    may be computed from it.
    """
    completions = tuple(Completion(rank, ()) for rank in ranks)
    finite: list[float | None] = []
    for score in scores:
        finite.append(score if math.isfinite(score) else None)
    context = ({"role": "user", "content": prompt},)
    example = Preference(context, completions, task_name=subset, id=id)
    num_tokens = (0,) * len(ranks)
    return ScoredExample(example, tuple(finite), tuple(lengths), num_tokens)


def gate_metrics(scored: Sequence[ScoredExample]) -> dict[str, Metric]:
    """The numbers of `GATE_METRICS` without intervals; the note of one that has no value says why.

    `worst_subset`: the lowest pair accuracy of a subset, where a missing score counts as wrong.
    """
    # Validation runs every few steps: no number here is resampled.
    metrics = {**diagnose_length(scored).numbers, **orders_and_confidences(scored)}
    gates = {}
    for name in GATE_METRICS[:-1]:  # without worst_subset, which is made below
        note = metrics[name].note if metrics[name].value is None else None
        gates[name] = replace(metrics[name], low=None, high=None, note=note)
    accuracies = []
    for name, examples in by_subset(scored).items():
        outcomes = [pair.outcome for pair in collect_pairs(examples)]
        if outcomes:
            accuracies.append((float(np.mean(outcomes)), name, len(outcomes)))
    if accuracies:
        # The first by name of equal ones, so that a run chooses alike every time.
        value, name, count = min(accuracies)
        gates["worst_subset"] = Metric("worst_subset", value, count=count, note=name)
    else:
        missing = "There is no pair of a better and a worse completion."
        gates["worst_subset"] = Metric("worst_subset", None, count=0, note=missing)
    return gates
