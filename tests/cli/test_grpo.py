"""`treeward grpo`: what it prints, what it refuses, and how it ends."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from verbs import Command, Ended


@pytest.fixture
def grpo(treeward: Command, tiny_grpo: Callable[..., Any], tmp_path: Path) -> Callable[..., Ended]:
    """`treeward grpo` of the tiny configuration, of two steps, with overrides."""
    tiny_grpo()
    common = [
        "grpo.max_num_steps=2",
        "grpo.val_period=1",
        f"checkpointing.checkpoint_dir={tmp_path}/the checkpoints",
    ]
    return lambda *words: treeward("grpo", "--config", tmp_path / "run.yaml", *common, *words)


def test_a_run_ends_with_its_results_and_where_they_are(
    grpo: Callable[..., Ended],
    tmp_path: Path,
) -> None:
    ended = grpo()
    folder = tmp_path / "the checkpoints"
    assert ended.code == 0
    # In quotes, as a shell needs it.
    assert f"The policy of step 2 of 2 is in '{folder / 'final'}'\n" in ended.out
    assert f"The report of the run:  '{folder / 'report.html'}'" in ended.out
    assert re.search(r"^ +validation/reward +[\d.]{5,6}$", ended.out, re.MULTILINE)
    assert "validation after step 1: reward" in ended.err
    assert "2 of 2 steps" in ended.err
    # The run is done, so it only tells.
    again = grpo()
    assert again.code == 0
    assert "The policy of step 2 of 2" in again.out
    assert "All 2 steps are done" in again.err
    assert re.search(r"^ +validation/reward +[\d.]{5,6}$", again.out, re.MULTILINE)


def test_alarms_are_printed(grpo: Callable[..., Ended]) -> None:
    ended = grpo("grpo.watch.stop_on=[truncation]")
    told = r"^Alarm after step 1: \d+% of the completions reach the length limit"
    assert ended.code == 0
    assert re.search(told, ended.out, re.MULTILINE)
    assert "The policy of step 1 of 2" in ended.out


def test_a_run_that_fails_is_one_message_and_exit_code_2(grpo: Callable[..., Ended]) -> None:
    ended = grpo("env.planted.function=planted.fails")
    assert ended.code == 2
    assert "treeward grpo: " in ended.err
    assert "too many completions have no reward" in ended.err
