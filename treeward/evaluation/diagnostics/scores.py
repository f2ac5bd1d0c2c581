"""`statistics_of`, `describe_scores`: the numbers of any scored comparisons, and how their scores are distributed.

    statistics = statistics_of(scored, suite.summarize(scored))
    statistics.pair_accuracy, statistics.auroc, statistics.ece, statistics.temperature
    describe_scores(scored, temperature=1.3).saturated     # Metric: pairs with a margin of more than 5 temperatures

Bradley and Terry's model reads a margin m as the probability sigma(m / T). Beyond 5 T that is above 0.993: a pair
teaches next to nothing any more, and a policy that is optimised against the scores is driven by their size alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from treeward.evaluation.diagnostics.completions import (
    Floats,
    collect_completions,
    collect_pairs,
    moments_metric,
)
from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.results import Block, Diagnostic, Metric, SuiteResult
from treeward.evaluation.statistics import (
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

__all__ = ["auroc_of_best", "describe_scores", "kendall_taus", "standard_deviation", "statistics_of"]

_SATURATED = 5.0  # temperatures
_BINS = 40
_MOST_SERIES = 8


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
    shown = [
        {"probability": one["mean_probability"], "frequency": one["frequency"], "count": one["count"]}
        | dict(zip(("low", "high"), one["interval"], strict=True))
        for one in bins
    ]
    figure: Block = {
        "kind": "reliability",
        "title": "How sure, and how often right",
        "note": "On the diagonal sigmoid(margin) is a probability; below it the model is overconfident.",
        "series": [{"name": model, "bins": shown}],
    }
    by_name = {metric.name: metric for metric in numbers}
    return Diagnostic(by_name, (figure,) if count else (), details={"reliability": bins})


def describe_scores(
    scored: Sequence[ScoredExample], model: str = "model", *, temperature: float | None = None
) -> Diagnostic:
    """Distributions by subset. `temperature`: of the model's calibration; None is taken as 1, and the notes say so.

    `saturated_wrong`: the saturated share of the pairs in the wrong order.
    """
    completions, pairs = collect_completions(scored), collect_pairs(scored)
    scores, prompts = completions.scores, completions.prompts
    centred = scores - scores.mean() if len(scores) else scores
    there = np.isfinite(pairs.margins)
    margins, of_prompts = pairs.margins[there], pairs.prompts[there]
    saturated, wrong = np.abs(margins) > _SATURATED * (temperature or 1.0), margins < 0

    def share(name: str, where: NDArray[np.bool_]) -> Metric:
        metric = accuracy_metric(saturated[where].astype(float).tolist(), name, of_prompts[where].tolist())
        assumed = "no temperature is fitted, so it is taken as 1"
        return metric if temperature is not None else replace(metric, note=assumed)

    numbers = (
        moments_metric("score_mean", scores[:, None], prompts, lambda means: means[:, 0]),
        moments_metric("score_std", np.column_stack([centred, centred**2]), prompts, standard_deviation),
        share("saturated", np.ones_like(wrong)),
        share("saturated_wrong", wrong),
    )
    subsets = np.array([one.example.subset for one in scored], dtype=object)[completions.examples]
    by_subset = {name: scores[subsets == name] for name in dict.fromkeys(one.example.subset for one in scored)}
    several = by_subset if len(by_subset) > 1 else {}
    drawn = dict(sorted(several.items(), key=lambda item: -len(item[1]))[:_MOST_SERIES]) or {model: scores}
    edges = np.histogram_bin_edges(scores if len(scores) else [0.0, 1.0], _BINS)
    figure: Block = {
        "kind": "histogram",
        "title": "Scores by subset" if several else "Scores",
        "note": "Every completion. Spikes and walls are completions that the model cannot tell apart.",
        "edges": edges.tolist(),
        "series": [{"name": name, "counts": np.histogram(own, edges)[0].tolist()} for name, own in drawn.items()],
        "x_label": "score",
        "y_label": "completions",
    }
    return Diagnostic({metric.name: metric for metric in numbers}, (figure,))


def standard_deviation(means_R2: Floats) -> Floats:
    """From the means of values and of their squares (R, 2), for `moments_metric`."""
    found: Floats = np.sqrt((means_R2[:, 1] - means_R2[:, 0] ** 2).clip(0.0))
    return found


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
    return replace(worst, name="worst_subset", note=worst.name)
