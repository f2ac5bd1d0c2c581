"""`describe_scores`, `compare_checkpoints`: how scores are distributed, where they say nothing, and how they drift.

    scores = describe_scores(scored, temperature=1.3)
    scores.subsets[0].quantiles     # at 1, 5, 25, 50, 75, 95 and 99 %
    scores.saturated                # Metric: pairs with a margin of more than 5 temperatures
    scores.ties                     # Metric: pairs of different replies with one score

    drift = compare_checkpoints(scored_before, scored_after)
    drift.shift, drift.scale_ratio, drift.rank_correlation, drift.psi

Bradley and Terry's model reads a margin m as the probability sigma(m / T). Beyond 5 T that is above 0.993: a pair tells
training next to nothing any more, and a policy that is optimised against the scores is driven by their size alone.
Equal scores of different replies are what a coarse number format or a collapsed head leaves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from treeward.errors import DataError
from treeward.evaluation.diagnostics.blocks import metrics_table
from treeward.evaluation.diagnostics.replies import (
    Floats,
    Integers,
    collect_pairs,
    collect_replies,
    correlation_metric,
    divided,
    mid_ranks,
    prompt_numbers,
)
from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.results import Metric
from treeward.evaluation.statistics import accuracy_metric, cluster_bootstrap

__all__ = [
    "QUANTILES",
    "SATURATED",
    "Drift",
    "ScoreDiagnostics",
    "ScoreDistribution",
    "compare_checkpoints",
    "describe_scores",
    "population_stability_index",
]

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
"""Where distributions are described."""

SATURATED = 5.0
"""Margins beyond this many temperatures are saturated."""

_BINS = 40
_MOST_SERIES = 8


@dataclass(frozen=True, slots=True)
class ScoreDistribution:
    """The scores of a subset, or of all (`name` is then "all"). `quantiles`: at `QUANTILES`; `counts`: of the bins."""

    name: str
    count: int
    mean: float | None
    std: float | None
    quantiles: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScoreDiagnostics:
    """Distributions and what they say.

    `edges`: of the histogram's bins, shared by all of them; `overall`, `subsets`: the distributions. `margins`: counts
    of the pairs' margins by `margin_edges`. `saturated`: pairs whose margin is beyond `SATURATED` temperatures.
    `saturated_wrong`: the same, of the pairs in the wrong order alone. `ties`: pairs with equal scores, of different
    texts. `repeated`: replies whose exact score another text has too. `num_failed`: replies without a score.
    """

    edges: tuple[float, ...]
    overall: ScoreDistribution
    subsets: tuple[ScoreDistribution, ...]
    margin_edges: tuple[float, ...]
    margins: tuple[int, ...]
    temperature: float
    mean: Metric
    std: Metric
    saturated: Metric
    saturated_wrong: Metric
    ties: Metric
    repeated: Metric
    num_failed: int

    def metrics(self) -> tuple[Metric, ...]:
        """All numbers."""
        return (self.mean, self.std, self.saturated, self.saturated_wrong, self.ties, self.repeated)

    def blocks(self, model: str = "model") -> list[dict[str, Any]]:
        """The blocks of a report: scores by subset, tables. The largest subsets are drawn, all are listed."""
        several = self.subsets if len(self.subsets) > 1 else ()
        drawn = sorted(several, key=lambda one: -one.count)[:_MOST_SERIES] or [self.overall]
        quantiles = {f"q{round(100 * q)}": f"{round(100 * q)} %" for q in QUANTILES}
        columns = {"name": "Subset", "count": "Replies", "mean": "Mean", "std": "Std. dev.", **quantiles}
        rows = [
            {"name": one.name, "count": one.count, "mean": one.mean, "std": one.std}
            | dict(zip(quantiles, one.quantiles or [None] * len(quantiles), strict=True))
            for one in (self.overall, *several)
        ]
        return [
            {
                "kind": "histogram",
                "title": "Scores by subset" if several else "Scores",
                "note": "Of every reply. Spikes and walls are replies that the model cannot tell apart.",
                "edges": list(self.edges),
                "series": [{"name": one.name if several else model, "counts": list(one.counts)} for one in drawn],
                "x_label": "score",
                "y_label": "replies",
                "mark": None,
            },
            {
                "kind": "table",
                "title": "Distribution of scores",
                "columns": [
                    {"key": key, "label": label, "format": {"name": "text", "count": "integer"}.get(key, "number")}
                    for key, label in columns.items()
                ],
                "rows": rows,
            },
            metrics_table("Scores in numbers", model, self.metrics()),
        ]


@dataclass(frozen=True, slots=True)
class Drift:
    """How the scores of a second checkpoint differ from those of a first, on the same replies.

    `shift`: mean of second less first; `relative_shift`: the same in standard deviations of the first. `scale_ratio`:
    standard deviation of the second by that of the first. `rank_correlation`, `correlation`: Spearman's and Pearson's
    over all replies. `order_agreement`: pairs of replies with different ranks that both order alike. `psi`: of the
    scores as they are; `shape_psi`: after each was brought to mean 0 and standard deviation 1. By custom below 0.1 is
    stable and above 0.25 another population. `num_unmatched`: replies that only one of them has a score for.
    """

    shift: Metric
    relative_shift: Metric
    scale_ratio: Metric
    rank_correlation: Metric
    correlation: Metric
    order_agreement: Metric
    psi: Metric
    shape_psi: Metric
    num_unmatched: int
    edges: tuple[float, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    def metrics(self) -> tuple[Metric, ...]:
        """All numbers, in the order of the fields."""
        values = (getattr(self, name) for name in self.__slots__)
        return tuple(value for value in values if isinstance(value, Metric))

    def blocks(self, first: str = "before", second: str = "after") -> list[dict[str, Any]]:
        """The blocks of a report: both distributions, table."""
        return [
            {
                "kind": "histogram",
                "title": f"Scores of the same replies: {first} and {second}",
                "edges": list(self.edges),
                "series": [
                    {"name": first, "counts": list(self.before)},
                    {"name": second, "counts": list(self.after)},
                ],
                "x_label": "score",
                "mark": None,
            },
            metrics_table(f"Drift from {first} to {second}", f"{first} to {second}", self.metrics()),
        ]


def describe_scores(scored: Sequence[ScoredExample], *, temperature: float | None = None) -> ScoreDiagnostics:
    """Distributions by subset, in order of first appearance. `temperature`: of the model's calibration; None is 1,
    which the numbers that depend on it say."""
    assumed = "no temperature is fitted, so it is taken as 1" if temperature is None else None
    temperature = temperature or 1.0
    replies, pairs = collect_replies(scored), collect_pairs(scored)
    edges = _edges(replies.scores)
    names = np.array([one.example.subset for one in scored], dtype=object)
    of_reply = names[replies.examples] if len(scored) else np.zeros(0, dtype=object)
    order = list(dict.fromkeys(names.tolist()))
    texts = _text_numbers(scored)
    codes = np.array(
        [texts[i, j] for i, j in zip(replies.examples.tolist(), replies.completions.tolist(), strict=True)], np.int64
    )
    there = np.isfinite(pairs.margins)
    margins, of_prompts = pairs.margins[there], pairs.prompts[there]
    saturated = np.abs(margins) > SATURATED * temperature
    differ = np.array(
        [texts[i, a] != texts[i, b] for i, (a, b) in zip(pairs.examples.tolist(), pairs.sides.tolist(), strict=True)],
        dtype=bool,
    )[there]
    wrong = margins < 0
    margin_edges = _edges(margins, around_zero=True)
    scores, prompts = replies.scores, replies.prompts
    return ScoreDiagnostics(
        edges=tuple(edges.tolist()),
        overall=_distribution("all", scores, edges),
        subsets=tuple(_distribution(name, scores[of_reply == name], edges) for name in order),
        margin_edges=tuple(margin_edges.tolist()),
        margins=tuple(np.histogram(margins, margin_edges)[0].tolist()),
        temperature=temperature,
        mean=_bootstrapped(scores, prompts, "score_mean", lambda values: float(values.mean())),
        std=_bootstrapped(scores, prompts, "score_std", lambda values: float(values.std())),
        saturated=_noted(_share(saturated, of_prompts, "saturated"), assumed),
        saturated_wrong=_noted(_share(saturated[wrong], of_prompts[wrong], "saturated_wrong"), assumed),
        ties=_share((margins == 0)[differ], of_prompts[differ], "ties"),
        repeated=_share(_repeated(scores, codes), prompts, "repeated_scores"),
        num_failed=replies.num_failed,
    )


def compare_checkpoints(first: Sequence[ScoredExample], second: Sequence[ScoredExample]) -> Drift:
    """The drift from `first` to `second`, matched by the examples' ids; examples of only one of them are left out.

    Raises `DataError` where an example is not the same in both, or fewer than two replies have both scores.
    """
    others = {one.example.id: one for one in second}
    matched = [(one, others[one.example.id]) for one in first if one.example.id in others]
    for a, b in matched:
        if (a.example.context, a.example.completions) != (b.example.context, b.example.completions):
            raise DataError(
                "the two checkpoints were not scored on the same examples",
                where=b.example.where,
                got=f"another text in the example {a.example.id!r}",
                need="the examples of one suite, or one file",
            )
    prompts = prompt_numbers([a.example for a, _ in matched])
    rows, num_unmatched, agreements, of_pairs = [], 0, [], []
    for (a, b), prompt in zip(matched, prompts.tolist(), strict=True):
        for before, after in zip(a.scores, b.scores, strict=True):
            if before is not None and after is not None:
                rows.append((before, after, prompt))
            num_unmatched += (before is None) != (after is None)
        for i, j in a.pairs():
            margins = [_difference(one.scores[i], one.scores[j]) for one in (a, b)]
            if all(map(math.isfinite, margins)):
                agreements.append(float(np.sign(margins[0]) == np.sign(margins[1])))
                of_pairs.append(prompt)
    if len(rows) < 2:
        raise DataError(
            "there are no scores to compare", got=f"{len(rows)} replies with a score of both", need="two at least"
        )
    table = np.asarray(rows, dtype=np.float64)
    x, y, groups = table[:, 0], table[:, 1], table[:, 2].astype(np.int64)
    std = float(x.std())
    shift = _bootstrapped(y - x, groups, "shift", lambda values: float(values.mean()))
    low, high = cluster_bootstrap(table[:, :2], groups.tolist(), statistic=_ratio)
    edges = _edges(np.concatenate([x, y]))
    return Drift(
        shift=shift,
        relative_shift=divided(shift, std, "relative_shift"),
        scale_ratio=Metric("scale_ratio", _ratio(table[:, :2]), low, high, len(x)),
        rank_correlation=correlation_metric(mid_ranks(x), mid_ranks(y), groups, "rank_correlation"),
        correlation=correlation_metric(x, y, groups, "correlation"),
        order_agreement=accuracy_metric(agreements, "order_agreement", of_pairs),
        psi=Metric("psi", population_stability_index(x, y), count=len(x)),
        shape_psi=Metric("shape_psi", _shape_psi(x, y), count=len(x)),
        num_unmatched=num_unmatched,
        edges=tuple(edges.tolist()),
        before=tuple(np.histogram(x, edges)[0].tolist()),
        after=tuple(np.histogram(y, edges)[0].tolist()),
    )


def population_stability_index(expected: Floats, actual: Floats, num_bins: int = 10) -> float:
    """sum_b (q_b - p_b) ln(q_b / p_b) of the shares p of `expected` (N,), q of `actual` (M,) in bins; 0 is no change.

    The bins lie between quantiles of `expected`, open at both ends. Shares are (n_b + 1/2) / (n + B/2) for B bins, so
    that an empty bin has one too. It is Jeffreys' divergence (1946) of the two; under the name of population stability
    index it is used of scores in Siddiqi 2006, Credit Risk Scorecards. Of two samples of one population it is about
    (B - 1) (1/N + 1/M) (Yurdakul and Naranjo 2020, Journal of Risk Model Validation).
    """
    inner = np.unique(np.quantile(expected, np.linspace(0, 1, num_bins + 1)[1:-1]))
    shares = []
    for values in (expected, actual):
        counts = np.bincount(np.searchsorted(inner, values, side="right"), minlength=len(inner) + 1)
        shares.append((counts + 0.5) / (len(values) + len(counts) / 2))
    p, q = shares
    return float(np.sum((q - p) * np.log(q / p)))


def _shape_psi(x: Floats, y: Floats) -> float | None:
    if x.std() == 0 or y.std() == 0:
        return None
    return population_stability_index((x - x.mean()) / x.std(), (y - y.mean()) / y.std())


def _distribution(name: str, scores: Floats, edges: Floats) -> ScoreDistribution:
    counts = tuple(np.histogram(scores, edges)[0].tolist())
    if len(scores) == 0:
        return ScoreDistribution(name, 0, None, None, (), counts)
    quantiles = tuple(np.quantile(scores, QUANTILES).tolist())
    return ScoreDistribution(name, len(scores), float(scores.mean()), float(scores.std()), quantiles, counts)


def _edges(values: Floats, *, around_zero: bool = False) -> Floats:
    """Edges (`_BINS` + 1) of equal bins that hold all values; with `around_zero` one of them is 0."""
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if around_zero:
        reach = max(abs(low), abs(high)) or 1.0
        low, high = -reach, reach
    if low == high:
        low, high = low - 0.5, high + 0.5
    edges: Floats = np.linspace(low, high, _BINS + 1)
    return edges


def _share(flags: Any, prompts: Integers, name: str) -> Metric:
    return accuracy_metric(flags.astype(float).tolist(), name, prompts.tolist())


def _noted(metric: Metric, note: str | None) -> Metric:
    return metric if note is None else replace(metric, note=note)


def _bootstrapped(values: Floats, prompts: Integers, name: str, statistic: Any) -> Metric:
    if len(values) == 0:
        return Metric(name, None, count=0)
    low, high = cluster_bootstrap(values, prompts.tolist(), statistic=statistic)
    return Metric(name, statistic(values), low, high, len(values))


def _ratio(table: Floats) -> float | None:
    size = float(table[:, 0].std())
    return float(table[:, 1].std()) / size if size > 0 else None


def _difference(better: float | None, worse: float | None) -> float:
    return math.nan if better is None or worse is None else better - worse


def _text_numbers(scored: Sequence[ScoredExample]) -> dict[tuple[int, int], int]:
    """A number for each different conversation, by example and completion."""
    prompts, seen = prompt_numbers([one.example for one in scored]).tolist(), dict[tuple[int, str], int]()
    return {
        (i, j): seen.setdefault((prompts[i], json.dumps(list(text), sort_keys=True, default=str)), len(seen))
        for i, one in enumerate(scored)
        for j, text in enumerate(one.example.completions)
    }


def _repeated(scores: Floats, codes: Integers) -> Any:
    """Which replies have a score that a different conversation has too. (N,) booleans"""
    different = np.unique(np.column_stack([scores, codes.astype(np.float64)]), axis=0)
    values, counts = np.unique(different[:, 0], return_counts=True)
    return np.isin(scores, values[counts > 1])
