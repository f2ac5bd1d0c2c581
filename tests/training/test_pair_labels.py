"""Training with `data.labels`: a suspect that is dropped is as a row that was never there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import WORDS

from treeward.config.data import DatasetConfig
from treeward.data.datasets import open_dataset
from treeward.data.pair_labels import pair_name
from treeward.data.preference import pair_ids
from treeward.errors import ConfigError, TreewardError
from treeward.training.train import train

STEPS = ("rm={max_num_steps: 3, max_num_epochs: 9, seed: 7}", "checkpointing.metric_name=null")


def rows(start: int, end: int) -> list[dict[str, str]]:
    made = []
    for n in range(start, end):
        chosen = f"{WORDS[n % 14]} {n} sun."
        made.append({"prompt": f"Name {n}.", "chosen": chosen, "rejected": f"{n} rain."})
    return made


def flipped(row: dict[str, str]) -> dict[str, str]:
    return row | {"chosen": row["rejected"], "rejected": row["chosen"]}


@pytest.mark.parametrize("backbone", ["trained", "frozen"])
@pytest.mark.parametrize("suspects", ["drop", "flip"])
def test_a_run_equals_one_on_mended_data(
    suspects: str,
    backbone: str,
    write_rows: Callable[..., Path],
    tiny_runs: Callable[[Path], Callable[..., Any]],
    read_weights: Callable[..., Any],
    policy_folder: Path,
    tmp_path: Path,
) -> None:
    all_rows = rows(0, 24)
    kept = [row for n, row in enumerate(all_rows) if n % 4 != 1]
    if suspects == "flip":
        kept = [flipped(row) if n % 4 == 1 else row for n, row in enumerate(all_rows)]
    data = {"labels": write_rows("all.jsonl", all_rows), "mended": write_rows("kept.jsonl", kept)}
    validation = write_rows("val.jsonl", rows(30, 36))
    lines = []
    for n, (preference, _) in enumerate(open_dataset(DatasetConfig(data_path=str(data["labels"])))):
        [pair] = pair_ids(preference, preference.completions)
        lines.append({"pair": pair_name(pair), "proposal": "drop" if n % 4 == 1 else "keep"})
    labels = write_rows("labels.jsonl", reversed(lines))
    weights = []
    for name, path in data.items():
        (tmp_path / name).mkdir()
        options = [
            f"data.train=[{{dataset_name: auto, data_path: {path}}}]",
            f"data.validation=[{{dataset_name: auto, data_path: {validation}, name: held_out}}]",
            *STEPS,
            # A tokenizer that is trained on the data would be another one.
            "policy.model_config=null",
            "policy.tokenizer.vocab_size=null",
            "policy.max_total_sequence_length=128",
            f"policy.model_name={policy_folder}",
        ]
        if name == "labels":
            options += [f"+data.labels={labels}", f"+data.suspects={suspects}"]
        if backbone == "frozen":
            options.append("+policy.reward_model_cfg.freeze_backbone=true")
        config = tiny_runs(tmp_path / name)(*options)
        weights.append(read_weights(train(config, show_progress=False).model_folder))
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        # A flipped comparison lies in the batch in the order of its row.
        assert torch.allclose(weight, weights[1][name], atol=1e-6), name


def test_what_the_loss_cannot_learn_is_refused(tiny_run: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="no labels, or the type bradley_terry"):
        tiny_run("+data.labels=x", "policy.reward_model_cfg.reward_model_type=plackett_luce")
    with pytest.raises(ConfigError, match=r"drop, or no rm\.loss\.strength"):
        tiny_run("+data.labels=x", "+data.suspects=soft", "+rm.loss.strength=margin")
    assert tiny_run("+data.labels=x,y", "+data.suspects=drop").data.labels == ("x", "y")


def test_a_run_resumes_with_its_own_labels_alone(
    write_rows: Callable[..., Path], tiny_run: Callable[..., Any]
) -> None:
    data = write_rows("data.jsonl", rows(0, 24))
    lines = []
    for n, (preference, _) in enumerate(open_dataset(DatasetConfig(data_path=str(data)))):
        [pair] = pair_ids(preference, preference.completions)
        lines.append({"pair": pair_name(pair), "proposal": "drop" if n < 4 else "keep"})
    labels = write_rows("labels.jsonl", lines)
    options = (f"data.train=[{{data_path: {data}}}]", *STEPS, f"+data.labels={labels}")
    assert train(tiny_run(*options), show_progress=False).step == 3
    # The same labels in another order are the same run.
    write_rows("labels.jsonl", reversed(lines))
    assert train(tiny_run(*options), show_progress=False).step == 3
    with pytest.raises(TreewardError, match="the training data"):
        train(tiny_run(*options, "+data.suspects=flip"), show_progress=False)
