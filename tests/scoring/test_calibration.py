"""What was planted in simulated scores is found again, and what cannot be fitted is said to be
so."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from evaluated import RuleScorer, preference

from treeward.config.scoring import RewardShapingConfig
from treeward.data.preference import Preference
from treeward.errors import DataError
from treeward.model.contract import RewardCalibration
from treeward.scoring.calibration import MAX_KNOTS, calibrate, fit_temperature, preference_nll
from treeward.scoring.shaping import Shaper


def _quality(text: str) -> float:
    return float(text.split()[0].removeprefix("q="))


def length_lover() -> RuleScorer:
    """Scores a completion `q=<quality> xxx...` by its quality and 0.01 for each of its
    characters."""
    return RuleScorer(
        lambda context, text: None if "unscorable" in text else _quality(text) + 0.01 * len(text),
        error="it was planted so",
    )


def completion(quality: float, length: int) -> str:
    return f"q={quality:.4f} ".ljust(length, "x")


def comparison(*texts: str, ranks: Sequence[int] | None = None) -> Preference:
    return preference("", "", "Which?", texts, ranks)


def planted(count: int, seed: int = 0) -> list[Preference]:
    """Comparisons whose better completion has the higher quality; their lengths, 20 to 1000, are
    independent of it."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        better, worse = sorted((draw.gauss(0, 1), draw.gauss(0, 1)), reverse=True)
        rows.append(
            comparison(
                completion(better, draw.randint(20, 1000)),
                completion(worse, draw.randint(20, 1000)),
            )
        )
    return rows


def calibrated(rows: list[Preference], **options: Any) -> RewardCalibration:
    return calibrate(length_lover(), iter(rows), name="planted", **options)


def test_a_planted_length_bias_is_found_and_taken_away() -> None:
    calibration = calibrated(planted(600))
    held_out = planted(400, seed=1)
    conversations = [[*row.context, *c.messages] for row in held_out for c in row.completions]
    scores = length_lover().score(conversations)
    shaper = Shaper(RewardShapingConfig(length_calibration=True), calibration=calibration)
    shaped = np.array([one.value for one in shaper.shape(scores, conversations)], dtype=float)
    lengths = np.array([len(c[-1]["content"]) for c in conversations])
    qualities = np.array([_quality(c[-1]["content"]) for c in conversations])
    before = np.array([score.score for score in scores], dtype=float)
    assert np.corrcoef(before, lengths)[0, 1] > 0.9
    assert abs(np.corrcoef(shaped, lengths)[0, 1]) < 0.1
    assert np.corrcoef(shaped, qualities)[0, 1] > 0.98
    accuracy = [float(np.mean(v[::2] > v[1::2])) for v in (before, shaped)]
    assert accuracy[0] < 0.75 and accuracy[1] > 0.95
    curve = calibration.length_curve
    assert curve is not None and len(curve.lengths) <= MAX_KNOTS
    effects = np.interp([100, 900], curve.lengths, curve.values)
    assert effects[1] - effects[0] == pytest.approx(8.0, abs=0.3)
    assert curve.residual_std == pytest.approx(1.0, abs=0.1) and abs(curve.residual_mean) < 0.1
    assert curve.residual_std == pytest.approx(float(shaped.std()), rel=0.1)
    # the temperature after the curve is that of what the curve leaves
    assert curve.residual_temperature is not None and calibration.temperature is not None
    chats = [[*row.context, *c.messages] for row in planted(600) for c in row.completions]
    left = np.array(
        [one.value for one in shaper.shape(length_lover().score(chats), chats)], dtype=float
    )
    own = fit_temperature(left[::2] - left[1::2])
    assert own is not None and own.value == pytest.approx(curve.residual_temperature.value)
    assert own.value != pytest.approx(calibration.temperature.value, rel=0.05)


@pytest.mark.parametrize("temperature", [0.25, 40.0])
def test_a_known_temperature_is_recovered(temperature: float) -> None:
    draw = np.random.default_rng(3)
    log_odds = draw.normal(scale=2.0, size=20_000)
    better_first = draw.random(20_000) < 1 / (1 + np.exp(-log_odds))
    differences = np.where(better_first, log_odds, -log_odds) * temperature
    fitted = fit_temperature(differences)
    assert fitted is not None and fitted.num_pairs == 20_000
    assert fitted.value == pytest.approx(temperature, rel=0.05)
    assert fitted.nll_after <= fitted.nll_before
    assert fitted.nll_after == pytest.approx(np.mean(np.log1p(np.exp(-differences / fitted.value))))
    around = [preference_nll(differences, fitted.value * factor) for factor in (0.99, 1.01)]
    assert fitted.nll_after < min(around)


def test_the_temperature_of_perfect_scores_is_finite_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="treeward"):
        few = fit_temperature(np.full(8, 3.0))
        many = fit_temperature(np.full(998, 3.0))
    assert few is not None and many is not None
    assert 1 / (1 + np.exp(-3.0 / few.value)) == pytest.approx(9 / 10)
    assert 1 / (1 + np.exp(-3.0 / many.value)) == pytest.approx(999 / 1000)
    assert caplog.text.count("cautious guess") == 2


@pytest.mark.parametrize("differences", [[], [-1.0, 0.5], [0.0, 0.0]])
def test_scores_that_do_not_agree_have_no_temperature(
    differences: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="treeward"):
        assert fit_temperature(np.array(differences)) is None
    assert "no temperature" in caplog.text


def test_pairs_follow_the_ranks_and_ties_are_none() -> None:
    rows = [
        comparison(completion(1.0, 20), completion(2.0, 20), completion(4.0, 20), ranks=[2, 0, 0]),
        comparison(completion(3.0, 20), completion(3.5, 20), ranks=[0, 0]),
        comparison(completion(0.0, 20), completion(0.5, 30), ranks=[0, 1]),
    ]
    fitted = calibrated(rows).temperature
    assert fitted is not None and fitted.num_pairs == 3
    assert fitted.nll_before == pytest.approx(
        np.mean(np.log1p(np.exp(-np.array([1.0, 3.0, -0.6]))))
    )


def test_what_cannot_be_scored_is_counted_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    rows = planted(5)
    broken = [
        comparison(completion(1.0, 25), "unscorable"),
        comparison("unscorable", "unscorable as well"),
    ]
    with caplog.at_level(logging.WARNING, logger="treeward"):
        calibration = calibrated([*rows, *broken])
    source = calibration.provenance
    assert source is not None
    assert (source.num_comparisons, source.num_conversations, source.num_failed) == (7, 11, 3)
    assert "3 of 14 completions have no score" in caplog.text and "planted so" in caplog.text
    assert calibration.temperature is not None and calibration.temperature.num_pairs == 5
    with pytest.raises(
        DataError, match=r"too few(?s:.*)1 with two scored completions, of 3(?s:.*)planted so"
    ):
        calibrated([rows[0], *broken])
    with pytest.raises(DataError, match="0 comparisons"):
        calibrated([])
    with pytest.raises(DataError, match="the same score"):
        calibrated([comparison(completion(1.0, 20), completion(1.0, 20))] * 4)
