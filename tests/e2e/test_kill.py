"""A user's run in a process of its own, killed at several moments, and started again with the same command."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from treeward.config.load import load_config
from treeward.training.state import read_state
from treeward.training.tracking import read_metrics
from treeward.training.train import train

pytestmark = pytest.mark.e2e

PATIENCE_SECONDS = 120

# Started in place of `treeward`, it stands still at one moment, so that the test can kill it just there. What it stands
# still in is the real thing: the wrapped function does all of its work before or after.
STAND_STILL = """
import functools, os, shutil, sys, time
from pathlib import Path

from treeward.cli.main import main
from treeward.training import checkpoints, export, loop
from treeward.training.train import RewardModelRun

folder, moment = Path(sys.argv[1]), sys.argv[2]

def stand_still():
    (folder / "standing_still").touch()
    time.sleep(600)

def before(module, name, condition=lambda *a: True):
    function = getattr(module, name)
    def replaced(*arguments, **options):
        if condition(*arguments):
            stand_still()
        return function(*arguments, **options)
    setattr(module, name, replaced)

if moment == "before the first checkpoint":
    before(RewardModelRun, "step", lambda run, number: number == 2)
elif moment == "between the model and the optimiser of a save":
    before(loop, "save_state", lambda folder, state, *_: state.step == 4)
elif moment == "before the rename of a save":
    before(os, "rename", lambda source, target: Path(target).name == "step_4")
elif moment == "after the rename, before the old ones are removed":
    before(checkpoints.CheckpointStore, "_prune", lambda store: store.latest().step == 6)
elif moment == "in the middle of a step":
    before(RewardModelRun, "_update_weights", lambda run, number, total: number == 7)
elif moment == "in the export":
    before(export, "model_card")
else:
    raise SystemExit(f"no such moment: {moment}")
sys.exit(main(sys.argv[3:]))
"""
MOMENTS = re.findall(r'moment == "(.*)"', STAND_STILL)
MOST_TELLING = [MOMENTS[0], MOMENTS[1], MOMENTS[2], MOMENTS[5]]


class User:
    """Someone who runs `treeward train` in a folder."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self.folder, self.command = folder, command
        self.script = folder / "stand_still.py"
        self.script.write_text(textwrap.dedent(STAND_STILL), encoding="utf-8")
        self.metrics = folder / "logs" / "metrics.jsonl"
        self.running: list[subprocess.Popen[str]] = []

    def start(self, *, stand_still: str | None = None) -> subprocess.Popen[str]:
        head = ["-m", "treeward.cli.main"] if stand_still is None else [str(self.script), str(self.folder), stand_still]
        process = subprocess.Popen(
            [sys.executable, *head, *self.command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        )
        self.running.append(process)
        return process

    def finish(self) -> None:
        process = self.start()
        _, error = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, error

    def kill_when(self, happened: Callable[[], bool], *, stand_still: str | None = None) -> None:
        process = self.start(stand_still=stand_still)
        wait_until(happened, process)
        process.kill()
        process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == -signal.SIGKILL

    def kill_at(self, moment: str) -> None:
        flag = self.folder / "standing_still"
        self.kill_when(flag.exists, stand_still=moment)
        flag.unlink()

    def last_step(self) -> int:
        lines = read_metrics(self.metrics) if self.metrics.exists() else []
        return max((int(line["step"]) for line in lines), default=0)


def wait_until(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not happened():
        assert time.monotonic() < end, "it never happened"
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


@pytest.fixture
def user(tiny_run: Callable[..., Any], tmp_path: Path) -> Iterator[User]:
    """A user of the tiny configuration, made eight steps long."""
    tiny_run()
    user = User(tmp_path, ["train", "--config", str(tmp_path / "run.yaml"), "rm.max_num_steps=8"])
    yield user
    for process in user.running:
        if process.poll() is None:
            process.kill()
            process.communicate()


def uninterrupted(user: User, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run, in this process, that nothing stops."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    _, _, file, *overrides = user.command
    paths = [f"checkpointing.checkpoint_dir={folder}/checkpoints", f"logger.log_dir={folder}/logs"]
    train(load_config(file, [*overrides, *paths, f"data.cache_dir={folder}/cache"]), show_progress=False)
    return folder


def without_times(metrics: Path) -> list[str]:
    """As text, so that NaN equals NaN."""
    return [
        repr({name: value for name, value in line.items() if name != "time" and "timing/" not in name})
        for line in read_metrics(metrics)
    ]


def assert_same_run(got: Path, want: Path) -> None:
    assert without_times(got / "logs" / "metrics.jsonl") == without_times(want / "logs" / "metrics.jsonl")
    checkpoints = [sorted(path.name for path in (folder / "checkpoints").iterdir()) for folder in (got, want)]
    assert checkpoints[0] == checkpoints[1]
    for name in checkpoints[1]:
        file = f"checkpoints/{name}/{'' if name == 'final' else 'model/'}model.safetensors"
        weights, expected = load_file(got / file), load_file(want / file)
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weight, expected[key]) for key, weight in weights.items()), name
        if name != "final":
            assert read_state(got / "checkpoints" / name) == read_state(want / "checkpoints" / name)


def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(
    user: User, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for moment in MOST_TELLING:
        user.kill_at(moment)
    user.finish()
    assert_same_run(tmp_path, uninterrupted(user, tmp_path_factory))


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_each_moment_on_its_own(
    user: User, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, moment: str
) -> None:
    user.kill_at(moment)
    user.finish()
    assert_same_run(tmp_path, uninterrupted(user, tmp_path_factory))


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2, 3, 5, 7])
def test_killed_wherever_it_happens_to_be_after_a_step(
    user: User, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, step: int
) -> None:
    user.kill_when(lambda: user.last_step() >= step)
    user.finish()
    assert_same_run(tmp_path, uninterrupted(user, tmp_path_factory))


@pytest.mark.slow
def test_sigterm_saves_and_leaves_and_the_same_command_goes_on(
    user: User, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    user.command.append("rm.max_num_steps=40")
    user.command.append("checkpointing.save_period=100")
    process = user.start()
    wait_until(lambda: user.last_step() >= 3, process)
    process.terminate()
    _, error = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 143
    assert "SIGTERM: finishing this step" in error and "The same command goes on from here." in error
    saved = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert len(saved) == 1 and int(saved[0].removeprefix("step_")) < 40
    user.finish()
    want = uninterrupted(user, tmp_path_factory)
    assert without_times(user.metrics) == without_times(want / "logs" / "metrics.jsonl")
    got, expected = (load_file(folder / "checkpoints" / "final" / "model.safetensors") for folder in (tmp_path, want))
    assert all(torch.equal(weight, expected[name]) for name, weight in got.items())


def test_two_ctrl_c_leave_at_once(user: User, tmp_path: Path) -> None:
    process = user.start(stand_still="in the middle of a step")
    wait_until((tmp_path / "standing_still").exists, process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None  # the first one waits for the step
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "A second one leaves at once" in error and "interrupted" in error and "Traceback" not in error
    assert "step_6" in [path.name for path in (tmp_path / "checkpoints").iterdir()]


@pytest.mark.slow
def test_hh_harmless_goes_on_after_kill_9(
    shared_data: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    train_file, val_file = (shared_data / "hh_harmless" / f"{split}.jsonl.gz" for split in ("train", "validation"))
    config = tmp_path / "run.yaml"
    config.write_text(
        f"""
rm: {{max_num_steps: 24, val_period: 8, val_batches: 4, val_global_batch_size: 16, seed: 11}}
policy:
  model_config: {{model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,
                 num_attention_heads: 4, max_position_embeddings: 1024}}
  tokenizer: {{vocab_size: 2000}}
  train_global_batch_size: 16
  train_micro_batch_tokens: 4096
  max_total_sequence_length: 1024
  precision: float32
  optimizer: {{kwargs: {{lr: 1.0e-3}}}}
data:
  train: {{dataset_name: hh-rlhf, data_path: {train_file}}}
  validation: [{{dataset_name: hh-rlhf, data_path: {val_file}, name: harmless}}]
  cache_dir: {tmp_path}/cache
checkpointing: {{checkpoint_dir: {tmp_path}/checkpoints, save_period: 4, keep_top_k: 2,
                metric_name: "val:validation-harmless_accuracy"}}
logger: {{log_dir: {tmp_path}/logs}}
""",
        encoding="utf-8",
    )
    user = User(tmp_path, ["train", "--config", str(config)])
    for step in (3, 9, 17):
        user.kill_when(lambda step=step: user.last_step() >= step)  # type: ignore[misc]
    user.finish()
    assert_same_run(tmp_path, uninterrupted(user, tmp_path_factory))
