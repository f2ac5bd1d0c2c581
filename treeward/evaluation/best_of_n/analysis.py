"""`analyse`: from the proxy and gold scores of N samples of each prompt to the curves of best-of-n and what they say.

    prompts = [SampledPrompt(proxy=(0.3, 1.2, -0.4), gold=(0.5, 0.1, 0.9), cluster="2 + 2?"), ...]
    result = analyse(prompts)
    result.curves["gold"].mean       # expected gold of what the proxy chooses among n, for each n of result.sizes
    result.verdict.sentence

    found = analyse_several({"plain": prompts, "worst of two": others})      # the same samples, another proxy
    found["worst of two"].difference                                         # gold at the largest n, less the first's

The same prompts stand behind every n. Intervals are of 95 %, by a bootstrap over clusters: the rows of one prompt are
drawn together, and the quantiles are those of `treeward.evaluation.statistics.cluster_bootstrap`. Array suffixes: P
prompts, C clusters, R resamples, G values of n, K statistics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from treeward.errors import ConfigError, DataError
from treeward.evaluation.best_of_n.laws import (
    FEWEST_POINTS,
    FORMS,
    GaoForm,
    fit_gao,
    point_weights,
)
from treeward.evaluation.best_of_n.selection import Floats, curve_sizes, expected_best_of, kl_of_best_of, size_of_kl
from treeward.evaluation.best_of_n.verdict import MIN_CLUSTERS, ROUNDING, Verdict, judge
from treeward.evaluation.results import Metric
from treeward.evaluation.statistics import cluster_bootstrap, expanded_tail

_SHARE_OF_PROMPTS = 0.95
_CURVES = ("gold", "proxy", "best", "regret", "normalised_regret", "gold_gain", "proxy_gain", "best_gain", "gap")
_Bounds: TypeAlias = tuple[Floats, Floats]


@dataclass(frozen=True, slots=True)
class SampledPrompt:
    """The N samples of one prompt: a proxy and a gold score of each, None where there is none.

    `cluster`: the same for rows of one prompt; None: this row is one of its own. `where`: file and line, for errors.
    """

    proxy: Sequence[float | None]
    gold: Sequence[float | None]
    cluster: str | None = None
    where: str | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """A number for each n with its pointwise 95 % interval; None where it is not known."""

    mean: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class FittedLaw:
    """A law of Gao et al. fitted to the gold over that at n = 1.

    `peak`: the n at which it is highest; None where it rises without end, and beyond the largest n an extrapolation.
    `r_squared`: the share of the squared gain that it explains.
    """

    alpha: float
    beta: float
    peak: float | None
    r_squared: float | None


@dataclass(frozen=True, slots=True)
class BestOfN:
    """The result. `sizes` (G,): the n; `kl` (G,): KL(n) in nats; `curves`, each of G values:

    `gold`, `proxy`: of what the proxy chooses, in their own units. `best`: gold of the best by gold. `regret` = best -
    gold. `normalised_regret` = regret(n) / (best(n) - gold(1)): 0 is choosing by gold, 1 choosing at random, more is
    worse than that. `gold_gain`, `proxy_gain`, `best_gain`: over n = 1, in standard deviations within a prompt.
    `gap` = proxy_gain - gold_gain. `correlation`: of proxy and gold within prompts, without an interval
    for fewer than 10 of them. `laws`: none with fewer than 4 n. `difference`: of several proxies, gold of what this one
    chooses among the largest n less that of what the first chooses, prompt by prompt.
    """

    sizes: tuple[int, ...]
    kl: tuple[float, ...]
    curves: Mapping[str, Curve]
    laws: Mapping[GaoForm, FittedLaw]
    correlation: Metric
    verdict: Verdict
    counts: Mapping[str, int]
    difference: Metric | None = None

    @property
    def max_n(self) -> int:
        """The largest n."""
        return self.sizes[-1]

    def at(self, name: str, size: int) -> Metric:
        """A curve's value at one of `sizes`."""
        curve, i = self.curves[name], self.sizes.index(size)
        return Metric(f"{name}@{size}", curve.mean[i], curve.low[i], curve.high[i], self.counts["num_prompts"])


def analyse(
    prompts: Sequence[SampledPrompt], *, max_n: int | None = None, num_resamples: int = 2000, seed: int = 0
) -> BestOfN:
    """The curves of best-of-n and what `BestOfN` has besides.

    A sample without a proxy or a gold score is left out and counted; so is a prompt with fewer than `max_n` samples
    left. `max_n`: None is the largest n that 95 % of the prompts have. Raises `DataError` where no prompt has two
    samples with both scores, or a score is not finite, and `ConfigError` for a `max_n` that no prompt has.
    """
    scored = [_both_known(prompt) for prompt in prompts]
    max_n = _largest_size([len(proxy) for proxy, _ in scored], max_n)
    kept = [(scores, prompt) for scores, prompt in zip(scored, prompts, strict=True) if len(scores[0]) >= max_n]
    sizes = curve_sizes(max_n)
    distances = np.sqrt(kl_of_best_of(sizes))
    table_PK = np.stack([_statistics(proxy, gold, sizes) for (proxy, gold), _ in kept])
    sums_CK, counts_C = _by_cluster(table_PK, [prompt.cluster for _, prompt in kept])
    num = len(counts_C)
    point = _derive(table_PK.mean(axis=0), distances)
    draws_RC = np.random.default_rng(seed).multinomial(num, np.full(num, 1.0 / num), size=num_resamples).astype(float)
    resampled = _derive((draws_RC @ sums_CK) / (draws_RC @ counts_C)[:, None], distances)

    def metric(name: str, fewest: int = 2) -> Metric:
        return _metric(name, point[name], _bounds(resampled[name], num, fewest), len(kept))

    curves = {name: Curve(*map(_numbers, (point[name], *_bounds(resampled[name], num)))) for name in _CURVES}
    gain = (point["gold"] - point["gold"][0])[1:]
    laws = {form: _fitted(form, distances[1:], gain) for form in FORMS if len(gain) >= FEWEST_POINTS}
    verdict = judge(
        sizes,
        sums_CK[:, : len(sizes)],
        counts_C,
        rise=metric("rise"),
        expected_peak=laws["bon"].peak if laws else None,
    )
    return BestOfN(
        sizes=sizes,
        kl=tuple((distances**2).tolist()),
        curves=curves,
        laws=laws,
        correlation=metric("correlation", MIN_CLUSTERS),
        verdict=verdict,
        counts={
            "num_prompts": len(kept),
            "num_clusters": num,
            "num_prompts_with_fewer_samples": len(prompts) - len(kept),
            "num_samples": sum(len(proxy) for (proxy, _), _ in kept),
            "num_without_proxy": sum(value is None for prompt in prompts for value in prompt.proxy),
            "num_without_gold": sum(value is None for prompt in prompts for value in prompt.gold),
            "num_prompts_with_equal_proxies": sum(len(np.unique(proxy)) < len(proxy) for (proxy, _), _ in kept),
        },
    )


def analyse_several(
    prompts: Mapping[str, Sequence[SampledPrompt]],
    *,
    max_n: int | None = None,
    num_resamples: int = 2000,
    seed: int = 0,
) -> dict[str, BestOfN]:
    """`analyse` for each proxy on the samples that all have scored, and how its gold differs from that of the first.

    Each proxy has the same prompts in the same order, with the same gold. A sample that one proxy could not score is
    left out for all, so that the curves differ by the proxy alone. Raises as `analyse`.
    """
    shared: dict[str, list[SampledPrompt]] = {name: [] for name in prompts}
    for row in zip(*prompts.values(), strict=True):
        known = [None not in scores for scores in zip(*(one.proxy for one in row), strict=True)]
        for own, one in zip(shared.values(), row, strict=True):
            proxy = [score if all_know else None for score, all_know in zip(one.proxy, known, strict=True)]
            own.append(replace(one, proxy=proxy))
    found: dict[str, BestOfN] = {}
    for name, own in shared.items():
        result = analyse(own, max_n=max_n, num_resamples=num_resamples, seed=seed)
        if found:
            first = shared[next(iter(found))]
            result = replace(result, difference=_difference(first, own, result.max_n, num_resamples, seed))
        found[name] = result
    return found


def _difference(
    first: Sequence[SampledPrompt], other: Sequence[SampledPrompt], n: int, num_resamples: int, seed: int
) -> Metric:
    values, clusters = [], []
    for number, pair in enumerate(zip(first, other, strict=True)):
        scores = [_both_known(one) for one in pair]
        if len(scores[0][0]) >= n:
            before, after = (float(expected_best_of(proxy, gold, [n])[0]) for proxy, gold in scores)
            values.append(after - before)
            clusters.append(number if pair[0].cluster is None else pair[0].cluster)
    low, high = cluster_bootstrap(values, clusters, num_resamples=num_resamples, seed=seed)
    return Metric(f"gold@{n} less that of the first proxy", float(np.mean(values)), low, high, len(values))


def _both_known(prompt: SampledPrompt) -> tuple[Floats, Floats]:
    """Proxy and gold of the samples that have both."""
    if len(prompt.proxy) != len(prompt.gold):
        got = f"{len(prompt.proxy)} proxy and {len(prompt.gold)} gold scores"
        raise DataError("a sample has a proxy and a gold score", where=prompt.where, got=got, need="one of each")
    both = [pair for pair in zip(prompt.proxy, prompt.gold, strict=True) if None not in pair]
    values = np.array(both, dtype=np.float64).reshape(-1, 2)
    if not np.isfinite(values).all():
        need = "a number, or None where there is none"
        raise DataError("a score is not finite", where=prompt.where, got=values.tolist(), need=need)
    return values[:, 0], values[:, 1]


def _largest_size(lengths: Sequence[int], max_n: int | None) -> int:
    ordered = sorted(lengths, reverse=True)
    if not ordered or ordered[0] < 2:
        raise DataError(
            "no prompt has two samples with both scores",
            got=f"{len(ordered)} prompts with at most {max(ordered, default=0)} such samples",
            need="two or more completions of a prompt",
        )
    if max_n is None:
        return max(2, ordered[math.ceil(_SHARE_OF_PROMPTS * len(ordered)) - 1])
    if not 2 <= max_n <= ordered[0]:
        raise ConfigError("no prompt has so many samples", field="max_n", got=max_n, need=f"2 to {ordered[0]}")
    return max_n


def _statistics(proxy: Floats, gold: Floats, sizes: tuple[int, ...]) -> Floats:
    """(3 G + 3,): one prompt's curves of gold, proxy and best, its two variances and its covariance."""
    curves = [expected_best_of(by, values, sizes) for by, values in ((proxy, gold), (proxy, proxy), (gold, gold))]
    covariance = np.cov(proxy, gold)  # divides by N - 1
    return np.concatenate([*curves, [covariance[0, 0], covariance[1, 1], covariance[0, 1]]])


def _by_cluster(table_PK: Floats, clusters: Sequence[str | None]) -> tuple[Floats, Floats]:
    """(C, K) sums and (C,) counts of rows."""
    index: dict[Any, int] = {}
    of_P = np.array([index.setdefault(i if name is None else name, len(index)) for i, name in enumerate(clusters)])
    sums = np.zeros((len(index), table_PK.shape[1]))
    np.add.at(sums, of_P, table_PK)
    return sums, np.bincount(of_P).astype(np.float64)


def _derive(means: Floats, distances: Floats) -> dict[str, Floats]:
    """Everything that is computed of the means (..., 3 G + 3) of `_statistics`."""
    num = len(distances)
    gold, proxy, best = (means[..., i * num : (i + 1) * num] for i in range(3))
    var_proxy, var_gold, covariance = (means[..., 3 * num + i : 3 * num + i + 1] for i in range(3))
    sd_proxy, sd_gold = _divisor(np.sqrt(var_proxy), proxy), _divisor(np.sqrt(var_gold), gold)
    gold_gain, proxy_gain = (gold - gold[..., :1]) / sd_gold, (proxy - proxy[..., :1]) / sd_proxy
    possible = _divisor(best - gold[..., :1], gold)
    regret = np.maximum(best - gold, 0.0)  # it is never less, but for rounding
    possible[..., 0], regret[..., 0] = np.nan, 0.0  # among one there is nothing to choose
    return {
        "gold": gold,
        "proxy": proxy,
        "best": best,
        "regret": regret,
        "normalised_regret": regret / possible,
        "gold_gain": gold_gain,
        "proxy_gain": proxy_gain,
        "best_gain": (best - gold[..., :1]) / sd_gold,
        "gap": proxy_gain - gold_gain,
        "correlation": (covariance / (sd_proxy * sd_gold))[..., 0],
        "rise": gold[..., -1] - gold[..., 0],
    }


def _divisor(values: Floats, beside: Floats) -> Floats:
    """The values, with NaN for those that are 0 but for the rounding of what they were computed from."""
    scale = np.abs(beside).max(axis=-1, keepdims=True)
    return np.where(values > ROUNDING * scale, values, np.nan)


def _fitted(form: GaoForm, distances: Floats, gain: Floats) -> FittedLaw:
    law, weights = fit_gao(distances, gain, form), point_weights(distances)
    residual, total = float(weights @ (gain - law.gain(distances)) ** 2), float(weights @ gain**2)
    peak = None if law.peak_distance is None else float(size_of_kl(min(law.peak_distance, 1e100) ** 2))
    return FittedLaw(
        alpha=law.alpha,
        beta=law.beta,
        peak=None if peak is None or math.isinf(peak) else peak,
        r_squared=1.0 - residual / total if total > 0.0 else None,
    )


def _bounds(values: Floats, num_clusters: int, fewest: int = 2) -> _Bounds:
    """The 95 % interval (...,) of a number of resamples (R, ...); perhaps infinite.

    NaN where a resample has no number, and for fewer than `fewest` clusters.
    """
    if num_clusters < fewest:
        return np.full(values.shape[1:], np.nan), np.full(values.shape[1:], np.nan)
    tail = expanded_tail(num_clusters)
    # without interpolation, as there is none between a number and infinity
    low, high = np.quantile(values, (tail, 1.0 - tail), axis=0, method="inverted_cdf")
    missing = np.isnan(values).any(axis=0)
    return np.where(missing, np.nan, low), np.where(missing, np.nan, high)


def _metric(name: str, value: Floats, bounds: Any, count: int) -> Metric:
    known, low, high = _numbers(np.stack([value, *bounds]))
    return Metric(name, known, low, high, count)


def _numbers(values: Floats) -> tuple[float | None, ...]:
    return tuple(value if math.isfinite(value) else None for value in values.tolist())
