from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import WORDS

from treeward.cli.main import main

Write = Callable[..., Path]

HUMAN = "\n\nHuman: What falls in {}?\n\nAssistant: {}"
ROWS = [{"context": f"What is {word}?", "response1": f"A {word}.", "response2": "No idea.", "overall_preference": -1}
        for word in WORDS]  # fmt: skip


def test_a_run_is_checked_with_its_own_sets_tokenizer_and_limits(
    write_rows: Write, policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = write_rows("train.jsonl", [*ROWS, ROWS[0] | {"context": "rain? " * 90}])
    config = write_rows("run.yaml", [
        f"policy: {{model_name: {policy_folder}, max_total_sequence_length: 100}}",
        f"data: {{train_data_path: {train}, val_data_path: {write_rows('val.jsonl', ROWS[:2])}}}",
    ])  # fmt: skip
    assert main(["check-data", "--config", str(config), "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    found = {one["name"]: one for one in json.loads((tmp_path / "out" / "results.json").read_text())["findings"]}
    assert found["too_long"]["count"] == 1 and found["validation_overlap"]["count"] == 2
    assert f"Tokens of {policy_folder}" in shown and "do not fit in 100 tokens" in shown
    assert str(tmp_path / "out" / "report.html") in shown


def test_formats_are_recognised_and_broken_rows_shown(
    write_rows: Write, policy_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transcripts = [{side: HUMAN.format(word, end) for side, end in (("chosen", "Rain."), ("rejected", "Snow."))}
                   for word in WORDS]  # fmt: skip
    broken = {"context": "Half a pair?", "response1": "\ud83d", "response2": "No.", "overall_preference": 1}
    files = [str(write_rows("a.jsonl", ["{", *ROWS, broken])), str(write_rows("b.jsonl", transcripts))]
    assert main(["check-data", *files, "--tokenizer", str(policy_folder)]) == 1
    shown = capsys.readouterr().out
    assert "a.jsonl:1: the line is not JSON" in shown and "need:  one complete JSON object" in shown
    assert f"a.jsonl:{len(ROWS) + 2}: the conversation has text that is not valid Unicode" in shown
    assert "28" in shown.partition("comparisons")[2].partition("\n")[0]
    assert main(["check-data", *files]) == 1  # the same with a tokenizer of its own
    assert "Tokens of a tokenizer trained on the first texts" in capsys.readouterr().out


def test_data_without_a_sound_row_is_one_error(
    tmp_path: Path, policy_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = ["--tokenizer", str(policy_folder)]
    data = tmp_path / "own.csv"
    data.write_text("question,good,bad\n" + "2 + 2?,4,5\n" * 12, encoding="utf-8")
    assert main(["check-data", str(data), *tokenizer, "--data-option", "prompt_key=question"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("has no chosen") == 1 and "--data-option prompt_key=" in shown.err
    options = [word for key in ("prompt_key=question", "chosen_key=good", "rejected_key=bad")
               for word in ("--data-option", key)]  # fmt: skip
    assert main(["check-data", str(data), *tokenizer, *options]) == 0


def test_mistakes_are_errors(
    write_rows: Write, policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(write_rows("a.jsonl", ROWS))
    for words, said in (
        ([], "there is nothing to check"),
        ([str(write_rows("b.jsonl", ["[", "{"]))], "b.jsonl:1"),
        ([data, "--benchmark", str(tmp_path / "none.jsonl")], "there is no such file"),
    ):
        assert main(["check-data", "--tokenizer", str(policy_folder), *words]) == 2
        assert said in capsys.readouterr().err
