from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treeward.cli.main import main
from treeward.training import train as train_module


@pytest.fixture
def command(tiny_run: Callable[..., Any], tmp_path: Path) -> Callable[..., int]:
    """`treeward train` of the tiny configuration, of two steps, with overrides."""
    tiny_run()

    def run(*words: str) -> int:
        return main(["train", "--config", str(tmp_path / "run.yaml"), "rm.max_num_steps=2", *words])

    return run


def test_a_run_ends_with_its_results_and_what_to_do_next(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command() == 0
    out = capsys.readouterr().out
    final = tmp_path / "checkpoints" / "final"
    assert "\nheld_out: accuracy " in out and "chance, 0.5; the loss, " in out
    assert f"The model of step 2 of 2 is in {final}" in out
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "2 + 2?", "responses": ["4", "5"]}) + "\n")
    advice = out.partition("Score with it:")[2].split()
    words = [str(rows) if word == "FILE.jsonl" else word for word in advice]
    monkeypatch.chdir(tmp_path)
    assert main(words[1:]) == 0
    assert len(json.loads((tmp_path / "scores.jsonl").read_text())["scores"]) == 2


@pytest.mark.parametrize(
    ("word", "named"),
    [("rm.max_num_stepz=3", "rm.max_num_stepz"), ("policy.optimizer.name=torch.optim.Adamm", "torch.optim.Adamm")],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], word: str, named: str
) -> None:
    assert command(word) == 2
    said = capsys.readouterr().err
    assert named in said and "treeward train: " in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "Saved. The same command goes on from here."),
        (["checkpointing.enabled=false"], "Nothing was saved"),
    ],
)
def test_what_ctrl_c_has_saved_is_told(
    command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    run = train_module.RewardModelRun
    step = run.step
    monkeypatch.setattr(run, "step", lambda *at: (signal.raise_signal(signal.SIGINT), step(*at))[1])
    assert command(*options) == 130
    error = capsys.readouterr().err
    assert "Stopped after step 1 of 2 (SIGINT)." in error and message in error
    if not options:
        monkeypatch.undo()
        assert command() == 0
