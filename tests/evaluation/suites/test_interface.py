"""What holds for every suite and for preference data as one: names, rows, intervals of sections."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evaluated import preference, rated
from messages import write_jsonl

from treeward.config.data import DatasetConfig
from treeward.errors import ConfigError, DataError
from treeward.evaluation.diagnostics.scores import statistics_of
from treeward.evaluation.results import Metric
from treeward.evaluation.statistics import accuracy_metric, combined
from treeward.evaluation.suites import SUITES, PreferenceSuite, get_suite


def test_names() -> None:
    assert list(SUITES) == [
        "rewardbench",
        "rewardbench2",
        "ppepreference",
        "ppecorrectness",
        "rmb",
        "rmbench",
        "judgebench",
        "llmbar",
        "ifrewardbench",
        "processbench",
    ]
    # Of these the mean is over parts in which a guess is right in different shares, or solutions
    # have different numbers of steps.
    without_chance = ("rewardbench2", "rmb", "processbench")
    for name, cls in SUITES.items():
        suite = get_suite(name)
        assert type(suite) is cls and suite.name == name and suite.title
        assert suite.chance() == (None if name in without_chance else 0.5)
    assert get_suite("RM-Bench").name == "rmbench"
    assert (get_suite("rewardbench2").chance("Ties"), get_suite("rewardbench2").chance("Math")) == (
        None,
        0.25,
    )
    with pytest.raises(ConfigError, match="did you mean judgebench"):
        get_suite("jugdebench")


@pytest.mark.parametrize("name", list(SUITES))
def test_the_data_of_another_suite_and_no_data_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        get_suite(name).load(str(tmp_path / "nowhere" / "at all.jsonl"))
    file = write_jsonl(tmp_path / "other.jsonl", {"question": "?", "answer": "!"})
    with pytest.raises(DataError, match="does not fit the suite") as caught:
        get_suite(name).load(file)
    assert caught.value.where == f"{file}:1"


def test_the_interval_of_parts_by_hand() -> None:
    parts = [Metric("a", 0.5, 0.25, 0.75, 4), Metric("c", 1.0, 0.5, 1.0, 2)]
    metrics = combined("headline", parts, [1, 3])
    assert "fewer than 5 examples" in str(metrics.note)
    assert (metrics.value, metrics.count) == (0.875, 6) and combined("headline", []).value is None
    assert metrics.low == pytest.approx(0.875 - math.hypot(0.25 * 0.25, 0.75 * 0.5))
    assert metrics.high == pytest.approx(0.875 + 0.25 * 0.25)
    for value, low, high in ((0.2, 0.1, 0.5), (0.8, 0.5, 0.9)):  # one part is itself, on both sides
        alone = combined("headline", [Metric("a", value, low, high, 9)])
        assert (alone.low, alone.high) == (pytest.approx(low), pytest.approx(high))


# --- preference data of one's own -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "right", "pairs"),
    [
        # 0 of 1; 0>1, 0>2 and not 1>2; 0>2 and not 1>2
        ([((0, 1), (0.0, 1.0)), ((0, 1, 2), (3.0, 1.0, 2.0)), ((0, 0, 1), (2.0, 0.0, 1.0))], 3, 6),
        # a tie, right, right; a tie, wrong, wrong
        ([((0, 1, 2), (1.0, 1.0, 0.0)), ((0, 1, 2), (1.0, 1.0, 2.0))], 2, 6),
        # what needs a missing score is wrong
        ([((0, 1, 2), (2.0, 1.0, None)), ((0, 1), (1.0, 0.0))], 2, 4),
    ],
    ids=["ranks", "ties are wrong", "a missing score"],
)
def test_pairs_are_pooled_as_in_the_trainers_validation(rows: Any, right: int, pairs: int) -> None:
    suite = PreferenceSuite("mine", DatasetConfig(data_path="mine.jsonl"))
    scored = [
        rated(preference(str(i), "s", str(i), ["a"] * len(ranks), ranks), scores)
        for i, (ranks, scores) in enumerate(rows)
    ]
    result = suite.summarize(scored)
    assert (
        result.headline.value == pytest.approx(right / pairs)
        and result.details["num_pairs"] == pairs
    )
    assert result.headline.low is not None and result.headline.low <= right / pairs <= (
        result.headline.high or 0
    )
    assert result.num_failed == sum(None in scores for _, scores in rows)


def test_an_example_without_a_context_is_a_prompt_of_its_own(tmp_path: Path) -> None:
    rows = [{"chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(40)]
    suite = PreferenceSuite("x", DatasetConfig(data_path=write_jsonl(tmp_path / "x.jsonl", *rows)))
    scored = []
    for n, example in enumerate(suite.load()):
        scored.append(rated(example, (1.0, 2.0) if n % 4 == 0 else (2.0, 1.0)))
    independent = accuracy_metric([0.0, 1.0, 1.0, 1.0] * 10, "accuracy")
    assert suite.summarize(scored).headline == independent
    pair_accuracy = statistics_of(scored).pair_accuracy
    assert (pair_accuracy.low, pair_accuracy.high) == (independent.low, independent.high)
    # Copies are no new examples, whatever the order of their completions.
    first, second = scored[0].example.completions
    swapped = replace(scored[0].example, completions=(second, first), id="41")
    assert swapped.prompt_key == scored[0].example.prompt_key != scored[1].example.prompt_key
