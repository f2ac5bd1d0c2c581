"""Metrics are sums and counts: however a set is cut into batches, they are the same."""

from __future__ import annotations

import math
from functools import reduce
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treeward.losses import (
    METRIC_NAMES,
    GradeSums,
    RewardMetrics,
    RewardSums,
    bradley_terry,
    grade_metrics,
    graded,
    ranked_pairs,
)

RANKS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=8)


def measure(scores: torch.Tensor, ranks: list[list[int]], ties: str = "drop") -> RewardMetrics:
    pairs = ranked_pairs(ranks, ties=ties)  # type: ignore[arg-type]
    sums = RewardSums()
    sums.add(scores, pairs, bradley_terry(scores, pairs))
    return sums.read()


@given(RANKS, st.sets(st.integers(1, 7)), st.sampled_from(["drop", "half"]), st.integers(0, 9))
@settings(deadline=None)
def test_any_split_adds_up(ranks: list[list[int]], cuts: set[int], ties: str, seed: int) -> None:
    scores = torch.randn(sum(map(len, ranks)), generator=torch.Generator().manual_seed(seed))
    parts = scores.split([len(group) for group in ranks])
    bounds = pairwise([0, *sorted(cut for cut in cuts if cut < len(ranks)), len(ranks)])
    batches = [measure(torch.cat(parts[low:high]), ranks[low:high], ties) for low, high in bounds]
    whole, added = measure(scores, ranks, ties).means(), reduce(RewardMetrics.__add__, batches, RewardMetrics()).means()
    assert tuple(whole) == METRIC_NAMES
    for name in METRIC_NAMES:
        assert added[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-6, nan_ok=True)


def test_worked_by_hand() -> None:
    """Two pairs right of three; a tie is no pair; equal scores are not right."""
    metrics = measure(torch.tensor([2.0, 1.0, 0.0, 0.0, 5.0, 4.0, 9.0]), [[0, 1], [0, 1], [0, 1, 1]], "half")
    assert (metrics.num_units, metrics.num_pairs, metrics.num_correct) == (3, 4, 2)
    means = metrics.means()
    graded_sums = RewardSums()  # whose loss is a mean over more comparisons than have pairs
    graded_sums.add(torch.tensor([1.0, 0.0]), ranked_pairs([[0, 1]]), torch.tensor(6.0), 3)
    assert graded_sums.read().means()["loss"] == 2.0
    assert means["accuracy"] == 0.5 and metrics.gap_sum == 1 + 0 + 1 + 4
    assert means["chosen_rewards"] == (2 + 0 + 5 + 5) / 4 and means["rejected_rewards"] == (1 + 0 + 4 + 9) / 4
    assert means["reward_margin"] == means["chosen_rewards"] - means["rejected_rewards"]


def test_nothing_is_nan_not_zero() -> None:
    assert all(math.isnan(value) for value in RewardMetrics().means().values())
    only_ties = measure(torch.tensor([1.0, 2.0]), [[0, 0]], "half").means()
    assert math.isnan(only_ties["accuracy"]) and not math.isnan(only_ties["loss"])
    assert RewardMetrics() + RewardMetrics() == RewardMetrics()


def test_errors_and_correlations_of_grades_are_those_of_numpy_however_they_are_batched() -> None:
    generator = np.random.default_rng(0)
    grades, values = generator.integers(0, 5, (30, 3)).astype(float), generator.normal(size=(30, 3))
    grades[generator.random((30, 3)) < 0.3] = np.nan
    grades[:, 1] = np.where(np.isnan(grades[:, 1]), np.nan, 3.0)  # no correlation with a constant
    grades[:, 2] = np.nan
    sums = GradeSums()
    for rows in (slice(0, 7), slice(7, 7), slice(7, 30)):
        sums.add(torch.tensor(values[rows]), graded([grades[rows].tolist()], stds=(1.0,) * 3))
    assert sums.sums_6H is not None
    found, known = grade_metrics(sums.sums_6H, ["a", "b", "c"]), ~np.isnan(grades)
    x, y = values[known[:, 0], 0], grades[known[:, 0], 0]
    wrong = [float(np.mean((values[known[:, i], i] - grades[known[:, i], i]) ** 2)) for i in (0, 1)]
    assert (found["mse_a"], found["mse_b"], found["mse"]) == pytest.approx((*wrong, sum(wrong) / 2))
    assert found["pearson_a"] == found["pearson"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert math.isnan(found["pearson_b"]) and math.isnan(found["mse_c"])
