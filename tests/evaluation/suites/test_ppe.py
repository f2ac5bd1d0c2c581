"""PPE: whom people preferred, and which of many answers are correct."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from evaluated import rated
from messages import write_jsonl

from treeward.errors import DataError
from treeward.evaluation.suites.ppe import PPECorrectness, PPEPreference

# --- preference -----------------------------------------------------------------------------------


def arena(number: int, winner: str, **kinds: bool) -> dict[str, Any]:
    return {
        "question_id": f"q{number}",
        "prompt": f"question {number}",
        "response_1": "first",
        "response_2": "second",
        "model_a": "a",
        "model_b": "b",
        "winner": winner,
        "language": "English",
        **kinds,
    }


def test_ties_are_left_out_and_a_prompt_counts_in_each_of_its_kinds(tmp_path: Path) -> None:
    rows = [
        arena(0, "model_a", hard_prompt=True, is_code=True),
        arena(1, "model_b", hard_prompt=True, is_code=False),
        arena(2, "tie (bothbad)", hard_prompt=True),
        arena(3, "model_b"),
    ]
    suite = PPEPreference()
    examples = suite.load(write_jsonl(tmp_path / "test.jsonl", *rows))
    assert [example.ranks for example in examples] == [(0, 1), (1, 0), (1, 0)]
    # The first answer always scores higher: right, wrong, wrong.
    result = suite.summarize([rated(example, [1.0, 0.0]) for example in examples])
    assert result.headline.value == pytest.approx(1 / 3)
    assert {part.name: part.value for part in result.sections} == {"Hard": 0.5, "Code": 1.0}


# --- correctness ----------------------------------------------------------------------------------


def best_of_k(
    number: int, scores: list[bool], pairs: list[tuple[int, int]], **more: Any
) -> dict[str, Any]:
    responses = {f"response_{i + 1}": f"answer {i}" for i in range(len(scores))}
    return {
        "question_id": number,
        "prompt": f"problem {number}",
        "model_name": "m",
        "scores": scores,
        "sampled_conflict_pairs": pairs,
        **responses,
        **more,
    }


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Two of the five benchmarks, as downloads of the hub have them."""
    math = [
        best_of_k(0, [True, False, False, True], [(0, 1), (2, 3), (0, 1)]),
        best_of_k(1, [False, True, False, False], [(1, 0)]),
    ]
    gpqa = [best_of_k(0, [False, True], [(0, 1)])]
    for name, rows in (("MATH", math), ("GPQA", gpqa)):
        folder = tmp_path / "ppe" / f"PPE-{name}-Best-of-K"
        folder.mkdir(parents=True)
        write_jsonl(folder / "train.jsonl", *rows)
    return tmp_path / "ppe"


def test_accuracy_is_over_the_sampled_pairs_and_the_headline_over_benchmarks(copy: Path) -> None:
    suite = PPECorrectness()
    examples = suite.load(str(copy))
    assert [example.task_name for example in examples] == ["MATH", "MATH", "GPQA"]
    # MATH 0: the correct answers are 0 and 3. Pair (0, 1) is right and comes twice; of (2, 3) the
    # correct one is 3, which ties: wrong. MATH 1: (1, 0) is wrong. GPQA: right.
    scores: list[list[float | None]] = [[2.0, 1.0, 0.5, 0.5], [3.0, 2.0, 1.0, 0.0], [0.0, 1.0]]
    scored = [rated(example, values) for example, values in zip(examples, scores, strict=True)]
    result = suite.summarize(scored)
    assert {part.name: part.value for part in result.sections} == {"MATH": 0.5, "GPQA": 1.0}
    assert result.headline.value == pytest.approx(0.75)


def test_areas_and_the_best_of_k_by_hand(copy: Path) -> None:
    suite = PPECorrectness()
    examples = suite.load(str(copy))
    scores: list[list[float | None]] = [[2.0, 1.0, 0.5, 0.5], [3.0, 2.0, 1.0, 0.0], [0.0, 1.0]]
    scored = [rated(example, values) for example, values in zip(examples, scores, strict=True)]
    details = suite.summarize(scored).details
    # MATH 0: 2.0 beats both wrong ones, 0.5 ties with one: 2.5 of 4. MATH 1: 2.0 beats two of
    # three.
    assert details["auc"]["MATH"] == pytest.approx((2.5 / 4 + 2 / 3) / 2)
    # MATH 0 chooses answer 0, which is correct; MATH 1 always chooses answer 0, which is wrong.
    assert details["best_of_k"]["MATH"] == {1: 0.5, 2: 0.5, 4: 0.5}
    assert details["best_of_k"]["GPQA"] == {1: 0.0, 2: 1.0}


def test_a_missing_score_is_wrong_and_is_never_chosen(copy: Path) -> None:
    suite = PPECorrectness()
    examples = suite.load(str(copy))[:1]
    result = suite.summarize([rated(examples[0], [None, 1.0, 0.0, 2.0])])
    # (0, 1) twice wrong; (2, 3): 2.0 > 0.0, right.
    assert result.headline.value == pytest.approx(1 / 3)
    assert result.details["best_of_k"]["MATH"] == {1: 0.0, 2: 0.0, 4: 1.0}


def test_a_benchmark_without_pairs_is_left_out_of_the_mean(copy: Path) -> None:
    write_jsonl(copy / "PPE-IFEval-Best-of-K.jsonl", best_of_k(0, [True, True], []))
    suite = PPECorrectness()
    scored = []
    for example in suite.load(str(copy)):
        count = len(example.completions)
        scored.append(rated(example, [float(-number) for number in range(count)]))
    result = suite.summarize(scored)
    # MATH: (0, 1) twice right, (2, 3) and (1, 0) wrong. GPQA: wrong.
    assert {part.name: part.value for part in result.sections} == {"MATH": 0.5, "GPQA": 0.0}
    assert result.headline.value == pytest.approx(0.25)


def test_a_benchmark_in_two_files_is_refused(copy: Path) -> None:
    write_jsonl(copy / "MATH-00001-of-00002.jsonl", best_of_k(2, [True, False], [(0, 1)]))
    with pytest.raises(DataError, match="more than once"):
        PPECorrectness().load(str(copy))


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (best_of_k(0, [True, False, True], [(0, 2)]), "sampled_conflict_pairs"),
        (best_of_k(0, [True, False], [(0, 7)]), "sampled_conflict_pairs"),
        (best_of_k(0, [True, False], [(0, 1)], response_3="more"), "response_1 scores"),
    ],
    ids=["both correct", "no such response", "no score"],
)
def test_a_row_that_does_not_fit_itself_is_refused(
    row: dict[str, Any], field: str, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "PPE-MATH-Best-of-K.jsonl", row)
    with pytest.raises(DataError) as raised:
        PPECorrectness().load(str(tmp_path))
    assert raised.value.field == field
    assert "PPE-MATH-Best-of-K.jsonl" in str(raised.value)


def test_a_folder_without_a_benchmark_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no benchmark of PPE"):
        PPECorrectness().load(str(tmp_path))
