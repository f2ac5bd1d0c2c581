"""A run that was stopped goes on as if it had not been: at any moment, by a crash, a failure or a signal.

Every case has what a resumed run could forget: rewards that depend on those before, groups that dynamic sampling left
out, several updates of a batch, a KL in the reward, a schedule, a watch that remembers.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treeward.errors import CheckpointError, ModelError
from treeward.rl import grpo as grpo_module
from treeward.rl.grpo import GRPOOutcome, grpo
from treeward.rl.update import PolicyUpdater
from treeward.training import loop
from treeward.training.tracking import TrackerGroup

Make = Callable[..., Any]
Result = dict[str, Any]

FORGETFUL = (
    "env={planted: {type: planted.Troubled, orders: ORDERS}, gold: {type: custom, function: planted.length}}",
    "grpo.environments=[planted]",
    "grpo.gold_environment=gold",
    "grpo.updates_per_batch=2",
    "policy.train_global_batch_size=8",
    "grpo.use_dynamic_sampling=true",
    "grpo.batch_multiplier=1.5",
    "loss_fn.kl_in_reward=true",
    "loss_fn.reference_policy_kl_type=k1",
    "policy.scheduler={name: linear, warmup_steps: 2}",
    "checkpointing.metric_name=val:raw_reward",
    "grpo.environment_timeout_seconds=5",
)


class Killed(BaseException):
    """As near as a test in one process comes to kill -9: nothing that handles exceptions handles it."""


def die(*arguments: Any, **options: Any) -> Any:
    raise Killed


@pytest.fixture
def orders(tmp_path: Path) -> Callable[..., None]:
    """Tell the environment what to do."""

    def give(**told: float) -> None:
        (tmp_path / "orders.json").write_text(json.dumps(told), encoding="utf-8")

    give()
    return give


@pytest.fixture
def start(tiny_grpo: Make, tmp_path: Path, orders: Callable[..., None]) -> Callable[..., GRPOOutcome]:
    """Start the run, or start it again."""

    def run(*more: str) -> GRPOOutcome:
        options = [option.replace("ORDERS", str(tmp_path / "orders.json")) for option in FORGETFUL]
        return grpo(tiny_grpo(*options, *more), show_progress=False)

    return run


@pytest.fixture(scope="module")
def computed() -> dict[str, Result]:
    return {}


@pytest.fixture
def uninterrupted(
    computed: dict[str, Result],
    start: Callable[..., GRPOOutcome],
    tmp_path_factory: pytest.TempPathFactory,
    result_of: Callable[[Path], Result],
) -> Result:
    """What the run comes to when nothing stops it; run once."""
    if not computed:
        folder = tmp_path_factory.mktemp("uninterrupted")
        start(f"checkpointing.checkpoint_dir={folder}/checkpoints", f"logger.log_dir={folder}/logs")
        computed["tiny"] = result_of(folder)
        lines = [line for line in computed["tiny"]["metrics"] if "train/reward" in line]
        assert len(lines) == 6 and "'train/prompts_drawn': 36" in lines[-1]  # it has left groups out
    return computed["tiny"]


def assert_same(got: Result, want: Result) -> None:
    assert got["metrics"] == want["metrics"]
    assert got["samples"] == want["samples"]
    assert got["alarms"] == want["alarms"]
    assert got["weights"].keys() == want["weights"].keys()
    assert [name for name, weight in want["weights"].items() if got["weights"][name] != weight] == []


def _before_step(step: int) -> Callable[[pytest.MonkeyPatch], None]:
    def arm(monkeypatch: pytest.MonkeyPatch) -> None:
        collect = grpo_module.collect
        monkeypatch.setattr(
            grpo_module, "collect", lambda run, **at: die() if at["step"] == step else collect(run, **at)
        )

    return arm


def _at(owner: Any, name: str, when: Callable[..., bool]) -> Callable[[pytest.MonkeyPatch], None]:
    """Die as soon as this is called, and `when` says so."""

    def arm(monkeypatch: pytest.MonkeyPatch) -> None:
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: die() if when(*a) else function(*a, **k))

    return arm


def _is_third(updater: PolicyUpdater, *_: Any) -> bool:
    """The optimiser is in the second half of step 3."""
    count = updater.__dict__["asked"] = updater.__dict__.get("asked", 0) + 1
    return count == 11


MOMENTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "before the first checkpoint": _before_step(1),
    "between the updates of a batch": _at(PolicyUpdater, "_step", _is_third),
    "in step 4": _before_step(3),
    "before the log of a step": _at(
        TrackerGroup, "log", lambda group, metrics: "train/reward" in metrics and metrics["train/prompts_drawn"] == 24
    ),
    "between the policy and the optimiser of a save": _at(
        loop, "save_state", lambda folder, state, *_: state.step == 4
    ),
    "before the rename of a save": _at(os, "rename", lambda source, target: Path(target).name == "step_4"),
    "between a validation and the save": _at(loop.Loop, "save", lambda loop: loop.state.step == 4),
    "in step 5": _before_step(4),
    "in the export": _at(grpo_module.shutil, "copytree", lambda *_: True),
    "before the report": _at(grpo_module, "write_rl_report", lambda *_, **__: True),
}


def test_a_run_that_dies_at_each_of_many_moments_goes_on_exactly(
    start: Callable[..., GRPOOutcome], tmp_path: Path, uninterrupted: Result, result_of: Callable[[Path], Result]
) -> None:
    for moment in MOMENTS.values():
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            moment(patch)
            start()
    assert start().step == 6
    assert_same(result_of(tmp_path), uninterrupted)


def test_a_signal_in_a_validation_is_made_up_for_and_killed_there_again(
    start: Callable[..., GRPOOutcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    uninterrupted: Result,
    result_of: Callable[[Path], Result],
) -> None:
    """The made-up validation writes its lines; killed before it is saved, it writes none of them twice."""
    with monkeypatch.context() as patch:
        collect = grpo_module.collect

        def signalled(run: Any, **at: int) -> Any:
            if at["step"] == 3:
                signal.raise_signal(signal.SIGTERM)
            return collect(run, **at)

        patch.setattr(grpo_module, "collect", signalled)
        outcome = start()
    assert (outcome.step, outcome.exit_code) == (4, 143)  # it was to be validated
    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            _at(loop, "write_state", lambda folder, state: state.validation_step == 4)(patch)
            start()
    assert start().step == 6
    assert_same(result_of(tmp_path), uninterrupted)


def test_an_environment_that_fails_stops_at_a_saved_state_and_is_mended(
    start: Callable[..., GRPOOutcome],
    orders: Callable[..., None],
    tmp_path: Path,
    uninterrupted: Result,
    result_of: Callable[[Path], Result],
    caplog: pytest.LogCaptureFixture,
) -> None:
    orders(after=60, fail=0.8)  # in the middle of a step's draws
    with pytest.raises(ModelError, match="too many completions have no reward") as caught:
        start()
    assert "max_failed_share" in str(caught.value) and "told to fail" in str(caught.value)
    (said,) = [r.getMessage() for r in caplog.records if "is saved: the same command" in r.getMessage()]
    step = int(said.split()[1])
    assert 0 < step < 6 and (tmp_path / "checkpoints" / f"step_{step}").is_dir()
    with pytest.raises(ModelError, match="too many completions"):
        start()  # it was not mended
    orders()
    assert start().step == 6
    assert_same(result_of(tmp_path), uninterrupted)


def test_a_loss_that_is_not_finite_leaves_the_state_before_the_step(
    start: Callable[..., GRPOOutcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    uninterrupted: Result,
    result_of: Callable[[Path], Result],
) -> None:
    with monkeypatch.context() as patch:
        advantages = grpo_module.advantages
        calls: list[int] = []
        patch.setattr(
            grpo_module,
            "advantages",
            lambda *a: advantages(*a) * (float("nan") if calls.append(1) or len(calls) == 4 else 1),
        )
        with pytest.raises(ModelError, match="loss is not finite"):
            start()
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*")) == ["step_2", "step_3"]
    assert start().step == 6
    assert_same(result_of(tmp_path), uninterrupted)


def test_another_configuration_is_refused_and_named(start: Callable[..., GRPOOutcome]) -> None:
    start("grpo.max_num_steps=2")
    for option, named in (
        ("loss_fn.ratio_clip_max=0.3", "loss_fn.ratio_clip_max: got 0.3, need 0.2"),
        ("grpo.seed=8", "grpo.seed: got 8, need 7"),
        ("policy.optimizer.kwargs.lr=0.02", "policy.optimizer.kwargs.lr"),
        ("policy.generation.temperature=0.9", "policy.generation.temperature"),
        ("data.train.max_samples=20", "the training prompts"),
        ("data.validation.max_samples=5", "the validation prompts"),
        ("grpo.max_val_samples=4", "grpo.max_val_samples"),
        ("policy.model_config.hidden_size=64", "the policy.hidden_size"),
    ):
        with pytest.raises(CheckpointError, match="of another run") as caught:
            start("grpo.max_num_steps=2", option)
        assert f"\n  {named}" in str(caught.value)


def test_what_may_change_may_change_and_a_longer_run_goes_on(
    start: Callable[..., GRPOOutcome], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert start("grpo.max_num_steps=2").step == 2
    free = ("grpo.val_batch_size=4", "grpo.val_period=1", "checkpointing.save_period=1", "grpo.watch.z=2",
            "grpo.environment_timeout_seconds=9", "policy.train_micro_batch_tokens=128")  # fmt: skip
    outcome = start("grpo.max_num_steps=4", *free)
    assert (outcome.step, outcome.total_steps) == (4, 4)
    lines = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2, 3, 3, 4, 4]
    assert "has another length than before (max_num_epochs, max_num_steps)" in caplog.text


def test_adapters_go_on_exactly_and_the_frozen_model_is_the_reference(
    start: Callable[..., GRPOOutcome],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    result_of: Callable[[Path], Result],
) -> None:
    lora = ("policy.dtensor_cfg.lora_cfg={enabled: true, dim: 4, alpha: 8}", "policy.optimizer.kwargs.lr=0.03",
            "grpo.val_at_start=true")  # fmt: skip
    whole = tmp_path_factory.mktemp("uninterrupted")
    start(*lora, f"checkpointing.checkpoint_dir={whole}/checkpoints", f"logger.log_dir={whole}/logs")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        MOMENTS["between a validation and the save"](patch)
        start(*lora)
    assert start(*lora).step == 6
    assert_same(result_of(tmp_path), result_of(whole))
    lines = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    kls = [line["validation/kl"] for line in lines if "validation/kl" in line]
    assert kls[0] == 0.0 and all(kl > 0 for kl in kls[1:])
    adapters = [one / "checkpoints" / "step_6" / "adapter" / "adapter_model.safetensors" for one in (tmp_path, whole)]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
