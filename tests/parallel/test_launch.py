"""A run on several processes: what is refused before they start, and one that is lost."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treeward import processes
from treeward.errors import ConfigError
from treeward.parallel.launch import launch, run_here


def test_a_layout_that_does_not_divide_the_processes_is_told_before_they_start(
    tiny_run: Callable[..., Any],
) -> None:
    config = tiny_run("cluster.gpus_per_node=3", "policy.dtensor_cfg.tensor_parallel_size=2")
    with pytest.raises(ConfigError, match="2 x 1 of 3 processes"):
        launch(print, config)


def test_several_tasks_of_slurm_need_torchrun(
    tiny_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(ConfigError, match="srun starts torchrun"):
        launch(print, tiny_run())


def test_an_empty_world_size_is_none(
    tiny_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "")
    assert launch(lambda _, show_progress: show_progress, tiny_run()) is True


def test_the_log_of_a_process_takes_any_text(
    tiny_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a surrogate pair in an error hid the error."""
    monkeypatch.setattr(processes, "size", lambda: 2)
    config = tiny_run()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("half \ud83d")

    with pytest.raises(OSError, match="half"):
        run_here(fail, config)
    log = Path(config.logger.log_dir) / "ranks" / "rank_0.log"
    assert "half \\ud83d" in log.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_main_process_is_killed(
    tiny_run: Callable[..., Any],
    as_torchrun: Callable[..., list[subprocess.Popen[str]]],
    tmp_path: Path,
) -> None:
    tiny_run()
    main, other = as_torchrun(
        [str(Path(__file__).parent / "launched.py"), str(tmp_path / "run.yaml")]
    )
    assert main.stdout is not None and main.stdout.readline() == "together\n"
    main.kill()
    _, error = other.communicate(timeout=120)
    assert main.wait() == -signal.SIGKILL and other.returncode == 2 and "waits in vain" in error
