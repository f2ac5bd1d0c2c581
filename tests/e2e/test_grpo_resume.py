"""A user's `treeward grpo` in a process of its own, killed with kill -9 at many moments, and started again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from signed import write_signed_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PATIENCE_SECONDS = 180
STEPS = 10
CONFIG = """
grpo: {{num_prompts_per_step: 4, num_generations_per_prompt: 4, max_num_epochs: 9, max_num_steps: {steps},
       val_period: 3, max_val_samples: 6, seed: 7, num_logged_samples: 2, updates_per_batch: 2,
       use_dynamic_sampling: true, batch_multiplier: 1.5, environments: [reward_model],
       gold_environment: gold, val_at_start: true}}
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
    reward_shaping: {{normalize_rewards: true, running: true}}
  gold: {{type: custom, function: planted.length}}
checkpointing: {{checkpoint_dir: {folder}/checkpoints, save_period: 2, keep_top_k: 2, metric_name: "val:raw_reward"}}
logger: {{log_dir: {folder}/logs}}
"""
STAND_STILL = """
import os, sys, time
from pathlib import Path

from treeward.cli.main import main
from treeward.rl import grpo
from treeward.rl.update import PolicyUpdater
from treeward.training import loop

folder, moment = Path(sys.argv[1]), sys.argv[2]

def before(owner, name, condition):
    function = getattr(owner, name)
    def replaced(*arguments, **options):
        if condition(*arguments):
            (folder / "standing_still").touch()
            time.sleep(600)
        return function(*arguments, **options)
    setattr(owner, name, replaced)

moments = {
    "step 1": (loop.TrackerGroup, "log", lambda group, metrics: metrics.get("train/prompts_drawn") == 6),
    "policy saved, optimiser not": (loop, "save_state", lambda folder, state, *_: state.step == 2),
    "rename": (os, "rename", lambda source, target: Path(target).name == "step_4"),
    "validated, not saved": (loop._Session, "save", lambda session: session.state.step == 6),
    "updating": (PolicyUpdater, "_step", lambda updater, *_: updater.on_step.args[0].last_epoch == 29),
    "export": (grpo.shutil, "copytree", lambda *_: True),
}
before(*moments[moment])
sys.exit(main(sys.argv[3:]))
"""
MOMENTS = ["step 1", "policy saved, optimiser not", "rename", "validated, not saved", "updating", "export"]


class User:
    """Someone who runs `treeward grpo` in a folder."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        words = ("sun", "moon", "rain", "wind", "snow", "leaf", "root", "seed", "tree", "bark", "moss", "fern")
        for name, asks in (
            ("train", [f"Say {a} and {b}." for a in words for b in words[:3]]),
            ("held_out", [f"Sing of {a}." for a in words]),
        ):
            rows = "".join(json.dumps({"prompt": ask}) + "\n" for ask in asks)
            (folder / f"{name}.jsonl").write_text(rows, encoding="utf-8")
        (folder / "run.yaml").write_text(CONFIG.format(folder=folder, model=model, steps=STEPS), encoding="utf-8")
        self.script = folder / "stand_still.py"
        self.script.write_text(textwrap.dedent(STAND_STILL), encoding="utf-8")
        self.running: list[subprocess.Popen[str]] = []

    def start(self, *, stand_still: str | None = None) -> subprocess.Popen[str]:
        head = ["-m", "treeward.cli.main"] if stand_still is None else [str(self.script), str(self.folder), stand_still]
        helpers = str(Path(__file__).parent.parent)
        path = os.pathsep.join(filter(None, (helpers, os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            [sys.executable, *head, "grpo", "--config", str(self.folder / "run.yaml")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )
        self.running.append(process)
        return process

    def finish(self) -> str:
        process = self.start()
        out, error = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, error
        return out

    def kill_when(self, happened: Callable[[], bool], *, stand_still: str | None = None) -> bool:
        """False if it has ended before."""
        process = self.start(stand_still=stand_still)
        end = time.monotonic() + PATIENCE_SECONDS
        while not happened() and process.poll() is None:
            assert time.monotonic() < end, "it never happened"
            time.sleep(0.002)
        process.kill()
        _, error = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode in (0, -signal.SIGKILL), error
        return process.returncode != 0

    def kill_at(self, moment: str) -> None:
        flag = self.folder / "standing_still"
        assert self.kill_when(flag.exists, stand_still=moment), moment
        flag.unlink()

    def last_step(self) -> int:
        file = self.folder / "logs" / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=-1)


@pytest.fixture(scope="module")
def model(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_signed_model(tmp_path_factory.mktemp("model"), tiny_tokenizer, seed=3, max_length=256)


@pytest.fixture(scope="module")
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that nothing stops."""
    user = User(tmp_path_factory.mktemp("uninterrupted"), model)
    user.finish()
    return user.folder


@pytest.fixture
def user(model: Path, tmp_path: Path) -> Iterator[User]:
    user = User(tmp_path, model)
    yield user
    for process in user.running:
        if process.poll() is None:
            process.kill()
            process.communicate()


def lines_of(file: Path) -> list[str]:
    """As text, so that NaN equals NaN; without times."""
    return [
        repr({key: value for key, value in json.loads(line).items() if key != "time" and "timing/" not in key})
        for line in file.read_text(encoding="utf-8").splitlines()
    ]


def assert_same_run(got: Path, want: Path) -> None:
    for name in ("metrics.jsonl", "samples.jsonl", "alarms.json"):
        read = lines_of if name.endswith("l") else Path.read_text
        assert read(got / "logs" / name) == read(want / "logs" / name), name
    weights, expected = (load_file(one / "checkpoints" / "final" / "model.safetensors") for one in (got, want))
    assert weights.keys() == expected.keys()
    assert [name for name, weight in weights.items() if not weight.equal(expected[name])] == []
    last = f"checkpoints/step_{STEPS}"
    weights, expected = (load_file(one / last / "optimizer.safetensors") for one in (got, want))
    assert all(tensor.equal(expected[name]) for name, tensor in weights.items())
    states = [json.loads((one / last / "training_state.json").read_text())["run"] for one in (got, want)]
    assert states[0] == states[1] and states[0]["rewards"]["reward_model"]["reward_shaping"]["running"]["count"] > 100


def test_killed_at_each_moment_it_ends_as_if_it_had_not_been(user: User, uninterrupted: Path) -> None:
    for moment in MOMENTS:
        user.kill_at(moment)
    out = user.finish()
    assert "The policy of step" in out and str(user.folder / "checkpoints" / "final") in out
    assert_same_run(user.folder, uninterrupted)


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_wherever_it_happens_to_be(user: User, uninterrupted: Path, seed: int) -> None:
    """Some steps on each time, and then at a random moment of the next."""
    draw = random.Random(seed)
    step = 0
    while step < STEPS:
        step = max(step, user.last_step()) + draw.randint(1, 3)

        def happened(step: int = step) -> bool:
            if user.last_step() < step:
                return False
            time.sleep(draw.random() * 0.4)
            return True

        if not user.kill_when(happened):
            break
    user.finish()
    assert_same_run(user.folder, uninterrupted)


def test_sigterm_saves_and_leaves(user: User, uninterrupted: Path) -> None:
    process = user.start()
    while user.last_step() < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    process.terminate()
    _, error = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 143, error
    assert "SIGTERM: finishing this step" in error and "Saved. The same command goes on from here." in error
    user.finish()
    assert_same_run(user.folder, uninterrupted)
