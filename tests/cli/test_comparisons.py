"""`--data-option` reaches what a configuration reaches, and errors advise what the command takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from treeward.cli.comparisons import advice_of_a_command, data_options, dataset_config
from treeward.cli.main import main
from treeward.config.data import DatasetConfig
from treeward.data.datasets import open_dataset
from treeward.errors import ConfigError, DataError
from treeward.model.contract import read_contract

Write = Callable[..., Path]

ROWS = [{"question": f"{n} + 1?", "yes": f"It is {n + 1}.", "no": "No idea." * (n % 3 + 1)} for n in range(12)]
KEYS = ["prompt_key=question", "chosen_key=yes", "rejected_key=no"]


def test_options_are_keys_of_a_dataset(write_rows: Write) -> None:
    options = data_options([*KEYS, "subset=none-such", "subset=preference", "kwargs.depth=3", "kwargs.name=a=b"])
    assert options == {
        "prompt_key": "question", "chosen_key": "yes", "rejected_key": "no", "subset": "preference",
        "kwargs": {"depth": 3, "name": "a=b"},
    }  # fmt: skip
    config = dataset_config(str(write_rows("d.jsonl", ROWS)), None, None, data_options(KEYS))
    assert config.dataset_name == "BinaryPreferenceDataset"
    assert isinstance(config, DatasetConfig) and len(list(open_dataset(config))) == 12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("promt_key=question", "did you mean prompt_key=question"),
        ("prompt_key", "KEY=VALUE"),
        ("weight=2", "says nothing of how comparisons are read"),
        ("split=test", "--split test"),
        ("prompt_key.inner=a", "says nothing"),
        ("prompt_key=", "KEY=VALUE"),
        ("kwargs=3", "kwargs"),
    ],
)
def test_what_is_no_option(text: str, message: str, write_rows: Write) -> None:
    with pytest.raises(ConfigError, match=message):
        dataset_config(str(write_rows("d.jsonl", ROWS)), "BinaryPreferenceDataset", None, data_options([text]))


@pytest.mark.parametrize("verb", ["eval", "calibrate"])
def test_the_commands_read_what_training_reads_with_its_keys(
    verb: str, model_folder: Path, write_rows: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(write_rows("d.jsonl", ROWS))
    words = [verb, str(model_folder), "--data", data, "--output", str(tmp_path / "out"), "--device", "cpu"]
    options = [word for option in KEYS for word in ("--data-option", option)]
    assert main([*words, *options]) == 0
    capsys.readouterr()
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "--data-option prompt_key=question" in error and "dataset_name:" not in error
    assert read_contract(model_folder) is not None


def test_each_step_of_the_advice_leads_to_the_next(
    model_folder: Path, write_rows: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": row["question"], "chosen": row["yes"], "rejected": row["no"]} for row in ROWS]
    words = ["eval", str(model_folder), "--data", str(write_rows("d.jsonl", rows))]
    for options, advice in (
        ([], "--dataset-name BinaryPreferenceDataset"),
        (["--dataset-name", "BinaryPreferenceDataset"], "--data-option prompt_key=question"),
        (["--data-option", "prompt_key=question"], None),
    ):
        code = main([*words, *options])
        error = capsys.readouterr().err
        assert (code, advice is None or advice in error) == (0 if advice is None else 2, True)


def test_advice_that_is_right_for_a_command_stays() -> None:
    given = DataError("wrong", where="a:1", field="f", got=3, need="this", fix="remove the row")
    with pytest.raises(DataError) as raised, advice_of_a_command():
        raise given
    assert raised.value is given


def test_options_without_data_are_refused(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(model_folder), "--suite", "llmbar", "--data-option", "prompt_key=q"]) == 2
    assert "there is no --data" in capsys.readouterr().err
