"""Both runs: mistakes are told before anything slow begins, and progress is seen where nobody configured logging."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from treeward.errors import ConfigError, ModelError, TreewardError
from treeward.rl.grpo import grpo
from treeward.training.loop import Loop
from treeward.training.train import train

RUNS: list[tuple[str, Callable[..., Any]]] = [("tiny_run", train), ("tiny_grpo", grpo)]


@pytest.mark.parametrize(("make", "run"), RUNS)
def test_processes_that_no_launcher_has_joined_are_refused(
    make: str, run: Callable[..., Any], request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = "not one group(?s:.*)launch"
    with pytest.raises(ConfigError, match=want):
        run(request.getfixturevalue(make)("cluster.gpus_per_node=2"), show_progress=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=want):
        run(request.getfixturevalue(make)(), show_progress=False)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(("make", "run"), RUNS)
@pytest.mark.parametrize("key", ["logger.log_dir", "checkpointing.checkpoint_dir"])
def test_a_folder_that_cannot_be_made_is_told_first(
    make: str, run: Callable[..., Any], key: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    config = request.getfixturevalue(make)(f"{key}={tmp_path}/file/folder", "policy.tokenizer.vocab_size=1")
    with pytest.raises(TreewardError, match="cannot be used") as caught:
        run(config, show_progress=False)
    assert key in str(caught.value)


def test_too_little_memory_says_what_to_set(tiny_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def validate(loop: Loop) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore.")

    monkeypatch.setattr(Loop, "validate", validate)
    with pytest.raises(ModelError, match="(?s)memory is too small.*2 GiB.*train_micro_batch_tokens"):
        train(tiny_run("rm.val_at_start=true"), show_progress=False)


@pytest.mark.parametrize(("make", "run"), RUNS)
def test_called_from_python_a_run_shows_lines_where_nobody_configured_logging(
    make: str,
    run: Callable[..., Any],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # those of pytest
    section = "rm" if make == "tiny_run" else "grpo"
    run(request.getfixturevalue(make)(f"{section}.max_num_steps=2", "checkpointing.metric_name=null"))
    shown = capsys.readouterr().err
    assert "training: 1 of 2 steps" in shown and "training: 2 of 2 steps" in shown and "after step 2" in shown
    assert logging.getLogger("treeward").handlers == []
