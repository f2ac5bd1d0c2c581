"""RewardUQ's numbers, against examples by hand and against a plain loop over the pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import expit

from treeward.scoring import spread_metrics as metrics

ONE = np.zeros(3, dtype=int)
"""The part of three pairs that are all compared."""


def test_calibration_errors_by_hand() -> None:
    # Two pairs with probability 0.9 and 0.7, both right. The other way round they are 0.1 and 0.3,
    # both wrong. Each lies in a bin of its own: errors 0.1, 0.3, 0.1 and 0.3, mean 0.2.
    log_odds = np.log(np.array([0.9 / 0.1, 0.7 / 0.3]))
    assert metrics.calibration_error(log_odds) == pytest.approx(0.2)
    # A bin's frequency is of all its pairs: right at 0.62, wrong at 0.64 give 1/2 for 0.63, and
    # 1/2 for 0.37 the other way round.
    together = np.array([np.log(0.62 / 0.38), -np.log(0.64 / 0.36)])
    assert metrics.calibration_error(together) == pytest.approx(0.13)


def test_bounds_by_hand() -> None:
    # One pair, right, with bounds 0.6 and 0.8; the other way round it is wrong, with 0.2 and 0.4.
    lower = np.log(np.array([0.6 / 0.4]))
    upper = np.log(np.array([0.8 / 0.2]))
    # Lower bounds 0.6 (frequency 1) and 0.2 (frequency 0): only the second is too high.
    assert metrics.lower_calibration_error(lower, upper) == pytest.approx(0.2 / 2)
    # Upper bounds 0.8 (frequency 1) and 0.4 (frequency 0): only the first is too low.
    assert metrics.upper_calibration_error(lower, upper) == pytest.approx(0.2 / 2)


def test_the_ranking_score_by_hand() -> None:
    # Six of eight pairs are right, three of them surely; two are wrong, one of them surely.
    margin = np.array([3.0, 2.0, 1.0, 0.5, 0.2, 0.1, -1.0, -0.1])
    lower = np.array([2.0, 1.0, 0.5, -0.5, -1.0, -1.0, -2.0, -1.0])
    upper = np.array([4.0, 3.0, 2.0, 1.0, 1.0, 1.0, -0.5, 1.0])
    assert metrics.ranking_score(margin, lower, upper, 0.0) == pytest.approx(3 / 6 - 1 / 2)
    assert metrics.ranking_score(margin, lower, upper, 1.0) == pytest.approx(3 / 8 - 1 / 8)
    want = (3 / 8) / (0.8 * 6 / 8 + 0.2) - (1 / 8) / (0.8 * 2 / 8 + 0.2)
    assert metrics.ranking_score(margin, lower, upper, 0.2) == pytest.approx(want)
    assert metrics.ranking_score(margin[:6], lower[:6], upper[:6], 0.0) == pytest.approx(3 / 6)


def test_auroc_by_hand() -> None:
    is_true = np.array([True, True, False, True])
    # Of the three true ones two are above the false one, and one ties with it.
    one = np.zeros(4, dtype=int)
    assert metrics.auroc(np.array([3.0, 2.0, 1.0, 1.0]), is_true, one) == pytest.approx(2.5 / 3)
    assert metrics.auroc(np.array([1.0, 2.0]), np.array([True, True]), one[:2]) is None
    # Pairs of another part are not compared: the first beats nothing, and of the three others two
    # are compared with the false one.
    parts = np.array([1, 0, 0, 0])
    assert metrics.auroc(np.array([3.0, 2.0, 1.0, 1.0]), is_true, parts) == pytest.approx(1.5 / 2)


def test_all_numbers_equal_a_loop_over_pairs() -> None:
    draw = np.random.default_rng(0)
    margin_P = draw.normal(scale=2.0, size=500)
    spread_P = draw.uniform(0.1, 3.0, size=500)
    got = metrics.spread_metrics(margin_P, spread_P, np.full(500, 1.7), np.zeros(500, dtype=int))

    bins: dict[str, dict[int, list[tuple[float, float]]]] = {"mean": {}, "low": {}, "high": {}}
    nll = 0.0
    for margin, spread in zip(margin_P, spread_P, strict=True):
        odds = margin / math.sqrt(1 + math.pi * spread**2 / 8)
        nll += math.log1p(math.exp(-odds)) / 500
        low = float(expit(margin - spread / 2))
        high = float(expit(margin + spread / 2))
        for label, ends in ((1.0, (low, high)), (0.0, (1 - high, 1 - low))):
            probability = float(expit(odds)) if label else float(expit(-odds))
            for kind, value in zip(("mean", "low", "high"), (probability, *ends), strict=True):
                bins[kind].setdefault(int(value * 20), []).append((value, label))

    def error(kind: str, of: float) -> float:
        total = 0.0
        for members in bins[kind].values():
            excess = sum(value - label for value, label in members) / len(members)
            total += len(members) / 1000 * (abs(excess) if of == 0 else max(of * excess, 0.0))
        return total

    assert got.num_pairs == 500 and got.nll_spread == pytest.approx(nll)
    assert got.ece_spread == pytest.approx(error("mean", 0))
    assert got.elce == pytest.approx(error("low", 1))
    assert got.euce == pytest.approx(error("high", -1))
    # The bounds of a pair the other way round are the mirror image of its own.
    assert got.euce == pytest.approx(got.elce)
    sure = np.abs(margin_P) > spread_P / 2
    assert got.confident_true == pytest.approx(np.mean(sure & (margin_P > 0)))
    assert got.confident_false == pytest.approx(np.mean(sure & (margin_P < 0)))
    assert got.nll_temperature == pytest.approx(np.mean(np.log1p(np.exp(-margin_P / 1.7))))
    assert set(got.ranking) == {"0", "0.01", "0.2", "1"}


def test_a_pair_with_equal_features_is_no_surer_than_any() -> None:
    got = metrics.spread_metrics(
        np.array([0.0, 1.0, -1.0]), np.array([0.0, 2.0, 1.0]), np.ones(3), ONE
    )
    assert got.auroc_sureness == pytest.approx(0.5)
