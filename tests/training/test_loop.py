"""Runs before their first step, their progress, and a validation, which depends on no batch and may
be stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from treeward.errors import ConfigError, ModelError, TreewardError
from treeward.rl.grpo import grpo
from treeward.training.loop import Loop
from treeward.training.setup import set_up
from treeward.training.train import RewardModelRun, train
from treeward.training.validation import metric_values

RUNS: list[tuple[str, Callable[..., Any]]] = [("tiny_run", train), ("tiny_grpo", grpo)]


@pytest.mark.parametrize(("make", "run"), RUNS)
def test_processes_that_no_launcher_has_joined_are_refused(
    make: str,
    run: Callable[..., Any],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
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
    config = request.getfixturevalue(make)(
        f"{key}={tmp_path}/file/folder", "policy.tokenizer.vocab_size=1"
    )
    with pytest.raises(TreewardError, match="cannot be used") as caught:
        run(config, show_progress=False)
    assert key in str(caught.value)


def test_too_little_memory_says_what_to_set(
    tiny_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def validate(loop: Loop) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore.")

    monkeypatch.setattr(Loop, "validate", validate)
    with pytest.raises(
        ModelError, match="(?s)memory is too small.*2 GiB.*train_micro_batch_tokens"
    ):
        train(tiny_run("rm.val_at_start=true"), show_progress=False)


def test_what_does_not_fit_the_model_is_refused(tiny_run: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="longer than the model's positions") as caught:
        set_up(tiny_run("policy.max_total_sequence_length=1024"))
    assert caught.value.need == "at most 512"
    with pytest.raises(ConfigError, match="vocabulary is too small"):
        set_up(tiny_run("policy.tokenizer.vocab_size=100"))


def test_the_metrics_do_not_depend_on_the_batches(tiny_run: Callable[..., Any]) -> None:
    setups = [
        set_up(tiny_run("rm.val_batches=3", option))
        for option in ("policy.train_micro_batch_tokens=100", "rm.val_micro_batch_size=24")
    ]
    few, other = (RewardModelRun(setup).validate_set("held_out") for setup in setups)
    assert few is not None and other is not None
    assert few.sums.num_units == len(few.scored) == 24
    assert metric_values(few.metrics()) == pytest.approx(metric_values(other.metrics()), abs=1e-5)
    dataset = setups[0].validation_sets["held_out"]
    for one, same, comparison in zip(few.scored, other.scored, dataset[:24], strict=True):
        assert one.scores == pytest.approx(same.scores, abs=1e-5)
        assert (one.example.ranks, one.lengths) == (comparison.ranks, comparison.lengths)
        assert (one.example.id, one.example.task_name) == (
            comparison.where,
            f"held_out/{comparison.subset}",
        )


def test_it_can_be_stopped_on_the_way_and_leaves_no_gradient(tiny_run: Callable[..., Any]) -> None:
    run = RewardModelRun(set_up(tiny_run("rm.val_micro_batch_size=4")))
    answers = iter([False, False, True])
    assert run.validate_set("held_out", lambda: next(answers)) is None
    assert run.model.training and all(
        parameter.grad is None for parameter in run.model.parameters()
    )
