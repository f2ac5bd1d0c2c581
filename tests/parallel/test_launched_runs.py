"""Runs in two processes: by torchrun, also stopped, and by Ray Train and a worker killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from killed_run import PATIENCE_SECONDS, User, assert_same_run

REPOSITORY = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow]
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--nproc-per-node",
    "2",
    "-m",
    "treeward",
]


def command(folder: Path, *overrides: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    settings = (
        *(
            "rm.max_num_steps=8",
            "rm.val_period=4",
            "rm.val_batches=2",
            "policy.train_global_batch_size=8",
        ),
        *("checkpointing.metric_name=null", "checkpointing.save_period=2"),
        *(f"checkpointing.checkpoint_dir={folder}/checkpoints", f"logger.log_dir={folder}/logs"),
    )
    return [
        "train",
        "--config",
        str(REPOSITORY / "examples/configs/quickstart.yaml"),
        *settings,
        *overrides,
    ]


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory,
    as_torchrun: Callable[..., list[subprocess.Popen[str]]],
) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    running = as_torchrun(["-m", "treeward", *command(folder)])
    said = [process.communicate(timeout=PATIENCE_SECONDS) for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    (out, log), (other_out, other_log) = said
    assert "The model of step 8 of 8 is in" in out and "Saved" in log
    assert not other_out and not other_log, "one process tells"
    assert "Saved" in (folder / "logs/ranks/rank_1.log").read_text()
    return folder


def test_a_worker_of_ray_that_is_killed_changes_nothing(tmp_path: Path, undisturbed: Path) -> None:
    user = User(tmp_path, command(tmp_path, "cluster.gpus_per_node=2"))
    process = user.start()
    try:
        user.wait_until(lambda: user.last_step() >= 1, process)
        workers = [one for one in children(process) if "RayTrainWorker" in " ".join(one.cmdline())]
        # they are looked for before the step: that can take as long as the rest of the run
        assert len(workers) == 2
        user.wait_until(lambda: user.last_step() >= 3, process)
        workers[1].kill()
        out, log = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        user.close()
    assert process.returncode == 0, log
    assert "its process has died" in log and "Restart 1 of 3, from the last checkpoint." in log
    assert "The model of step 8 of 8 is in" in out
    assert_same_run(tmp_path, undisturbed)


def test_torchrun_stops_all_when_one_is_stopped_and_goes_on(
    tmp_path: Path, undisturbed: Path
) -> None:
    stop_one_and_go_on(tmp_path, command(tmp_path))
    assert_same_run(tmp_path, undisturbed)


def test_torchrun_of_grpo_that_is_stopped_goes_on(
    tmp_path: Path, tiny_grpo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_grpo()
    # Its reward is a function of `planted.py`.
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "tests"))
    grpo = ["grpo", "--config", str(tmp_path / "run.yaml"), "grpo.max_num_steps=8"]
    grpo += ["checkpointing.save_period=2"]
    stop_one_and_go_on(tmp_path, grpo)
    whole = tmp_path / "whole"
    folders = [f"checkpointing.checkpoint_dir={whole}/checkpoints", f"logger.log_dir={whole}/logs"]
    subprocess.run([*TORCHRUN, *grpo, *folders], check=True, timeout=PATIENCE_SECONDS)
    assert_same_run(tmp_path, whole)


def stop_one_and_go_on(folder: Path, words: list[str]) -> None:
    """`words` by torchrun, whose second process gets a SIGTERM after two steps; then once more."""
    process = subprocess.Popen([*TORCHRUN, *words], stderr=subprocess.PIPE, text=True)
    user = User(folder, [])
    user.wait_until(lambda: user.last_step() >= 2, process)
    ranks = [one for one in children(process) if "treeward" in " ".join(one.cmdline())]
    next(one for one in ranks if one.environ()["RANK"] == "1").send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1, log
    # One process tells.
    assert log.count("(SIGTERM). Saved. The same command resumes the run.") == 1, log
    assert not (folder / "checkpoints/final").exists()
    subprocess.run([*TORCHRUN, *words], check=True, timeout=PATIENCE_SECONDS)


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)
