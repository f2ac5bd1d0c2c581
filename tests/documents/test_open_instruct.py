"""open-instruct's guide to reward modelling, section by section, and the page for those who come from elsewhere.

The automatic upload to the hub is tried in tests/training/test_train.py, the published numbers beside those of PR 1026.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from messages import chat, write_jsonl

from treeward.config.load import load_config
from treeward.model.loading import build_reward_model
from treeward.scoring.scorer import Scorer
from treeward.training.tracking import read_metrics
from treeward.training.train import train

REPOSITORY = Path(__file__).parent.parent.parent
METRICS = ("accuracy", "loss", "chosen_rewards", "rejected_rewards", "reward_margin")

# --- Implementation details ------------------------------------------------------------------------------------------


def test_the_tokenizer_pads_from_the_right(model_folder: Path) -> None:
    """Rows of two lengths, padded by the exported tokenizer, have the scores of plain transformers and of treeward."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    logs = [chat("Hi", text) for text in ("Hello!", "Hello, and how are you all?")]
    texts = [tokenizer.apply_chat_template(log, tokenize=False) for log in logs]
    batch = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
    assert tokenizer.padding_side == "right" and batch["attention_mask"][:, -1].tolist() == [0, 1]
    with torch.no_grad():
        plain = AutoModelForSequenceClassification.from_pretrained(model_folder).eval()(**batch).logits.flatten()
    ours = [score.score for score in Scorer.load(model_folder).score(logs)]
    assert plain.tolist() == pytest.approx(ours, abs=1e-5)


def test_dropout_is_off_and_the_head_is_drawn_as_documented(tiny_tokenizer: Any) -> None:
    rates = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    shape = {"model_type": "gpt2", "n_embd": 1024, "n_layer": 1, "n_head": 4, "n_positions": 64}
    model = build_reward_model({**shape, **rates}, tiny_tokenizer, seed=3).model
    model.train()
    batch = model.make_batch([[[1, 2, 3, 4], [1, 2, 5]]])
    assert torch.equal(model(batch), model(batch)) and model.training
    head = model.hf.score.weight.detach()
    assert head.shape == (1, 1024) and float(head.std()) == pytest.approx(1 / math.sqrt(1024 + 1), rel=0.1)


# --- Training metrics ------------------------------------------------------------------------------------------------


def test_the_documented_metrics(tiny_run: Callable[..., Any], tmp_path: Path) -> None:
    """Each name is logged and means what the guide says; a step of one pair has the log sigmoid of its margin."""
    one = ["policy.train_global_batch_size=1", "policy.train_micro_batch_tokens=null", "data.shuffle=false"]
    train(tiny_run("rm.max_num_steps=4", "checkpointing.enabled=false", *one), show_progress=False)
    lines = read_metrics(tmp_path / "logs" / "metrics.jsonl")
    steps = [line for line in lines if "train/rm/loss" in line]
    assert [line["episode"] for line in steps] == [1, 2, 3, 4]
    kept = next(value for line in lines for name, value in line.items() if name.endswith("/kept"))
    for line in steps:
        accuracy, loss, chosen, rejected, margin = (line[f"train/rm/{name}"] for name in METRICS)
        assert margin == pytest.approx(chosen - rejected, abs=1e-5) and accuracy == (margin > 0)
        assert loss == pytest.approx(math.log1p(math.exp(-margin)), abs=1e-5)
        assert line["epoch"] == pytest.approx(line["episode"] / kept)
    rates = [line["train/rm/lr"] for line in steps]
    assert all(before > after for before, after in pairwise(rates)), "the schedule is linear"
    (validated, *_) = [line for line in lines if "eval/rm/loss" in line]
    assert {f"eval/rm/{name}" for name in METRICS} <= set(validated)


# --- Debug, and the run of Tulu 3 ------------------------------------------------------------------------------------


def run_script(script: str, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """`bash SCRIPT` as quoted, from another folder, into `folder`; the lines of its metrics."""
    assert f"bash {script}" in (REPOSITORY / "docs" / "integrations.md").read_text(encoding="utf-8")
    folders = [f"checkpointing.checkpoint_dir={folder}/model", f"logger.log_dir={folder}/logs"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = ["bash", str(REPOSITORY / script), *folders, *overrides]
    done = subprocess.run(words, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (folder / "model" / "final" / "model.safetensors").is_file()
    return list(read_metrics(folder / "logs" / "metrics.jsonl"))


@pytest.mark.slow
def test_the_debug_script(tmp_path: Path) -> None:
    lines = run_script("scripts/train/debug/reward_modeling.sh", tmp_path, "rm.max_num_steps=2", "rm.val_batches=1")
    assert [line["episode"] for line in lines if "episode" in line] == [32, 64]


@pytest.mark.slow
def test_the_script_of_tulu_3_on_something_small(policy_folder: Path, tmp_path: Path) -> None:
    asked = {f"{n} + 1?": f"It is {n + 1}." for n in range(8)}
    rows = [{"chosen": chat(one, good), "rejected": chat(one, "No.")} for one, good in asked.items()]
    small = [
        f"policy.model_name={policy_folder}",
        f"data.train_data_path={write_jsonl(tmp_path / 'mixture.jsonl', *rows)}",
        *("policy.max_total_sequence_length=128", "policy.train_global_batch_size=4"),
        "policy.dtensor_cfg.cpu_offload=false",  # no GPU here
    ]
    lines = run_script("scripts/train/tulu3/reward_modeling_8b.sh", tmp_path, *small)
    assert [line["episode"] for line in lines if "episode" in line] == [4, 8]
    text = (REPOSITORY / "scripts/train/tulu3/reward_modeling_8b.sh").read_text(encoding="utf-8")
    assert "Needs one GPU with more than 140 GB" in text and "has not been run at this size" in text


# --- The page for those who come from elsewhere ----------------------------------------------------------------------

PAGE = (REPOSITORY / "docs" / "integrations.md").read_text(encoding="utf-8")
BASE = f"""
defaults: {REPOSITORY / "examples" / "configs" / "rm.yaml"}
data: {{_override_: true, train: {{data_path: train.jsonl}}, validation: {{data_path: val.jsonl}}}}
"""  # the file of the page's commands


def rows(section: str) -> list[tuple[str, str]]:
    """The rows of a section's table of options: theirs, ours."""
    _, _, text = PAGE.partition(f"\n### From {section}\n")
    lines = [line.strip("| ") for line in text.partition("\n### ")[0].splitlines() if line.startswith("| `")]
    return [(theirs, ours) for theirs, _, ours in (line.partition(" | ") for line in lines) if "=" in ours]


def has(found: Any, wanted: Any) -> bool:
    """Whether a value of the configuration is the one that was given, with defaults beside it."""
    if isinstance(wanted, dict):
        return all(has(found[key], value) for key, value in wanted.items())
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(has, found, wanted))
    return bool(found == (None if wanted == "default" else wanted))  # chat_template: the model's own


@pytest.mark.parametrize(("section", "number"), [("open-instruct", 17), ("TRL", 9), ("OpenRLHF", 10)])
def test_every_row_is_an_override_that_is_heeded(section: str, number: int, tmp_path: Path) -> None:
    file = tmp_path / "base.yaml"
    file.write_text(BASE, encoding="utf-8")
    found = rows(section)
    assert len(found) >= number
    for theirs, ours in found:
        overrides = [code for code in re.findall(r"`([^`]+)`", ours) if "=" in code]
        assert overrides, theirs
        for key, _, text in (override.partition("=") for override in overrides):
            config: Any = load_config(file, [f"{key}={text}"]).model_dump(mode="json", by_alias=True)
            value = reduce(lambda section, name: section[name], key.split("."), config)
            assert has(value, yaml.safe_load(text)), (theirs, value)
