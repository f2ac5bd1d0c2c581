"""A user's `treeward train` in a process of its own, killed at several moments, and started again."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from killed_run import User, assert_same_run

from treeward.config.load import load_config
from treeward.training.train import train

pytestmark = pytest.mark.e2e

STEPS = 8
MOMENTS = """
from treeward.training import checkpoints, export, state
from treeward.training.train import RewardModelRun

moments = {
    "before the first checkpoint": (RewardModelRun, "step", lambda run, number: number == 2),
    "between model and optimiser of a save": (
        state, "write_tensors", lambda folder, *_: folder.parent.name == ".saving_step_4"
    ),
    "before the rename of a save": (os, "rename", lambda source, target: Path(target).name == "step_4"),
    "before old ones are removed": (checkpoints.CheckpointStore, "prune", lambda store: store.latest().step == 6),
    "in the middle of a step": (RewardModelRun, "_update_weights", lambda run, number, total: number == 7),
    "in the export": (export, "model_card"),
}
"""


@pytest.fixture
def user(tiny_run: Callable[..., Any], tmp_path: Path) -> Iterator[User]:
    """A user of the tiny configuration, made eight steps long."""
    tiny_run()
    command = ["train", "--config", str(tmp_path / "run.yaml"), f"rm.max_num_steps={STEPS}"]
    user = User(tmp_path, command, MOMENTS)
    yield user
    user.close()


def command_of(user: User) -> tuple[str, list[str]]:
    """The file and the overrides of the user's command."""
    _, _, file, *overrides = user.command
    return file, overrides


def uninterrupted(user: User, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run, in this process, that nothing stops."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    file, overrides = command_of(user)
    paths = [f"checkpointing.checkpoint_dir={folder}/checkpoints", f"logger.log_dir={folder}/logs"]
    train(load_config(file, [*overrides, *paths]), show_progress=False)
    return folder


@pytest.mark.slow
def test_killed_in_a_save_and_left_by_two_ctrl_c_it_ends_as_if_nothing_had_been(
    user: User, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    user.kill_at("before the rename of a save")
    process = user.start(stand_still="in the middle of a step")
    user.wait_until((tmp_path / "standing_still").exists, process)
    assert process.stderr is not None
    process.send_signal(signal.SIGINT)
    while "A second one leaves at once" not in (line := process.stderr.readline()):  # the first waits for the step
        assert line, "it has ended"
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "interrupted" in error and "Traceback" not in error
    assert "step_6" in [path.name for path in (tmp_path / "checkpoints").iterdir()]
    train(load_config(*command_of(user)), show_progress=False)
    assert_same_run(tmp_path, uninterrupted(user, tmp_path_factory))


@pytest.mark.slow
def test_killed_at_each_moment_it_ends_as_if_it_had_not_been(
    user: User, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for moment in re.findall(r'^    "(.*)":', MOMENTS, re.MULTILINE):
        user.kill_at(moment)
    user.finish()
    assert_same_run(tmp_path, uninterrupted(user, tmp_path_factory))
