"""The document: "This document explains how to train reward models (RM) within NeMo RL."

NeMo RL's guide to reward-model training, section by section; each quoted line is tried on something
small.

`uv run` itself needs a network: here the scripts run in this process, and the versions that uv
reads are compared.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from messages import assistant, user, write_jsonl

from treeward.compat.nemo_rl import (
    BinaryPreferenceDataset,
    HelpSteer3Dataset,
    PreferenceDataset,
    TaskDataSpec,
    Tulu3PreferenceDataset,
)
from treeward.config.load import load_config, load_grpo_config
from treeward.training.tracking import read_metrics

REPOSITORY = Path(__file__).parent.parent.parent
WriteRows = Callable[[str, Any], Path]

CAPITALS = """{
    "context": [
        {"role": "user", "content": "What's the capital of France?"},
        {"role": "assistant", "content": "The capital of France is Paris."},
        {"role": "user", "content": "Thanks! And what's the capital of Germany?"}
    ],
    "completions": [
        {"rank": 0, "completion": [{"role": "assistant", "content": "The capital of Germany is Berlin."}]},
        {"rank": 1, "completion": [{"role": "assistant", "content": "The capital of Germany is Munich."}]}
    ]
}"""


def rank_rows(start: int = 0) -> list[Any]:
    """Rows as the guide's, each with a prompt of its own."""
    return [
        json.loads(CAPITALS.replace("Germany?", f"Germany? ({n})")) for n in range(start, start + 8)
    ]


def pairs(start: int = 0) -> list[dict[str, str]]:
    return [
        {"question": f"{n} + 1?", "good": f"It is {n + 1}.", "bad": "No."}
        for n in range(start, start + 8)
    ]


# --- Launch a Training Job ------------------------------------------------------------------------

SMALL = (
    "policy.max_total_sequence_length=128",
    "policy.train_global_batch_size=4",
    "rm.max_num_steps=2",
    "rm.val_period=2",
    "rm.val_global_batch_size=4",
)


THEIRS = (
    "--config=tests/config/nemo_rl/rm.yaml",
    "logger.wandb_enabled=false",
    "logger.tensorboard_enabled=false",
)


@pytest.mark.parametrize("words", [(), THEIRS], ids=["the shipped file", "NeMo RL's"])
def test_the_script_runs(
    words: tuple[str, ...],
    uv_run: Callable[..., int],
    policy_folder: Path,
    write_rows: WriteRows,
    tmp_path: Path,
) -> None:
    """`uv run examples/run_rm.py`: HelpSteer3 and Llama-3.2-1B, here copies in the same schema."""
    rows = [
        {
            "context": f"{n} + 1?",
            "response1": f"It is {n + 1}.",
            "response2": "No.",
            "overall_preference": -2,
        }
        for n in range(16)
    ]
    train = write_rows("train.jsonl", rows[:8])
    held_out = write_rows("validation.jsonl", rows[8:])
    data = [f"+data.train_data_path={train}", f"+data.val_data_path={held_out}"]
    assert (
        uv_run("examples/run_rm.py", *words, f"policy.model_name={policy_folder}", *data, *SMALL)
        == 0
    )
    lines = read_metrics(tmp_path / "logs" / "metrics.jsonl")
    assert [line["step"] for line in lines if "train/rm/loss" in line] == [1, 2]
    assert (tmp_path / "checkpoints" / "final" / "model.safetensors").is_file()


def test_overrides_on_the_command_line(
    uv_run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """`--config examples/configs/rm.yaml policy.model_name=Qwen/Qwen2.5-1.5B` is read; the hub is
    not asked here."""
    quoted = ["--config", "examples/configs/rm.yaml", "policy.model_name=Qwen/Qwen2.5-1.5B"]
    config = load_config(REPOSITORY / quoted[1], quoted[2:])
    assert config.policy.model_name == config.policy.tokenizer.name == "Qwen/Qwen2.5-1.5B"
    assert (
        config.policy.reward_model_cfg.enabled and config.data.train[0].dataset_name == "HelpSteer3"
    )
    assert uv_run("examples/run_rm.py", *quoted, "policy.reward_model_cfg.enabled=false") == 2
    assert "policy.reward_model_cfg.enabled" in capsys.readouterr().err


def test_uv_reads_the_versions_of_constraints_txt() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["uv"]["constraint-dependencies"] == pins


@pytest.mark.slow
def test_uv_finds_versions_of_all_extras_together(tmp_path: Path) -> None:
    """`uv run` resolves every extra with the pins before it runs anything; asks the package
    index."""
    for name in ("pyproject.toml", "README.md", "src/treeward/version.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    command = [sys.executable, "-m", "uv", "lock", "--dry-run", "--project", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


# --- Datasets -------------------------------------------------------------------------------------


def test_the_attributes_of_a_dataset(write_rows: WriteRows) -> None:
    """`formatted_ds` with `context` and ranked `completions`, and `task_spec`, with the
    constructors of NeMo RL."""
    written = json.loads(CAPITALS)
    file = write_rows("rows.jsonl", [written])
    ranked = PreferenceDataset(str(file), val_data_path=str(file))
    assert ranked.task_spec == TaskDataSpec("PreferenceDataset")
    for split in ("train", "validation"):
        # of the package datasets, as theirs
        (row,) = ranked.formatted_ds[split].map(lambda row: {"seen": True})
        found = [{key: one[key] for key in ("rank", "completion")} for one in row["completions"]]
        assert row["context"] == written["context"] and found == written["completions"]
    keys = ("question", "good", "bad")
    binary = BinaryPreferenceDataset(
        str(write_rows("pairs.jsonl", pairs())), None, *keys, train_split="train"
    )
    assert binary.formatted_ds["validation"] is None and binary.formatted_ds["train"].num_rows == 8
    assert (
        binary.formatted_ds["train"][0]["completions"][0]["completion"][0]["content"] == "It is 1."
    )


def test_datasets_of_the_hub_need_no_path(
    write_rows: WriteRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HelpSteer3 and Tulu3Preference, here with rows in their schemas in the place of the
    downloads."""
    import datasets

    question = user("2 + 2?")
    good = assistant("4")
    bad = assistant("5")
    rows = {
        "nvidia/HelpSteer3": {
            "context": [question],
            "response1": "5",
            "response2": "4",
            "overall_preference": 2,
        },
        "allenai/llama-3.1-tulu-3-8b-preference-mixture": {
            "chosen": [question, good],
            "rejected": [question, bad],
        },
    }
    monkeypatch.setattr(
        datasets, "load_dataset", lambda path, *_, **__: datasets.Dataset.from_list([rows[path]])
    )
    for found, splits in ((HelpSteer3Dataset(), 2), (Tulu3PreferenceDataset(), 1)):
        sets = [rows for rows in found.formatted_ds.values() if rows is not None]
        assert len(sets) == splits and found.task_spec.task_name in (
            "HelpSteer3",
            "Tulu3Preference",
        )
        for (row,) in sets:
            assert [one["completion"] for one in row["completions"]] == [[good], [bad]]


PREFERENCE_DATASET = """
data:
  _override_: true
  dataset_name: PreferenceDataset
  train_data_path: {folder}
  val_data_paths:
    easy: {folder}
    hard: {folder}/validation.jsonl
  train_split: train
  val_split: validation
"""
BINARY_PREFERENCE_DATASET = """
data:
  _override_: true
  dataset_name: BinaryPreferenceDataset
  train_data_path: {folder}
  val_data_path: {folder}
  prompt_key: question
  chosen_key: good
  rejected_key: bad
  train_split: train
  val_split: validation
"""


@pytest.mark.parametrize(
    ("block", "rows", "sets"),
    [
        (PREFERENCE_DATASET, rank_rows, ["easy", "hard"]),
        (BINARY_PREFERENCE_DATASET, pairs, ["default"]),
    ],
    ids=["PreferenceDataset", "BinaryPreferenceDataset"],
)
def test_a_training_run_on_a_custom_dataset(
    block: str,
    rows: Any,
    sets: list[str],
    uv_run: Callable[..., int],
    policy_folder: Path,
    tmp_path: Path,
) -> None:
    """The guide's blocks, a folder with splits in the place of a dataset of the hub; its names of
    metrics."""
    folder = tmp_path / "data"
    folder.mkdir()
    for split, start in (("train", 0), ("validation", 100)):
        write_jsonl(folder / f"{split}.jsonl", *rows(start))
    file = tmp_path / "run.yaml"
    text = f"defaults: {REPOSITORY}/examples/configs/rm.yaml\n{block.format(folder=folder)}"
    file.write_text(text, encoding="utf-8")
    own = [
        f"policy.model_name={policy_folder}",
        f"checkpointing.metric_name=validation-{sets[0]}_loss",
    ]
    assert uv_run("examples/run_rm.py", "--config", str(file), *own, *SMALL) == 0
    (validated,) = [
        line for line in read_metrics(tmp_path / "logs" / "metrics.jsonl") if "eval/rm/loss" in line
    ]
    assert validated["timing/validation/total_validation_time"] > 0
    for name in sets:
        assert {f"validation-{name}/loss", f"validation-{name}/accuracy"} <= set(validated)


# --- Using Reward Models as Environments
# ----------------------------------------------------------------------------- The guide's actor is
# the one in docs/environments.md, whose code blocks are run.

ENV = """
env:
  reward_model:
    enabled: true
    model_name: "path/to/your/trained/reward/model"
    tokenizer:
      name: "path/to/your/trained/reward/model"
    precision: "bfloat16"
    batch_size: 32
    resources:
      gpus_per_node: 1
      num_nodes: 1
    reward_model_cfg:
      enabled: true
      reward_model_type: "bradley_terry"
"""


def test_the_section_in_a_configuration_of_grpo(tmp_path: Path) -> None:
    """`run_grpo_rm.py` itself is run by the walk through pull request 1026."""
    file = tmp_path / "run.yaml"
    file.write_text(
        f"defaults: {REPOSITORY}/examples/configs/grpo_rm_1B.yaml\n{ENV}", encoding="utf-8"
    )
    section = load_grpo_config(file).env["reward_model"]
    assert (
        section["models"] == "path/to/your/trained/reward/model" and section["dtype"] == "bfloat16"
    )
