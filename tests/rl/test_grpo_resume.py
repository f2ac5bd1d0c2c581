"""A run that was stopped goes on as if it had not been: at any moment, by a crash, a failure or a signal.

Every case has what a resumed run could forget: rewards that depend on those before, groups that dynamic sampling left
out, several updates of a batch, a KL in the reward, a schedule, a watch that remembers.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from loopback import Asked, Loopback
from served_policy import ServedPolicy

from treeward.errors import ModelError
from treeward.rl import grpo as grpo_module
from treeward.rl.advantages import advantages
from treeward.rl.generation import GenerationError
from treeward.rl.grpo import GRPOOutcome, grpo
from treeward.rl.update import PolicyUpdater
from treeward.training import loop, optimisation, state
from treeward.training.checkpoints import CheckpointStore
from treeward.training.optimisation import SkippedSteps
from treeward.training.tracking import TrackerGroup, read_metrics

Make = Callable[..., Any]
Result = dict[str, Any]

FORGETFUL = (
    "env={planted: {type: planted.Troubled, orders: ORDERS}, gold: {type: custom, function: planted.length}}",
    "grpo.environment=planted",
    "grpo.gold_environment=gold",
    "grpo.updates_per_batch=2",
    "policy.train_global_batch_size=8",
    "grpo.use_dynamic_sampling=true",
    "grpo.batch_multiplier=1.5",
    "loss_fn.kl_in_reward=true",
    "loss_fn.reference_policy_kl_type=k1",
    "policy.scheduler={name: linear, warmup_steps: 2}",
    "checkpointing.metric_name=val:raw_reward",
    "checkpointing.keep_top_k=1",
    "grpo.environment_timeout_seconds=5",
)


class Killed(BaseException):
    """As near as a test in one process comes to kill -9: nothing that handles exceptions handles it."""


def die(*arguments: Any, **options: Any) -> Any:
    raise Killed


COMPUTED: dict[str, Result] = {}


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@dataclass
class Trial:
    """A run in `folder` that is started, and started again."""

    make: Make
    folder: Path
    temporary: pytest.TempPathFactory
    result_of: Callable[[Path], Result]

    def order(self, **told: float) -> None:
        """Tell the environment what to do."""
        (self.folder / "orders.json").write_text(json.dumps(told), encoding="utf-8")

    def start(self, *more: str) -> GRPOOutcome:
        options = [option.replace("ORDERS", str(self.folder / "orders.json")) for option in FORGETFUL]
        return grpo(self.make(*options, *more), show_progress=False)

    def is_as_uninterrupted(self, *options: str) -> bool:
        """Whether it came to what the run with these options comes to when nothing stops it."""
        if (key := " ".join(options)) not in COMPUTED:
            folder = self.temporary.mktemp("uninterrupted")
            self.start(*options, f"checkpointing.checkpoint_dir={folder}/checkpoints", f"logger.log_dir={folder}/logs")
            COMPUTED[key] = self.result_of(folder) | {"kept": kept(folder)}
        return self.result_of(self.folder) | {"kept": kept(self.folder)} == COMPUTED[key]


@pytest.fixture
def trial(
    tiny_grpo: Make, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, result_of: Callable[[Path], Result]
) -> Trial:
    made = Trial(tiny_grpo, tmp_path, tmp_path_factory, result_of)
    made.order()
    return made


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
        state, "write_tensors", lambda folder, *_: folder.parent.name == ".saving_step_4"
    ),
    "before the rename of a save": _at(os, "rename", lambda source, target: Path(target).name == "step_4"),
    "between a validation and the save": _at(loop.Loop, "save", lambda loop: loop.state.step == 4),
    "in step 5": _before_step(4),
    "between the last save and its pruning": _at(
        CheckpointStore, "prune", lambda store: (store.folder / "step_6").exists()
    ),
    "in the export": _at(grpo_module.shutil, "copytree", lambda *_: True),
    "before the report": _at(grpo_module, "write_rl_report", lambda *_, **__: True),
}


@pytest.mark.slow
def test_a_run_that_dies_at_each_of_many_moments_goes_on_exactly(trial: Trial) -> None:
    for moment in MOMENTS.values():
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            moment(patch)
            trial.start()
    assert trial.start().step == 6
    assert trial.is_as_uninterrupted()
    lines = [line for line in COMPUTED[""]["metrics"] if "train/reward" in line]
    assert len(lines) == 6 and "'train/prompts_drawn': 36" in lines[-1]  # it has left groups out


@pytest.mark.slow
def test_without_validation_prompts_the_completions_of_steps_are_kept(trial: Trial) -> None:
    alone = ("data.validation=null", "checkpointing.metric_name=null")
    for moment in ("in step 4", "in step 5"):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            MOMENTS[moment](patch)
            trial.start(*alone)
    outcome = trial.start(*alone)
    assert trial.is_as_uninterrupted(*alone)
    samples = read_metrics(trial.folder / "logs" / "samples.jsonl")
    assert [line["step"] for line in samples] == [step for step in (1, 2, 4, 6) for _ in range(4)]
    assert outcome.report is not None and "Completions over time" in outcome.report.read_text("utf-8")


@pytest.mark.slow
def test_a_run_goes_on_after_failures_and_signals(trial: Trial) -> None:
    trial.order(after=60, fail=0.8)  # in the middle of a step's draws
    for _ in range(2):
        with pytest.raises(ModelError, match="(?s)too many completions have no reward.*told to fail.*max_failed_share"):
            trial.start()
        trial.order(fail=0.8)  # the second time it was not mended
    trial.order()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ModelError, match="loss or its gradient is not finite"):
        patch.setattr(grpo_module, "advantages", lambda *a: advantages(*a) * float("nan"))
        patch.setattr(optimisation, "MOST_SKIPPED_IN_A_ROW", 1)  # a step has several updates
        trial.start()
    with pytest.MonkeyPatch.context() as patch:
        collect = grpo_module.collect

        def signalled(run: Any, **at: int) -> Any:
            if at["step"] == 3:
                signal.raise_signal(signal.SIGTERM)
            return collect(run, **at)

        patch.setattr(grpo_module, "collect", signalled)
        outcome = trial.start()
    assert (outcome.step, outcome.exit_code) == (4, 143)  # it was to be validated
    for _ in range(2):  # killed before the made-up validation is saved, it writes none of its lines twice
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            _at(loop, "write_state", lambda folder, state: state.validation_step == 4)(patch)
            trial.start()
    assert trial.start().step == 6
    assert trial.is_as_uninterrupted()


@pytest.mark.slow
def test_masters_of_bfloat16_weights_and_skipped_steps_go_on_exactly(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect, clip, step = grpo_module.collect, SkippedSteps.clip, -1

    def noted(run: Any, **at: int) -> Any:
        nonlocal step
        step = at["step"]
        return collect(run, **at)

    def broken(skipped: SkippedSteps, model: Any, max_norm: float, loss: float, **named: Any) -> float:
        return clip(skipped, model, max_norm, float("nan") if step == 1 else loss, **named)

    monkeypatch.setattr(grpo_module, "collect", noted)
    monkeypatch.setattr(SkippedSteps, "clip", broken)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        MOMENTS["between a validation and the save"](patch)
        trial.start("policy.precision=bfloat16")
    assert trial.start("policy.precision=bfloat16").step == 6 and trial.is_as_uninterrupted("policy.precision=bfloat16")
    lines = read_metrics(trial.folder / "logs" / "metrics.jsonl")
    assert [line["train/skipped_steps"] for line in lines if "train/skipped_steps" in line] == [0, 4, 4, 4, 4, 4]


@pytest.mark.slow
def test_adapters_go_on_exactly_and_the_frozen_model_is_the_reference(trial: Trial) -> None:
    lora = ("policy.dtensor_cfg.lora_cfg={enabled: true, dim: 4, alpha: 8}", "policy.optimizer.kwargs.lr=0.03",
            "grpo.val_at_start=true")  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        MOMENTS["between a validation and the save"](patch)
        trial.start(*lora)
    assert trial.start(*lora).step == 6 and trial.is_as_uninterrupted(*lora)
    lines = read_metrics(trial.folder / "logs" / "metrics.jsonl")
    kls = [line["validation/kl"] for line in lines if "validation/kl" in line]
    assert kls[0] == 0.0 and all(kl > 0 for kl in kls[1:])


class Dying(ServedPolicy):
    """It is dead from its `dies_at`-th request of the path `dies_in` on."""

    dies_at: int | None = None
    dies_in = ""
    asked = 0

    def __call__(self, asked: Asked) -> Any:
        self.asked += asked.path == self.dies_in
        return None if self.dies_at is not None and self.asked >= self.dies_at else super().__call__(asked)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "count", "saved"),
    [
        ("/v1/completions", 39, 1),  # each change of weights takes 16, and step 2 is the second
        ("/collective_rpc", 4, 3),  # after the update of step 3
        ("/v1/completions", 58, 1),  # in the validation after step 2
    ],
)
def test_a_run_whose_generator_dies_goes_on_from_its_last_checkpoint(
    tiny_grpo: Make, tiny_tokenizer: Any, tmp_path: Path, result_of: Callable[[Path], Result],
    path: str, count: int, saved: int,
) -> None:  # fmt: skip
    vllm = Dying(None, tiny_tokenizer)
    with Loopback(vllm) as loopback:

        def serve(folder: Path) -> GRPOOutcome:
            generation = f"{{backend: vllm, url: {loopback.url}, model: m, max_new_tokens: 8, max_retries: 1}}"
            folders = f"checkpointing.checkpoint_dir={folder}/checkpoints", f"logger.log_dir={folder}/logs"
            options = ("grpo.max_num_steps=4", "checkpointing.save_period=1", f"policy.generation={generation}")
            return grpo(tiny_grpo(*options, *folders), show_progress=False)

        if "served" not in COMPUTED:
            serve(tmp_path / "whole")
            COMPUTED["served"] = result_of(tmp_path / "whole")
        vllm.asked, vllm.policy, vllm.dies_in, vllm.dies_at = 0, None, path, count
        with pytest.raises(GenerationError, match="generator has failed"):
            serve(tmp_path)
        assert max(folder.name for folder in (tmp_path / "checkpoints").glob("step_*")) == f"step_{saved}"
        vllm.dies_at, vllm.policy = None, None  # a new server, without the weights
        assert serve(tmp_path).step == 4
    assert result_of(tmp_path) == COMPUTED["served"]
    # The trainer finds the same log-probabilities: the weights are those of the step, and not of one before.
    lines = [line for line in read_metrics(tmp_path / "logs" / "metrics.jsonl") if "train/loss" in line]
    assert len(lines) == 4
    assert all(line["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4) for line in lines)
