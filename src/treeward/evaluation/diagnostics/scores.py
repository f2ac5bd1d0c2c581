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
from scipy import stats

from treeward.data.preference import Completion, Preference
from treeward.evaluation.diagnostics.biases import collect_pairs, diagnose_length, known_margins
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
    outcomes = []
    prompts = []
    is_tie = []
    prompts_of_margins = []
    pairs = collect_pairs(scored)
    for pair in pairs:
        outcomes.append(pair.outcome)
        prompts.append(pair.prompt)
        # A pair without a score is wrong in the accuracy, and no tie.
        if not math.isnan(pair.margin):
            is_tie.append(float(pair.margin == 0))
            prompts_of_margins.append(pair.prompt)
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
        accuracy_metric(is_tie, "ties", prompts_of_margins),
        *orders_and_confidences(scored).values(),
        *grade_errors(scored).values(),
        *_fitted_temperature(known_margins(pairs), name),
        _worst_subset(result),
        Metric("score_mean", mean, count=len(scores)),
        Metric("score_std", deviation, count=len(scores)),
    ]
    return Diagnostic({metric.name: metric for metric in numbers})


def _fitted_temperature(margins: Sequence[float], name: str | None) -> tuple[Metric, Metric]:
    """`ece_fitted` and `temperature`."""
    count = len(margins)
    fitted = None
    # Without pairs the fit would only warn that there are none.
    if margins:
        fitted = fit_temperature(np.array(margins, dtype=np.float64), name=name)
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
    margins = known_margins(collect_pairs(scored))
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
    if not names:
        return {}
    sums = GradeSums()
    for example in scored:
        grades: list[list[float]] = []
        values: list[list[float]] = []
        # `heads` is empty for an example without grades of such names.
        for heads, completion in zip(example.heads, example.example.completions, strict=False):
            if heads:
                # An unknown grade is NaN, which `graded` masks. So is one without a value, as of a
                # criterion without a verdict: its 0 is read by nobody.
                own_grades = []
                own_values = []
                for name in names:
                    has_value = name in heads
                    own_values.append(heads[name] if has_value else 0.0)
                    grade = completion.all_grades.get(name, math.nan)
                    own_grades.append(grade if has_value else math.nan)
                grades.append(own_grades)
                values.append(own_values)
        if grades:
            # `GradeSums` asks of a weight only whether there is a grade: any unit would do.
            units_H = (1.0,) * len(names)
            sums.add(torch.tensor(values), graded([grades], units_H))
    if sums.sums_6H is None:
        return {}
    # The first of the six sums counts the grades of each name.
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
    is_in_order: list[bool] = []
    is_best_on_top: list[bool] = []
    for example in scored:
        if len(set(example.example.ranks)) > 1:
            is_in_order.append(_is_in_order(example))
            sides = example.best_and_others()
            is_best_on_top.append(sides is not None and max(sides[0]) > max(sides[1]))
        tau = _kendall_tau(example)
        if tau is not None:
            taus.append(tau)
    margins = known_margins(collect_pairs(scored))
    ece = expected_calibration_error(*pair_confidences(margins))
    no_pairs = "There is no pair of a better and a worse completion that both have a score."
    no_taus = "There is no example of more than two completions with different scores."
    metrics = [
        _mean_metric("kendall_tau", taus, no_taus),
        _mean_metric("group_accuracy", is_in_order, no_pairs),
        _mean_metric("best_of_k", is_best_on_top, no_pairs),
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
    known_scores: list[float | None] = []
    for score in scores:
        known_scores.append(score if math.isfinite(score) else None)
    context = ({"role": "user", "content": prompt},)
    example = Preference(context, completions, task_name=subset, id=id)
    num_tokens = (0,) * len(ranks)
    return ScoredExample(example, tuple(known_scores), tuple(lengths), num_tokens)


def gate_metrics(scored: Sequence[ScoredExample]) -> dict[str, Metric]:
    """The numbers of `GATE_METRICS` without intervals; the note of one that has no value says why.

    `worst_subset`: the lowest pair accuracy of a subset, where a missing score counts as wrong.
    """
    # Validation runs every few steps: no number here is resampled.
    metrics = {**diagnose_length(scored).numbers, **orders_and_confidences(scored)}
    gates = {}
    for name in GATE_METRICS[:-1]:  # without worst_subset, which is made below
        gates[name] = replace(metrics[name], low=None, high=None)
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
