"""`Completions` and `Pairs`: scored examples as arrays, and the regression within prompts.

    completions = collect_completions(scored)
    slope, = regress_within_prompts(completions.scores, completions.lengths[:, None] / 100, completions.prompts, ["b"])

Biases are looked for among the completions of one prompt: a score that rises with length across prompts may only say
that long completions go with prompts that the model likes.

Shapes: N completions with a score, P pairs of a better and a worse completion of one prompt, F features, G prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from treeward.data.preference import Message
from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.results import Metric
from treeward.evaluation.statistics import expanded_tail

__all__ = [
    "Completions",
    "Pairs",
    "collect_completions",
    "collect_pairs",
    "completion_text",
    "correlation_metric",
    "divided",
    "in_standard_deviations",
    "moments_metric",
    "regress_within_prompts",
    "shortened",
]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

FEWEST_PROMPTS = 10
"""With fewer prompts slopes and correlations have no interval: it would hold the truth less often than it says."""

_RESAMPLES = 2000
_TOO_FEW = "too few for an interval"


@dataclass(frozen=True, slots=True)
class Completions:
    """Every completion that has a score, in order.

    `scores`, `lengths` (characters), `places` (N,) float64: the place of a completion is 0 for the best rank of its
    example and 1 for the worst, 0.5 where all are equal. `prompts` (N,): one number for each different context.
    `examples`, `completions` (N,): indices of the example and of its completion.
    """

    scores: Floats
    lengths: Floats
    places: Floats
    prompts: Integers
    examples: Integers
    completions: Integers


@dataclass(frozen=True, slots=True)
class Pairs:
    """Every pair of completions of an example with different ranks.

    `margins` (P,): the better one's score less the other's, NaN where one has none. `better`, `worse` (P,): their
    lengths in characters. `prompts` (P,) as in `Completions`; `examples` (P,): index of the example; `sides` (P, 2):
    indices of its completions, the better first.
    """

    margins: Floats
    better: Floats
    worse: Floats
    prompts: Integers
    examples: Integers
    sides: Integers

    @property
    def outcomes(self) -> Floats:
        """1 where the better completion scores higher, else 0: a tie and a missing score count as wrong. (P,)"""
        return (self.margins > 0).astype(np.float64)  # NaN is not above 0

    @property
    def num_failed(self) -> int:
        """Pairs with a completion that has no score."""
        return int(np.isnan(self.margins).sum())

    @property
    def with_scores(self) -> Pairs:
        """The pairs whose completions both have a score."""
        there = ~np.isnan(self.margins)
        return Pairs(*(getattr(self, field.name)[there] for field in fields(self)))


def collect_completions(scored: Sequence[ScoredExample]) -> Completions:
    """The completions of scored examples."""
    prompts, rows = _prompt_numbers(scored), []
    for i, one in enumerate(scored):
        distinct = sorted(set(one.example.ranks))
        for j, (score, rank) in enumerate(zip(one.scores, one.example.ranks, strict=True)):
            place = distinct.index(rank) / (len(distinct) - 1) if len(distinct) > 1 else 0.5
            if score is not None:
                rows.append((score, one.lengths[j], place, prompts[i], i, j))
    table = np.asarray(rows, dtype=np.float64).reshape(-1, 6)
    return Completions(*table[:, :3].T, *table[:, 3:].astype(np.int64).T)


def collect_pairs(scored: Sequence[ScoredExample]) -> Pairs:
    """The ordered pairs of scored examples; those without a score are among them."""
    prompts, rows = _prompt_numbers(scored), []
    for i, one in enumerate(scored):
        scores = np.array(one.scores, dtype=np.float64)  # None becomes NaN
        for a, b in one.pairs():
            rows.append((scores[a] - scores[b], one.lengths[a], one.lengths[b], prompts[i], i, a, b))
    table = np.asarray(rows, dtype=np.float64).reshape(-1, 7)
    (margins, better, worse), whole = table[:, :3].T, table[:, 3:].astype(np.int64)
    return Pairs(margins, better, worse, whole[:, 0], whole[:, 1], whole[:, 2:])


def _prompt_numbers(scored: Sequence[ScoredExample]) -> list[int]:
    """A number for each example, the same for those with the same context."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(one.example.prompt_key, len(numbers)) for one in scored]


def regress_within_prompts(
    scores: Floats, features_NF: Floats, prompts: Integers, names: Sequence[str]
) -> tuple[Metric, ...]:
    """The coefficients b (F) of s_ij = a_i + x_ij b + e_ij, with an intercept a_i for each prompt i.

    Least squares on scores and features less the mean of their prompt. Intervals are 95 %, of Student's t with G - 1
    degrees of freedom for G prompts, and robust to errors that go together within a prompt (the jackknife over prompts,
    CV3: MacKinnon, Nielsen and Webb 2023, Journal of Applied Econometrics 38, page 671; the usual CR1 is too narrow
    for skewed lengths). `count`: completions that have another of the same prompt. A feature that does not vary within
    prompts, or only together with the others, has no value, and there is no interval for fewer than `FEWEST_PROMPTS`
    or where one prompt alone decides a coefficient.
    """
    kept = np.bincount(prompts, minlength=1)[prompts] > 1 if len(prompts) else np.zeros(0, dtype=bool)
    groups = np.unique(prompts[kept], return_inverse=True)[1]
    x, y = _demeaned(features_NF[kept], groups), _demeaned(scores[kept, None], groups)[:, 0]
    count, num_prompts = len(y), int(groups.max()) + 1 if len(groups) else 0
    sizes = np.abs(x).max(axis=0, initial=0.0)
    varies = sizes > 1e-9 * np.abs(features_NF).max(axis=0, initial=1.0)
    scaled = x[:, varies] / sizes[varies]
    note = f"{num_prompts} prompts"
    if not varies.any() or np.linalg.matrix_rank(scaled) < scaled.shape[1] or count <= scaled.shape[1]:
        why = f"{note}: the features do not vary within them, or only together"
        return tuple(Metric(name, None, count=count, note=why) for name in names)
    params, errors = _jackknifed(y, scaled, groups)
    if num_prompts < FEWEST_PROMPTS:
        note, errors = f"{note}: {_TOO_FEW}", np.full_like(params, np.nan)
    half = special.stdtrit(num_prompts - 1, 0.975) * errors
    found = iter(np.column_stack([params, params - half, params + half]) / sizes[varies, None])
    metrics = []
    for name, has_value in zip(names, varies, strict=True):
        if not has_value:
            metrics.append(Metric(name, None, count=count, note=f"{note}: it does not vary within them"))
            continue
        value, low, high = (float(number) if math.isfinite(number) else None for number in next(found))
        metrics.append(Metric(name, value, low, high, count, note))
    return tuple(metrics)


def _jackknifed(y: Floats, x_NF: Floats, groups: Integers) -> tuple[Floats, Floats]:
    """Least squares (F,) and standard errors (F,), by leaving out each of G groups; NaN where that leaves too little.

    b - b(-g) = (X'X - X_g'X_g)^-1 X_g' e_g, and the variance is (G - 1) / G times the sum of their squares.
    """
    order = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[order], np.arange(int(groups.max()) + 1))
    products = x_NF[:, :, None] * x_NF[:, None, :]
    grams_GFF = np.add.reduceat(products[order], starts, axis=0)
    gram = grams_GFF.sum(axis=0)
    params: Floats = np.linalg.solve(gram, x_NF.T @ y)
    moments_GF = np.add.reduceat((x_NF * (y - x_NF @ params)[:, None])[order], starts, axis=0)
    rest_GFF = gram - grams_GFF
    if (np.linalg.eigvalsh(rest_GFF)[:, 0] <= 1e-9 * np.linalg.eigvalsh(gram)[-1]).any():
        return params, np.full_like(params, np.nan)
    changes_GF = np.linalg.solve(rest_GFF, moments_GF[:, :, None])[:, :, 0]
    num = len(starts)
    return params, np.sqrt((num - 1) / num * (changes_GF**2).sum(axis=0))


def in_standard_deviations(slope: Metric, completions: Completions, name: str) -> Metric:
    """A coefficient divided by the standard deviation of the scores within prompts, to compare models of other scales.

    The deviation is taken as known, and pooled: sum (s_ij - mean_i)^2 / (N - G).
    """
    groups = np.unique(completions.prompts, return_inverse=True)[1]
    residuals = _demeaned(completions.scores[:, None], groups)[:, 0]
    freedom = len(residuals) - len(np.unique(groups))
    std = math.sqrt(float(residuals @ residuals) / freedom) if freedom > 0 else 0.0
    return divided(slope, std, name, slope.note)


def divided(metric: Metric, size: float, name: str, note: str | None = None) -> Metric:
    """A metric and its interval in units of `size`, which is taken as known; no value where `size` is 0."""
    if metric.value is None or size == 0:
        return Metric(name, None, count=metric.count, note=note)
    low, high = (None if bound is None else bound / size for bound in (metric.low, metric.high))
    return Metric(name, metric.value / size, low, high, metric.count, note)


def correlation_metric(x: Floats, y: Floats, prompts: Integers, name: str) -> Metric:
    """Pearson's correlation of x (N,) and y (N,), with the interval of a bootstrap over prompts (N,).

    No value where one of them is constant; no interval for fewer than `FEWEST_PROMPTS`, and the note says so.
    """
    columns = [column - column.mean() if len(column) else column for column in (x, y)]
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return Metric(name, None, count=len(x))
    a, b = columns
    metric = moments_metric(name, np.column_stack([a, b, a * a, b * b, a * b]), prompts, _correlation)
    num_prompts = len(np.unique(prompts))
    if num_prompts >= FEWEST_PROMPTS:
        return metric
    few = f"{num_prompts} prompt{'' if num_prompts == 1 else 's'}: {_TOO_FEW}"
    return replace(metric, low=None, high=None, note=few)


def moments_metric(name: str, columns_NK: Floats, prompts: Integers, statistic: Callable[[Floats], Floats]) -> Metric:
    """A function of column means with the 95 % interval of a bootstrap over prompts (N,): see `cluster_bootstrap`.

    `statistic` maps the means of R resamples (R, K) to values (R,), NaN where it has none. All resamples are computed
    at once, from the sums of each prompt.
    """
    if len(columns_NK) == 0:
        return Metric(name, None, count=0)
    groups = np.unique(prompts, return_inverse=True)[1]
    num_prompts = int(groups.max()) + 1
    sums_GK = np.zeros((num_prompts, columns_NK.shape[1] + 1))
    np.add.at(sums_GK, groups, np.column_stack([columns_NK, np.ones(len(groups))]))
    draws_RG = np.random.default_rng(0).multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), _RESAMPLES)
    drawn_RK = np.vstack([sums_GK.sum(axis=0), draws_RG @ sums_GK])
    with np.errstate(invalid="ignore", divide="ignore"):
        value, *found = statistic(drawn_RK[:, :-1] / drawn_RK[:, -1:]).tolist()
    value = value if math.isfinite(value) else None
    found = [one for one in found if math.isfinite(one)]
    if num_prompts < 2 or not found:
        return Metric(name, value, count=len(columns_NK))
    tail = expanded_tail(num_prompts)
    low, high = np.quantile(found, [tail, 1 - tail]).tolist()
    return Metric(name, value, low, high, len(columns_NK))


def _correlation(means_R5: Floats) -> Floats:
    x, y, xx, yy, xy = means_R5.T
    return np.asarray(((xy - x * y) / np.sqrt((xx - x * x) * (yy - y * y))).clip(-1.0, 1.0))


def completion_text(completion: Sequence[Message]) -> str:
    """The text of a completion's last message; of content in parts those that are text."""
    content: Any = completion[-1].get("content") if completion else None
    if content is None or isinstance(content, str):
        return content or ""
    texts = (part if isinstance(part, str) else part.get("text") for part in content)
    return "".join(text for text in texts if isinstance(text, str))


def shortened(text: str, most: int = 280) -> str:
    """The text, or its beginning with an ellipsis, for a table or a tooltip."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _demeaned(values_NF: Floats, groups: Integers) -> Floats:
    counts = np.maximum(np.bincount(groups, minlength=1), 1)
    means = np.stack([np.bincount(groups, weights=column, minlength=1) / counts for column in values_NF.T], axis=1)
    return np.asarray(values_NF - means[groups])
