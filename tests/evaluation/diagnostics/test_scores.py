"""The spread of scores and the temperature have the numbers that were planted."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from treeward.data.preference import Completion
from treeward.evaluation.diagnostics.scores import statistics_of
from treeward.evaluation.results import ScoredExample, scored_from_row, to_row


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


def test_a_row_gives_the_example_back_with_its_grades_and_heads(make_example: Any) -> None:
    example = make_example("7", "Why?", ["a", "b"])
    completions = (
        Completion(0, example.completions[0].messages, score=4.0, grades={"brief": 1.0}),
        *example.completions[1:],
    )
    scored = ScoredExample(
        replace(example, completions=completions), (1.0, None), (1, 1), (3, 3), (None, "too long"), ({"brief": 0.5}, {})
    )
    assert scored_from_row(json.loads(json.dumps(to_row(scored))), "examples.jsonl:1") == scored
