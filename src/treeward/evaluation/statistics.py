"""Statistics of an evaluation: pure functions of arrays, each with its formula and where it is
from.

    # A `Metric`, by `wilson` or `cluster_bootstrap`.
    accuracy_metric(outcomes, "accuracy", clusters=prompts)
    parts = [accuracy_metric([1, 1, 0], "hep-go"), accuracy_metric([1, 0], "math-prm")]
    combined("Reasoning", parts, weights=[164, 984])             # a section of two subsets

Examples of one prompt are not independent: wherever `clusters` is given, prompts are drawn, flipped
and counted. An outcome is 1 for right, 0 for wrong; a tie may be 0.5. A number that cannot be
computed is None, never NaN.

scipy is imported where it is used: it takes seconds, and `check-data` needs `wilson` alone.

Shapes: N examples, C clusters, R resamples, K columns, P pairs, I parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treeward.evaluation.results import Metric

Floats = NDArray[np.float64]
Interval = tuple[float | None, float | None]

_NORMAL_QUANTILE = NormalDist().inv_cdf(0.975)
_NUM_RESAMPLES = 2000
_DRAWS_AT_ONCE = 4_000_000  # numbers of 8 bytes in one array
_FEWEST_CLUSTERS = 10  # with fewer there is no bootstrap
_FEWEST_OF_A_PART = 5  # examples; with fewer there is a note


# --- intervals ------------------------------------------------------------------------------------


def wilson(successes: float, count: int) -> tuple[float, float]:
    """The 95 % score interval of a proportion of `count` independent examples; (0, 1) where there
    are none.

    (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n), with z the normal quantile
    of 0.975: Wilson 1927, JASA 22, page 209. It keeps its level near 0 and 1 and for few examples.
    """
    if count == 0:
        return 0.0, 1.0
    p = successes / count
    z = _NORMAL_QUANTILE
    centre = p + z**2 / (2 * count)
    reach = z * math.sqrt(p * (1 - p) / count + z**2 / (4 * count**2))
    scale = 1 + z**2 / count
    # At p = 0 and p = 1 an end is p itself; rounding would leave it a little beside.
    low = 0.0 if successes == 0 else max(0.0, (centre - reach) / scale)
    high = 1.0 if successes == count else min(1.0, (centre + reach) / scale)
    return low, high


def clopper_pearson(
    hits: ArrayLike, clusters: Sequence[Hashable], tail: float
) -> tuple[float, float]:
    """An interval of a proportion that has at most `tail` on each side; (0, 1) where there are
    none.

    `hits` (N,) bool; `clusters` (N,) says the cluster of each. The exact interval of independent
    examples (Clopper and Pearson 1934, Biometrika 26, page 404), for as many of them as the
    clustered ones are worth: k / d hits of N / d, where the design effect d >= 1 is the variance of
    the proportion over that of independent examples (Korn and Graubard 1998, Survey Methodology 24,
    page 193). Unlike a bootstrap it holds for few hits, and far out in the tails.
    """
    from scipy import special

    is_hit = np.asarray(hits, dtype=np.float64)
    count = len(is_hit)
    if count == 0:
        return 0.0, 1.0
    codes = _codes(clusters, count)
    sizes_C = np.bincount(codes)
    num_clusters = len(sizes_C)
    num_hits = float(is_hit.sum())
    share = num_hits / count
    if 0 < share < 1 and num_clusters > 1:
        residuals_C = np.bincount(codes, weights=is_hit) - share * sizes_C
        sample_factor = num_clusters / (num_clusters - 1)
        variance = sample_factor * float(residuals_C @ residuals_C) / count**2
        independent_variance = share * (1 - share) / (count - 1)
        design_effect = max(1.0, variance / independent_variance)
    else:
        # Examples that are all alike do not show their dependence: each cluster counts as one.
        design_effect = count / num_clusters
    hits_worth = num_hits / design_effect
    misses_worth = (count - num_hits) / design_effect
    low = 0.0
    if hits_worth > 0:
        low = float(special.betaincinv(hits_worth, misses_worth + 1, tail))
    high = 1.0
    if misses_worth > 0:
        high = float(special.betaincinv(hits_worth + 1, misses_worth, 1 - tail))
    return low, high


def cluster_bootstrap(
    values: ArrayLike,
    clusters: Sequence[Hashable],
    *,
    statistic: Callable[[Floats], Floats] = lambda means: means[:, 0],
) -> Interval:
    """A 95 % interval of a function of column means, by default the mean, of examples in clusters,
    drawn whole.

    `values` (N,) or (N, K), a row per example; `clusters` (N,) says the cluster of each.
    `statistic` maps the means of R resamples (R, K) to values (R,); those that are NaN are left
    out. The interval lies between the quantiles a and 1 - a, a = `expanded_tail` (Davison and
    Hinkley 1997, section 3.8). (None, None) for fewer than two clusters, and where no resample has
    a statistic.
    """
    rows = np.asarray(values, dtype=np.float64)
    codes_N = _codes(clusters, len(rows))
    num_clusters = int(codes_N.max(initial=-1)) + 1
    if num_clusters < 2:
        return None, None
    # Each cluster's sums of the columns, and in the last column how many rows it has: clusters
    # differ in it, and the mean of a resample is over its rows.
    sums_CK = np.zeros((num_clusters, rows[0].size + 1))
    np.add.at(sums_CK, codes_N, np.column_stack([rows, np.ones(len(rows))]))
    drawn_RK = resampled(sums_CK, _NUM_RESAMPLES)
    with np.errstate(invalid="ignore", divide="ignore"):
        values_R = statistic(drawn_RK[:, :-1] / drawn_RK[:, -1:])
    # A resample may lack a stratum, whose mean is then 0 / 0.
    values_R = values_R[np.isfinite(values_R)]
    if len(values_R) == 0:
        return None, None
    tail = expanded_tail(num_clusters)
    low, high = np.quantile(values_R, [tail, 1 - tail])
    return float(low), float(high)


def resampled(rows_CK: Floats, num_resamples: int) -> Floats:
    """(R, K): for each resample the mean of C rows, drawn from the C rows with replacement."""
    num_rows = len(rows_CK)
    rng = np.random.default_rng(0)  # the same draws, so that a report can be made again
    uniform_C = np.full(num_rows, 1.0 / num_rows)
    at_once = max(1, _DRAWS_AT_ONCE // num_rows)  # a bound of the memory
    sums = []
    for start in range(0, num_resamples, at_once):
        size = min(at_once, num_resamples - start)
        # How often each row is drawn.
        counts_RC = rng.multinomial(num_rows, uniform_C, size=size)
        sums.append(counts_RC @ rows_CK)
    return np.concatenate(sums) / num_rows


def expanded_tail(num_clusters: int) -> float:
    """The share of resamples of C >= 2 clusters to be left out on each side: Phi(-sqrt(C / (C - 1))
    t).

    t is the quantile of 0.975 of Student's t with C - 1 degrees: the expanded percentile interval,
    Hesterberg 2015 (arXiv 1411.5279, section 5.3). A share of 0.025 would be too narrow for few
    clusters.
    """
    from scipy import special

    t = float(special.stdtrit(num_clusters - 1, 0.975))
    return float(special.ndtr(-math.sqrt(num_clusters / (num_clusters - 1)) * t))


def accuracy_metric(
    outcomes: Sequence[float], name: str, clusters: Sequence[Hashable] | None = None
) -> Metric:
    """The mean outcome with a 95 % interval: Wilson's where no two examples share a cluster, else a
    cluster bootstrap.

    `outcomes` (N,) in [0, 1]; `clusters` (N,): the prompt of each; None if each has its own. With
    fewer than ten clusters, or where all have the same mean, Wilson's interval with the number of
    clusters as its count stands in.
    """
    values_N = np.asarray(outcomes, dtype=np.float64)
    count = len(values_N)
    if count == 0:
        return Metric(name, None, count=0, note="There are none.")
    codes_N = np.arange(count) if clusters is None else _codes(clusters, count)
    means_C = np.bincount(codes_N, weights=values_N) / np.bincount(codes_N)
    num_clusters = len(means_C)
    value = float(values_N.mean())
    if num_clusters < count and _can_resample(means_C):
        low, high = cluster_bootstrap(values_N, codes_N.tolist())
    else:
        # Each prompt counts as one example, as if those of a prompt were all alike: where they are
        # not, the interval is wider than it need be.
        low, high = wilson(value * num_clusters, num_clusters)
    return Metric(name, value, low, high, count)


def _can_resample(means_C: Floats) -> bool:
    """Whether resampling clusters with these means tells how uncertain their mean is."""
    # Equal means give an interval without a width. They may differ by their rounding.
    return len(means_C) >= _FEWEST_CLUSTERS and bool(np.ptp(means_C) >= 1e-12)


def combined(name: str, parts: Sequence[Metric], weights: Sequence[float] | None = None) -> Metric:
    """sum w_i p_i / sum w_i over parts, which all have a value, with a 95 % interval; weights of
    None are equal.

    p - sqrt(sum w_i^2 (p_i - low_i)^2) to p + sqrt(sum w_i^2 (high_i - p_i)^2), with weights that
    sum to 1: variance estimates recovery, Zou and Donner 2008, Statistics in Medicine 27, page
    1693, of independent parts. Many that are all right would make the upper end too low, so each
    end is at least sqrt(sum w_i^2 (p_i - low_i) (high_i - p_i)) away, but not beyond the weighted
    sum of the parts' ends.
    """
    if not parts:
        return Metric(name, None, count=0, note="There are no examples.")
    if weights is None:
        weights = [1.0] * len(parts)
    w_I = np.array(weights, dtype=np.float64)
    w_I = w_I / w_I.sum()
    ends = [(part.value, part.low, part.high) for part in parts]
    p_I, low_I, high_I = np.array(ends, dtype=np.float64).T
    below_I = p_I - low_I
    above_I = high_I - p_I
    value = float(w_I @ p_I)
    # Below 0 where a part lies beyond its interval, as the 1.01 of RewardBench 2's Ties may.
    least = math.sqrt(float(w_I**2 @ (below_I * above_I).clip(0.0)))
    below = max(float(np.linalg.norm(w_I * below_I)), least)
    above = max(float(np.linalg.norm(w_I * above_I)), least)
    low = max(value - below, float(w_I @ low_I))
    high = min(value + above, float(w_I @ high_I))
    counts = [part.count or 0 for part in parts]
    note = None
    if len(parts) > 1 and min(counts) < _FEWEST_OF_A_PART:
        note = (
            f"With parts of fewer than {_FEWEST_OF_A_PART} examples the interval may be too narrow."
        )
    return Metric(name, value, low, high, sum(counts), note)


# --- two models on the same examples --------------------------------------------------------------


def paired_test(
    differences: ArrayLike, clusters: Sequence[Hashable], *, num_resamples: int = 9999
) -> float:
    """The two-sided p-value of paired differences (N,) that come in clusters.

    If the models are exchangeable within each cluster, its sum D_c is as likely as -D_c: p = P(|sum
    +-D_c| >= |sum D_c|) over all signs, or over `num_resamples` random ones where that is fewer
    (Fisher 1935, The Design of Experiments, section 21). Where all sums but 0 are equally large, as
    of one example per cluster, it is McNemar's exact test (1947, Psychometrika 12, page 153).
    """
    from scipy import stats

    values_N = np.asarray(differences, dtype=np.float64)
    sums_C = np.bincount(_codes(clusters, len(values_N)), weights=values_N)
    # Clusters without a difference tell nothing, and their signs would only cost time.
    sums_C = sums_C[sums_C != 0]
    if len(sums_C) == 0:
        return 1.0
    # Of equally large sums only the number of positive ones counts, which is binomial.
    if np.ptp(np.abs(sums_C)) == 0:
        num_positive = int((sums_C > 0).sum())
        return float(stats.binomtest(num_positive, len(sums_C)).pvalue)
    # The second sample is 0: exchanging the samples of a cluster flips the sign of its sum.
    test = stats.permutation_test(
        (sums_C, np.zeros_like(sums_C)),
        lambda first, second, axis: (first - second).sum(axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=num_resamples,
        batch=max(1, _DRAWS_AT_ONCE // len(sums_C)),
        rng=np.random.default_rng(0),
    )
    return float(test.pvalue)


def paired_bootstrap(first: ArrayLike, second: ArrayLike, clusters: Sequence[Hashable]) -> Interval:
    """A 95 % interval of mean(first) - mean(second), outcomes (N,) of the same examples; both are
    drawn together.

    (None, None) with fewer than ten clusters, or where all of them have the same difference.
    """
    differences_N = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    codes_N = _codes(clusters, len(differences_N))
    means_C = np.bincount(codes_N, weights=differences_N) / np.bincount(codes_N)
    if not _can_resample(means_C):
        return None, None
    return cluster_bootstrap(differences_N, codes_N.tolist())


# --- calibration ----------------------------------------------------------------------------------


def pair_confidences(margins: ArrayLike, temperature: float = 1.0) -> tuple[Floats, Floats]:
    """What a reward model says of its choices, and whether they were right: probabilities (P,),
    outcomes (P,).

    `margins` (P,): s_better - s_worse of ordered pairs. The higher score is preferred with the
    probability sigma(|margin| / T) in [0.5, 1] (Bradley and Terry 1952); that is right (1) where
    the margin is positive, a tie 0.5.
    """
    from scipy import special

    margins_P = np.asarray(margins, np.float64)
    probabilities_P = special.expit(np.abs(margins_P) / temperature)
    # Signs of -1, 0 and 1 become 0, 1/2 and 1.
    outcomes_P = (np.sign(margins_P) + 1) / 2
    return probabilities_P, outcomes_P


def expected_calibration_error(probabilities: ArrayLike, outcomes: ArrayLike) -> float | None:
    """sum_b n_b / N |frequency_b - mean probability_b| over ten equal bins of [0, 1]; None for no
    predictions.

    `probabilities` (N,) of events and `outcomes` (N,), 1 where they happened. Guo et al. 2017
    (arXiv 1706.04599).
    """
    bins = reliability_curve(probabilities, outcomes)
    if not bins:
        return None
    error = 0.0
    count = 0
    for bin in bins:
        error += bin["count"] * abs(bin["frequency"] - bin["mean_probability"])
        count += bin["count"]
    return error / count


def reliability_curve(probabilities: ArrayLike, outcomes: ArrayLike) -> list[dict[str, Any]]:
    """Predictions (N,) in ten equal bins (low, high] of [0, 1], the first with 0; empty bins are
    left out.

    Each has `count`, `mean_probability`, `frequency` (how often the event happened) and `interval`,
    Wilson's of that.
    """
    p_N = np.asarray(probabilities, np.float64)
    happened_N = np.asarray(outcomes, np.float64)
    # Without 0 and 1 as edges, these belong to the first and the last bin.
    inner_edges = np.linspace(0.0, 1.0, 11)[1:-1]
    bin_N = np.searchsorted(inner_edges, p_N, side="left")
    bins: list[dict[str, Any]] = []
    for number in np.unique(bin_N):
        is_inside_N = bin_N == number
        count = int(is_inside_N.sum())
        num_happened = float(happened_N[is_inside_N].sum())
        bins.append(
            {
                "count": count,
                "mean_probability": float(p_N[is_inside_N].mean()),
                "frequency": num_happened / count,
                "interval": wilson(num_happened, count),
            }
        )
    return bins


def _codes(clusters: Sequence[Hashable], count: int) -> NDArray[np.int64]:
    """Clusters as numbers from 0, in order of appearance."""
    assert len(clusters) == count, "each value needs a cluster"
    numbers: dict[Hashable, int] = {}
    codes = []
    for cluster in clusters:
        # A cluster that is new has the next number.
        codes.append(numbers.setdefault(cluster, len(numbers)))
    return np.array(codes, dtype=np.int64)
