"""`analyse`: from the proxy and gold scores of N samples of each prompt to the curves of best-of-n and what they say.

    prompts = [SampledPrompt(proxy=(0.3, 1.2, -0.4), gold=(0.5, 0.1, 0.9), cluster="2 + 2?"), ...]
    result = analyse(prompts)
    result.curves["gold"].mean       # expected gold of what the proxy chooses among n, for each n of result.sizes
    result.verdict.sentence

    found = analyse_several({"plain": prompts, "worst of two": others})      # the same samples, another proxy
    found["worst of two"].difference                                         # gold at the largest n, less the first's

The same prompts stand behind every n. Rows of one prompt are averaged and count as one. Intervals are of 95 %, by a
bootstrap over prompts with the quantiles of `treeward.evaluation.statistics.cluster_bootstrap`. Array suffixes: C
prompts, R resamples, G values of n, K statistics.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import stats

from treeward.errors import ConfigError, DataError
from treeward.evaluation.best_of_n.expectation import Floats, curve_sizes, expected_best_of, kl_of_best_of
from treeward.evaluation.results import Metric
from treeward.evaluation.statistics import expanded_tail, resampled

_SHARE_OF_PROMPTS = 0.95
_FEWEST_PROMPTS = 10  # with fewer, nothing is said of certainty
_ROUNDING = 1e-12  # relative to what they were computed from, smaller differences are none
_CURVES = ("gold", "proxy", "best", "regret", "normalised_regret", "gold_gain", "proxy_gain", "best_gain")


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
    """The result. `sizes` (G,): the n; `kl` (G,): KL(n) in nats; `curves`, each of G values:

    `gold`, `proxy`: of what the proxy chooses, in their own units. `best`: gold of the best by gold. `regret` = best -
    gold. `normalised_regret` = regret(n) / (best(n) - gold(1)): 0 is choosing by gold, 1 choosing at random, more is
    worse than that. `gold_gain`, `proxy_gain`, `best_gain`: over n = 1, in standard deviations within a prompt.
    `correlation`: of proxy and gold within prompts, without an interval for fewer than
    10 of them. `counts`: rows (`num_prompts`), prompts (`num_clusters`), samples, and what is left out. `difference`:
    of several proxies, gold of what this one chooses among the largest n less that of what the first chooses.
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
    prompts: Sequence[SampledPrompt], *, max_n: int | None = None, num_resamples: int = 2000, seed: int = 0
) -> BestOfN:
    """The curves of best-of-n and what `BestOfN` has besides.

    A sample without a proxy or a gold score is left out and counted; so is a prompt with fewer than `max_n` samples
    left. `max_n`: None is the largest n that 95 % of the prompts have. Raises `DataError` where no prompt has two
    samples with both scores, or a score is not finite, and `ConfigError` for a `max_n` that no prompt has.
    """
    return analyse_several({"proxy": prompts}, max_n=max_n, num_resamples=num_resamples, seed=seed)["proxy"]


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
    first_gold: Floats | None = None
    for name, own in shared.items():
        scored = [_both_known(prompt) for prompt in own]
        sizes = curve_sizes(_largest_size([len(proxy) for proxy, _ in scored], max_n))
        kept = [(*scores, one.cluster) for scores, one in zip(scored, own, strict=True) if len(scores[0]) >= sizes[-1]]
        table_CK = _by_prompt([_statistics(proxy, gold, sizes) for proxy, gold, _ in kept], [one[2] for one in kept])
        counts = {
            "num_prompts": len(kept),
            "num_clusters": len(table_CK),
            "num_prompts_with_fewer_samples": len(own) - len(kept),
            "num_samples": sum(len(proxy) for proxy, _, _ in kept),
            "num_without_proxy": sum(value is None for prompt in own for value in prompt.proxy),
            "num_without_gold": sum(value is None for prompt in own for value in prompt.gold),
        }
        last_gold = table_CK[:, len(sizes) - 1]
        beyond_first = None if first_gold is None else last_gold - first_gold
        first_gold = last_gold if first_gold is None else first_gold
        found[name] = _summarize(table_CK, sizes, counts, beyond_first, num_resamples, seed)
    return found


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
        return Curve(*(tuple(v if math.isfinite(v) else None for v in row.tolist()) for row in (point[name], *ends)))

    def metric(name: str, fewest: int = 2) -> Metric:
        one = curve(name, fewest)
        return Metric(name, one.mean[0], one.low[0], one.high[0], counts["num_prompts"])

    return BestOfN(
        sizes=sizes,
        kl=tuple(kl_of_best_of(sizes).tolist()),
        curves={name: curve(name) for name in _CURVES},
        correlation=metric("correlation", _FEWEST_PROMPTS),
        verdict=judge(sizes, table_CK[:, : len(sizes)], metric("rise")),
        counts=counts,
        difference=None if beyond_first is None else metric("difference"),
    )


def _both_known(prompt: SampledPrompt) -> tuple[Floats, Floats]:
    """Proxy and gold of the samples that have both."""
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
    """(3 G + 3,): one row's curves of gold, proxy and best, its two variances and its covariance."""
    curves = [expected_best_of(by, values, sizes) for by, values in ((proxy, gold), (proxy, proxy), (gold, gold))]
    covariance = np.cov(proxy, gold)  # divides by N - 1
    return np.concatenate([*curves, [covariance[0, 0], covariance[1, 1], covariance[0, 1]]])


def _by_prompt(rows: Sequence[Floats], clusters: Sequence[str | None]) -> Floats:
    """(C, K): the mean of the rows of each prompt."""
    members: dict[str | int, list[Floats]] = {}
    for number, (row, cluster) in enumerate(zip(rows, clusters, strict=True)):
        members.setdefault(number if cluster is None else cluster, []).append(row)
    return np.stack([np.mean(own, axis=0) for own in members.values()])


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


def judge(sizes: Sequence[int], gold_CG: Floats, rise: Metric) -> Verdict:
    """The verdict on the gold curves (C, G) of prompts; `rise`: gold at the largest n less that at n = 1."""
    gold_G, end = gold_CG.mean(axis=0), sizes[-1]
    rounding = _ROUNDING * float(np.abs(gold_G).max())
    at = int(np.argmax(gold_G >= gold_G.max() - rounding))  # the first of equal ones
    peak, drop, p_value = sizes[at], float(gold_G[at] - gold_G[-1]), None
    if len(gold_CG) >= _FEWEST_PROMPTS:
        tested = [i for i, n in enumerate(sizes[:-1]) if n & (n - 1) == 0]
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of differences that do not vary
            found = stats.ttest_1samp(gold_CG[:, tested] - gold_CG[:, -1:], 0.0, axis=0, alternative="greater")
        p_value = min(1.0, len(tested) * float(np.nan_to_num(found.pvalue, nan=1.0).min()))
    highest = f"gold is highest at n = {peak} ({gold_G[at]:.3g}) and lower by {drop:.3g} at n = {end}"
    if drop <= rounding:
        return Verdict("not seen", peak, 0.0, p_value, _not_seen(end, rise, rounding))
    if p_value is not None and p_value < 0.05:
        sentence = f"Over-optimisation is seen: {highest}, while the proxy keeps rising; p = {p_value:.2g}."
        return Verdict("seen", peak, drop, p_value, sentence)
    few = f"{len(gold_CG)} {'prompt is' if len(gold_CG) == 1 else 'prompts are'} too few to say more"
    doubt = few if p_value is None else f"this may be chance (p = {p_value:.2g})"
    return Verdict(
        "unclear", peak, drop, p_value, f"Over-optimisation is neither shown nor excluded: {highest}, but {doubt}."
    )


def _not_seen(end: int, rise: Metric, rounding: float) -> str:
    start = f"No over-optimisation is seen up to n = {end}"
    assert rise.value is not None
    if rise.value <= rounding:
        return f"{start}, and no gain either: gold is the same at every n."
    span = "" if rise.low is None or rise.high is None else f" ({rise.low:.3g} to {rise.high:.3g})"
    doubt = "" if rise.low is not None and rise.low > 0.0 else ", which may be chance"
    return f"{start}: gold is highest there, {rise.value:.3g}{span} above n = 1{doubt}."
