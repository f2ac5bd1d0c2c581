"""`statistics_of`: the numbers of any scored comparisons.

    statistics = statistics_of(scored, suite.summarize(scored))
    statistics.pair_accuracy, statistics.auroc, statistics.ece, statistics.temperature

Bradley and Terry's model reads a margin m as the probability sigma(m / T). Beyond 5 T that is above 0.993: a pair is
saturated. It teaches next to nothing any more, and a policy that is optimised against the scores is driven by their
size alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from treeward.evaluation.diagnostics.completions import collect_pairs
from treeward.evaluation.examples import ScoredExample, mostly_failed
from treeward.evaluation.results import Block, Diagnostic, Metric, SuiteResult
from treeward.evaluation.statistics import (
    accuracy_metric,
    auroc,
    brier,
    expected_calibration_error,
    kendall_tau_b,
    pair_confidences,
    reliability_curve,
)
from treeward.losses import graded
from treeward.metrics import GradeSums, grade_metrics
from treeward.scoring.calibration import fit_temperature

_SATURATED = 5.0  # temperatures


def statistics_of(
    scored: Sequence[ScoredExample], result: SuiteResult | None = None, model: str = "model", *, name: str | None = None
) -> Diagnostic:
    """The numbers of any scored comparisons; ties and failures count as wrong in `pair_accuracy`, which has no value
    where most examples failed.

    `temperature`: the T for which sigma(margin / T) predicts these pairs best; no value where none does. `ece_fitted`:
    at that temperature, and `saturated` too (at 1 where there is none). `worst_subset`: of `result`. `score_mean`,
    `score_std`: over all completions. The others are those of `orders_and_confidences`. `name`: for the log.
    """
    pairs = collect_pairs(scored)
    known, scores = pairs.with_scores, np.array([s for one in scored for s in one.scores if s is not None])
    margins, prompts, count = known.margins, known.prompts.tolist(), len(known.margins)
    fitted = fit_temperature(margins, name=name) if count else None
    scale, found = (None if fitted is None else fitted.value), orders_and_confidences(scored)
    after = None if scale is None else expected_calibration_error(*pair_confidences(margins, scale))
    saturated = (np.abs(margins) > _SATURATED * (scale or 1.0)).astype(float).tolist()
    outcomes = [] if result is not None and result.mostly_failed else pairs.outcomes.tolist()
    missing = "There is none: the better completions do not score higher on average." if scale is None else None
    assumed = "No temperature is fitted, so it is taken as 1." if scale is None else None
    worst = min((s for s in (result.subsets if result else ()) if s.value is not None),
                key=lambda one: (one.value or 0.0, one.name), default=None)  # fmt: skip
    numbers = (
        accuracy_metric(outcomes, "pair_accuracy", pairs.prompts.tolist()[: len(outcomes)], of="pairs"),
        accuracy_metric((margins == 0).astype(float).tolist(), "ties", prompts, of="pairs"),
        *found.values(),
        *grade_errors(scored).values(),
        *spread_metric(scored).values(),
        Metric("ece_fitted", after, count=count),
        Metric("temperature", scale, count=count, note=missing),
        Metric("worst_subset", None) if worst is None else replace(worst, name="worst_subset", note=worst.name),
        Metric("score_mean", float(scores.mean()) if len(scores) else None, count=len(scores)),
        Metric("score_std", float(scores.std()) if len(scores) else None, count=len(scores)),
        replace(accuracy_metric(saturated, "saturated", prompts, of="pairs"), note=assumed),
    )
    bins = reliability_curve(*pair_confidences(margins))
    figure: Block = {
        "kind": "curves",
        "title": "How sure, and how often right",
        "note": "On the diagonal sigmoid(margin) is a probability; below it the model is overconfident.",
        "x_label": "predicted probability",
        "y_label": "how often it was right",
        "format": "percent",
        "is_square": True,
        "series": [
            {"name": model, "x": [one["mean_probability"] for one in bins], "y": [one["frequency"] for one in bins]}
            | {"low": [one["interval"][0] for one in bins], "high": [one["interval"][1] for one in bins]}
            | {"labels": [f"predicted {one['mean_probability']:.1%}, n = {one['count']}" for one in bins]}
        ],
    }
    return Diagnostic({metric.name: metric for metric in numbers}, (figure,) if count else ())


def grade_errors(scored: Sequence[ScoredExample]) -> dict[str, Metric]:
    """`mse` and `pearson` of the values of heads and the grades of their names, over all of them and of each, as in
    `metrics.grade_metrics`; empty where no example has both."""
    names = sorted({name for one in scored for own in one.heads for name in _graded_names(one, own)})
    sums = GradeSums()
    for one in scored:
        grades = one.example.suite_data.get("attributes", {})
        known = [i for i, own in enumerate(one.heads) if _graded_names(one, own)]
        rows = [[grades[name][i] for name in names] for i in known]
        targets = graded(
            [[[math.nan if grade is None else grade for grade in row] for row in rows]], (1.0,) * len(names)
        )
        values_SH = torch.tensor([[one.heads[i][name] for name in names] for i in known])
        if known:
            sums.add(values_SH, targets)
    if sums.sums_6H is None:
        return {}
    values, count = grade_metrics(sums.sums_6H, names), int(sums.sums_6H[0].sum())
    return {name: Metric(name, value if math.isfinite(value) else None, count=count) for name, value in values.items()}


def _graded_names(one: ScoredExample, heads: Iterable[str]) -> list[str]:
    return [name for name in heads if name in one.example.suite_data.get("attributes", {})]


def spread_metric(scored: Sequence[ScoredExample]) -> dict[str, Metric]:
    """`spread_auroc`: how often the heads differ more about a pair in the wrong order than about one in the right
    order, by the standard deviation over heads of the difference of the two values; empty where the heads are no
    estimates of one score."""
    spreads: tuple[list[float], list[float]] = [], []
    for one in scored:
        values_SH = [[own[name] for name in sorted(own.keys() - _graded_names(one, own))] for own in one.heads]
        for better, worse in one.pairs() if any(values_SH) else ():
            a, b = one.scores[better], one.scores[worse]
            if a is not None and b is not None:
                spreads[a > b].append(float(np.std(np.subtract(values_SH[better], values_SH[worse]))))
    wrong, right = spreads
    note = None if wrong and right else "It needs pairs in the right order and in the wrong one."
    metric = Metric("spread_auroc", auroc(wrong, right), count=len(wrong) + len(right), note=note)
    return {metric.name: metric} if metric.count else {}


def orders_and_confidences(scored: Sequence[ScoredExample]) -> dict[str, Metric]:
    """The numbers that cost no resampling; the note of one that has no value says why.

    `auroc`: of best-ranked completions against the others over all prompts, which asks more than pairs do.
    `kendall_tau`: mean of tau-b over examples with more than two scores. `group_accuracy`: examples every pair of which
    is in the right order; `best_of_k`: those whose highest score is that of a best completion, and of no other; a
    missing score counts as wrong in both. `ece`, `brier`: of sigma(|margin|) as the
    chance that the higher score is right, of pairs with both scores.
    """
    right: list[float] = []
    wrong: list[float] = []
    taus: list[float] = []
    all_right: list[bool] = []
    best_wins: list[bool] = []
    for one in scored:
        known = [(s, rank) for s, rank in zip(one.scores, one.example.ranks, strict=True) if s is not None]
        best = min(one.example.ranks, default=0)
        if max(one.example.ranks, default=0) != best:
            right += [score for score, rank in known if rank == best]
            wrong += [score for score, rank in known if rank != best]
            all_right.append(not one.failed and all(s > t for s, a in known for t, b in known if a < b))
            best_wins.append(not one.failed and {rank for score, rank in known if score == max(known)[0]} == {best})
        tau = kendall_tau_b([s for s, _ in known], [rank for _, rank in known]) if len(known) > 2 else None
        taus += [] if tau is None else [tau]
    if mostly_failed(scored):
        all_right, best_wins = [], []
    margins = collect_pairs(scored).with_scores.margins
    predictions = pair_confidences(margins)
    no_pairs = "There is no pair of a better and a worse completion that both have a score."
    no_taus = "There is no example of more than two completions with different scores."
    values = {
        "auroc": (auroc(right, wrong), len(right) + len(wrong), no_pairs),
        "kendall_tau": (float(np.mean(taus)) if taus else None, len(taus), no_taus),
        "group_accuracy": (float(np.mean(all_right)) if all_right else None, len(all_right), no_pairs),
        "best_of_k": (float(np.mean(best_wins)) if best_wins else None, len(best_wins), no_pairs),
        "ece": (expected_calibration_error(*predictions), len(margins), no_pairs),
        "brier": (brier(*predictions), len(margins), no_pairs),
    }
    return {
        name: Metric(name, value, count=count, note=missing if value is None else None)
        for name, (value, count, missing) in values.items()
    }
