"""ProcessBench's F1 by hand, and the suite with a process reward model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from treeward.errors import DataError
from treeward.evaluation.process_metrics import (
    JudgedSolution,
    first_error_accuracy,
    first_error_of,
    first_wrong,
    process_bench_f1,
)
from treeward.evaluation.results import ScoredExample, scored_from_row, to_row
from treeward.evaluation.suites import get_suite


def row(number: int, label: int, subset: str = "gsm8k") -> dict[str, Any]:
    return {
        "id": f"{subset}-{number}",
        "generator": "m",
        "problem": f"Problem {number}",
        "steps": ["first\n\nwith a blank line", "second", "third"],
        "final_answer_correct": label == -1,
        "label": label,
    }


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return str(path)


def scored(example: Any, *probabilities: float) -> ScoredExample:
    return ScoredExample(
        example, (math.prod(probabilities),), (9,), (9,), (None,), steps=(probabilities,)
    )


def test_the_f1_is_the_harmonic_mean_of_two_accuracies() -> None:
    # Of four solutions with an error one is found exactly; of two without one, one is.
    judged = [
        JudgedSolution(1, 1),
        JudgedSolution(0, 1),
        JudgedSolution(2, 1),
        JudgedSolution(-1, 0),
    ]
    judged += [JudgedSolution(-1, -1), JudgedSolution(3, -1)]
    assert first_error_accuracy(judged) == 2 / 6
    assert process_bench_f1(judged) == pytest.approx(2 * 0.25 * 0.5 / 0.75)
    assert process_bench_f1([JudgedSolution(1, 0), JudgedSolution(1, -1)]) == 0
    assert math.isnan(process_bench_f1([JudgedSolution(-1, -1)]))
    # The published numbers of the paper's Table 3, Math-Shepherd on GSM8K: 32.4 and 91.7 give 47.9.
    assert round(2 * 32.4 * 91.7 / (32.4 + 91.7), 1) == 47.9


def test_the_first_wrong_step() -> None:
    assert first_wrong([0.9, 0.5, 0.49, 0.1]) == 2 and first_wrong([0.5]) == -1
    nan = math.nan
    assert first_error_of([1.0, 0.4, nan]) == 1 and first_error_of([1.0, 0.5]) == -1
    assert first_error_of([nan, 0.0]) is None and first_error_of([1.0, nan]) is None
    assert first_error_of([1.0, 0.0], is_whole=False) == 1
    assert first_error_of([1.0, 1.0], is_whole=False) is None


def test_the_headline_is_the_plain_mean_of_the_subsets(tmp_path: Path) -> None:
    folder = tmp_path / "processbench"
    write(folder / "gsm8k.jsonl", [row(n, label) for n, label in enumerate((0, 1, -1))])
    write(folder / "math.jsonl", [row(n, label, "math") for n, label in enumerate((2, -1))])
    suite = get_suite("processbench")
    examples = suite.load(str(folder))
    assert [example.task_name for example in examples] == ["gsm8k"] * 3 + ["math"] * 2
    assert examples[0].completions[0].messages[0]["content"].count("\n\n") == 2
    answers = [(0.1, 0.2, 0.3), (0.4, 0.9, 0.9), (0.9, 0.6, 0.5), (0.9, 0.9, 0.1), (0.9, 0.9, 0.4)]
    results = [scored(example, *one) for example, one in zip(examples, answers, strict=True)]
    summary = suite.summarize(results)
    # gsm8k: 1 of 2 with an error, 1 of 1 without; math: 1 of 1, and 0 of 1.
    gsm8k = 2 * 0.5 * 1 / 1.5
    assert [part.value for part in summary.sections] == [pytest.approx(gsm8k), 0.0]
    assert summary.headline.value == pytest.approx(gsm8k / 2)
    assert summary.headline.note is not None and "5 of 3400" in summary.headline.note
    # What has other steps, or none, is wrong; of a model without steps there is no result.
    short = suite.summarize([scored(examples[2], 0.9, 0.9), *results[:2], *results[3:]])
    assert [part.value for part in short.sections] == [0.0, 0.0]
    without = [ScoredExample(example, (1.0,), (9,), (9,), (None,)) for example in examples]
    assert suite.summarize(without).headline.value is None
    again = scored_from_row(json.loads(json.dumps(to_row(results[0]))), "x:1")
    assert [list(steps) for steps in again.steps] == [[0.1, 0.2, 0.3]]


def test_a_label_beyond_the_steps_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [row(0, 3)])
    with pytest.raises(DataError, match=r"rows\.jsonl:1(?s:.*)label"):
        get_suite("processbench").load(path)


def test_a_kind_of_solutions_that_is_missing_has_no_accuracy(tmp_path: Path) -> None:
    suite = get_suite("processbench")
    path = write(tmp_path / "rows.jsonl", [row(0, -1), row(1, -1)])
    results = [scored(example, 0.9, 0.9, 0.9) for example in suite.load(path)]
    details = suite.summarize(results).details
    assert details == {"accuracy": {"gsm8k": {"error": None, "correct": 1.0}}}
    json.dumps(details, allow_nan=False)
