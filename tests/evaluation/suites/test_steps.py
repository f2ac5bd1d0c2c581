"""Labels of steps as a suite: its numbers by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from treeward.config.data import DatasetConfig
from treeward.evaluation.results import ScoredExample
from treeward.evaluation.suites import PreferenceSuite, StepsSuite, suite_of_data


def solution(steps: str, labels: list[Any], **more: Any) -> dict[str, Any]:
    return {"prompt": "Add.", "completions": list(steps), "labels": labels, **more}


def written(folder: Path, rows: list[dict[str, Any]]) -> DatasetConfig:
    path = folder / "steps.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return DatasetConfig(data_path=str(path))


def scored(example: Any, *steps: tuple[float, ...]) -> ScoredExample:
    count = len(steps)
    return ScoredExample(
        example, (0.5,) * count, (9,) * count, (9,) * count, (None,) * count, steps=steps
    )


def numbers(suite: StepsSuite, results: list[ScoredExample]) -> dict[str, tuple[Any, Any]]:
    summary = suite.summarize(results)
    return {part.name: (part.value, part.count) for part in (summary.headline, *summary.sections)}


def test_a_shared_step_counts_once_and_an_unjudged_one_not_at_all(tmp_path: Path) -> None:
    config = written(
        tmp_path,
        [
            solution("abc", [True, True, True]),
            solution("abd", [True, True, False]),
            solution("xyz", [True, None, False]),
            solution("abc", [True, True, True]),
            solution("pq", [None, None]) | {"prompt": "Nobody has judged this."},
            solution("e", [0.2], task_name="soft") | {"prompt": "Other."},
        ],
    )
    suite = suite_of_data("mine", config)
    assert isinstance(suite, StepsSuite)
    first, other = suite.load()
    texts = [completion.messages[0]["content"] for completion in first.completions]
    assert texts == ["a\n\nb\n\nc", "a\n\nb\n\nd", "x\n\ny\n\nz"]
    assert (first.task_name, other.task_name) == ("all", "soft")
    results = [
        scored(first, (0.9, 0.4, 0.9), (0.9, 0.4, 0.1), (0.9, 0.1, 0.1)),
        scored(other, (0.3,)),
    ]
    # Labelled are a, b, c, d, x, z and e; b is called wrong. Of xyz nobody knows the first error.
    assert numbers(suite, results) == {
        "accuracy by step": (pytest.approx(6 / 7), 7),
        "first error": (pytest.approx(1 / 3), 3),
        "ProcessBench F1": (0.0, 3),
    }
    assert [(part.name, part.count) for part in suite.summarize(results).subsets] == [
        ("all", 6),
        ("soft", 1),
    ]


def test_a_solution_without_its_steps_is_wrong(tmp_path: Path) -> None:
    suite = StepsSuite("mine", written(tmp_path, [solution("ab", [True, True])]))
    [example] = suite.load()
    assert numbers(suite, [scored(example, (0.9, 0.9))])["accuracy by step"] == (1.0, 2)
    # A model that has read another number of steps.
    found = numbers(suite, [scored(example, (0.9,))])
    assert found["accuracy by step"] == (0.0, 2) and found["first error"] == (0.0, 1)
    # A model without probabilities of steps is not wrong: nothing was measured.
    without = ScoredExample(example, (1.0,), (9,), (9,), (None,))
    assert suite.summarize([without]).headline.value is None


def test_comparisons_are_no_steps(tmp_path: Path) -> None:
    pair = {"prompt": "Add.", "chosen": "4", "rejected": "5"}
    assert isinstance(suite_of_data("mine", written(tmp_path, [pair])), PreferenceSuite)
    # Ranked completions with labels are comparisons too, as in training.
    ranked = solution("ab", [1, 0], scores=[1, 0])
    assert isinstance(suite_of_data("mine", written(tmp_path, [ranked])), PreferenceSuite)
    missing = DatasetConfig(data_path=str(tmp_path / "none.jsonl"))
    assert isinstance(suite_of_data("mine", missing), PreferenceSuite)
    named = written(tmp_path, [solution("ab", [1, 0])])
    named = named.model_copy(update={"dataset_name": "StepDataset"})
    assert isinstance(suite_of_data("mine", named), StepsSuite)
