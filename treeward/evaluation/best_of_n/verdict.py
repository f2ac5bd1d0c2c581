"""`judge`: whether gold falls again within the sampled n, how sure that is, and a sentence that says it.

The highest point of a measured curve is where chance has helped most, so that a drop from there proves little. What is
tested is every n at once: t_n is the mean over prompts of gold(n) - gold(N), N the largest n, over its standard error;
max_n t_n is compared with what it becomes when the signs of the prompts' deviations from the mean are flipped at
random, each prompt's alike for all n: a wild bootstrap (Davidson, Flachaire 2008, Journal of Econometrics 146) of the
largest of several statistics (Romano, Wolf 2005, Econometrica 73). Array suffixes: C clusters, R resamples, G values
of n.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from treeward.evaluation.best_of_n.selection import Floats
from treeward.evaluation.results import Metric

__all__ = ["ROUNDING", "State", "Verdict", "chunks", "judge", "largest_drop"]

State = Literal["seen", "unclear", "not seen"]

ROUNDING = 1e-12
"""Relative to the numbers that they were computed from, smaller differences are none."""
MIN_CLUSTERS = 10
"""With fewer prompts nothing is said of certainty."""

_LEVEL = 0.95
_MOST = 1_000_000
_NUMBERS_AT_ONCE = 4_000_000


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether choosing by the proxy makes gold worse again within the sampled n.

    `state`: `seen` (p below 0.05), `unclear` (gold is highest before the largest n, which chance may do) or `not seen`.
    `peak`: the n of the highest measured gold; `drop`: how much less it is at the largest n. `p_value`: how often
    chance alone gives such an excess of gold(n) over gold(N) at some n, were there none. `drop_at_least`: with 95 %
    confidence gold(n) is by this much or more above gold(N) for some n. Both allow for the n being picked after
    looking; both are None with fewer than 10 prompts.
    """

    state: State
    peak: int
    drop: float
    drop_at_least: float | None
    p_value: float | None
    sentence: str


def judge(
    sizes: Sequence[int],
    gold_CG: Floats,
    counts_C: Floats,
    *,
    rise: Metric,
    expected_peak: Metric | None,
    num_resamples: int,
    rng: np.random.Generator,
) -> Verdict:
    """The verdict on gold curves (C, G), summed over the `counts_C` (C,) rows of each cluster.

    `rise`: gold at the largest n less that at n = 1. `expected_peak`: the n at which the fitted law is highest.
    """
    gold_G = gold_CG.sum(axis=0) / counts_C.sum()
    scale = ROUNDING * float(np.abs(gold_G).max())
    at = int(np.argmax(gold_G >= gold_G.max() - scale))  # the first of equal ones
    drop = float(gold_G[at] - gold_G[-1]) if at < len(sizes) - 1 else 0.0
    p_value = drop_at_least = None
    if len(counts_C) >= MIN_CLUSTERS:
        p_value, bound = largest_drop(gold_CG[:, :-1] - gold_CG[:, -1:], counts_C, scale, num_resamples, rng)
        drop_at_least = max(bound, 0.0)
    state: State = "not seen"
    if drop > scale:
        state = "seen" if p_value is not None and p_value < 1.0 - _LEVEL else "unclear"
    peak, end, height = sizes[at], sizes[-1], float(gold_G[at])
    if state == "seen":
        sentence = _seen(peak, end, height, drop, drop_at_least, p_value)
    elif state == "unclear":
        sentence = _unclear(peak, end, height, drop, p_value, len(counts_C))
    else:
        sentence = _not_seen(end, rise, scale, expected_peak)
    return Verdict(state, peak, drop, drop_at_least, p_value, sentence)


def largest_drop(
    excess_CG: Floats, counts_C: Floats, scale: float, num_resamples: int, rng: np.random.Generator
) -> tuple[float, float]:
    """The p-value of max_n t_n, and a lower bound of max_n (gold(n) - gold(N)) that holds with 95 % confidence.

    `excess_CG`: gold(n) - gold(N), summed over the `counts_C` rows of each cluster. `scale`: what is less is rounding.
    """
    num = len(counts_C)
    mean_G = excess_CG.sum(axis=0) / counts_C.sum()
    deviations_CG = (excess_CG - counts_C[:, None] * mean_G) / counts_C.mean()
    varies_G = np.sqrt((deviations_CG**2).sum(axis=0)) > scale
    if not varies_G.any():  # the same in every prompt; all signs are equal with this chance
        return (0.5**num if mean_G.max() > scale else 1.0), float(mean_G.max())
    mean_G, deviations_CG = mean_G[varies_G], deviations_CG[:, varies_G]
    squares_G = (deviations_CG**2).sum(axis=0)
    error_G = np.sqrt(squares_G / (num * (num - 1)))
    largest: list[Floats] = []
    for size in chunks(num_resamples, num + len(mean_G)):
        signs_RC = rng.integers(0, 2, size=(size, num)) * 2.0 - 1.0
        means_RG = signs_RC @ deviations_CG / num
        spread_RG = np.maximum(squares_G - num * means_RG**2, ROUNDING * squares_G)
        largest.append((means_RG / np.sqrt(spread_RG / (num * (num - 1)))).max(axis=1))
    by_chance_R = np.concatenate(largest)
    at_least_as_large = float((by_chance_R >= (mean_G / error_G).max()).sum())
    critical = float(np.quantile(by_chance_R, _LEVEL))
    return (1.0 + at_least_as_large) / (num_resamples + 1.0), float((mean_G - critical * error_G).max())


def chunks(total: int, width: int) -> Iterator[int]:
    """Numbers that sum to `total`, so small that as many rows of `width` numbers fit in memory at once."""
    size = max(1, _NUMBERS_AT_ONCE // width)
    return (min(size, total - start) for start in range(0, total, size))


def _seen(peak: int, end: int, height: float, drop: float, at_least: float | None, p_value: float | None) -> str:
    course = "falls from the start" if peak == 1 else f"is highest at n = {peak} ({height:.3g})"
    bound = f" (by at least {at_least:.3g} with 95 % confidence)" if at_least else ""
    return (
        f"Over-optimisation is seen: gold {course} and is lower by {drop:.3g}{bound} at n = {end}, while the proxy "
        f"rises on; p = {p_value:.2g} for chance alone."
    )


def _unclear(peak: int, end: int, height: float, drop: float, p_value: float | None, num_clusters: int) -> str:
    doubt = "chance alone may do that"
    if p_value is None:
        doubt = f"{num_clusters} {'prompt is' if num_clusters == 1 else 'prompts are'} too few to say more"
    known = "" if p_value is None else f" (p = {p_value:.2g})"
    return (
        f"Over-optimisation is neither shown nor excluded: gold is highest at n = {peak} ({height:.3g}) and lower by "
        f"{drop:.3g} at n = {end}, but {doubt}{known}."
    )


def _not_seen(end: int, rise: Metric, scale: float, expected_peak: Metric | None) -> str:
    start = f"No over-optimisation is seen up to n = {end}"
    assert rise.value is not None
    if rise.value <= scale:
        return f"{start}, and no gain either: gold is the same at every n."
    span = "" if rise.low is None or rise.high is None else f" ({rise.low:.3g} to {rise.high:.3g})"
    doubt = "" if rise.low is not None and rise.low > 0.0 else ", which may be chance"
    further = ""
    if expected_peak is not None and expected_peak.value is not None and expected_peak.value > end:
        peak, low, high = map(_size, (expected_peak.value, expected_peak.low, expected_peak.high))
        between = "" if expected_peak.low is None else f" (95 % interval: {low} to {high})"
        further = f" The fitted law, an extrapolation, has its peak at n = {peak}{between}."
        if expected_peak.value > _MOST:
            further = f" The fitted law, an extrapolation, has its peak beyond n = {_MOST:,}{between}."
    return f"{start}: gold is highest there, {rise.value:.3g}{span} above n = 1{doubt}.{further}"


def _size(n: float | None) -> str:
    return "over a million" if n is None or n > _MOST else f"{n:,.0f}"
