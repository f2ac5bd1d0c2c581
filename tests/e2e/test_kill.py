"""A user's `treeward train` or `treeward grpo` in a process of its own, killed at many moments, and
started again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from killed_run import User, assert_same_run

from treeward.config.load import load_config, load_grpo_config
from treeward.rl.grpo import grpo
from treeward.training.train import train

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TRAIN = """
from treeward.training import checkpoints, state
from treeward.training import train as train_module
from treeward.training.train import RewardModelRun

moments = {
    "before the first checkpoint": (RewardModelRun, "step", lambda run, number: number == 2),
    "between model and optimiser of a save": (
        state, "write_tensors", lambda folder, *_: folder.parent.name == ".saving_step_4"
    ),
    "before the rename of a save": (os, "rename", lambda source, target: Path(target).name == "step_4"),
    "before old ones are removed": (checkpoints.CheckpointStore, "prune", lambda store: store.latest().step == 6),
    "in the middle of a step": (train_module, "advance", lambda scheduler: scheduler.last_epoch == 6),
    "in the export": (train_module, "model_card"),
}
"""
GRPO = """
from treeward.rl import grpo
from treeward.rl.update import PolicyUpdater
from treeward.training import loop, state
from treeward.training.checkpoints import CheckpointStore

moments = {
    "step 1": (loop.TrackerGroup, "log", lambda group, metrics, **_: metrics.get("train/prompts_drawn") == 6),
    "policy saved, optimiser not": (state, "write_tensors", lambda folder, *_: folder.parent.name == ".saving_step_2"),
    "rename": (os, "rename", lambda source, target: Path(target).name == "step_4"),
    "validated, not saved": (loop.Loop, "save", lambda session: session.state.step == 6),
    "updating": (
        PolicyUpdater, "micro_batch_loss", lambda updater, *_: updater.on_step.args[0].last_epoch == 29
    ),
    "saved, not pruned": (CheckpointStore, "prune", lambda store: (store.folder / "step_10").exists()),
    "export": (loop.shutil, "copytree"),
    "report": (os, "replace", lambda source, target: Path(target).name == "report.html"),
}
"""
REWARDS = "model_name: {model}, precision: float32, resources: {{gpus_per_node: 0, num_nodes: 1}}"
ALL_OF_GRPO = (
    (
        "grpo={max_num_steps: 10, val_period: 3, val_at_start: true, updates_per_batch: 2, "
        "gold_environment: gold}"
    ),
    "grpo={use_dynamic_sampling: true, batch_multiplier: 1.5}",
    "loss_fn={reference_policy_kl_penalty: 0.05, kl_in_reward: true, reference_policy_kl_type: k1}",
    "policy={train_global_batch_size: 8, scheduler: {name: linear, warmup_steps: 3}}",
    "env.gold={type: custom, function: planted.length}",
    *("~env.planted", "checkpointing.metric_name=val:raw_reward"),
)


@pytest.fixture
def user(
    request: Any, tiny_run: Any, tiny_grpo: Any, signed_model: Any, tmp_path: Path
) -> Iterator[User]:
    """A user of the tiny configuration of `train`, made eight steps long, or with the parameter
    "grpo" of that verb."""
    verb = getattr(request, "param", "train")
    words = ["rm.max_num_steps=8"]
    if verb == "grpo":
        section = REWARDS.format(model=signed_model(max_length=256))
        shaping = "reward_shaping: {length_penalty: {threshold: 4}}"
        words = [*ALL_OF_GRPO, f"env.reward_model={{{section}, {shaping}}}"]
    (tiny_grpo if verb == "grpo" else tiny_run)()
    user = User(
        tmp_path,
        [verb, "--config", str(tmp_path / "run.yaml"), *words],
        GRPO if verb == "grpo" else TRAIN,
    )
    yield user
    user.close()


@pytest.fixture
def uninterrupted(user: User, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """A function that gives the folder of the same run, in this process, that nothing stops."""

    def run() -> Path:
        folder = tmp_path_factory.mktemp("uninterrupted")
        verb, _, file, *words = user.command
        words += [
            f"checkpointing.checkpoint_dir={folder}/checkpoints",
            f"logger.log_dir={folder}/logs",
        ]
        if verb == "grpo":
            grpo(load_grpo_config(file, words), show_progress=False)
        else:
            train(load_config(file, words), show_progress=False)
        return folder

    return run


@pytest.mark.parametrize("user", ["train", "grpo"], indirect=True)
def test_killed_at_each_moment_it_ends_as_if_it_had_not_been(
    user: User, uninterrupted: Callable[[], Path]
) -> None:
    for moment in user.moments:
        user.kill_at(moment)
    assert str(user.folder / "checkpoints" / "final") in user.finish()
    assert_same_run(user.folder, uninterrupted())
