from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import WORDS
from messages import write_jsonl
from verbs import Command, Ended

Write = Callable[..., Path]

HUMAN = "\n\nHuman: What falls in {}?\n\nAssistant: {}"
ROWS = [{"context": f"What is {word}?", "response1": f"A {word}.", "response2": "No idea.", "overall_preference": -1}
        for word in WORDS]  # fmt: skip


@pytest.fixture
def check(treeward: Command, policy_folder: Path) -> Callable[..., Ended]:
    """`treeward check-data` with a tokenizer."""
    return lambda *words: treeward("check-data", "--tokenizer", policy_folder, *words)


def test_a_run_is_checked_with_its_own_sets_and_tokenizer(
    treeward: Command,
    write_rows: Write,
    policy_folder: Path,
    tmp_path: Path,
) -> None:
    train = write_rows("train.jsonl", [*ROWS, ROWS[0] | {"context": "rain? " * 90}])
    config = write_rows("run.yaml", [
        f"policy: {{model_name: {policy_folder}, max_total_sequence_length: 100}}",
        f"data: {{train_data_path: {train}, val_data_path: {write_rows('val.jsonl', ROWS[:2])}}}",
    ])  # fmt: skip
    ended = treeward("check-data", "--config", config, "--out", tmp_path / "out")
    found = {one["name"]: one for one in json.loads((tmp_path / "out" / "results.json").read_text())["findings"]}
    assert ended.code == 0
    assert found["validation_overlap"]["count"] == 2
    assert f"Tokens of {policy_folder}" in ended.out
    assert str(tmp_path / "out" / "results.json") in ended.out


def test_formats_are_recognised_and_broken_rows_shown(
    treeward: Command,
    check: Callable[..., Ended],
    write_rows: Write,
) -> None:
    transcripts = [{"chosen": HUMAN.format(word, "Rain."), "rejected": HUMAN.format(word, "Snow.")} for word in WORDS]
    broken = {
        "context": "Half a pair?",
        "response1": "\ud83d",
        "response2": "No.",
        "overall_preference": 1,
    }
    files = [write_rows("a.jsonl", ["{", *ROWS, broken]), write_rows("b.jsonl", transcripts)]
    ended = check(*files)
    assert ended.code == 1
    assert "28" in ended.out.partition("comparisons")[2].partition("\n")[0]
    assert "a.jsonl:1: the line is not JSON" in ended.out
    assert "need:  one complete JSON object" in ended.out
    assert f"a.jsonl:{len(ROWS) + 2}: the conversation has text that is not valid Unicode" in ended.out
    own = treeward("check-data", *files)  # the same with a tokenizer of its own
    assert own.code == 1
    assert "Tokens of a tokenizer trained on the first texts" in own.out


def test_data_without_a_sound_row_is_one_error(check: Callable[..., Ended], tmp_path: Path) -> None:
    data = tmp_path / "own.csv"
    data.write_text("question,good,bad\n" + "2 + 2?,4,5\n" * 12, encoding="utf-8")
    ended = check(data, "--data-option", "prompt_key=question")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.count("in no known format") == 1
    assert "--data-option prompt_key=" in ended.err
    keys = ("prompt_key=question", "chosen_key=good", "rejected_key=bad")
    assert check(data, *(word for key in keys for word in ("--data-option", key))).code == 0


def test_data_of_which_train_keeps_nothing_fail(
    treeward: Command,
    write_rows: Write,
    policy_folder: Path,
    tmp_path: Path,
) -> None:
    same = write_rows("same.jsonl", [row | {"response2": row["response1"]} for row in ROWS])
    ended = treeward("check-data", "--tokenizer", policy_folder, same)
    assert ended.code == 1
    assert "no comparison is left to learn from" in ended.out
    assert "identical completions" in ended.out

    long = write_rows("long.jsonl", ROWS)
    config = write_rows("run.yaml", [
        f"policy: {{model_name: {policy_folder}, max_total_sequence_length: 3}}",
        f"data: {{train_data_path: {long}}}",
    ])  # fmt: skip
    of_run = treeward("check-data", "--config", config)
    assert of_run.code == 1
    assert "too long" in of_run.out.partition("no comparison is left")[2]

    held_out = treeward("check-data", write_rows("good.jsonl", ROWS), "--validation", same)
    assert held_out.code == 1
    assert f"{same}: no comparison is left to learn from" in held_out.out


STARTING = """
import sys
from treeward.cli.main import main
main(["check-data", sys.argv[1]])
print([name for name in ("torch", "scipy", "pandas", "statsmodels") if name in sys.modules], file=sys.stderr)
"""


def test_checking_data_imports_nothing_heavy(tmp_path: Path) -> None:
    """It took 12 seconds of a busy processor, most of them for one interval of Wilson's."""
    path = write_jsonl(
        tmp_path / "rows.jsonl",
        *[{"prompt": f"{i}?", "chosen": "Yes.", "rejected": "No."} for i in range(9)],
    )
    ended = subprocess.run(
        [sys.executable, "-c", STARTING, str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stderr.splitlines()[-1] == "[]"


def test_nothing_to_check_is_a_mistake(treeward: Command) -> None:
    ended = treeward("check-data")
    assert ended.code == 2
    assert "there is nothing to check" in ended.err
    assert "--config" in ended.err
