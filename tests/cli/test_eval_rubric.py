"""Rubrics outside RL: `treeward eval` and `treeward bon` with criteria that the rows bring."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_judge import FakeJudge, between_tags
from messages import read_jsonl
from verbs import Command

Write = Callable[..., Path]

NUMBER = {"title": "Number", "criterion": "It says the number.", "points": 3}
LECTURE = {"title": "Lecture", "criterion": "It lectures.", "points": -2}
SENTENCE = {"title": "Sentence", "criterion": "It is a sentence.", "points": 1}


def row(n: int) -> dict[str, Any]:
    """The worse completion lectures, and says the right number too where `n` is odd."""
    lecture = "Listen." if n % 2 == 0 else f"Listen: {n + 1}."
    rubric = [NUMBER, LECTURE, SENTENCE]
    return {
        "prompt": f"What is {n} + 1?",
        "chosen": f"It is {n + 1}.",
        "rejected": lecture,
        "rubric": rubric,
    }


@pytest.fixture
def judge() -> Iterator[FakeJudge]:
    """It sees a number, a lecture and a sentence."""

    def answer(request: dict[str, Any]) -> str:
        question = request["messages"][1]["content"]
        text = between_tags(request, "completion")
        if "It says the number." in question:
            met = any(character.isdigit() for character in text)
        elif "It lectures." in question:
            met = "Listen" in text
        else:
            met = text.endswith(".")
        return "[[YES]]" if met else "[[NO]]"

    made = FakeJudge(answer)
    yield made
    made.server.__exit__()


def section_of(judge: FakeJudge, **keys: Any) -> str:
    section = {"type": "rubric", "base_url": judge.url, "model": "org/m", "api_key_env": None}
    return json.dumps(section | keys)


def test_eval_reads_the_rubric_of_each_row_and_says_what_its_criteria_tell(
    treeward: Command, judge: FakeJudge, write_rows: Write, tmp_path: Path
) -> None:
    data = write_rows("rows.jsonl", [row(n) for n in range(10)])
    output = tmp_path / "eval"
    ended = treeward("eval", section_of(judge), "--data", data, "--output", output)
    assert ended.code == 0
    # Of each prompt "Sentence" is met by both. "Number" differs at the five even ones, and
    # "Lecture", a bad thing, at all ten.
    sentence = (
        "Of 30 criteria 15 are met by all completions of their prompt and 0 by none: these tell no "
        "completions apart; where a criterion differs in a pair, the better completion meets it "
        "more in 100.0%"
    )
    assert sentence in " ".join(ended.out.split())
    [result] = json.loads((output / "results.json").read_text("utf-8"))["results"]
    assert result["headline"]["value"] == 1.0
    number = result["components"]["components"]["Number"]
    assert number["always_met"] == 0.5
    assert number["agreement"]["count"] == 5
    rows = read_jsonl(output / "rubric-m" / "rows" / "examples.jsonl")
    assert rows[0]["scores"] == [1.0, pytest.approx((1 - 2) / 4)]
    page = (output / "report.html").read_text("utf-8")
    assert "The parts of the reward of rubric-m" in page


def test_criteria_may_have_the_names_of_the_tables_columns(
    treeward: Command, judge: FakeJudge, write_rows: Write, tmp_path: Path
) -> None:
    named = [NUMBER | {"title": "model"}, SENTENCE | {"title": "seconds"}]
    data = write_rows("rows.jsonl", [row(n) | {"rubric": named} for n in range(3)])
    output = tmp_path / "eval"
    ended = treeward("eval", section_of(judge), "--data", data, "--output", output)
    assert ended.code == 0
    # The table of costs names the model, which the table of accuracies does twice.
    assert [line.split()[1:2] for line in ended.out.splitlines() if line[:2] == "1 "] == [
        ["rubric-m"],
    ]
    [result] = json.loads((output / "results.json").read_text("utf-8"))["results"]
    # Every completion is a sentence, so the mean of that criterion is 1.
    assert result["usage"]["seconds"] != 1.0
    assert "model" not in result["usage"]


def test_kept_rows_are_not_used_for_another_rubric(
    treeward: Command, judge: FakeJudge, write_rows: Write, tmp_path: Path
) -> None:
    output = tmp_path / "eval"
    data = write_rows("rows.jsonl", [row(n) for n in range(3)])
    words = ("eval", section_of(judge), "--data", data, "--output", output)
    assert treeward(*words).code == 0
    asked = len(judge.requests)
    assert treeward(*words).code == 0
    assert len(judge.requests) == asked
    write_rows("rows.jsonl", [row(n) | {"rubric": [NUMBER]} for n in range(3)])
    ended = treeward(*words)
    assert ended.code == 2
    assert "another content of the columns" in ended.err


def test_two_judges_and_a_model_stand_in_one_table(
    treeward: Command, judge: FakeJudge, model_folder: Path, write_rows: Write, tmp_path: Path
) -> None:
    data = write_rows("rows.jsonl", [row(n) for n in range(4)])
    output = tmp_path / "eval"
    # As a plain sum the even and the odd rows are told apart by other criteria, with one winner.
    models = (section_of(judge, name="a"), section_of(judge, name="b", aggregation="absolute"))
    ended = treeward("eval", *models, model_folder, "--data", data, "--output", output)
    assert ended.code == 0
    table = ended.out.partition("on rows")[2]
    assert "agrees with 3" in table
    results = json.loads((output / "results.json").read_text("utf-8"))["results"]
    first, second, model = results
    assert first["agreement"]["b"]["value"] == 1.0
    assert second["agreement"]["a"]["value"] == 1.0
    assert first["usage"]["num_requests"] == 24
    assert model["usage"]["num_prompt_tokens"] > 0
    assert set(model["agreement"]) == {"a", "b"}
    assert "What the judges cost" in (output / "report.html").read_text("utf-8")


def test_best_of_n_by_a_rubric(
    treeward: Command, judge: FakeJudge, write_rows: Write, tmp_path: Path
) -> None:
    rows = []
    for n in range(12):
        responses = ["Listen.", f"It is {n + 1}.", "no"]
        # The column likes the lecture most.
        rows.append(
            {"prompt": f"What is {n} + 1?", "responses": responses, "liked": [3, 2, 1]}
            | {"rubric": [NUMBER, LECTURE, SENTENCE]}
        )
    data = write_rows("samples.jsonl", rows)
    output = tmp_path / "bon"
    words = ("--proxy", "liked", "--gold", section_of(judge), "--data", data, "--output", output)
    ended = treeward("bon", *words)
    assert ended.code == 0
    [scores] = output.glob("*/examples.jsonl")
    assert read_jsonl(scores)[0]["scores"] == [pytest.approx(-0.25), 1.0, 0.0]
