"""A run that was stopped goes on as if it had not been: at any moment, by a crash or by a
signal."""

from __future__ import annotations

import math
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_run import assert_same_run, dying, killed_before_step

from treeward.errors import CheckpointError
from treeward.model.contract import read_contract, write_contract
from treeward.training import state
from treeward.training import train as train_module
from treeward.training.checkpoints import CheckpointStore
from treeward.training.optimisation import SkippedSteps
from treeward.training.state import read_state, stored_metric
from treeward.training.tracking import read_metrics
from treeward.training.train import RewardModelRun, train


@pytest.fixture(scope="module")
def uninterrupted(
    tiny_runs: Callable[[Path], Callable[..., Any]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a run of the tiny configuration that nothing stops."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    train(tiny_runs(folder)(), show_progress=False)
    return folder


def before_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], None]) -> None:
    """Have `act` called when `step` steps are done and the next one begins."""
    take_step = RewardModelRun.step

    def replaced(self: RewardModelRun, number: int) -> Any:
        if number == step + 1:
            act()
        return take_step(self, number)

    monkeypatch.setattr(RewardModelRun, "step", replaced)


MOMENTS: list[tuple[Any, ...]] = [
    (RewardModelRun, "step", lambda run, number: number == 1),
    (RewardModelRun, "step", lambda run, number: number == 2),
    (state, "write_tensors"),  # the model is written, the optimiser not
    (RewardModelRun, "step", lambda run, number: number == 4),
    (os, "rename", lambda source, target: str(target).endswith("step_4")),
    (CheckpointStore, "prune", lambda store: len(store.all()) > 1),
    (RewardModelRun, "step", lambda run, number: number == 6),
    (train_module, "model_card"),
]


def test_a_run_that_dies_at_each_of_many_moments_goes_on_exactly(
    tiny_run: Callable[..., Any], tmp_path: Path, uninterrupted: Path
) -> None:
    for moment in MOMENTS:
        with dying(*moment):
            train(tiny_run(), show_progress=False)
    train(tiny_run(), show_progress=False)
    assert_same_run(tmp_path, uninterrupted)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted_also_by_a_run_that_died(
    tiny_runs: Callable[[Path], Callable[..., Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
) -> None:
    """In a deterministic run; in bfloat16 the resumed one has the masters of the other too."""
    clip = SkippedSteps.clip

    def broken(self: SkippedSteps, model: Any, *arguments: Any, what: str, fix: str) -> float:
        if what in ("the loss of step 1", "the loss of step 3", "the loss of step 4"):
            next(p for p in model.parameters() if p.grad is not None).grad[0] = torch.inf
        return clip(self, model, *arguments, what=what, fix=fix)

    monkeypatch.setattr(SkippedSteps, "clip", broken)
    options = ("rm.log_period=1", "policy.deterministic=true", f"policy.precision={precision}")
    try:
        for name, step in (("whole", None), ("died", 4)):
            (tmp_path / name).mkdir()
            config = tiny_runs(tmp_path / name)(*options, "checkpointing.save_period=1")
            if step is not None:
                with killed_before_step(step):
                    train(config, show_progress=False)
            train(config, show_progress=False)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_run(tmp_path / "died", tmp_path / "whole")
    lines = read_metrics(tmp_path / "died" / "logs" / "metrics.jsonl")
    counts = [line["train/rm/skipped_steps"] for line in lines if "train/rm/skipped_steps" in line]
    assert counts == [1, 1, 2, 3, 3, 3]
    assert sum(math.isnan(line.get("train/rm/grad_norm", 0.0)) for line in lines) == 3


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal_saves_and_leaves_and_the_run_goes_on(
    tiny_run: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    uninterrupted: Path,
    number: signal.Signals,
    code: int,
) -> None:
    before_step(monkeypatch, 2, lambda: signal.raise_signal(number))
    stopped = train(tiny_run(), show_progress=False)
    monkeypatch.undo()
    assert (stopped.step, stopped.interrupted_by, stopped.exit_code) == (3, number.name, code)
    assert stopped.model_folder is None
    assert (tmp_path / "checkpoints" / "step_3").is_dir()
    assert train(tiny_run(), show_progress=False).exit_code == 0
    assert_same_run(tmp_path, uninterrupted)


def test_a_checkpoint_that_only_a_signal_has_made_is_never_the_best(
    tiny_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The undisturbed run does not save this step, so it could not choose it."""
    name = "validation-held_out/loss"
    options = ("rm.val_period=1", "rm.max_num_steps=4", "checkpointing.save_period=4")
    before_step(monkeypatch, 2, lambda: signal.raise_signal(signal.SIGTERM))
    train(tiny_run(*options), show_progress=False)
    monkeypatch.undo()
    train(tiny_run(*options), show_progress=False)
    disturbed, regular = (tmp_path / "checkpoints" / f"step_{step}" for step in (3, 4))
    assert name in read_state(disturbed).own_validation and stored_metric(disturbed, name) is None
    assert stored_metric(regular, name) == read_state(regular).own_validation[name]


def test_a_finished_run_is_not_trained_again_but_can_be_made_longer(
    tiny_run: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = train(tiny_run("rm.max_num_steps=2"), show_progress=False)
    metrics = tmp_path / "logs" / "metrics.jsonl"
    logged = metrics.read_text()
    assert train(tiny_run("rm.max_num_steps=2"), show_progress=False) == first
    assert metrics.read_text() == logged
    outcome = train(tiny_run("rm.max_num_steps=4"), show_progress=False)
    assert (outcome.step, outcome.total_steps) == (4, 4)
    shorter = train(tiny_run("rm.max_num_steps=2"), show_progress=False)
    assert (shorter.step, shorter.total_steps) == (4, 4)
    assert "This run has taken 4 steps" in caplog.text and "now asks for 2" in caplog.text
    rates = [line["train/rm/lr"] for line in read_metrics(metrics) if "train/rm/lr" in line]
    assert rates == pytest.approx([1e-3, 5e-4, 5e-4, 2.5e-4])


def test_what_is_exported_is_what_the_outcome_says_also_after_a_longer_run_that_died_before_its_export(
    tiny_run: Callable[..., Any], tmp_path: Path, read_weights: Callable[[Path], dict[str, Any]]
) -> None:
    train(tiny_run("rm.max_num_steps=2", "checkpointing.metric_name=null"), show_progress=False)
    with dying(RewardModelRun, "complete_export"):
        train(tiny_run("rm.max_num_steps=4", "checkpointing.metric_name=null"), show_progress=False)
    outcome = train(
        tiny_run("rm.max_num_steps=4", "checkpointing.metric_name=null"), show_progress=False
    )
    exported, last = (
        read_weights(tmp_path / "checkpoints" / name) for name in ("final", "step_4/model")
    )
    assert outcome.model_step == 4 and all(torch.equal(exported[name], last[name]) for name in last)
    with pytest.MonkeyPatch.context() as patch:  # as when it is ranked by another metric
        patch.setattr(CheckpointStore, "best", lambda self: self.all()[0])
        outcome = train(
            tiny_run("rm.max_num_steps=4", "checkpointing.metric_name=null"), show_progress=False
        )
    exported, first = (
        read_weights(tmp_path / "checkpoints" / name) for name in ("final", "step_2/model")
    )
    assert outcome.model_step == 2 and all(
        torch.equal(exported[name], first[name]) for name in first
    )


def test_a_run_that_is_stopped_in_its_last_validation_chooses_when_it_is_made_up_for(
    tiny_run: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    uninterrupted: Path,
) -> None:
    validate = RewardModelRun.validate

    def signalled(self: RewardModelRun, step: int, should_stop: Callable[[], str | None]) -> Any:
        if step == 6:
            signal.raise_signal(signal.SIGTERM)
        return validate(self, step, should_stop)

    monkeypatch.setattr(RewardModelRun, "validate", signalled)
    stopped = train(tiny_run(), show_progress=False)
    monkeypatch.undo()
    assert (stopped.step, stopped.exit_code, stopped.model_folder) == (6, 143, None)
    train(tiny_run(), show_progress=False)
    assert_same_run(tmp_path, uninterrupted)


def test_another_run_is_not_continued(tiny_run: Callable[..., Any]) -> None:
    train(tiny_run("rm.max_num_steps=2"), show_progress=False)
    for override, what in (
        ("rm.seed=8", "rm.seed: got 8, need 7"),
        ("policy.train_global_batch_size=4", "policy.train_global_batch_size: got 4, need 8"),
        ("policy.model_config.hidden_size=48", "the model.hidden_size"),
        ("policy.optimizer.kwargs.lr=1e-4", "policy.optimizer.kwargs.lr"),
        ("+data.train.weight=0.5", "the training data"),
        ("+policy.tokenizer.chat_template_kwargs={x: 1}", "the tokenizer or template"),
    ):
        with pytest.raises(
            CheckpointError, match="the checkpoint belongs to a run with other settings"
        ) as caught:
            train(tiny_run(override), show_progress=False)
        assert what in caught.value.summary and "checkpointing.checkpoint_dir" in str(caught.value)


def test_a_full_disk_is_told_and_the_run_goes_on_when_there_is_room(
    tiny_run: Callable[..., Any], tmp_path: Path, uninterrupted: Path
) -> None:
    """A limit of file sizes stands for the disk: the weights are the first that do not fit."""
    # the rows are cached
    train(tiny_run("checkpointing.enabled=false", "rm.max_num_steps=1"), show_progress=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(CheckpointError, match="cannot be saved(?s:.*)make room"):
            train(tiny_run(), show_progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".run_id"]
    train(tiny_run(), show_progress=False)
    assert_same_run(tmp_path, uninterrupted)


def flip(file: Path) -> None:
    """Change one bit in the middle of a file, as a disk may."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_damaged_checkpoint_is_not_resumed_and_the_one_before_it_is(
    tiny_run: Callable[..., Any], tmp_path: Path, uninterrupted: Path
) -> None:
    with dying(RewardModelRun, "step", lambda run, number: number == 6):
        train(tiny_run("checkpointing.keep_top_k=null"), show_progress=False)
    weights = tmp_path / "checkpoints" / "step_4" / "model" / "model.safetensors"
    flip(weights)
    with pytest.raises(CheckpointError, match="the checkpoint is damaged") as caught:
        train(tiny_run(), show_progress=False)
    assert caught.value.where == str(weights) and f"remove {weights.parent.parent}" in str(
        caught.value
    )
    shutil.rmtree(weights.parent.parent)
    train(tiny_run(), show_progress=False)
    assert_same_run(tmp_path, uninterrupted)


def test_a_damaged_checkpoint_is_not_exported(tiny_run: Callable[..., Any], tmp_path: Path) -> None:
    """The best one may be older than the one that a run has resumed from."""
    options = ("checkpointing.metric_name=null", "checkpointing.keep_top_k=3")
    train(tiny_run("rm.max_num_steps=4", *options), show_progress=False)
    final = tmp_path / "checkpoints" / "final" / "model.safetensors"
    exported = final.read_bytes()
    flip(tmp_path / "checkpoints" / "step_2" / "model" / "tokenizer.json")
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(CheckpointError, match="tokenizer.json"),
    ):
        patch.setattr(CheckpointStore, "best", lambda self: self.all()[0])
        train(tiny_run("rm.max_num_steps=6", *options), show_progress=False)
    assert final.read_bytes() == exported


def test_a_run_does_not_begin_with_the_damaged_model_of_another(
    tiny_runs: Callable[[Path], Callable[..., Any]], tmp_path: Path
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    train(tiny_runs(tmp_path / "first")("rm.max_num_steps=2"), show_progress=False)
    model = tmp_path / "first" / "checkpoints" / "step_2" / "model"
    second = tiny_runs(tmp_path / "second")(
        "rm.max_num_steps=2",
        "~policy.model_config",
        "~policy.tokenizer.vocab_size",
        f"policy.model_name={model}",
    )
    flip(model / "model.safetensors")
    with pytest.raises(CheckpointError, match="the checkpoint is damaged"):
        train(second, show_progress=False)
    flip(model / "model.safetensors")
    assert train(second, show_progress=False).step == 2


def test_a_contract_that_is_written_anew_does_not_damage_its_checkpoint(
    tiny_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`treeward calibrate` writes it, also for the model of a run that goes on."""
    train(tiny_run("rm.max_num_steps=2"), show_progress=False)
    monkeypatch.chdir(tmp_path / "checkpoints" / "step_2" / "model")
    contract = read_contract(".")
    assert contract is not None
    write_contract(contract.model_copy(update={"problem_type": "other"}), ".")
    monkeypatch.undo()
    assert train(tiny_run("rm.max_num_steps=4"), show_progress=False).step == 4


def test_a_resumed_run_keeps_the_log_of_another_that_has_used_its_folder(
    tiny_run: Callable[..., Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    uninterrupted: Path,
) -> None:
    logs = tmp_path / "logs"
    with killed_before_step(5):
        train(tiny_run(), show_progress=False)
    first = (logs / "metrics.jsonl").read_bytes()
    train(tiny_run(f"checkpointing.checkpoint_dir={tmp_path}/other"), show_progress=False)
    other = (logs / "metrics.jsonl").read_bytes()
    assert train(tiny_run(), show_progress=False).step == 6
    assert "has the log of another run" in caplog.text
    assert [(logs / f"metrics.{number}.jsonl").read_bytes() for number in (1, 2)] == [first, other]
    steps = [line["step"] for line in read_metrics(logs / "metrics.jsonl")]
    assert set(steps) == {5, 6}
    caplog.clear()
    train(tiny_run(), show_progress=False)  # the folder is this run's again
    assert "another run" not in caplog.text
    assert [line["step"] for line in read_metrics(logs / "metrics.jsonl")] == steps


def test_a_copy_of_a_run_leaves_the_log_of_its_original_whole(
    tiny_run: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    original, copied, moved = (tmp_path / name for name in ("original", "copied", "moved"))
    logs = tmp_path / "logs"

    def steps(folder: Path, number: int) -> None:
        overrides = [f"checkpointing.checkpoint_dir={folder}", f"logger.log_dir={logs}"]
        train(tiny_run(f"rm.max_num_steps={number}", *overrides), show_progress=False)

    steps(original, 2)
    shutil.copytree(original, copied)
    steps(original, 4)
    log = (logs / "metrics.jsonl").read_bytes()
    steps(copied, 3)
    assert "has the log of another run" in caplog.text
    assert (logs / "metrics.1.jsonl").read_bytes() == log
    caplog.clear()
    copied.rename(moved)  # that is no copy: the run and its log go on
    steps(moved, 4)
    assert "another run" not in caplog.text
    lines = read_metrics(logs / "metrics.jsonl")
    assert {line["step"] for line in lines} == {3, 4}


def test_the_log_may_lie_in_the_folder_of_the_checkpoints(
    tiny_run: Callable[..., Any], tmp_path: Path
) -> None:
    config = tiny_run("rm.max_num_steps=2", f"logger.log_dir={tmp_path}/checkpoints")
    train(config, show_progress=False)
    assert train(config, show_progress=False).step == 2
