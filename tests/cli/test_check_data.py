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
ROWS = [
    {
        "context": f"What is {word}?",
        "response1": f"A {word}.",
        "response2": "No idea.",
        "overall_preference": -1,
    }
    for word in WORDS
]


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
    validation = write_rows("val.jsonl", ROWS[:2])
    sections = [
        f"policy: {{model_name: {policy_folder}, max_total_sequence_length: 100}}",
        f"data: {{train_data_path: {train}, val_data_path: {validation}}}",
    ]
    config = write_rows("run.yaml", sections)
    ended = treeward("check-data", "--config", config, "--out", tmp_path / "out")
    findings = json.loads((tmp_path / "out" / "results.json").read_text())["findings"]
    overlaps = [one for one in findings if one["name"] == "validation_overlap"]
    assert ended.code == 0
    assert [overlap["count"] for overlap in overlaps] == [2]
    assert f"Tokens of {policy_folder}" in ended.out
    assert str(tmp_path / "out" / "results.json") in ended.out


def test_formats_are_recognised_and_broken_rows_shown(
    treeward: Command,
    check: Callable[..., Ended],
    write_rows: Write,
) -> None:
    transcripts = []
    for word in WORDS:
        rain = HUMAN.format(word, "Rain.")
        transcripts.append({"chosen": rain, "rejected": HUMAN.format(word, "Snow.")})
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
    place = f"a.jsonl:{len(ROWS) + 2}"
    assert f"{place}: the conversation has text that is not valid Unicode" in ended.out
    own = treeward("check-data", *files)  # the same with a tokenizer of its own
    assert own.code == 1
    assert "Tokens of a tokenizer trained on the first texts" in own.out


@pytest.fixture
def own_csv(tmp_path: Path) -> Path:
    """A file with columns of its own names."""
    data = tmp_path / "own.csv"
    data.write_text("question,good,bad\n" + "2 + 2?,4,5\n" * 12, encoding="utf-8")
    return data


def test_data_without_a_sound_row_is_one_error(check: Callable[..., Ended], own_csv: Path) -> None:
    ended = check(own_csv, "--data-option", "prompt_key=question")
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.count("in no known format") == 1
    assert "--data-option prompt_key=" in ended.err


def test_columns_may_be_named(check: Callable[..., Ended], own_csv: Path) -> None:
    options = []
    for key in ("prompt_key=question", "chosen_key=good", "rejected_key=bad"):
        options += ["--data-option", key]
    assert check(own_csv, *options).code == 0


@pytest.fixture
def tied(write_rows: Write) -> Path:
    """Comparisons of two completions that are the same."""
    return write_rows("same.jsonl", [row | {"response2": row["response1"]} for row in ROWS])


def test_data_of_which_train_keeps_nothing_fail(check: Callable[..., Ended], tied: Path) -> None:
    ended = check(tied)
    assert ended.code == 1
    assert "no comparison is left to learn from" in ended.out
    assert "identical completions" in ended.out


def test_the_limit_of_a_run_counts_too(
    treeward: Command,
    write_rows: Write,
    policy_folder: Path,
) -> None:
    sections = [
        f"policy: {{model_name: {policy_folder}, max_total_sequence_length: 3}}",
        f"data: {{train_data_path: {write_rows('long.jsonl', ROWS)}}}",
    ]
    ended = treeward("check-data", "--config", write_rows("run.yaml", sections))
    assert ended.code == 1
    assert "too long" in ended.out.partition("no comparison is left")[2]


def test_validation_data_of_which_nothing_is_kept_fail(
    treeward: Command,
    write_rows: Write,
    tied: Path,
) -> None:
    ended = treeward("check-data", write_rows("good.jsonl", ROWS), "--validation", tied)
    assert ended.code == 1
    assert f"{tied}: no comparison is left to learn from" in ended.out


STARTING = """
import sys
from treeward.cli.main import main
main(["check-data", sys.argv[1]])
heavy = ("torch", "scipy", "pandas", "statsmodels")
print([name for name in heavy if name in sys.modules], file=sys.stderr)
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


def test_two_benchmarks_of_one_name_are_a_mistake(own_csv: Path, treeward: Command) -> None:
    benchmarks = ["--benchmark", str(own_csv)] * 2
    ended = treeward("check-data", own_csv, *benchmarks)
    assert ended.code == 2
    assert "two benchmarks have one name" in ended.err


def test_nothing_to_check_is_a_mistake(treeward: Command) -> None:
    ended = treeward("check-data")
    assert ended.code == 2
    assert "there is nothing to check" in ended.err
    assert "--config" in ended.err
