"""Saturation and the spread of scores have the numbers that were planted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from treeward.evaluation.diagnostics.scores import statistics_of
from treeward.evaluation.examples import ScoredExample


def test_the_spread_is_that_of_all_completions(normal_scores: list[ScoredExample]) -> None:
    found = statistics_of(normal_scores)
    scores = np.array([score for one in normal_scores for score in one.scores])
    assert (found.score_mean.value, found.score_std.value) == pytest.approx((scores.mean(), scores.std()))
    assert all(metric.value is None for metric in statistics_of([]).metrics())


def test_saturation_is_of_margins_beyond_five_temperatures(make_example: Any) -> None:
    def found(margins: list[float]) -> Any:
        return statistics_of([
            ScoredExample(make_example(str(i), str(i), ["a", "b"]), (margin, 0.0), (1, 1), (1, 1))
            for i, margin in enumerate(margins)
        ])  # fmt: skip

    wrong = found([-6.0, -4.9, 5.1, -0.5, -1.0, -5.0])
    assert wrong.temperature.value is None and wrong.saturated.value == 2 / 6
    assert "taken as 1" in str(wrong.saturated.note) and "do not score higher" in str(wrong.temperature.note)
    margins = np.random.default_rng(0).normal(2, 4, 400)
    fitted = found(margins.tolist())
    assert fitted.saturated.value == np.mean(np.abs(margins) > 5 * (fitted.temperature.value or 0)) < 0.9
