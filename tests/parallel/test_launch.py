"""A run on several processes: started as torchrun does, with losses and stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treeward.errors import ConfigError
from treeward.parallel.launch import launch

LAUNCHED = Path(__file__).parent / "launched.py"
PATIENCE_SECONDS = 120


def test_a_layout_that_does_not_divide_the_processes_is_told_before_they_start(tiny_run: Callable[..., Any]) -> None:
    config = tiny_run("cluster.gpus_per_node=3", "policy.dtensor_cfg.tensor_parallel_size=2")
    with pytest.raises(ConfigError, match="2 x 1 of 3 processes"):
        launch(print, config)


def test_several_tasks_of_slurm_need_torchrun(tiny_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(ConfigError, match="srun starts torchrun"):
        launch(print, tiny_run())


@pytest.fixture
def started(
    tmp_path: Path, tiny_run: Callable[..., Any], as_torchrun: Callable[..., list[subprocess.Popen[str]]]
) -> Callable[..., list[subprocess.Popen[str]]]:
    """Starts a function of `launched.py` in two processes, as torchrun would."""

    def start(function: str, **cluster: object) -> list[subprocess.Popen[str]]:
        return as_torchrun([str(LAUNCHED), function, written(tmp_path, tiny_run, **cluster)])

    return start


def written(folder: Path, tiny_run: Callable[..., Any], **cluster: object) -> str:
    """A configuration with this section `cluster`."""
    tiny_run()
    (folder / "logs").mkdir()
    with (folder / "run.yaml").open("a") as file:
        file.write(f"\ncluster: {json.dumps(cluster)}\n")
    return str(folder / "run.yaml")


def last_steps(folder: Path) -> list[str]:
    return [(folder / "logs" / f"last_step_{rank}").read_text() for rank in range(2)]


def pid(folder: Path, rank: int) -> int:
    """The process of a rank, as soon as it takes steps."""
    file, end = folder / "logs" / f"pid_{rank}", time.monotonic() + PATIENCE_SECONDS
    while not file.exists() or not (text := file.read_text()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return int(text)


def ends(running: list[subprocess.Popen[str]]) -> tuple[list[int], list[str], list[str]]:
    """Exit codes, what was printed, and errors."""
    said = [process.communicate(timeout=PATIENCE_SECONDS) for process in running]
    return [process.returncode for process in running], [out for out, _ in said], [error for _, error in said]


def log(folder: Path, rank: int) -> str:
    return (folder / "logs" / "ranks" / f"rank_{rank}.log").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_process_never_comes(started: Callable[..., list[subprocess.Popen[str]]], tmp_path: Path) -> None:
    running = started("standstill", timeout_minutes=0.05)
    codes, _, errors = ends(running[:1])
    running[1].kill()
    running[1].communicate()
    assert codes == [1], errors
    for said in (errors[0], log(tmp_path, 0)):
        assert "rank 0 waits in vain" in said and "cluster.timeout_minutes=0.05" in said


@pytest.mark.slow
def test_a_signal_to_one_stops_all_at_the_same_step_and_an_error_is_told_once(
    started: Callable[..., list[subprocess.Popen[str]]], tmp_path: Path
) -> None:
    running = started("mistake_after_a_stop")
    os.kill(pid(tmp_path, 1), signal.SIGTERM)
    codes, _, errors = ends(running)
    text = "one makes a mistake after SIGTERM 143"
    assert codes == [2, 2] and text in errors[1] and "waits in vain" not in errors[0], errors
    assert len(set(last_steps(tmp_path))) == 1
    assert text in log(tmp_path, 1) and "rank 0 waits in vain" in log(tmp_path, 0)


@pytest.mark.slow
def test_the_main_process_is_killed(started: Callable[..., list[subprocess.Popen[str]]], tmp_path: Path) -> None:
    running = started("steps")
    os.kill(pid(tmp_path, 0), signal.SIGKILL)
    codes, _, errors = ends(running)
    assert codes == [-signal.SIGKILL, 2] and "waits in vain" in errors[1]
