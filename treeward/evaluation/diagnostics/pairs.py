"""`statistics_of`: the numbers of any scored comparisons, over ordered pairs, and whether margins are probabilities.

statistics = statistics_of(scored, suite.summarize(scored))
statistics.pair_accuracy, statistics.auroc, statistics.ece, statistics.temperature
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from treeward.evaluation.diagnostics.completions import collect_pairs
from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.results import Block, Diagnostic, Metric, SuiteResult
from treeward.evaluation.statistics import (
    ReliabilityBin,
    accuracy_metric,
    auroc,
    brier,
    cluster_bootstrap,
    expected_calibration_error,
    kendall_tau_b,
    pair_confidences,
    reliability_curve,
)
from treeward.scoring.calibration import fit_temperature

__all__ = ["auroc_of_best", "kendall_taus", "statistics_of"]


def statistics_of(
    scored: Sequence[ScoredExample], result: SuiteResult | None = None, model: str = "model", *, name: str | None = None
) -> Diagnostic:
    """The numbers of any scored comparisons; ties and failures count as wrong in `pair_accuracy`.

    `temperature`: the T for which sigma(margin / T) predicts these pairs best; no value where none does. `ece` and
    `brier` are of the scores as they are, `ece_fitted` at that temperature. `auroc`: of best-ranked completions against
    the others over all prompts, which asks more than pairs do. `kendall_tau`: mean over examples with more than two
    completions. `worst_subset`: of `result`. `name`: for the log. `details`: the bins of the reliability diagram.
    """
    pairs = collect_pairs(scored)
    known = np.isfinite(pairs.margins)
    margins, clusters = pairs.margins[known], pairs.prompts[known].tolist()
    count = len(margins)
    fitted = fit_temperature(margins, name=name) if count else None
    confidences, outcomes = pair_confidences(margins)
    after = None if fitted is None else expected_calibration_error(*pair_confidences(margins, fitted.value))
    no_temperature = "there is none: the better completions do not score higher on average"
    auroc_value, auroc_count = auroc_of_best(scored)
    numbers = (
        accuracy_metric(pairs.outcomes.tolist(), "pair_accuracy", pairs.prompts.tolist(), of="pairs"),
        accuracy_metric((margins == 0).astype(float).tolist(), "ties", clusters, of="pairs"),
        Metric("auroc", auroc_value, count=auroc_count),
        _kendall(scored),
        Metric("ece", expected_calibration_error(confidences, outcomes), count=count),
        Metric("ece_fitted", after, count=count, note="at the fitted temperature"),
        Metric("brier", brier(confidences, outcomes), count=count),
        Metric("temperature", None, count=count, note=no_temperature if count else None)
        if fitted is None
        else Metric("temperature", fitted.value, count=count),
        _worst(result),
    )
    bins = reliability_curve(confidences, outcomes)
    figures = (_reliability(bins, model),) if count else ()
    return Diagnostic({metric.name: metric for metric in numbers}, figures, details={"reliability": bins})


def auroc_of_best(scored: Sequence[ScoredExample]) -> tuple[float | None, int]:
    """AUROC of best-ranked completions against the others of all ordered examples, and the number of completions."""
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


def _kendall(scored: Sequence[ScoredExample]) -> Metric:
    taus = kendall_taus(scored)
    if not taus:
        return Metric("kendall_tau", None, count=0, note="there are no examples of more than two completions")
    low, high = cluster_bootstrap(taus, range(len(taus)))
    return Metric("kendall_tau", float(np.mean(taus)), low, high, len(taus))


def _worst(result: SuiteResult | None) -> Metric:
    known = [subset for subset in (result.subsets if result else ()) if subset.value is not None]
    if not known:
        return Metric("worst_subset", None)
    worst = min(known, key=lambda subset: (subset.value or 0.0, subset.name))
    return dataclasses.replace(worst, name="worst_subset", note=worst.name)


def _reliability(bins: Sequence[ReliabilityBin], model: str) -> Block:
    shown = [
        {
            "probability": one["mean_probability"],
            "frequency": one["frequency"],
            "low": one["interval"][0],
            "high": one["interval"][1],
            "count": one["count"],
        }
        for one in bins
    ]
    return {
        "kind": "reliability",
        "title": "How sure, and how often right",
        "note": "On the diagonal sigmoid(margin) is a probability; below it the model is overconfident.",
        "series": [{"name": model, "bins": shown}],
    }
