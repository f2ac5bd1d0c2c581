"""Saturation and the spread of scores have the numbers that were planted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from treeward.evaluation.diagnostics.scores import spread_metric, statistics_of
from treeward.evaluation.examples import ScoredExample


def test_the_spread_is_that_of_all_completions(normal_scores: list[ScoredExample]) -> None:
    found = statistics_of(normal_scores)
    scores = np.array([score for one in normal_scores for score in one.scores])
    assert (found.score_mean.value, found.score_std.value) == pytest.approx((scores.mean(), scores.std()))
    assert all(metric.value is None for metric in statistics_of([]).numbers.values())


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


def test_the_spread_of_heads_is_compared_between_wrong_and_right_pairs(make_example: Any) -> None:
    """Of the differences of two heads; a grade's head, a tie in the data and a missing score are no part of it."""

    def scored(i: int, a: tuple[float, float], b: tuple[float, float]) -> ScoredExample:
        heads = tuple({"LABEL_0": own[0], "LABEL_1": own[1]} for own in (a, b))
        return ScoredExample(
            make_example(str(i), str(i), ["a", "b"]), (sum(a) / 2, sum(b) / 2), (1, 1), (1, 1), (), heads
        )

    # half the distance between the two heads' differences: right 0.5, 2 and 0, wrong 1
    some = [scored(0, (3.0, 2.0), (0.0, 0.0)), scored(1, (5.0, 1.0), (0.0, 0.0)), scored(2, (9.0, 2.0), (8.0, 1.0))]
    some.append(scored(3, (0.0, 2.0), (3.0, 3.0)))
    failed = replace(some[0], scores=(None, 1.0), heads=({}, some[0].heads[1]))
    metric = spread_metric([*some, failed, replace(some[0], heads=())])["spread_auroc"]
    assert (metric.value, metric.count, metric.note) == (2 / 3, 4, None)
    alone = spread_metric(some[:3])["spread_auroc"]
    assert alone.value is None and alone.count == 3 and "in the wrong one" in str(alone.note)
    assert spread_metric([replace(one, heads=()) for one in some]) == {}
    assert statistics_of(some).spread_auroc == metric and "mse" not in {
        one.name for one in statistics_of(some).numbers.values()
    }
