"""Statistics of an evaluation: pure functions of arrays, each with its formula and where it is from.

    low, high = wilson(71, 100)                                  # an accuracy of independent examples
    low, high = cluster_bootstrap(outcomes, prompts)             # of examples that share prompts
    accuracy_metric(outcomes, "accuracy", clusters=prompts)      # the right one of the two, as a `Metric`

Examples of one prompt are not independent: wherever `clusters` is given, prompts are drawn, flipped and counted. An
outcome is 1 for right, 0 for wrong; parts are allowed (a tie as 0.5). A number that cannot be computed is None, never
NaN. The methods are scipy's and statsmodels', which is imported where it is used: training needs none of it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

from treeward.evaluation.results import Metric

__all__ = [
    "McNemar",
    "ReliabilityBin",
    "accuracy_metric",
    "auroc",
    "brier",
    "cluster_bootstrap",
    "cohen_kappa",
    "expanded_tail",
    "expected_calibration_error",
    "holm",
    "kendall_tau_b",
    "mcnemar",
    "mean",
    "pair_confidences",
    "paired_bootstrap",
    "reliability_curve",
    "sign_flip_test",
    "spearman",
    "weighted_mean_metric",
    "wilson",
]

Floats = NDArray[np.float64]
Interval = tuple[float | None, float | None]

_DRAWS_AT_ONCE = 4_000_000
_FEWEST_CLUSTERS = 10
_FEWEST_OF_A_PART = 5


class ReliabilityBin(TypedDict):
    """Predictions with a probability in (low, high]: how many, their mean probability, how often the event happened.

    `interval`: Wilson's, of the frequency.
    """

    low: float
    high: float
    count: int
    mean_probability: float
    frequency: float
    interval: tuple[float, float]


@dataclass(frozen=True, slots=True)
class McNemar:
    """Of two models on the same examples: how many only the first has right, only the second, and the p-value."""

    only_first: int
    only_second: int
    p_value: float


def mean(values: Floats) -> float:
    """The mean of values (N,), N >= 1."""
    return float(np.mean(values))


# --- intervals ------------------------------------------------------------------------------------------------------


def wilson(successes: float, count: int, level: float = 0.95) -> tuple[float, float]:
    """The score interval of a proportion of `count` independent examples; (0, 1) where there are none.

        (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n),   p = successes / n

    with z the normal quantile of (1 + level) / 2. Wilson 1927, JASA 22, page 209. Unlike p -+ z sqrt(p (1 - p) / n) it
    keeps its level near 0 and 1 and for few examples. Where outcomes lie between 0 and 1 it is wider than needed.
    """
    if count == 0:
        return 0.0, 1.0
    if not 0 <= successes <= count:
        raise ValueError(f"a proportion needs 0 <= successes <= count, got {successes} of {count}")
    from statsmodels.stats.proportion import proportion_confint

    low, high = proportion_confint(successes, count, alpha=1 - level, method="wilson")
    # At p = 0 and p = 1 an end is p itself; rounding would leave it a little beside.
    return (0.0 if successes == 0 else max(0.0, float(low))), (1.0 if successes == count else min(1.0, float(high)))


def cluster_bootstrap(
    values: ArrayLike,
    clusters: Sequence[Hashable],
    *,
    statistic: Callable[[Floats], float | None] = mean,
    num_resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """An interval of `statistic(values)` for examples that come in clusters: whole clusters are drawn anew.

    `values` (N,) or (N, k), a row per example; `clusters` (N,) says the cluster of each. Each resample draws, with
    replacement, as many clusters as there are, and the statistic is computed over all their rows. The interval lies
    between the quantiles a and 1 - a of these, where for C clusters

        a = Phi(-sqrt(C / (C - 1)) t),   t the quantile of (1 + level) / 2 of Student's t with C - 1 degrees

    instead of (1 - level) / 2, which for few clusters is too narrow: the expanded percentile interval, Hesterberg 2015
    (arXiv 1411.5279, section 5.3). Cluster resampling: Davison and Hinkley 1997, section 3.8. Deterministic in `seed`.
    Resamples for which the statistic is None or NaN are left out. (None, None) for fewer than two clusters, from which
    nothing can be learnt about others, and where no resample has a statistic. Below about ten clusters no bootstrap
    keeps its level.
    """
    rows = np.asarray(values, dtype=np.float64)
    codes = _codes(clusters, len(rows))
    num_clusters = int(codes.max()) + 1 if len(codes) else 0
    if num_clusters < 2:
        return None, None
    found = _resampled(rows, codes, num_clusters, statistic, num_resamples, seed)
    found = found[np.isfinite(found)]
    if len(found) == 0:
        return None, None
    tail = expanded_tail(num_clusters, level)
    low, high = np.quantile(found, [tail, 1 - tail])
    return float(low), float(high)


def _resampled(
    rows: Floats,
    codes: NDArray[np.int64],
    num_clusters: int,
    statistic: Callable[[Floats], float | None],
    num_resamples: int,
    seed: int,
) -> Floats:
    """The statistic of each resample (R,), NaN where it is None."""
    sums, sizes = np.bincount(codes, weights=rows) if rows.ndim == 1 else None, np.bincount(codes)
    members = np.split(np.argsort(codes, kind="stable"), np.cumsum(sizes)[:-1])

    def of_means(drawn: NDArray[np.int64], axis: int) -> Floats:
        assert sums is not None
        means: Floats = sums[drawn].sum(axis=axis) / sizes[drawn].sum(axis=axis)
        return means

    def of_any(drawn: NDArray[np.int64]) -> float:
        value = statistic(rows[np.concatenate([members[cluster] for cluster in drawn])])
        return math.nan if value is None else value

    fast = statistic is mean and rows.ndim == 1
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of resamples without a statistic
        made = stats.bootstrap(
            (np.arange(num_clusters),),
            of_means if fast else of_any,
            vectorized=fast,
            method="percentile",
            n_resamples=num_resamples,
            batch=max(1, _DRAWS_AT_ONCE // num_clusters),
            rng=np.random.default_rng(seed),
        )
    found: Floats = made.bootstrap_distribution
    return found


def expanded_tail(num_clusters: int, level: float = 0.95) -> float:
    """The a of `cluster_bootstrap`: the share of resamples of C >= 2 clusters to be left out on each side."""
    t = float(special.stdtrit(num_clusters - 1, (1 + level) / 2))
    return float(special.ndtr(-math.sqrt(num_clusters / (num_clusters - 1)) * t))


def accuracy_metric(
    outcomes: Sequence[float], name: str, clusters: Sequence[Hashable] | None = None, *, of: str = "examples"
) -> Metric:
    """The mean outcome with a 95 % interval: Wilson's where no two examples share a cluster, else a cluster bootstrap.

    `outcomes` (N,) in [0, 1]; `clusters` (N,): the prompt of each; None if each has its own. `of`: what has these
    outcomes (`pairs`, `replies`), for the note. Where resampling tells too little, Wilson's interval with the number of
    clusters as its count stands in, which is wider than needed: with fewer than ten clusters, or where all have the
    same mean. With fewer than ten whose mean is not the most common one (one wrong of a hundred), each end is the wider
    of both.
    """
    values = np.asarray(outcomes, dtype=np.float64)
    count = len(values)
    if count == 0:
        return Metric(name, None, count=0, note=f"There are no {of}.")
    value = float(values.mean())
    codes = np.arange(count) if clusters is None else _codes(clusters, count)
    num_clusters = int(codes.max()) + 1
    if num_clusters == count:
        low, high = wilson(float(values.sum()), count)
        return Metric(name, value, low=low, high=high, count=count)
    note = f"The interval is over {num_clusters} prompts, which the {count} {of} share."
    cluster_means = np.bincount(codes, weights=values) / np.bincount(codes)
    low, high = wilson(value * num_clusters, num_clusters)
    if num_clusters >= _FEWEST_CLUSTERS and np.ptp(cluster_means) >= 1e-12:
        resampled = cluster_bootstrap(values, codes.tolist())
        assert resampled[0] is not None and resampled[1] is not None
        most_common = int(np.unique(np.round(cluster_means, 12), return_counts=True)[1].max())
        few_differ = num_clusters - most_common < _FEWEST_CLUSTERS
        low = min(low, resampled[0]) if few_differ else resampled[0]
        high = max(high, resampled[1]) if few_differ else resampled[1]
    return Metric(name, value, low=low, high=high, count=count, note=note)


def weighted_mean_metric(parts: Sequence[Metric], weights: Sequence[float], name: str) -> Metric:
    """sum w_i p_i / sum w_i of independent parts, with an interval from theirs: for headlines made of sections.

        p - sqrt(sum w_i^2 (p_i - low_i)^2),  p + sqrt(sum w_i^2 (high_i - p_i)^2)     with weights that sum to 1

    The method of variance estimates recovery, Zou and Donner 2008, Statistics in Medicine 27, page 1693. A part that is
    all right reaches nowhere above itself, so that with many of them the upper end would be too low: each end is at
    least sqrt(sum w_i^2 (p_i - low_i) (high_i - p_i)) away, but not beyond the weighted sum of the parts' own ends. For
    Wilson's intervals that product is z^2 p_i (1 - p_i) / (n_i + z^2), the variance itself. Parts without a value are
    left out with their weight, and the note says how many; no interval where a part has none. With parts of fewer than
    five examples the interval may be too narrow (of four parts of two it held the truth in 86 to 93 of 100
    simulations, of four parts of five in 92 to 96), and the note says that.
    """
    known = [(part, weight) for part, weight in zip(parts, weights, strict=True) if part.value is not None]
    total = sum(weight for _, weight in known)
    count = sum(part.count or 0 for part, _ in known)
    missing = len(parts) - len(known)
    fewest = min((part.count for part, _ in known if part.count is not None), default=_FEWEST_OF_A_PART)
    notes = [f"{missing} of {len(parts)} parts have no value and are left out."] if missing else []
    if len(known) > 1 and fewest < _FEWEST_OF_A_PART:
        notes.append(f"The interval may be too narrow: a part has only {fewest} example{'' if fewest == 1 else 's'}.")
    note = " ".join(notes) or None
    if not known or total <= 0:
        return Metric(name, None, count=count, note=note or "There are no parts.")
    shares = np.array([weight / total for _, weight in known])
    value = float(shares @ [part.value or 0.0 for part, _ in known])
    ends = [(part.low, part.high) for part, _ in known if part.low is not None and part.high is not None]
    if len(ends) < len(known):
        return Metric(name, value, count=count, note=note)
    p, (lows, highs) = np.array([part.value or 0.0 for part, _ in known]), np.array(ends).T
    least = math.sqrt(float(shares**2 @ ((p - lows) * (highs - p)).clip(0.0)))
    low = max(value - max(float(np.linalg.norm(shares * (p - lows))), least), float(shares @ lows))
    high = min(value + max(float(np.linalg.norm(shares * (highs - p))), least), float(shares @ highs))
    return Metric(name, value, low=low, high=high, count=count, note=note)


# --- two models on the same examples --------------------------------------------------------------------------------


def mcnemar(first: ArrayLike, second: ArrayLike) -> McNemar:
    """The exact test whether two models are right equally often, of independent examples: right (N,) of each, booleans.

    Only examples that one alone has right say which is better. If neither is, each of these n is the first's with
    probability 1/2, so with b of one and c of the other

        p = min(1, 2 P(Binomial(n, 1/2) <= min(b, c)))     and 1 for n = 0

    McNemar 1947, Psychometrika 12, page 153; exact as in Liddell 1976.
    """
    a, b = np.asarray(first, dtype=bool), np.asarray(second, dtype=bool)
    if a.shape != b.shape:
        raise ValueError(f"paired outcomes need the same examples, got shapes {a.shape} and {b.shape}")
    from statsmodels.stats.contingency_tables import mcnemar as exact_test

    only_first, only_second = int(np.sum(a & ~b)), int(np.sum(b & ~a))
    table = [[int(np.sum(a & b)), only_first], [only_second, int(np.sum(~a & ~b))]]
    p_value = float(exact_test(table, exact=True).pvalue) if only_first + only_second else 1.0
    return McNemar(only_first, only_second, p_value)


def sign_flip_test(
    differences: ArrayLike, clusters: Sequence[Hashable], *, num_resamples: int = 9999, seed: int = 0
) -> float:
    """The two-sided p-value of paired differences (N,) that come in clusters.

    If the models are exchangeable within each cluster, its sum D_c is as likely as -D_c, whatever the dependence inside
    it: p = P(|sum +-D_c| >= |sum D_c|) over all signs, or over `num_resamples` random ones and the observed one where
    that is fewer (more than 13 clusters that differ). Fisher 1935, The Design of Experiments, section 21.
    """
    values = np.asarray(differences, dtype=np.float64)
    sums = np.bincount(_codes(clusters, len(values)), weights=values)
    sums = sums[sums != 0]
    if len(sums) < 2:
        return 1.0
    made = stats.permutation_test(
        (sums, np.zeros_like(sums)),
        lambda first, second, axis: (first - second).sum(axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=num_resamples,
        batch=max(1, _DRAWS_AT_ONCE // len(sums)),
        rng=np.random.default_rng(seed),
    )
    return float(made.pvalue)


def paired_bootstrap(
    first: ArrayLike,
    second: ArrayLike,
    clusters: Sequence[Hashable] | None = None,
    *,
    num_resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """An interval of mean(first) - mean(second), outcomes (N,) of the same examples; both are drawn together.

    A `cluster_bootstrap` of the differences, where resampling tells enough. Where all differences are 0 it is -u to u,
    u the upper end of Wilson's interval of 0 in C clusters. With fewer than ten clusters, or one and the same
    difference in all, it is that of Newcombe 1998 (Statistics in Medicine 17, page 873, method 10 for independent
    proportions), from Wilson's intervals with C as their count: wider than needed. (None, None) for no examples.
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    differences = a - b
    if len(differences) == 0:
        return None, None
    codes = np.arange(len(a)) if clusters is None else _codes(clusters, len(a))
    num_clusters = int(codes.max()) + 1
    if not differences.any():
        beyond = wilson(0, num_clusters, level)[1]
        return -beyond, beyond
    cluster_means = np.bincount(codes, weights=differences) / np.bincount(codes)
    if num_clusters < _FEWEST_CLUSTERS or np.ptp(cluster_means) < 1e-12:
        p, q = float(a.mean()), float(b.mean())
        (p_low, p_high), (q_low, q_high) = (wilson(share * num_clusters, num_clusters, level) for share in (p, q))
        return p - q - math.hypot(p - p_low, q_high - q), p - q + math.hypot(p_high - p, q - q_low)
    return cluster_bootstrap(differences, codes.tolist(), num_resamples=num_resamples, seed=seed, level=level)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values of m tests, adjusted: rejecting those below alpha errs with probability alpha at most, in any of them.

    The k-th smallest becomes the largest of (m - j + 1) p_(j) over j <= k, at most 1. Holm 1979, Scandinavian Journal
    of Statistics 6, page 65; no assumption about dependence.
    """
    from statsmodels.stats.multitest import multipletests

    return [float(p_value) for p_value in multipletests(p_values, method="holm")[1]] if len(p_values) else []


def cohen_kappa(first: ArrayLike, second: ArrayLike) -> float | None:
    """Agreement of two labellings (N,) beyond chance: (p_o - p_e) / (1 - p_e), from -1 to 1.

    p_o is the share of equal labels, p_e = sum_k p_k q_k what independent labels of the same frequencies would have.
    None where both give one and the same label always, and for no examples. Cohen 1960, Educational and Psychological
    Measurement 20, page 37.
    """
    a, b = np.asarray(first), np.asarray(second)
    if a.shape != b.shape:
        raise ValueError(f"paired labels need the same examples, got shapes {a.shape} and {b.shape}")
    if len(a) == 0:
        return None
    labels, codes = np.unique(np.concatenate([a, b]), return_inverse=True)
    if len(labels) == 1:
        return None
    from statsmodels.stats.inter_rater import cohens_kappa

    table = np.zeros((len(labels), len(labels)))
    np.add.at(table, tuple(np.split(codes, 2)), 1)
    return float(cohens_kappa(table, return_results=False))


# --- orders ---------------------------------------------------------------------------------------------------------


def auroc(positive_scores: ArrayLike, negative_scores: ArrayLike) -> float | None:
    """The chance that a positive (P,) scores higher than a negative (Q,), ties half; None if either is empty.

    The area under the ROC curve, as (R - P (P + 1) / 2) / (P Q) with R the sum of the positives' ranks among all, ties
    at their mean rank. Mann and Whitney 1947; Hanley and McNeil 1982.
    """
    positive, negative = np.asarray(positive_scores, np.float64), np.asarray(negative_scores, np.float64)
    p, q = len(positive), len(negative)
    if p == 0 or q == 0:
        return None
    return float(stats.mannwhitneyu(positive, negative, method="asymptotic").statistic) / (p * q)


def kendall_tau_b(scores: ArrayLike, ranks: ArrayLike) -> float | None:
    """How well scores (K,), higher is better, follow ranks (K,), lower is better: 1 same order, -1 the opposite.

        (C - D) / sqrt((n - n_s) (n - n_r))

    over the n = K (K - 1) / 2 pairs: C in the same order, D in the opposite, n_s with equal scores, n_r with equal
    ranks. None where all scores or all ranks are equal. Kendall 1945, Biometrika 33, page 239.
    """
    s, r = np.asarray(scores, np.float64), np.asarray(ranks, np.float64)
    if s.shape != r.shape:
        raise ValueError(f"each score needs a rank, got shapes {s.shape} and {r.shape}")
    if len(s) < 2 or np.ptp(s) == 0 or np.ptp(r) == 0:
        return None
    return float(stats.kendalltau(s, -r, variant="b").statistic)


def spearman(first: ArrayLike, second: ArrayLike) -> float | None:
    """Spearman's rank correlation of two columns (N,): Pearson's, of the ranks, ties at their mean rank.

    None where a column is constant. Spearman 1904.
    """
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(stats.spearmanr(a, b).statistic)


# --- calibration ----------------------------------------------------------------------------------------------------


def pair_confidences(margins: ArrayLike, temperature: float = 1.0) -> tuple[Floats, Floats]:
    """What a reward model says of its choices, and whether they were right: probabilities (P,), outcomes (P,).

    `margins` (P,): s_better - s_worse of ordered pairs. It prefers the higher score, with probability
    sigma(|margin| / T) in [0.5, 1] (Bradley and Terry 1952); it is right (1) where the margin is positive, a tie is
    0.5. These are what `expected_calibration_error`, `brier` and `reliability_curve` take: sigma(margin / T) itself
    would be of an event that always happens.
    """
    values = np.asarray(margins, np.float64)
    return special.expit(np.abs(values) / temperature), (np.sign(values) + 1) / 2


def expected_calibration_error(probabilities: ArrayLike, outcomes: ArrayLike, num_bins: int = 10) -> float | None:
    """sum_b n_b / N |frequency_b - mean probability_b| over equal bins of [0, 1]; None for no predictions.

    `probabilities` (N,) of events and `outcomes` (N,), 1 where they happened. Guo et al. 2017 (arXiv 1706.04599),
    equation 3. It is never negative, so for few examples it is above 0 for a calibrated model too.
    """
    bins = reliability_curve(probabilities, outcomes, num_bins)
    total = sum(bin["count"] for bin in bins)
    if total == 0:
        return None
    return sum(bin["count"] * abs(bin["frequency"] - bin["mean_probability"]) for bin in bins) / total


def brier(probabilities: ArrayLike, outcomes: ArrayLike) -> float | None:
    """mean((probability - outcome)^2) over predictions (N,), None for none: 0 is perfect, 0.25 a coin's. Brier 1950."""
    p, o = _predictions(probabilities, outcomes)
    return float(np.mean((p - o) ** 2)) if len(p) else None


def reliability_curve(
    probabilities: ArrayLike, outcomes: ArrayLike, num_bins: int = 10, *, level: float = 0.95
) -> list[ReliabilityBin]:
    """Predictions (N,) in `num_bins` equal bins (low, high] of [0, 1], the first with 0; empty bins are left out.

    DeGroot and Fienberg 1983; bins as in Guo et al. 2017 (arXiv 1706.04599), section 2.
    """
    p, o = _predictions(probabilities, outcomes)
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    places = np.minimum(np.searchsorted(edges[1:], p, side="left"), num_bins - 1)
    bins: list[ReliabilityBin] = []
    for place in range(num_bins):
        inside = places == place
        count = int(inside.sum())
        if count:
            happened = float(o[inside].sum())
            bins.append(
                ReliabilityBin(
                    low=float(edges[place]),
                    high=float(edges[place + 1]),
                    count=count,
                    mean_probability=float(p[inside].mean()),
                    frequency=happened / count,
                    interval=wilson(happened, count, level),
                )
            )
    return bins


def _predictions(probabilities: ArrayLike, outcomes: ArrayLike) -> tuple[Floats, Floats]:
    p, o = np.asarray(probabilities, np.float64), np.asarray(outcomes, np.float64)
    if p.shape != o.shape:
        raise ValueError(f"each probability needs an outcome, got shapes {p.shape} and {o.shape}")
    if len(p) and not (p.min() >= 0 and p.max() <= 1):
        raise ValueError(f"probabilities lie in [0, 1], got {p.min()} to {p.max()}")
    return p, o


def _codes(clusters: Sequence[Hashable], count: int) -> NDArray[np.int64]:
    """Clusters as numbers from 0, in order of appearance."""
    if len(clusters) != count:
        raise ValueError(f"each value needs a cluster, got {len(clusters)} for {count}")
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(cluster, len(numbers)) for cluster in clusters], dtype=np.int64)
