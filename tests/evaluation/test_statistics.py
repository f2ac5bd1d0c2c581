from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from treeward.evaluation.statistics import (
    accuracy_metric,
    clopper_pearson,
    cluster_bootstrap,
    expanded_tail,
    expected_calibration_error,
    pair_confidences,
    paired_test,
    reliability_curve,
    wilson,
)

NUM_DATA_SETS = 400
# Of 400 intervals with coverage 0.95, fewer than 0.915 hold the truth once in five hundred times.
LOWEST_COVERAGE = 0.915


def clustered_outcomes(
    rng: np.random.Generator, num_clusters: int
) -> tuple[NDArray[np.float64], list[int]]:
    """Outcomes with a mean of 0.6; each prompt has 2 to 8 of them and a difficulty of its own."""
    difficulties = rng.beta(1.2, 0.8, num_clusters)
    clusters = np.repeat(np.arange(num_clusters), rng.integers(2, 9, num_clusters))
    return (rng.random(len(clusters)) < difficulties[clusters]).astype(float), clusters.tolist()


# --- intervals ---


def test_intervals_by_hand() -> None:
    z = stats.norm.ppf(0.975)
    p = 0.71
    n = 100
    middle = p + z**2 / 2 / n
    half = z * math.sqrt(p * (1 - p) / n + z**2 / 4 / n**2)
    assert wilson(71, 100) == pytest.approx(
        ((middle - half) / (1 + z**2 / n), (middle + half) / (1 + z**2 / n))
    )
    assert wilson(0, 0) == (0.0, 1.0) and wilson(0, 5)[0] == 0.0 and wilson(5, 5)[1] == 1.0
    assert cluster_bootstrap([1.0, 0.0], ["a", "a"]) == cluster_bootstrap([], []) == (None, None)
    assert cluster_bootstrap(
        [1.0, 0.0], ["a", "b"], statistic=lambda means: means[:, 0] * np.nan
    ) == (None, None)
    outcomes, clusters = clustered_outcomes(np.random.default_rng(5), 30)
    twice = cluster_bootstrap(outcomes[:, None], clusters, statistic=lambda means: 2 * means[:, 0])
    low, high = cluster_bootstrap(outcomes, clusters)
    assert twice == pytest.approx((2 * (low or 0), 2 * (high or 0)))
    # One example in a cluster and three in another: drawn twice, once each, or not at all.
    drawn = set[float]()
    cluster_bootstrap(
        [1, 0, 0, 0], "abbb", statistic=lambda means: (drawn.update(means[:, 0]), means[:, 0])[1]
    )
    assert drawn == {1.0, 0.25, 0.0}
    assert expanded_tail(5) == pytest.approx(
        stats.norm.cdf(-math.sqrt(5 / 4) * stats.t.ppf(0.975, 4))
    )


def test_the_exact_interval_is_that_of_the_binomial_and_clusters_widen_it() -> None:
    hits = [True] * 3 + [False] * 57
    low, high = clopper_pearson(hits, range(60), 0.005)
    expected = stats.binomtest(3, 60).proportion_ci(0.99, method="exact")
    assert (low, high) == pytest.approx((expected.low, expected.high))
    # Four equal copies of each are worth no more than one.
    copies = [hit for hit in hits for _ in range(4)]
    clusters = [number for number in range(60) for _ in range(4)]
    assert clopper_pearson(copies, clusters, 0.005) == pytest.approx((low, high), rel=0.02)
    none = clopper_pearson([False] * 60, range(60), 0.05)
    assert none == pytest.approx((0.0, 1 - 0.05 ** (1 / 60)))
    assert clopper_pearson([True] * 120, [n // 2 for n in range(120)], 0.05) == (
        pytest.approx(0.05 ** (1 / 60)),
        1.0,
    )
    assert clopper_pearson([], [], 0.05) == (0.0, 1.0)


def test_a_design_effect_by_hand() -> None:
    """Three clusters of two examples, with two hits, none and one."""
    hits = [True, True, False, False, True, False]
    # Residuals 1, -1 and 0: a variance of 3/2 * 2 / 36 = 1/12 for 1/4 / 5 = 1/20 of six examples.
    worth = 3 / (20 / 12)
    low, high = clopper_pearson(hits, "aabbcc", 0.05)
    assert low == pytest.approx(stats.beta.ppf(0.05, worth, worth + 1))
    assert high == pytest.approx(stats.beta.ppf(0.95, worth + 1, worth))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_clusters", "highest"), [(2, 1.0), (4, 1.0), (9, 1.0), (15, 1.0), (40, 0.985)]
)
def test_accuracy_covers_with_few_prompts_and_with_many(num_clusters: int, highest: float) -> None:
    rng = np.random.default_rng(num_clusters)
    held = 0
    for _ in range(NUM_DATA_SETS):
        outcomes, clusters = clustered_outcomes(rng, num_clusters)
        metric = accuracy_metric(outcomes.tolist(), "accuracy", clusters)
        assert metric.low is not None and metric.high is not None
        held += metric.low <= 0.6 <= metric.high
    assert LOWEST_COVERAGE < held / NUM_DATA_SETS <= highest


def test_accuracy_metric_chooses_the_interval() -> None:
    apart = accuracy_metric([1, 1, 0, 0.5], "accuracy", ["a", "b", "c", "d"])
    assert apart == accuracy_metric([1, 1, 0, 0.5], "accuracy")
    assert (apart.value, apart.count, apart.note) == (0.625, 4, None)
    assert (apart.low, apart.high) == wilson(2.5, 4)
    outcomes, clusters = clustered_outcomes(np.random.default_rng(3), 30)
    shared = accuracy_metric(outcomes.tolist(), "accuracy", clusters)
    assert (shared.low, shared.high) == cluster_bootstrap(outcomes, clusters)
    all_right = accuracy_metric([1.0] * 40, "accuracy", [n // 2 for n in range(40)])
    assert (all_right.low, all_right.high) == wilson(20, 20)
    assert accuracy_metric([], "accuracy").value is None


def test_the_paired_test_counts_every_sign() -> None:
    differences = [1, 1, -1, 1, 0, 1, 1, -1]
    clusters = [0, 0, 1, 2, 3, 2, 4, 5]
    sums = np.bincount(clusters, weights=differences)
    signs = np.array(list(itertools.product((-1, 1), repeat=len(sums))))
    by_hand = np.mean(np.abs(signs @ sums) >= abs(sums.sum()))
    assert paired_test(differences, clusters) == pytest.approx(by_hand, abs=1e-12)
    # One example per prompt: McNemar's exact test.
    assert paired_test([], []) == paired_test([0, 0], [1, 2]) == 1.0
    assert paired_test([1] * 10, range(10)) == pytest.approx(2 / 2**10)
    assert paired_test([1] * 5 + [-1] + [0] * 9, range(15)) == pytest.approx(14 / 64)


# --- calibration ---


def test_calibration_by_hand() -> None:
    probabilities = [0.05, 0.15, 0.12, 0.95, 0.85]
    outcomes = [0, 1, 0, 1, 0]
    # Bins: 0.05 | 0.12, 0.15 (mean 0.135, half happened) | 0.85 (did not happen) | 0.95 (happened)
    assert expected_calibration_error(probabilities, outcomes) == pytest.approx(
        (1 * 0.05 + 2 * abs(0.5 - 0.135) + 1 * 0.85 + 1 * 0.05) / 5
    )
    bins = reliability_curve(probabilities, outcomes)
    assert [bin["count"] for bin in bins] == [1, 2, 1, 1]
    assert [bin["frequency"] for bin in bins] == [0.0, 0.5, 0.0, 1.0]
    assert bins[1]["mean_probability"] == pytest.approx(0.135)
    assert bins[1]["interval"] == wilson(1, 2)
    # Edges belong to the bin below them, and 0 to the first.
    assert [
        bin["count"] for bin in reliability_curve([0.0, 0.1, 0.11, 0.5, 0.51, 1.0], [0] * 6)
    ] == [2, 1, 1, 1, 1]
    assert expected_calibration_error([], []) is None and reliability_curve([], []) == []


def test_the_confidence_in_a_pair_is_of_the_side_that_scores_higher() -> None:
    probabilities, outcomes = pair_confidences([2.0, -2.0, 0.0], 0.5)
    assert outcomes.tolist() == [1.0, 0.0, 0.5]
    assert probabilities == pytest.approx([1 / (1 + math.exp(-4)), 1 / (1 + math.exp(-4)), 0.5])
