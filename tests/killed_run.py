"""A user's run in a process of its own, which tests kill with kill -9 and start again with the same
command."""

from __future__ import annotations

import contextlib
import json
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
from torch.utils._pytree import tree_leaves

from treeward.training.loop import StepMetrics
from treeward.training.state import read_state
from treeward.training.train import RewardModelRun

PATIENCE_SECONDS = 180
# Started in place of `treeward`, it stands still at one moment, so that the test can kill it just
# there. What it stands still in is the real thing: the wrapped function does all of its work before
# or after.
_SCRIPT = """
import os, sys, time
from pathlib import Path

from treeward.cli.main import main

folder, moment = Path(sys.argv[1]), sys.argv[2]

def before(owner, name, condition=lambda *a: True):
    function = getattr(owner, name)
    def replaced(*arguments, **options):
        if condition(*arguments):
            (folder / "standing_still").touch()
            time.sleep(600)
        return function(*arguments, **options)
    setattr(owner, name, replaced)

{moments}
before(*moments[moment])
sys.exit(main(sys.argv[3:]))
"""


class Killed(BaseException):
    """As near as a test in one process comes to kill -9: nothing that handles exceptions handles
    it."""


@contextlib.contextmanager
def killed_before_step(step: int) -> Iterator[None]:
    """Within it a run of a reward model is killed when it begins this step."""
    take_step = RewardModelRun.step

    def replaced(run: RewardModelRun, number: int) -> StepMetrics:
        if number == step:
            raise Killed
        return take_step(run, number)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RewardModelRun, "step", replaced)
        yield


@contextlib.contextmanager
def dying(owner: Any, name: str, when: Callable[..., bool] = lambda *_: True) -> Iterator[None]:
    """Within it a run is killed as soon as this function is called, and `when` says so of its
    arguments."""
    function = getattr(owner, name)

    def replaced(*arguments: Any, **options: Any) -> Any:
        if when(*arguments):
            raise Killed
        return function(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(owner, name, replaced)
        yield


class User:
    """Someone who runs `command` in a folder. `moments`: code that makes a dictionary, from a
    moment's name to the arguments of `before`: an owner, the name of its function, and when to
    stand still."""

    def __init__(self, folder: Path, command: list[str], moments: str = "moments = {}") -> None:
        self.folder, self.command = folder, command
        self.moments: list[str] = re.findall(r'^    "(.*)":', moments, re.MULTILINE)
        self.script = folder / "stand_still.py"
        self.script.write_text(_SCRIPT.format(moments=textwrap.dedent(moments)), encoding="utf-8")
        self.running: list[subprocess.Popen[str]] = []

    def start(self, *, stand_still: str | None = None) -> subprocess.Popen[str]:
        head = (
            ["-m", "treeward.cli.main"]
            if stand_still is None
            else [str(self.script), str(self.folder), stand_still]
        )
        path = os.pathsep.join(
            filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
        )
        process = subprocess.Popen(
            [sys.executable, *head, *self.command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": path},
        )
        self.running.append(process)
        return process

    def wait_until(self, happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not happened():
            assert time.monotonic() < end, "it never happened"
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)

    def finish(self) -> str:
        process = self.start()
        out, error = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, error
        return out

    def kill_at(self, moment: str) -> None:
        flag = self.folder / "standing_still"
        process = self.start(stand_still=moment)
        self.wait_until(flag.exists, process)
        process.kill()
        process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == -signal.SIGKILL
        flag.unlink()

    def last_step(self) -> int:
        file = self.folder / "logs" / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=-1)

    def close(self) -> None:
        for process in self.running:
            if process.poll() is None:
                process.kill()
                process.communicate()


def assert_same_run(got: Path, want: Path) -> None:
    """Logs (but for times), exported weights, and the weights and states of checkpoints are the
    same."""
    for file in sorted((want / "logs").glob("*.json*")):
        assert _lines(got / "logs" / file.name) == _lines(file), file.name
    names = [
        sorted(path.name for path in (folder / "checkpoints").iterdir()) for folder in (got, want)
    ]
    assert names[0] == names[1]
    for name in (name for name in names[1] if name == "final" or name.startswith("step_")):
        file_name = f"checkpoints/{name}/{'' if name == 'final' else 'model/'}model.safetensors"
        weights = load_file(got / file_name)
        expected = load_file(want / file_name)
        assert weights.keys() == expected.keys()
        assert all(weight.equal(expected[key]) for key, weight in weights.items()), name
        if name != "final":
            # NaN equals NaN
            states = [repr(read_state(one / "checkpoints" / name)) for one in (got, want)]
            assert states[0] == states[1]
            held = [
                torch.load(one / "checkpoints" / name / "optimizer.pt", weights_only=True)
                for one in (got, want)
            ]
            for one, other in zip(*map(tree_leaves, held), strict=True):
                assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
            files = [
                next((one / "checkpoints" / name / "optimizer").glob("*.safetensors"))
                for one in (got, want)
            ]
            torch.testing.assert_close(load_file(files[0]), load_file(files[1]), rtol=0, atol=0)


def _lines(file: Path) -> list[str]:
    """As text, so that NaN equals NaN; without times."""
    if file.suffix == ".json":
        return [file.read_text(encoding="utf-8")]
    return [
        repr(
            {
                key: value
                for key, value in json.loads(line).items()
                if key != "time" and "timing/" not in key
            }
        )
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
