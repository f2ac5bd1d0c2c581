"""How `eval` and `calibrate` are told what a file of comparisons is."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
from verbs import Command

from treeward.cli.comparisons import dataset_config
from treeward.config.load import load_config, load_grpo_config
from treeward.errors import ConfigError

KEYS = ["prompt_key=question", "chosen_key=yes", "rejected_key=no"]
ROWS = []
for _n in range(12):
    ROWS.append({"prompt": f"{_n} + 1?", "chosen": f"It is {_n + 1}.", "rejected": "No idea."})


def test_options_are_keys_of_a_dataset() -> None:
    config = dataset_config("d.jsonl", None, None, [*KEYS, "subset=none-such", "subset=preference"])
    assert config.prompt_key == "question"
    assert config.subset == "preference", "the last one holds"


def test_options_with_a_dot_are_keys_within_a_section() -> None:
    config = dataset_config("d.jsonl", "my.Set", None, ["kwargs.depth=3", "kwargs.name=a"])
    assert config.kwargs == {"depth": 3, "name": "a"}


def test_a_misspelt_option_has_the_nearest_key() -> None:
    with pytest.raises(ConfigError, match="did you mean prompt_key"):
        dataset_config("d.jsonl", "BinaryPreferenceDataset", None, ["promt_key=question"])


@pytest.mark.parametrize("verb", ["eval", "calibrate"])
def test_the_commands_read_what_training_reads_with_its_keys(
    verb: str,
    treeward: Command,
    own_model: Path,
    write_rows: Callable[..., Path],
) -> None:
    rows = []
    for n in range(12):
        rejected = "No idea." * (n % 3 + 1)
        rows.append({"question": f"{n} + 1?", "yes": f"It is {n + 1}.", "no": rejected})
    words = [verb, own_model, "--data", write_rows("d.jsonl", rows), "--device", "cpu"]
    options = []
    for key in KEYS:
        options += ["--data-option", key]
    assert treeward(*words, *options).code == 0
    ended = treeward(*words)
    assert ended.code == 2
    assert "--data-option prompt_key=question" in ended.err


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder of `save_to_disk` with two splits."""
    table = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def advice(treeward: Command, *words: object) -> list[str]:
    """What a command asks to add, as words of a command line."""
    ended = treeward(*words)
    assert ended.code == 2
    assert "there are several splits and none is chosen" in ended.err
    (line,) = re.findall(r"fix:   add (.*)", ended.err)
    return str(line).split()


@pytest.mark.parametrize("verb", ["check-data", "calibrate", "eval"])
def test_an_error_about_splits_names_the_option_of_the_verb(
    verb: str,
    treeward: Command,
    own_model: Path,
    saved: Path,
) -> None:
    words: list[object] = [verb, own_model, "--data", saved, "--device", "cpu"]
    if verb == "check-data":
        words = [verb, saved]
    added = advice(treeward, *words)
    assert added == ["--split", "train"]
    assert treeward(*words, *added).code == 0


RUN = "policy: {{model_config: {{model_type: qwen3}}, tokenizer: {{vocab_size: 300}}}}\n{0}\n"
FORMS = [
    ("data: {train_data_path: SAVED}", "data.train_split=train"),
    ("data: {train: {data_path: SAVED}}", "data.train_split=train"),
    ("data: {train: [{data_path: OTHER}, {data_path: SAVED}]}", "data.train[1].split=train"),
    ("data: {train_data_path: OTHER, val_data_path: SAVED}", "data.val_split=train"),
    (
        "data: {train: {data_path: OTHER}, validation: {a: {data_path: SAVED}}}",
        "data.val_split=train",
    ),
]


@pytest.mark.parametrize(("form", "override"), FORMS)
def test_an_error_about_splits_names_the_override_of_a_run(
    treeward: Command,
    saved: Path,
    write_rows: Callable[..., Path],
    form: str,
    override: str,
) -> None:
    other = write_rows("other.jsonl", ROWS)
    text = form.replace("SAVED", str(saved)).replace("OTHER", str(other))
    run = write_rows("run.yaml", [RUN.format(text)])
    assert advice(treeward, "train", "--config", run) == [override]
    place = f"{override}, a key of {run}"
    assert " ".join(advice(treeward, "check-data", "--config", run)) == place
    data = load_config(run, [override]).data
    splits = {dataset.data_path: dataset.split for dataset in [*data.train, *data.validation]}
    assert splits[str(saved)] == "train"


@pytest.mark.parametrize(("form", "override"), FORMS)
def test_an_error_about_splits_of_prompts_names_the_override(
    treeward: Command,
    saved: Path,
    write_rows: Callable[..., Path],
    form: str,
    override: str,
) -> None:
    other = write_rows("other.jsonl", ROWS)
    text = form.replace("SAVED", str(saved)).replace("OTHER", str(other))
    prompts = "data: {default: {dataset_name: PromptDataset}, " + text.removeprefix("data: {")
    environment = "env: {form: {type: rules, rule: regex, pattern: x}}"
    run = write_rows("grpo.yaml", [RUN.format(prompts), environment])
    assert advice(treeward, "grpo", "--config", run) == [override]
    assert load_grpo_config(run, [override])
