"""What each process of tests/parallel/test_grpo.py does: runs of GRPO, that end well, that are stopped, that fail."""

from __future__ import annotations

import platform
import signal
from pathlib import Path
from typing import Any

from treeward import processes
from treeward.config.load import load_grpo_config
from treeward.errors import TreewardError
from treeward.parallel import ray_cluster
from treeward.parallel.stopping import stop_with
from treeward.rl import grpo as grpo_module
from treeward.rl.grpo import GRPOOutcome, grpo


def run_one(file: str, folder: Path | str, overrides: list[str]) -> GRPOOutcome:
    places = [f"checkpointing.checkpoint_dir={folder}/checkpoints", f"logger.log_dir={folder}/logs"]
    return grpo(load_grpo_config(file, [*overrides, *places]), show_progress=False)


def run_all(file: str, folder: str, cases: dict[str, list[str]]) -> dict[str, Any]:
    """Each case's run, in a folder of its own: its steps and the validation of the exported policy."""
    outcomes = {name: run_one(file, Path(folder) / name, overrides) for name, overrides in cases.items()}
    return {name: {"step": one.step, "validation": dict(one.validation)} for name, one in outcomes.items()}


def run_stopped_and_failing(
    file: str, folder: str, cases: dict[str, list[str]], stopped: str, failing: dict[str, list[str]]
) -> dict[str, Any]:
    """`run_all`; also what failing runs say, and a run that the last process is asked to stop in its first step."""
    found = run_all(file, folder, cases)
    collect, stop_file = grpo_module.collect, Path(folder) / f"stop_{processes.rank()}"
    stop_file.write_text(str(signal.SIGTERM.value), encoding="utf-8")

    def asked(run: Any, **at: int) -> Any:
        if at["step"] == 0 and processes.rank() == processes.size() - 1:
            stop_with(stop_file)
        return collect(run, **at)

    for name, overrides in failing.items():
        try:
            run_one(file, Path(folder) / name, overrides)
        except TreewardError as error:
            found[name] = str(error)
    platform.node = lambda: f"node{processes.rank()}"
    try:
        ray_cluster.start_ray_of_run(spares=False, everywhere=True)
    except TreewardError as error:
        found["nodes"] = str(error)
    grpo_module.collect = asked
    outcome = run_one(file, Path(folder) / "stopped", cases[stopped])
    found["stopped"] = [outcome.step, outcome.interrupted_by, outcome.exit_code]
    return found
