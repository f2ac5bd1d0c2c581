"""Preference data as a suite: every form that the trainer reads, K completions, ties in the data and in the scores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evaluated import rated

from treeward.config.data import DatasetConfig
from treeward.evaluation.suites import PreferenceSuite


def ranked(prompt: str, *ranks: int, **more: Any) -> dict[str, Any]:
    completions = [
        {"rank": rank, "completion": [{"role": "assistant", "content": f"answer {i}"}]} for i, rank in enumerate(ranks)
    ]
    return {"context": [{"role": "user", "content": prompt}], "completions": completions, **more}


@pytest.fixture
def suite_of(tmp_path: Path) -> Callable[..., PreferenceSuite]:
    def make(*rows: dict[str, Any], **options: Any) -> PreferenceSuite:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return PreferenceSuite("mine", DatasetConfig(data_path=str(file)), **options)

    return make


def test_rows_become_examples(suite_of: Callable[..., PreferenceSuite]) -> None:
    first, second = suite_of(ranked("a", 0, 1), ranked("b", 2, 0, 2, 1, task_name="hard", margin=0.5)).load()
    assert (first.id, second.id) == ("1", "2") and second.task_name == "hard" and second.ranks == (2, 0, 2, 1)
    assert second.strength == 0.5 and str(second.where).endswith("rows.jsonl:2")
    assert second.conversations[3] == [
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "answer 3"},
    ]


def test_pairs_are_pooled_as_in_the_trainers_validation(suite_of: Callable[..., PreferenceSuite]) -> None:
    suite = suite_of(ranked("a", 0, 1), ranked("b", 0, 1, 2), ranked("c", 0, 0, 1))
    a, b, c = suite.load()
    rows = [rated(a, (0.0, 1.0)), rated(b, (3.0, 1.0, 2.0)), rated(c, (2.0, 0.0, 1.0))]
    result = suite.summarize(rows)
    # a: 0 of 1; b: 0>1, 0>2 and not 1>2; c: 0>2 and not 1>2
    assert result.headline.value == 3 / 6 and result.details["num_pairs"] == 6
    assert result.headline.low is not None and result.headline.low <= 0.5 <= (result.headline.high or 0)


@pytest.mark.parametrize(("policy", "value"), [("strict", 2 / 6), ("half", 3 / 6)])
def test_ties_of_scores(suite_of: Callable[..., PreferenceSuite], policy: Any, value: float) -> None:
    suite = suite_of(ranked("a", 0, 1, 2), ranked("b", 0, 1, 2), tie_policy=policy)
    a, b = suite.load()
    result = suite.summarize([rated(a, (1.0, 1.0, 0.0)), rated(b, (1.0, 1.0, 2.0))])
    # a: tie, right, right; b: tie, wrong, wrong
    assert result.headline.value == pytest.approx(value)


def test_what_needs_a_missing_score_is_wrong(suite_of: Callable[..., PreferenceSuite]) -> None:
    suite = suite_of(ranked("a", 0, 1, 2), ranked("b", 0, 1))
    a, b = suite.load()
    result = suite.summarize([rated(a, (2.0, 1.0, None)), rated(b, (1.0, 0.0))])
    assert result.headline.value == 2 / 4 and result.num_failed == 1
