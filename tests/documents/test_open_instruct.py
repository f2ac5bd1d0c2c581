"""The document: "We support training reward models, mostly based on Learning to summarize from
human feedback."

open-instruct's guide to reward modelling, section by section, and the page for those who come from
elsewhere.

The automatic upload to the hub is tried in tests/training/test_train.py, the published numbers
beside those of PR 1026.
"""

from __future__ import annotations

import ast
import math
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from messages import chat, write_jsonl

from treeward.cli.open_instruct import NO_COUNTERPART, overrides
from treeward.config.load import load_config
from treeward.errors import ConfigError
from treeward.model.loading import build_reward_model
from treeward.scoring.scorer import Scorer
from treeward.training.tracking import read_metrics
from treeward.training.train import train

REPOSITORY = Path(__file__).parent.parent.parent
METRICS = ("accuracy", "loss", "chosen_rewards", "rejected_rewards", "reward_margin")

# --- Implementation details -----------------------------------------------------------------------


def test_the_tokenizer_pads_from_the_right(model_folder: Path) -> None:
    """Rows of two lengths, padded by the exported tokenizer, have the scores of plain transformers
    and of treeward."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    logs = [chat("Hi", text) for text in ("Hello!", "Hello, and how are you all?")]
    texts = [tokenizer.apply_chat_template(log, tokenize=False) for log in logs]
    batch = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
    assert tokenizer.padding_side == "right" and batch["attention_mask"][:, -1].tolist() == [0, 1]
    with torch.no_grad():
        plain = (
            AutoModelForSequenceClassification.from_pretrained(model_folder)
            .eval()(**batch)
            .logits.flatten()
        )
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
    assert head.shape == (1, 1024) and float(head.std()) == pytest.approx(
        1 / math.sqrt(1024 + 1), rel=0.1
    )


# --- Training metrics -----------------------------------------------------------------------------


def test_the_documented_metrics(tiny_run: Callable[..., Any], tmp_path: Path) -> None:
    """Each name is logged and means what the guide says; a step of one pair has the log sigmoid of
    its margin."""
    one = [
        "policy.train_global_batch_size=1",
        "policy.train_micro_batch_tokens=null",
        "data.shuffle=false",
    ]
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


# --- Debug, and the run of Tulu 3 -----------------------------------------------------------------


def run_script(script: str, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """`bash SCRIPT` as quoted, from another folder, into `folder`; the lines of its metrics."""
    assert f"bash {script}" in (REPOSITORY / "docs" / "coming_from.md").read_text(encoding="utf-8")
    folders = [f"checkpointing.checkpoint_dir={folder}/model", f"logger.log_dir={folder}/logs"]
    # As after `make env` alone: the `python` of PATH has no treeward, and nothing is activated
    # unless these tests run in an environment of another folder.
    without_treeward = folder / "bin"
    without_treeward.mkdir()
    (without_treeward / "python").symlink_to("/bin/false")
    environment = {**os.environ, "PATH": f"{without_treeward}:{os.environ['PATH']}"}
    environment.pop("VIRTUAL_ENV", None)
    if Path(sys.prefix) != REPOSITORY / ".venv":
        environment["VIRTUAL_ENV"] = sys.prefix
    words = ["bash", str(REPOSITORY / script), *folders, *overrides]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (folder / "model" / "final" / "model.safetensors").is_file()
    return list(read_metrics(folder / "logs" / "metrics.jsonl"))


@pytest.mark.slow
def test_the_debug_script(tmp_path: Path) -> None:
    words = ("rm.max_num_steps=2", "--learning_rate", "3e-4", "--seed=8", "rm.val_batches=1")
    lines = run_script("scripts/train/debug/reward_modeling.sh", tmp_path, *words)
    assert [line["episode"] for line in lines if "episode" in line] == [32, 64]
    assert max(line["train/rm/lr"] for line in lines if "train/rm/lr" in line) == pytest.approx(
        3e-4
    )


OPTION_NAMES = """
dataset_mixer_list dataset_mixer_eval_list dataset_mixer_list_splits dataset_mixer_eval_list_splits
dataset_transform_fn dataset_target_columns dataset_cache_mode dataset_local_cache_dir
dataset_config_hash dataset_config_eval_hash dataset_skip_cache max_token_length
max_prompt_token_length cache_dataset_only exp_name seed run_name eps learning_rate
lr_scheduler_type warm_up_steps num_train_epochs gradient_accumulation_steps
per_device_train_batch_size per_device_eval_batch_size total_episodes world_size micro_batch_size
local_batch_size batch_size num_training_steps eval_freq hf_repo_url num_evals with_tracking
wandb_project_name wandb_entity push_to_hub hf_entity hf_repo_id hf_repo_revision output_dir
gs_bucket_path model_name_or_path model_revision gradient_checkpointing dtype attn_implementation
use_cache use_peft lora_r lora_alpha lora_dropout lora_target_modules lora_modules_to_save
lora_task_type load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant
tokenizer_name_or_path tokenizer_revision trust_remote_code use_fast chat_template_name add_bos
get_tokenizer_fn tokenizer_name use_slow_tokenizer tokenizer_files_hash ground_truths_key
sft_messages_key
"""
OPTIONS = frozenset(OPTION_NAMES.split())
"""The arguments of `Args`, `ModelConfig` and `TokenizerConfig` in open-instruct e6c3044a."""
VALUES = {
    "dataset_mixer_list": "me/pairs 0.5 me/more 400",
    "dataset_mixer_eval_list": "me/held-out 1.0",
    "dataset_mixer_list_splits": "train",
    "dataset_mixer_eval_list_splits": "test",
    "learning_rate": "3e-6",
    "eps": "1e-5",
    "lr_scheduler_type": "cosine",
    "chat_template_name": "default",
    "with_tracking": "",
    "add_bos": "",
    "push_to_hub": "",
    "gradient_checkpointing": "",
    "trust_remote_code": "",
    "model_name_or_path": "me/sft",
    "tokenizer_name": "me/other",
    "hf_repo_id": "rm",
    "hf_entity": "me",
    "dataset_local_cache_dir": "cache",
    "wandb_project_name": "rm",
    "wandb_entity": "me",
}
"""An option -> its words; any other option is 7."""


def test_every_option_with_a_counterpart_is_an_override(tmp_path: Path) -> None:
    words = []
    # tokenizer_name has the same key
    for name in sorted(OPTIONS - NO_COUNTERPART.keys() - {"tokenizer_name_or_path"}):
        words += [f"--{name}", *VALUES.get(name, "7").split()]
    file = tmp_path / "base.yaml"
    file.write_text(BASE, encoding="utf-8")
    config = load_config(file, overrides(words))
    [first, second] = config.data.train
    assert (first.data_path, first.split, first.weight) == ("me/pairs", "train", 0.5)
    assert second.split == "train[:400]"
    [held_out] = config.data.validation
    assert (held_out.data_path, held_out.split) == ("me/held-out", "test")
    assert config.policy.optimizer.kwargs["lr"] == 3e-6
    assert config.policy.optimizer.kwargs["eps"] == 1e-5
    assert config.policy.train_micro_batch_size == 7
    assert config.policy.train_global_batch_size == 49
    assert config.checkpointing.checkpoint_dir == "7/7"
    assert config.hub.repo_id == "me/rm"


def test_a_batch_is_that_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """open-instruct's sizes are those of one process."""
    sizes = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "4"]
    assert "policy.train_global_batch_size=16" in overrides(sizes)
    cluster = ["cluster.gpus_per_node=8", "cluster.num_nodes=2"]
    assert "policy.train_global_batch_size=256" in overrides([*sizes, *cluster])
    monkeypatch.setenv("WORLD_SIZE", "16")  # of torchrun
    assert "policy.train_global_batch_size=256" in overrides(sizes)


@pytest.mark.parametrize("name", sorted(NO_COUNTERPART))
def test_an_option_without_a_counterpart_is_refused_with_a_remedy(name: str) -> None:
    assert name in OPTIONS
    with pytest.raises(ConfigError, match="no counterpart") as refused:
        overrides([f"--{name}", "7"])
    assert refused.value.fix


def test_an_unknown_option_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        overrides(["--learning_rat", "7"])


@pytest.mark.slow
def test_the_script_of_tulu_3_on_something_small(policy_folder: Path, tmp_path: Path) -> None:
    asked = {f"{n} + 1?": f"It is {n + 1}." for n in range(8)}
    rows = [
        {"chosen": chat(one, good), "rejected": chat(one, "No.")} for one, good in asked.items()
    ]
    small = [
        f"policy.model_name={policy_folder}",
        f"data.train_data_path={write_jsonl(tmp_path / 'mixture.jsonl', *rows)}",
        *("policy.max_total_sequence_length=128", "policy.train_global_batch_size=4"),
        "policy.dtensor_cfg.cpu_offload=false",  # no GPU here
    ]
    lines = run_script("scripts/train/tulu3/reward_modeling_8b.sh", tmp_path, *small)
    assert [line["episode"] for line in lines if "episode" in line] == [4, 8]
    text = (REPOSITORY / "scripts/train/tulu3/reward_modeling_8b.sh").read_text(encoding="utf-8")
    assert "Needs one GPU of 80 GB" in text and "has not been run at this size" in text


# --- The page for those who come from elsewhere ---------------------------------------------------

PAGE = (REPOSITORY / "docs" / "coming_from.md").read_text(encoding="utf-8")
BASE = f"""
defaults: {REPOSITORY / "examples" / "configs" / "rm.yaml"}
data: {{_override_: true, train: {{data_path: train.jsonl}}, validation: {{data_path: val.jsonl}}}}
"""  # the file of the page's commands


def rows(section: str) -> list[tuple[str, str]]:
    """The rows of a section's table of options: theirs, ours."""
    _, _, text = PAGE.partition(f"\n## From {section}\n")
    lines = [
        line.strip("| ")
        for line in text.partition("\n## ")[0].splitlines()
        if line.startswith("| `")
    ]
    return [
        (theirs, ours)
        for theirs, _, ours in (line.partition(" | ") for line in lines)
        if "=" in ours
    ]


def has(found: Any, wanted: Any) -> bool:
    """Whether a value of the configuration is the one that was given, with defaults beside it."""
    if isinstance(wanted, dict):
        return all(has(found[key], value) for key, value in wanted.items())
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(has, found, wanted))
    # chat_template: the model's own
    return bool(found == (None if wanted == "default" else wanted))


@pytest.mark.parametrize(
    ("section", "number"), [("open-instruct", 19), ("TRL", 14), ("OpenRLHF", 18)]
)
def test_every_row_is_an_override_that_is_heeded(section: str, number: int, tmp_path: Path) -> None:
    file = tmp_path / "base.yaml"
    file.write_text(BASE, encoding="utf-8")
    found = rows(section)
    assert len(found) >= number
    for theirs, ours in found:
        overrides = [code for code in re.findall(r"`([^`]+)`", ours) if "=" in code]
        assert overrides, theirs
        for key, _, text in (override.partition("=") for override in overrides):
            config: Any = load_config(file, [f"{key}={text}"]).model_dump(
                mode="json", by_alias=True
            )
            value = reduce(lambda section, name: section[name], key.split("."), config)
            assert has(value, yaml.safe_load(text)), (theirs, value)


def test_every_field_that_trl_adds_is_named() -> None:
    reward_config = pytest.importorskip("trl").RewardConfig
    section = PAGE.partition("\n## From TRL\n")[2].partition("\n## From OpenRLHF")[0]
    named = set(re.findall(r"`([a-z_]+)`", section))
    added = set(reward_config.__annotations__) - {"_VALID_DICT_FIELDS"}
    assert "center_rewards_coefficient" in added
    assert added <= named, added - named


@pytest.mark.slow
def test_the_options_of_openrlhf_are_those_of_its_parser(tmp_path: Path) -> None:
    """The wheel is downloaded; its command line is read from the source, as the package needs
    DeepSpeed to be run."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "openrlhf==0.11.2",
        "-d",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the wheel cannot be downloaded: {done.stderr[-300:]}")
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [path] = [name for name in archive.namelist() if name.endswith("cli/train_rm.py")]
        source = archive.read(path).decode()
    known = {
        node.args[0].value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
        and isinstance(node.args[0], ast.Constant)
    }  # fmt: skip
    section = PAGE.partition("\n## From OpenRLHF\n")[2].partition("OpenRLHF forces an end token")[0]
    named = set(re.findall(r"--[a-z][\w.]+", section)) - {"--config"}
    assert len(known) > 70 and len(named) > 30
    assert named <= known, named - known


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--dataset_mixer_list a 1.0 b 1.0 c 1.0 --dataset_mixer_list_splits train test", "3"),
        ("--dataset_mixer_list a 1.0 --dataset_mixer_list_splits", "got: +nothing"),
        ("--dataset_mixer_eval_list a many", "dataset_mixer_eval_list(?s:.*)a many"),
        ("--dataset_mixer_eval_list a", "dataset_mixer_eval_list(?s:.*)not whole|not whole"),
        ("--per_device_train_batch_size two", "whole number(?s:.*)two"),
        ("--warm_up_steps 0.1", "warm_up_steps(?s:.*)0.1"),
    ],
)
def test_values_that_cannot_be_read(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        overrides(words.split())
