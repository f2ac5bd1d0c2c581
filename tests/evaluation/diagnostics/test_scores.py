"""The spread of scores and the temperature have the numbers that were planted."""

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
    assert all(metric.value is None for metric in statistics_of([]).numbers.values())


def test_a_model_that_is_wrong_on_average_has_no_temperature(make_example: Any) -> None:
    scored = [ScoredExample(make_example(str(i), str(i), ["a", "b"]), (margin, 0.0), (1, 1), (1, 1))
              for i, margin in enumerate([-6.0, -4.9, 5.1, -0.5, -1.0, -5.0])]  # fmt: skip
    temperature = statistics_of(scored).temperature
    assert temperature.value is None and "do not score higher" in str(temperature.note)
