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


def test_options_are_keys_of_a_dataset() -> None:
    config = dataset_config("d.jsonl", None, None, [*KEYS, "subset=none-such", "subset=preference"])
    assert config.prompt_key == "question"
    assert config.subset == "preference"
    own = dataset_config("d.jsonl", "my.Set", None, ["kwargs.depth=3", "kwargs.name=a"])
    assert own.kwargs == {"depth": 3, "name": "a"}
    with pytest.raises(ConfigError, match="did you mean prompt_key"):
        dataset_config("d.jsonl", "BinaryPreferenceDataset", None, ["promt_key=question"])


@pytest.mark.parametrize("verb", ["eval", "calibrate"])
def test_the_commands_read_what_training_reads_with_its_keys(
    verb: str,
    treeward: Command,
    own_model: Path,
    write_rows: Callable[..., Path],
) -> None:
    rows = [{"question": f"{n} + 1?", "yes": f"It is {n + 1}.", "no": "No idea." * (n % 3 + 1)} for n in range(12)]
    words = [verb, own_model, "--data", write_rows("d.jsonl", rows), "--device", "cpu"]
    assert treeward(*words, *(word for option in KEYS for word in ("--data-option", option))).code == 0
    ended = treeward(*words)
    assert ended.code == 2
    assert "--data-option prompt_key=question" in ended.err


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder of `save_to_disk` with two splits."""
    rows = [{"prompt": f"{n} + 1?", "chosen": f"It is {n + 1}.", "rejected": "No idea."} for n in range(12)]
    table = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def advice(treeward: Command, *words: object) -> list[str]:
    """What a command asks to add, as words of a command line."""
    ended = treeward(*words)
    assert ended.code == 2
    assert "there are several splits and none is chosen" in ended.err
    (line,) = re.findall(r"fix:   add (.*)", ended.err)
    return str(line).split()


def test_an_error_about_splits_names_the_option_of_the_verb(
    treeward: Command,
    own_model: Path,
    saved: Path,
) -> None:
    checked, calibrated = (
        ("check-data", saved),
        ("calibrate", own_model, "--data", saved, "--device", "cpu"),
    )
    for words in (checked, calibrated, ("eval", own_model, "--data", saved, "--device", "cpu")):
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
    rows = [{"prompt": f"{n} + 1?", "chosen": f"It is {n + 1}.", "rejected": "No."} for n in range(12)]
    other = write_rows("other.jsonl", rows)
    text = form.replace("SAVED", str(saved)).replace("OTHER", str(other))
    run = write_rows("run.yaml", [RUN.format(text)])
    assert advice(treeward, "train", "--config", run) == [override]
    assert advice(treeward, "check-data", "--config", run) == [
        f"{override},",
        "a",
        "key",
        "of",
        str(run),
    ]
    data = load_config(run, [override]).data
    assert ("train", str(saved)) in [(one.split, one.data_path) for one in (*data.train, *data.validation)]
    prompts = "data: {default: {dataset_name: PromptDataset}, " + text.removeprefix("data: {")
    grpo = write_rows(
        "grpo.yaml",
        [RUN.format(prompts), "env: {form: {type: rules, rule: regex, pattern: x}}"],
    )
    assert advice(treeward, "grpo", "--config", grpo) == [override]
    assert load_grpo_config(grpo, [override])
