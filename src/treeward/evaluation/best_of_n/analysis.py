"""`analyse`: from the proxy and gold scores of N samples of each prompt to the curves of best-of-n.

    # One score for each sample, of each prompt.
    result = analyse(proxy=[(0.3, 1.2, -0.4), ...], gold=[(0.5, 0.1, 0.9), ...])
    result.curves["gold"].mean       # expected gold of the proxy's choice among n, for each n

The same prompts stand behind every n; rows of one prompt are averaged and count as one. Intervals
are of 95 %, by a bootstrap over prompts.

Shapes: N samples, C prompts, R resamples, G values of n, K statistics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treeward.errors import ConfigError, DataError
from treeward.evaluation.results import Metric
from treeward.evaluation.statistics import expanded_tail, resampled

Floats = NDArray[np.float64]
Scores = Sequence[Sequence[float | None]]
"""A score of each sample of each prompt; None where there is none."""

_SHARE_OF_PROMPTS = 0.95  # a few prompts with few samples must not shorten the curves of all
_FEWEST_PROMPTS = 10  # with fewer, the correlation has no interval
_ROUNDING = 1e-12  # relative to what they were computed from, smaller differences are none
# Every n up to the first number, and then so many for each doubling.
_ALL_SIZES_TO = 64
_SIZES_PER_DOUBLING = 16
_CURVES = ("gold", "proxy", "best", "gold_gain", "proxy_gain", "best_gain")


@dataclass(frozen=True, slots=True)
class Curve:
    """A number for each n with its pointwise 95 % interval; None where it is not known."""

    mean: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class BestOfN:
    """The result of a proxy. `sizes` (G,): the n; `kl` (G,): KL(n) in nats; `curves`, each of G
    values:

    `gold`, `proxy`: of what the proxy chooses. `best`: gold of the best by gold. `gold_gain`,
    `proxy_gain`, `best_gain`: over n = 1, in standard deviations within a prompt. `correlation`: of
    proxy and gold within prompts. `peak`: the first n of the highest gold; `lead`: how much higher
    it is than at the largest n, or than at n = 1 where the largest n has as much. `counts`: rows
    (`num_prompts`), prompts (`num_clusters`), samples, and what is left out.
    """

    sizes: tuple[int, ...]
    kl: tuple[float, ...]
    curves: Mapping[str, Curve]
    correlation: Metric
    peak: int
    lead: Metric
    counts: Mapping[str, int]

    @property
    def max_n(self) -> int:
        """The largest n."""
        return self.sizes[-1]

    def at(self, name: str, size: int) -> Metric:
        """A curve's value at one of `sizes`."""
        curve = self.curves[name]
        i = self.sizes.index(size)
        count = self.counts["num_prompts"]
        return Metric(f"{name}@{size}", curve.mean[i], curve.low[i], curve.high[i], count)

    @property
    def sentence(self) -> str:
        """Where gold is highest, and by how much."""
        lead = self.lead
        if not lead.value:
            return "No n has more gold than n = 1."
        span = ""
        if lead.low is not None and lead.high is not None:
            span = f" ({lead.low:.3g} to {lead.high:.3g})"
        return f"Gold is highest at n = {self.peak}, {lead.value:.3g}{span} {lead.note}."


def analyse(
    proxy: Scores,
    gold: Scores,
    prompts: Sequence[str] | None = None,
    *,
    max_n: int | None = None,
    num_resamples: int = 2000,
) -> BestOfN:
    """What choosing by the proxy does to gold.

    `prompts`: the same for rows of one prompt; None: each row has its own. A sample without a score
    of both is left out and counted; so is a row with fewer than `max_n` samples left. `max_n`: None
    is the largest n that 95 % of the rows have. Raises `DataError` where no row has two samples
    with both scores, and `ConfigError` for a `max_n` that no row has.

    KL(n) = ln n - (n - 1) / n, how far best-of-n is from plain sampling (Stiennon et al. 2020,
    arXiv 2009.01325, appendix G.3), is an upper bound where samples are equal (Beirami et al. 2024,
    arXiv 2401.01879).
    """
    samples = _samples_with_both(proxy, gold)
    lengths = [len(row) for row in samples.rows]
    sizes = curve_sizes(_largest_size(lengths, max_n))
    kept_lengths = [length for length in lengths if length >= sizes[-1]]
    table_CK = _statistics_by_prompt(samples.rows, prompts, sizes)
    estimates = _Estimates(
        # Ratios are of means, not means of ratios: a prompt of equal samples has none of its own.
        of_all=_derive(table_CK.mean(axis=0), len(sizes)),
        of_resamples=_derive(resampled(table_CK, num_resamples), len(sizes)),
        num_prompts=len(table_CK),
        num_rows=len(kept_lengths),
    )
    gold_G = estimates.of_all["gold"]
    is_highest_G = gold_G >= gold_G.max() - _ROUNDING * np.abs(gold_G).max()
    peak = int(np.argmax(is_highest_G))  # argmax is the first of several
    # The peak is compared with the largest n, or with n = 1 where the largest has as much gold.
    other = len(gold_G) - 1
    if is_highest_G[-1]:
        other = 0
    estimates.add_lead(peak, other)
    n_G = np.array(sizes, dtype=np.float64)
    kl_G = np.log(n_G) - (n_G - 1.0) / n_G
    return BestOfN(
        sizes=sizes,
        kl=tuple(kl_G.tolist()),
        curves={name: estimates.curve(name) for name in _CURVES},
        correlation=estimates.metric("correlation", _FEWEST_PROMPTS),
        peak=sizes[peak],
        lead=replace(estimates.metric("lead"), note=f"above n = {sizes[other]}"),
        counts={
            "num_prompts": len(kept_lengths),
            "num_clusters": len(table_CK),
            "num_prompts_with_fewer_samples": len(lengths) - len(kept_lengths),
            "num_samples": sum(kept_lengths),
            "num_without_proxy": samples.num_without_proxy,
            "num_without_gold": samples.num_without_gold,
        },
    )


class _Samples(NamedTuple):
    """`rows`: the proxy and the gold score of each sample that has both, row by row."""

    rows: list[list[tuple[float, float]]]
    num_without_proxy: int
    num_without_gold: int


def _samples_with_both(proxy: Scores, gold: Scores) -> _Samples:
    rows: list[list[tuple[float, float]]] = []
    num_without_proxy = 0
    num_without_gold = 0
    for proxy_scores, gold_scores in zip(proxy, gold, strict=True):
        row = []
        for proxy_score, gold_score in zip(proxy_scores, gold_scores, strict=True):
            if proxy_score is None:
                num_without_proxy += 1
            if gold_score is None:
                num_without_gold += 1
            if proxy_score is not None and gold_score is not None:
                row.append((proxy_score, gold_score))
        rows.append(row)
    return _Samples(rows, num_without_proxy, num_without_gold)


def _largest_size(lengths: Sequence[int], max_n: int | None) -> int:
    """The largest n of the curves. `lengths`: how many samples each row has."""
    ordered = sorted(lengths, reverse=True)
    if not ordered or ordered[0] < 2:
        raise DataError(
            "no prompt has two samples with both scores",
            got=f"{len(ordered)} prompts with at most {max(ordered, default=0)} such samples",
            need="two or more completions of a prompt",
        )
    if max_n is None:
        num_that_have_it = math.ceil(_SHARE_OF_PROMPTS * len(ordered))
        return max(2, ordered[num_that_have_it - 1])
    if not 2 <= max_n <= ordered[0]:
        raise ConfigError(
            "no prompt has so many samples", field="max_n", got=max_n, need=f"2 to {ordered[0]}"
        )
    return max_n


# --- choosing -------------------------------------------------------------------------------------


def curve_sizes(max_n: int) -> tuple[int, ...]:
    """The n that curves are computed at: each up to 64, then 16 for every doubling, and `max_n`."""
    sizes = {max_n, *range(1, _ALL_SIZES_TO + 1)}
    # 2 ** bit_length is above max_n.
    for i in range(_SIZES_PER_DOUBLING * max_n.bit_length()):
        sizes.add(round(2 ** (i / _SIZES_PER_DOUBLING)))
    return tuple(n for n in sorted(sizes) if n <= max_n)


@lru_cache(maxsize=16)
def selection_weights(num_samples: int, sizes: tuple[int, ...]) -> Floats:
    """(G, N): the probability that the i-th of N samples, from below, is the best of n drawn
    without replacement.

    w_i(n) = C(i-1, n-1) / C(N, n), so sum_i w_i(n) gold_(i) is the mean over all subsets of n, an
    unbiased estimate from all samples at once (Nakano et al. 2021, arXiv 2112.09332, appendix I).
    Relative error below 1e-11.
    """
    # From the top down: w_N = n / N and w_(i-1) / w_i = (i - n) / (i - 1), all in [0, 1]: nothing
    # overflows or cancels.
    n_G1 = np.asarray(sizes, dtype=np.float64)[:, None]
    i = np.arange(num_samples, 1, -1, dtype=np.float64)[None, :]
    factors = np.concatenate([n_G1 / num_samples, np.maximum(i - n_G1, 0.0) / (i - 1.0)], axis=1)
    weights: Floats = np.cumprod(factors, axis=1)[:, ::-1].copy()
    # Every caller gets the array that is cached.
    weights.setflags(write=False)
    return weights


def expected_best_of(by: ArrayLike, values: ArrayLike, sizes: Sequence[int]) -> Floats:
    """(G,): the expected `values` (N,) of the sample with the highest `by` (N,) among n, over all
    subsets of n.

    Samples that are equal `by` are chosen from at random: they share the mean of their values. All
    numbers are finite.
    """
    keys_N = np.asarray(by, dtype=np.float64)
    amounts_N = np.asarray(values, dtype=np.float64)
    # The distinct keys from below, as the weights go, each with the mean value of its samples.
    _, tie_N, counts = np.unique(keys_N, return_inverse=True, return_counts=True)
    means = np.bincount(tie_N, weights=amounts_N) / counts
    shared_N = np.repeat(means, counts)
    return selection_weights(len(keys_N), tuple(sizes)) @ shared_N


# --- curves ---------------------------------------------------------------------------------------


def _statistics_by_prompt(
    rows: Sequence[Sequence[tuple[float, float]]],
    prompts: Sequence[str] | None,
    sizes: tuple[int, ...],
) -> Floats:
    """(C, K): the statistics of each prompt, of its rows that have the largest of the sizes.

    K is 3 G + 3: a row's curves of gold, proxy and best, its two variances and its covariance. Rows
    of one prompt are averaged: they are one draw of the bootstrap.
    """
    rows_by_prompt: dict[str, list[Floats]] = {}
    for i, samples in enumerate(rows):
        if len(samples) < sizes[-1]:
            continue
        prompt = str(i) if prompts is None else prompts[i]
        proxy_N, gold_N = np.array(samples, dtype=np.float64).T
        covariance = np.cov(proxy_N, gold_N)  # divides by N - 1
        statistics_K = np.concatenate(
            [
                expected_best_of(proxy_N, gold_N, sizes),
                expected_best_of(proxy_N, proxy_N, sizes),
                expected_best_of(gold_N, gold_N, sizes),
                [covariance[0, 0], covariance[1, 1], covariance[0, 1]],
            ]
        )
        rows_by_prompt.setdefault(prompt, []).append(statistics_K)
    return np.stack([np.mean(rows_K, axis=0) for rows_K in rows_by_prompt.values()])


def _known(values: Floats) -> tuple[float | None, ...]:
    """The values, None for NaN."""
    known: list[float | None] = []
    for value in values.tolist():
        known.append(value if math.isfinite(value) else None)
    return tuple(known)


def _derive(means: Floats, num: int) -> dict[str, Floats]:
    """Everything that is computed of the means of the statistics (..., 3 G + 3)."""
    gold, proxy, best, moments = np.split(means, [num, 2 * num, 3 * num], axis=-1)
    var_proxy, var_gold, covariance = np.split(moments, 3, axis=-1)
    # Within a prompt: each row's variance is about its own mean.
    sd_proxy = _divisor(np.sqrt(var_proxy), proxy)
    sd_gold = _divisor(np.sqrt(var_gold), gold)
    first_gold = gold[..., :1]
    first_proxy = proxy[..., :1]
    return {
        "gold": gold,
        "proxy": proxy,
        "best": best,
        "gold_gain": (gold - first_gold) / sd_gold,
        "proxy_gain": (proxy - first_proxy) / sd_proxy,
        "best_gain": (best - first_gold) / sd_gold,
        "correlation": covariance / (sd_proxy * sd_gold),
    }


def _divisor(values: Floats, beside: Floats) -> Floats:
    """The values, with NaN for those that are 0 but for the rounding of what they were computed
    from."""
    rounding = _ROUNDING * np.abs(beside).max(axis=-1, keepdims=True)
    return np.where(values > rounding, values, np.nan)


@dataclass(frozen=True, slots=True)
class _Estimates:
    """Curves by name, as `_derive` makes them, of `num_prompts` prompts in `num_rows` rows.

    `of_all` (G,): of the mean over all prompts. `of_resamples` (R, G): of the mean over each
    resample. What is the same for every n has 1 instead of G.
    """

    of_all: dict[str, Floats]
    of_resamples: dict[str, Floats]
    num_prompts: int
    num_rows: int

    def add_lead(self, peak: int, other: int) -> None:
        """Add `lead`: how much more gold there is at one n than at another, by their indices."""
        for curves in (self.of_all, self.of_resamples):
            curves["lead"] = curves["gold"][..., [peak]] - curves["gold"][..., [other]]

    def curve(self, name: str, fewest: int = 2) -> Curve:
        """A curve; without intervals for fewer prompts than `fewest`, and where a resample has no
        number."""
        mean = self.of_all[name]
        ends = np.full((2, len(mean)), np.nan)
        if self.num_prompts >= fewest:
            tail = expanded_tail(self.num_prompts)
            ends = np.quantile(self.of_resamples[name], (tail, 1.0 - tail), axis=0)
        return Curve(mean=_known(mean), low=_known(ends[0]), high=_known(ends[1]))

    def metric(self, name: str, fewest: int = 2) -> Metric:
        """The single value of a curve that is the same for every n."""
        single = self.curve(name, fewest)
        return Metric(name, single.mean[0], single.low[0], single.high[0], self.num_rows)
