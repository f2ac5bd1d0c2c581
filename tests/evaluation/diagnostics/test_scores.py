"""Distributions and saturation have the numbers that were planted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from treeward.evaluation.diagnostics.scores import describe_scores
from treeward.evaluation.examples import ScoredExample


def test_distributions_are_those_of_the_subsets(normal_scores: list[ScoredExample]) -> None:
    found = describe_scores(normal_scores, "mine")
    (histogram,) = found.figures
    assert {series["name"]: sum(series["counts"]) for series in histogram["series"]} == {"low": 120, "high": 60}
    scores = np.array([score for one in normal_scores for score in one.scores])
    assert (found.score_mean.value, found.score_std.value) == pytest.approx((scores.mean(), scores.std()))
    assert found.score_mean.low < found.score_mean.value < found.score_mean.high  # type: ignore[operator]
    assert all(metric.value is None for metric in describe_scores([]).metrics())


def test_saturation_is_of_margins_beyond_five_temperatures(make_example: Any) -> None:
    margins = [6.0, 4.9, -5.1, 0.5, -1.0, 5.0]
    scored = [
        ScoredExample(make_example(str(i), str(i), ["a", "b"]), (margin, 0.0), (1, 1), (1, 1))
        for i, margin in enumerate(margins)
    ]
    found = describe_scores(scored)
    assert found.saturated.value == 2 / 6 and found.saturated_wrong.value == 1 / 2
    assert found.saturated_wrong.count == 2 and "taken as 1" in str(found.saturated.note)
    assert describe_scores(scored, temperature=0.1).saturated.value == 5 / 6
    assert describe_scores(scored, temperature=2.0).saturated.value == 0
