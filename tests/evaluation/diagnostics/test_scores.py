"""Distributions, saturation, ties and repeated scores have the numbers that were planted."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from treeward.evaluation.diagnostics.scores import describe_scores
from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.report.blocks import check_blocks


def test_distributions_are_those_of_the_subsets(normal_scores: list[ScoredExample]) -> None:
    found = describe_scores(normal_scores, "mine")
    histogram, table = json.loads(json.dumps(found.figures, allow_nan=False))
    check_blocks([histogram, table], [])
    assert [(row["name"], row["count"]) for row in table["rows"]] == [("all", 180), ("high", 60), ("low", 120)]
    of_high = np.array([s for one in normal_scores for s in one.scores if one.example.subset == "high"])
    high = table["rows"][1]
    assert (high["mean"], high["std"]) == pytest.approx((of_high.mean(), of_high.std()))
    assert [high["q1"], high["q50"], high["q99"]] == pytest.approx(np.quantile(of_high, [0.01, 0.5, 0.99]))
    assert {series["name"]: sum(series["counts"]) for series in histogram["series"]} == {"low": 120, "high": 60}
    assert found.score_mean.low < found.score_mean.value < found.score_mean.high  # type: ignore[operator]


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


def test_equal_scores_of_equal_texts_are_no_ties(make_example: Any) -> None:
    def scored(id: str, texts: list[str], scores: tuple[float | None, ...]) -> ScoredExample:
        return ScoredExample(make_example(id, "p" + id[0], texts), scores, (1,) * len(texts), (1,) * len(texts))

    rows = [
        scored("a", ["x", "x"], (1.0, 1.0)),
        scored("b", ["x", "y"], (2.0, 2.0)),
        scored("c", ["x", "y"], (3.0, 4.0)),
        scored("c2", ["x", "z"], (3.0, 5.0)),  # the completion "x" of "pc" is scored twice
        scored("d", ["x", "y"], (None, 4.0)),
    ]
    found = describe_scores(rows)
    assert (found.ties.value, found.ties.count) == (1 / 3, 3)  # b, of b, c and c2
    assert found.repeated_scores.value == 4 / 9  # both of b; 4.0 of c and d
    assert all(metric.value is None for metric in describe_scores([]).metrics())


def test_a_half_precision_head_is_seen_by_its_repeated_scores(
    normal_scores: list[ScoredExample], rescored: Any
) -> None:
    rounded = rescored(normal_scores, lambda score: round(score * 16) / 16)
    assert describe_scores(normal_scores).repeated_scores.value == 0
    assert (describe_scores(rounded).repeated_scores.value or 0) > 0.5
