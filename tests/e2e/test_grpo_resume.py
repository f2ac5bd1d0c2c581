"""A user's `treeward grpo` in a process of its own, killed with kill -9 at many moments, and started again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import WORDS
from killed_run import User, assert_same_run
from messages import write_jsonl
from signed import write_signed_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STEPS = 10
CONFIG = """
grpo: {{num_prompts_per_step: 4, num_generations_per_prompt: 4, max_num_epochs: 9, max_num_steps: {steps},
       val_period: 3, max_val_samples: 6, seed: 7, updates_per_batch: 2,
       use_dynamic_sampling: true, batch_multiplier: 1.5, gold_environment: gold, val_at_start: true}}
loss_fn: {{reference_policy_kl_penalty: 0.05, kl_in_reward: true, reference_policy_kl_type: k1}}
policy:
  model_config: {{model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
                 num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 128}}
  tokenizer: {{vocab_size: 300}}
  train_global_batch_size: 8
  train_micro_batch_tokens: 256
  max_total_sequence_length: 96
  precision: float32
  optimizer: {{kwargs: {{lr: 1.0e-2}}}}
  scheduler: {{name: linear, warmup_steps: 3}}
  generation: {{max_new_tokens: 8}}
data:
  train: {{dataset_name: PromptDataset, data_path: {folder}/train.jsonl}}
  validation: {{dataset_name: PromptDataset, data_path: {folder}/held_out.jsonl}}
env:
  reward_model:
    model_name: {model}
    precision: float32
    resources: {{gpus_per_node: 0, num_nodes: 1}}
    reward_shaping: {{length_penalty: {{threshold: 4}}}}
  gold: {{type: custom, function: planted.length}}
checkpointing: {{checkpoint_dir: {folder}/checkpoints, save_period: 2, keep_top_k: 2, metric_name: "val:raw_reward"}}
logger: {{log_dir: {folder}/logs}}
"""
MOMENTS = """
from treeward.rl import grpo
from treeward.rl.update import PolicyUpdater
from treeward.training import loop, state
from treeward.training.checkpoints import CheckpointStore

moments = {
    "step 1": (loop.TrackerGroup, "log", lambda group, metrics, **_: metrics.get("train/prompts_drawn") == 6),
    "policy saved, optimiser not": (state, "write_tensors", lambda folder, *_: folder.parent.name == ".saving_step_2"),
    "rename": (os, "rename", lambda source, target: Path(target).name == "step_4"),
    "validated, not saved": (loop.Loop, "save", lambda session: session.state.step == 6),
    "updating": (PolicyUpdater, "_step", lambda updater, *_: updater.on_step.args[0].last_epoch == 29),
    "saved, not pruned": (CheckpointStore, "prune", lambda store: (store.folder / "step_10").exists()),
    "export": (grpo.shutil, "copytree"),
    "report": (os, "replace", lambda source, target: Path(target).name == "report.html"),
}
"""


def user_in(folder: Path, model: Path) -> User:
    asked = [f"Say {a} and {b}." for a in WORDS for b in WORDS[:3]]
    write_jsonl(folder / "train.jsonl", *({"prompt": text} for text in asked))
    write_jsonl(folder / "held_out.jsonl", *({"prompt": f"Sing of {a}."} for a in WORDS))
    (folder / "run.yaml").write_text(CONFIG.format(folder=folder, model=model, steps=STEPS), encoding="utf-8")
    return User(folder, ["grpo", "--config", str(folder / "run.yaml")], MOMENTS)


@pytest.fixture(scope="module")
def model(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_signed_model(tmp_path_factory.mktemp("model"), tiny_tokenizer, seed=3, max_length=256)


@pytest.fixture(scope="module")
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that nothing stops."""
    user = user_in(tmp_path_factory.mktemp("uninterrupted"), model)
    user.finish()
    return user.folder


@pytest.fixture
def user(model: Path, tmp_path: Path) -> Iterator[User]:
    user = user_in(tmp_path, model)
    yield user
    user.close()


def test_killed_at_each_moment_it_ends_as_if_it_had_not_been(user: User, uninterrupted: Path) -> None:
    for moment in re.findall(r'^    "(.*)":', MOMENTS, re.MULTILINE):
        user.kill_at(moment)
    out = user.finish()
    assert "The policy of step" in out and str(user.folder / "checkpoints" / "final") in out
    assert_same_run(user.folder, uninterrupted)


def test_killed_wherever_it_happens_to_be_and_stopped_by_sigterm(user: User, uninterrupted: Path) -> None:
    error = user.terminate_after(1)
    assert "SIGTERM: finishing this step" in error and "Saved. The same command goes on from here." in error
    user.kill_at_random(0, STEPS)
    user.finish()
    assert_same_run(user.folder, uninterrupted)
