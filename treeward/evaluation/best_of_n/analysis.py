"""`analyse`: from the proxy and gold scores of N samples of each prompt to the curves of best-of-n and what they say.

    proxies = {"plain": [(0.3, 1.2, -0.4), ...], "worst of two": [...]}      # of each prompt, one score a sample
    results = analyse(proxies, gold=[(0.5, 0.1, 0.9), ...])
    results["plain"].curves["gold"].mean       # expected gold of what the proxy chooses among n, for each n of `sizes`
    results["plain"].verdict.sentence
    results["worst of two"].difference         # its gold at the largest n, less that of the first proxy

Of N samples sorted by a score, the i-th from below is the best of n drawn without replacement with the probability
w_i(n) = C(i-1, n-1) / C(N, n). So sum_i w_i(n) gold_(i) is the mean over all subsets of n, an unbiased estimate from
all samples at once (Nakano et al. 2021, arXiv 2112.09332, appendix I).

The same prompts stand behind every n. Rows of one prompt are averaged and count as one. Intervals are of 95 %, by a
bootstrap over prompts with the quantiles of `treeward.evaluation.statistics.cluster_bootstrap`.

Shapes: N samples, C prompts, R resamples, G values of n, K statistics.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from treeward.errors import ConfigError, DataError
from treeward.evaluation.results import Metric
from treeward.evaluation.statistics import expanded_tail, resampled

Floats = NDArray[np.float64]
Scores = Sequence[Sequence[float | None]]
"""A score of each sample of each prompt; None where there is none."""

_SHARE_OF_PROMPTS = 0.95
_FEWEST_PROMPTS = 10  # with fewer, nothing is said of certainty
_ROUNDING = 1e-12  # relative to what they were computed from, smaller differences are none
_ALL_SIZES_TO, _SIZES_PER_DOUBLING = 64, 16
_CURVES = ("gold", "proxy", "best", "regret", "normalised_regret", "gold_gain", "proxy_gain", "best_gain")


@dataclass(frozen=True, slots=True)
class Curve:
    """A number for each n with its pointwise 95 % interval; None where it is not known."""

    mean: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether choosing by the proxy makes gold worse again within the sampled n.

    The highest point of a measured curve is partly luck, so gold at n = 1, 2, 4, ... is compared with gold at the
    largest n, by paired t-tests over prompts. `p_value`: the smallest of them, corrected for their number (Bonferroni);
    None with fewer than 10 prompts. `state`: `seen` (p below 0.05), `unclear` (gold is highest before the largest n,
    which may be chance) or `not seen`. `peak`: the n of the highest measured gold; `drop`: how much less it is at the
    largest n.
    """

    state: Literal["seen", "unclear", "not seen"]
    peak: int
    drop: float
    p_value: float | None
    sentence: str


@dataclass(frozen=True, slots=True)
class BestOfN:
    """The result of one proxy. `sizes` (G,): the n; `kl` (G,): KL(n) in nats; `curves`, each of G values:

    `gold`, `proxy`: of what the proxy chooses, in their own units. `best`: gold of the best by gold. `regret` = best -
    gold. `normalised_regret` = regret(n) / (best(n) - gold(1)): 0 is choosing by gold, 1 choosing at random, more is
    worse than that. `gold_gain`, `proxy_gain`, `best_gain`: over n = 1, in standard deviations within a prompt.
    `correlation`: of proxy and gold within prompts, without an interval for fewer than 10 of them. `counts`: rows
    (`num_prompts`), prompts (`num_clusters`), samples, and what is left out. `difference`: of several proxies, gold of
    what this one chooses among the largest n less that of what the first chooses.
    """

    sizes: tuple[int, ...]
    kl: tuple[float, ...]
    curves: Mapping[str, Curve]
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
    proxies: Mapping[str, Scores],
    gold: Scores,
    prompts: Sequence[str] | None = None,
    *,
    max_n: int | None = None,
    num_resamples: int = 2000,
    seed: int = 0,
) -> dict[str, BestOfN]:
    """The result of each proxy on the samples that all have scored, so that the curves differ by the proxy alone.

    `prompts`: the same for rows of one prompt; None: each row has its own. A sample without a gold score or the score
    of a proxy is left out and counted; so is a row with fewer than `max_n` samples left. `max_n`: None is the largest n
    that 95 % of the rows have. Raises `DataError` where no row has two samples with all scores, and `ConfigError` for a
    `max_n` that no row has.
    """
    rows = [_scored_by_all(scores) for scores in zip(gold, *proxies.values(), strict=True)]
    sizes = curve_sizes(_largest_size([row.shape[1] for row in rows], max_n))
    kept = [i for i, row in enumerate(rows) if row.shape[1] >= sizes[-1]]
    clusters = [str(i) if prompts is None else prompts[i] for i in kept]
    samples = [sample for row in zip(*proxies.values(), strict=True) for sample in zip(*row, strict=True)]
    counts = {
        "num_prompts": len(kept),
        "num_clusters": len(set(clusters)),
        "num_prompts_with_fewer_samples": len(rows) - len(kept),
        "num_samples": sum(rows[i].shape[1] for i in kept),
        "num_without_proxy": sum(None in scores for scores in samples),
        "num_without_gold": sum(score is None for row in gold for score in row),
    }
    results: dict[str, BestOfN] = {}
    first_gold: Floats | None = None
    for place, name in enumerate(proxies, start=1):
        table_CK = _by_prompt([_statistics(rows[i][place], rows[i][0], sizes) for i in kept], clusters)
        last_gold = table_CK[:, len(sizes) - 1]
        beyond_first = None if first_gold is None else last_gold - first_gold
        first_gold = last_gold if first_gold is None else first_gold
        results[name] = _summarize(table_CK, sizes, counts, beyond_first, num_resamples, seed)
    return results


def _scored_by_all(scores: Sequence[Sequence[float | None]]) -> Floats:
    """Gold and each proxy (1 + P, N) of the samples that have all scores."""
    samples = [sample for sample in zip(*scores, strict=True) if None not in sample]
    return np.array(samples, dtype=np.float64).reshape(-1, len(scores)).T


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


# --- choosing --------------------------------------------------------------------------------------------------------


def curve_sizes(max_n: int) -> tuple[int, ...]:
    """The n that curves are computed at: each up to 64, then 16 for every doubling, and `max_n`."""
    steps = range(_SIZES_PER_DOUBLING * max_n.bit_length())
    sizes = {*range(1, _ALL_SIZES_TO + 1), *(round(2 ** (i / _SIZES_PER_DOUBLING)) for i in steps), max_n}
    return tuple(sorted(n for n in sizes if n <= max_n))


@lru_cache(maxsize=16)
def selection_weights(num_samples: int, sizes: tuple[int, ...]) -> Floats:
    """(G, N): the probability that the i-th of N samples, from below, is the best of n drawn without replacement.

    C(i-1, n-1) / C(N, n) for n from 1 to N, to a relative error below 1e-11 for thousands of samples.
    """
    # From the top down: w_N = n / N and w_(i-1) / w_i = (i - n) / (i - 1). All factors lie in [0, 1]: nothing overflows
    # or cancels, and the error is a few roundings per factor, less than with logarithms of binomials.
    n_G1 = np.asarray(sizes, dtype=np.float64)[:, None]
    i = np.arange(num_samples, 1, -1, dtype=np.float64)[None, :]
    factors = np.concatenate([n_G1 / num_samples, np.maximum(i - n_G1, 0.0) / (i - 1.0)], axis=1)
    weights: Floats = np.cumprod(factors, axis=1)[:, ::-1].copy()
    weights.setflags(write=False)
    return weights


def expected_best_of(by: ArrayLike, values: ArrayLike, sizes: Sequence[int]) -> Floats:
    """(G,): the expected `values` (N,) of the sample with the highest `by` (N,) among n, over all subsets of n.

    Samples that are equal `by` are chosen from at random: they share the mean of their values. All numbers are finite.
    """
    keys, amounts = np.asarray(by, dtype=np.float64), np.asarray(values, dtype=np.float64)
    _, tie, count = np.unique(keys, return_inverse=True, return_counts=True)
    shared = np.bincount(tie, weights=amounts) / count
    return selection_weights(len(keys), tuple(sizes)) @ np.repeat(shared, count)


def kl_of_best_of(sizes: ArrayLike) -> Floats:
    """KL(n) = ln n - (n - 1) / n, in nats: how far best-of-n is from plain sampling.

    Source: Stiennon et al. 2020, arXiv 2009.01325, appendix G.3. It is exact where no two samples are equal and an
    upper bound otherwise (Beirami et al. 2024, arXiv 2401.01879).
    """
    n = np.asarray(sizes, dtype=np.float64)
    return np.asarray(np.log(n) - (n - 1.0) / n, dtype=np.float64)


# --- curves ----------------------------------------------------------------------------------------------------------


def _statistics(proxy: Floats, gold: Floats, sizes: tuple[int, ...]) -> Floats:
    """(3 G + 3,): one row's curves of gold, proxy and best, its two variances and its covariance."""
    covariance = np.cov(proxy, gold)  # divides by N - 1
    return np.concatenate(
        [
            expected_best_of(proxy, gold, sizes),
            expected_best_of(proxy, proxy, sizes),
            expected_best_of(gold, gold, sizes),
            [covariance[0, 0], covariance[1, 1], covariance[0, 1]],
        ]
    )


def _by_prompt(rows: Sequence[Floats], clusters: Sequence[str]) -> Floats:
    """(C, K): the mean of the rows of each prompt."""
    members: dict[str, list[Floats]] = {}
    for row, cluster in zip(rows, clusters, strict=True):
        members.setdefault(cluster, []).append(row)
    return np.stack([np.mean(of_prompt, axis=0) for of_prompt in members.values()])


def _summarize(
    table_CK: Floats,
    sizes: tuple[int, ...],
    counts: Mapping[str, int],
    beyond_first: Floats | None,
    num_resamples: int,
    seed: int,
) -> BestOfN:
    num = len(table_CK)
    table_CK = np.column_stack([table_CK, np.zeros(num) if beyond_first is None else beyond_first])
    point = _derive(table_CK.mean(axis=0), len(sizes))
    drawn = _derive(resampled(table_CK, num_resamples, seed), len(sizes))

    def curve(name: str, fewest: int = 2) -> Curve:
        """No interval for fewer prompts than `fewest`, nor where a resample has no number."""
        ends = np.full((2, len(point[name])), np.nan)
        if num >= fewest:
            tail = expanded_tail(num)
            ends = np.quantile(drawn[name], (tail, 1.0 - tail), axis=0)
        return Curve(mean=_known(point[name]), low=_known(ends[0]), high=_known(ends[1]))

    def metric(name: str, fewest: int = 2) -> Metric:
        only = curve(name, fewest)
        return Metric(name, only.mean[0], only.low[0], only.high[0], counts["num_prompts"])

    return BestOfN(
        sizes=sizes,
        kl=tuple(kl_of_best_of(sizes).tolist()),
        curves={name: curve(name) for name in _CURVES},
        correlation=metric("correlation", _FEWEST_PROMPTS),
        verdict=judge(sizes, table_CK[:, : len(sizes)], metric("rise")),
        counts=counts,
        difference=None if beyond_first is None else metric("difference"),
    )


def _known(values: Floats) -> tuple[float | None, ...]:
    return tuple(value if math.isfinite(value) else None for value in values.tolist())


def _derive(means: Floats, num: int) -> dict[str, Floats]:
    """Everything that is computed of the means (..., 3 G + 4): those of `_statistics`, and gold beyond the first's."""
    gold, proxy, best = (means[..., i * num : (i + 1) * num] for i in range(3))
    var_proxy, var_gold, covariance = (means[..., 3 * num + i : 3 * num + i + 1] for i in range(3))
    sd_proxy, sd_gold = _divisor(np.sqrt(var_proxy), proxy), _divisor(np.sqrt(var_gold), gold)
    start = gold[..., :1]
    regret, possible = np.maximum(best - gold, 0.0), _divisor(best - start, gold)
    possible[..., 0], regret[..., 0] = np.nan, 0.0  # among one there is nothing to choose
    return {
        "gold": gold,
        "proxy": proxy,
        "best": best,
        "regret": regret,
        "normalised_regret": regret / possible,
        "gold_gain": (gold - start) / sd_gold,
        "proxy_gain": (proxy - proxy[..., :1]) / sd_proxy,
        "best_gain": (best - start) / sd_gold,
        "correlation": covariance / (sd_proxy * sd_gold),
        "rise": (gold - start)[..., -1:],
        "difference": means[..., -1:],
    }


def _divisor(values: Floats, beside: Floats) -> Floats:
    """The values, with NaN for those that are 0 but for the rounding of what they were computed from."""
    return np.where(values > _ROUNDING * np.abs(beside).max(axis=-1, keepdims=True), values, np.nan)


# --- the verdict -----------------------------------------------------------------------------------------------------


def judge(sizes: Sequence[int], gold_CG: Floats, rise: Metric) -> Verdict:
    """The verdict on the gold curves (C, G) of prompts; `rise`: gold at the largest n less that at n = 1."""
    gold_G, end = gold_CG.mean(axis=0), sizes[-1]
    rounding = _ROUNDING * float(np.abs(gold_G).max())
    at = int(np.argmax(gold_G >= gold_G.max() - rounding))  # the first of equal ones
    peak, drop, p_value = sizes[at], float(gold_G[at] - gold_G[-1]), None
    if len(gold_CG) >= _FEWEST_PROMPTS:
        tested = [i for i, n in enumerate(sizes[:-1]) if n & (n - 1) == 0]
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of differences that do not vary
            tests = stats.ttest_1samp(gold_CG[:, tested] - gold_CG[:, -1:], 0.0, axis=0, alternative="greater")
        p_value = min(1.0, len(tested) * float(np.nan_to_num(tests.pvalue, nan=1.0).min()))
    if drop <= rounding:
        return Verdict("not seen", peak, 0.0, p_value, _not_seen(end, rise, rounding))
    highest = f"gold is highest at n = {peak} ({gold_G[at]:.3g}) and lower by {drop:.3g} at n = {end}"
    if p_value is not None and p_value < 0.05:
        sentence = f"Over-optimisation is seen: {highest}, while the proxy keeps rising; p = {p_value:.2g}."
        return Verdict("seen", peak, drop, p_value, sentence)
    if p_value is None:
        doubt = f"{len(gold_CG)} {'prompt is' if len(gold_CG) == 1 else 'prompts are'} too few to say more"
    else:
        doubt = f"this may be chance (p = {p_value:.2g})"
    sentence = f"Over-optimisation is neither shown nor excluded: {highest}, but {doubt}."
    return Verdict("unclear", peak, drop, p_value, sentence)


def _not_seen(end: int, rise: Metric, rounding: float) -> str:
    start = f"No over-optimisation is seen up to n = {end}"
    assert rise.value is not None
    if rise.value <= rounding:
        return f"{start}, and no gain either: gold is the same at every n."
    span = "" if rise.low is None or rise.high is None else f" ({rise.low:.3g} to {rise.high:.3g})"
    doubt = "" if rise.low is not None and rise.low > 0.0 else ", which may be chance"
    return f"{start}: gold is highest there, {rise.value:.3g}{span} above n = 1{doubt}."
