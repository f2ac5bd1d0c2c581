"""`treeward grpo`: what it prints, what it refuses, and how it ends."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treeward.cli.main import main


@pytest.fixture
def command(tiny_grpo: Callable[..., Any], tmp_path: Path) -> Callable[..., int]:
    """`treeward grpo` of the tiny configuration, of two steps, with overrides."""
    tiny_grpo()
    common = ["grpo.max_num_steps=2", "grpo.val_period=1", f"checkpointing.checkpoint_dir={tmp_path}/the checkpoints"]
    return lambda *words: main(["grpo", "--config", str(tmp_path / "run.yaml"), *common, *words])


def test_a_run_ends_with_its_results_and_where_they_are(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command() == 0
    printed = capsys.readouterr()
    final = tmp_path / "the checkpoints" / "final"
    assert f"The policy of step 2 of 2 is in '{final}'\n" in printed.out  # quoted as a shell needs it
    assert f"The report of the run:  '{tmp_path / 'the checkpoints' / 'report.html'}'" in printed.out
    assert re.search(r"^ +validation/reward +\d\.\d{4}$", printed.out, re.MULTILINE)
    assert "validation after step 1: reward" in printed.err and "2 of 2 steps" in printed.err
    assert "Traceback" not in printed.err
    assert command() == 0  # it is done
    again = capsys.readouterr()
    assert "The policy of step 2 of 2" in again.out and "All 2 steps are done" in again.err
    assert re.search(r"^ +validation/reward +\d\.\d{4}$", again.out, re.MULTILINE)


def test_alarms_are_printed(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command("grpo.watch.stop_on=[truncation]") == 0
    out = capsys.readouterr().out
    assert re.search(r"^Alarm after step 1: \d+% of the completions reach the length limit", out, re.MULTILINE)
    assert "The policy of step 1 of 2" in out


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("grpo.num_generations_per_prompt=1", "at least 2"),
        ("env.planted.function=planted.fails", "too many completions have no reward"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], word: str, message: str
) -> None:
    assert command(word) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "treeward grpo: " in captured.err
