from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import assistant, read_jsonl, user
from signed import contract_of
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from verbs import Command, Ended

from treeward.cli.main import main
from treeward.model.contract import NormalizationConstants, RewardCalibration, write_contract
from treeward.scoring.scorer import Scorer

Write = Callable[..., Path]

USER = user("2 + 2?")
ANSWER = assistant("4.")
OTHER = assistant("It is 5.")
SHAPES: dict[str, dict[str, Any]] = {
    "messages": {"messages": [USER, ANSWER], "id": 1},
    "binary": {"prompt": "2 + 2?", "chosen": "4.", "rejected": "It is 5."},
    "responses": {"prompt": "2 + 2?", "responses": ["4.", "It is 5.", "4."]},
}


@pytest.fixture
def score(
    treeward: Command,
    model_folder: Path,
    tmp_path: Path,
) -> Callable[..., tuple[Ended, list[Any]]]:
    """`treeward score` of a file, and the rows that were written."""

    def run(data: Path, *options: str, shaping: str = "null") -> tuple[Ended, list[Any]]:
        output = tmp_path / "out" / "scores.jsonl"
        model = f"{{models: {model_folder}, shaping: {shaping}}}"
        ended = treeward("score", model, "--data", data, "--output", output, *options)
        # Under its final name, or as far as it came.
        written = output
        if not output.exists():
            written = output.with_name("scores.partial.jsonl")
        return ended, read_jsonl(written) if written.exists() else []

    return run


def plain_scores(folder: Path, conversations: list[list[dict[str, str]]]) -> list[float]:
    """By transformers alone, one row at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    scores = []
    for conversation in conversations:
        text = tokenizer.apply_chat_template(conversation, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            scores.append(model(input_ids=ids).logits[0, 0].item())
    return scores


def test_every_shape_of_row_is_scored_in_order_as_transformers_does(
    score: Callable[..., Any],
    write_rows: Write,
    model_folder: Path,
) -> None:
    ended, rows = score(write_rows("in.jsonl", SHAPES.values()))
    assert ended.code == 0
    good, bad = plain_scores(model_folder, [[USER, ANSWER], [USER, OTHER]])
    assert abs(good - bad) > 1e-3
    messages, binary, responses = rows
    assert messages.pop("score") == pytest.approx(good, abs=1e-5)
    for row, expected in [(binary, [good, bad]), (responses, [good, bad, good])]:
        assert row.pop("scores") == pytest.approx(expected, abs=1e-5)
    assert rows == list(SHAPES.values())  # each row is written as it came


def test_standard_streams_are_utf_8(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_note = {"messages": [USER, ANSWER], "note": "é"}
    text = json.dumps(SHAPES["responses"]) + "\n\n" + json.dumps(with_note) + "\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    assert main(["score", str(model_folder), "--data", "-"]) == 0
    out = written.getvalue().decode()
    assert "é" in out
    responses, messages = map(json.loads, out.splitlines())
    assert "score" not in responses
    assert "score" in messages


def test_a_malformed_line_is_named_and_what_was_written_stays(
    score: Callable[..., Any],
    write_rows: Write,
) -> None:
    data = write_rows("in.jsonl", [*[SHAPES["messages"]] * 300, "{not json", SHAPES["messages"]])
    ended, rows = score(data)
    assert ended.code == 2
    assert f"{data}:301" in ended.err
    assert "Traceback" not in ended.err
    assert 256 <= len(rows) <= 300
    assert all("score" in row for row in rows)


@pytest.mark.slow
def test_an_interrupted_scoring_has_no_file_under_the_final_name_and_goes_on(
    score: Callable[..., Any],
    write_rows: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed after the first batch of rows; the rest is scored by the same command, and each row
    once.
    """
    rows = [{"prompt": f"{i} + 2?", "responses": ["4", str(i + 2)]} for i in range(600)]
    data = write_rows("in.jsonl", rows)
    _, want = score(data)
    calls: list[int] = []
    (tmp_path / "out" / "scores.jsonl").unlink()
    whole = Scorer.score

    def killed(self: Scorer, *arguments: Any, **options: Any) -> Any:
        calls.append(len(arguments[0]))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(self, *arguments, **options)

    monkeypatch.setattr(Scorer, "score", killed)
    assert score(data)[0].code == 130
    folder = tmp_path / "out"
    assert sorted(path.name for path in folder.iterdir()) == [
        "scores.partial.identity.json",
        "scores.partial.jsonl",
    ]
    kept = len(read_jsonl(folder / "scores.partial.jsonl"))
    assert 0 < kept < 600
    calls[:] = [0, 0]
    ended, rows = score(data)
    assert (ended.code, rows) == (0, want)
    assert sum(calls) == 2 * (600 - kept)
    assert [path.name for path in folder.iterdir()] == ["scores.jsonl"]


def many_rows(write_rows: Write, number: int) -> Path:
    """Rows of many lengths, so that a row's neighbours differ in every place of a chunk."""
    rows = []
    for i in range(number):
        rows.append({"prompt": f"{i} + 2?", "responses": ["4" * (i % 7), str(i + 2)]})
    return write_rows("in.jsonl", rows)


@pytest.mark.parametrize("damage", ["doubled", "missing", "of another row", "within a chunk"])
def test_kept_rows_are_those_of_the_data_to_the_byte(
    damage: str,
    score: Callable[..., Any],
    write_rows: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = many_rows(write_rows, 300)
    final = tmp_path / "out" / "scores.jsonl"
    assert score(data)[0].code == 0
    whole = final.read_bytes()
    lines = whole.splitlines(keepends=True)
    kept = {
        "doubled": [*lines[:5], lines[4], *lines[5:20]],
        "missing": [*lines[:5], *lines[6:20]],
        "of another row": [*lines[:5], lines[7], *lines[6:20]],
        "within a chunk": lines[:290],
    }
    final.unlink()
    whole_score = Scorer.score
    calls = []

    def stopped(self: Scorer, *arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole_score(self, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Scorer, "score", stopped)
        assert score(data)[0].code == 130
    half = tmp_path / "out" / "scores.partial.jsonl"
    half.write_bytes(b"".join(kept[damage]))
    ended, _ = score(data)
    assert ended.code == 0
    assert final.read_bytes() == whole


def test_the_target_of_a_symlink_is_written(
    treeward: Command,
    model_folder: Path,
    write_rows: Write,
    tmp_path: Path,
) -> None:
    data = write_rows("in.jsonl", [SHAPES["messages"]])
    link = tmp_path / "link.jsonl"
    target = tmp_path / "there" / "target.jsonl"
    target.parent.mkdir()
    link.symlink_to(target)
    assert treeward("score", model_folder, "--data", data, "--output", link).code == 0
    assert link.is_symlink()
    assert len(read_jsonl(target)) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "link.jsonl", "there"}


def test_a_fifo_is_written_and_stays(
    treeward: Command,
    model_folder: Path,
    write_rows: Write,
    tmp_path: Path,
) -> None:
    data = write_rows("in.jsonl", [SHAPES["messages"]])
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert treeward("score", model_folder, "--data", data, "--output", fifo).code == 0
        assert "score" in json.loads(os.read(reader, 10_000))
    finally:
        os.close(reader)
    assert fifo.is_fifo()
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "fifo"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["MODEL", "--output", "FOLDER"], "the output is a folder"),
        (["MODEL", "--output", "DATA/scores.jsonl"], "is not a folder"),
        (["/nowhere/model", "--workers", "2"], "there is no such folder"),  # before Ray is started
        (["MODEL", "--data", "none.jsonl"], "none.jsonl"),
        (["MODEL", "--output", "DATA"], "the output is the input"),
    ],
)
def test_mistakes_are_told_first(
    words: list[str],
    said: str,
    treeward: Command,
    write_rows: Write,
    model_folder: Path,
    monkeypatch: Any,
) -> None:
    for what in (
        "treeward.parallel.ray_cluster.start_ray",
        "treeward.scoring.ensemble.load_scorer",
    ):
        monkeypatch.setattr(what, None)
    data = write_rows("in.jsonl", [SHAPES["messages"]])
    before = data.read_bytes()
    places = {
        "MODEL": model_folder,
        "DATA": data,
        "FOLDER": data.parent,
        "DATA/scores.jsonl": data / "scores.jsonl",
    }
    ended = treeward("score", "--data", data, *(places.get(word, word) for word in words))
    assert ended.code == 2
    assert said in ended.err
    assert data.read_bytes() == before


def test_rewards_beside_the_scores_and_reasons_where_there_are_none(
    score: Callable[..., Any],
    write_rows: Write,
) -> None:
    rows = [SHAPES["messages"], {"prompt": "2 + 2?", "responses": ["4.", "Four is what it is."]}]
    rows.append({"messages": [USER, assistant("and so on " * 60)]})
    ended, (one, both, long) = score(
        write_rows("in.jsonl", rows),
        shaping="{length_penalty: {threshold: 3}}",
    )
    assert ended.code == 1
    assert long["score"] is None
    assert long["reward"] is None
    assert "too long" in long["error"]
    assert one["reward"] == one["score"]  # "4." is short enough
    assert both["rewards"] == pytest.approx(
        [both["scores"][0], both["scores"][1] - 0.001 * (19 - 3)],
    )


def test_rewards_of_other_constants_are_not_mixed(
    treeward: Command,
    own_model: Path,
    write_rows: Write,
    tmp_path: Path,
) -> None:
    data = write_rows("in.jsonl", [SHAPES["messages"], "{not json"])
    model = f"{{models: {own_model}, shaping: {{normalize_rewards: true}}}}"
    for mean, said in ((0.0, "in.jsonl:2"), (0.0, "in.jsonl:2"), (1.0, "constants")):
        calibration = RewardCalibration(normalization=NormalizationConstants(mean=mean, std=1.0))
        write_contract(
            contract_of(own_model).model_copy(update={"calibration": calibration}),
            own_model,
        )
        ended = treeward("score", model, "--data", data, "--output", tmp_path / "out.jsonl")
        assert ended.code == 2
        assert said in ended.err
    assert len(read_jsonl(tmp_path / "out.partial.jsonl")) == 1
