"""A run that was stopped goes on as if it had not been: by a crash, a failure or a signal.

`tests/e2e/test_grpo_resume.py` kills one at many moments.

Every case has what a resumed run could forget: rewards that depend on those before, groups that
dynamic sampling left out, several updates of a batch, a KL in the reward, a schedule, a watch that
remembers.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from killed_run import assert_same_run, dying
from loopback import Asked, Loopback
from served_policy import ServedPolicy

from treeward.errors import ModelError
from treeward.rl import grpo as grpo_module
from treeward.rl.advantages import advantages
from treeward.rl.generation import GenerationError
from treeward.rl.grpo import GRPOOutcome, GRPORun, grpo
from treeward.training import loop, optimisation
from treeward.training.optimisation import SkippedSteps
from treeward.training.tracking import read_metrics

Make = Callable[..., Any]

FORGETFUL = (
    (
        "env={planted: {type: planted.Troubled, orders: ORDERS}, gold: {type: custom, function: "
        "planted.length}}"
    ),
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
)


UNINTERRUPTED: dict[str, Path] = {}


@dataclass
class Trial:
    """A run in `folder` that is started, and started again."""

    make: Make
    folder: Path
    temporary: pytest.TempPathFactory

    def order(self, **told: float) -> None:
        """Tell the environment what to do."""
        (self.folder / "orders.json").write_text(json.dumps(told), encoding="utf-8")

    def start(self, *more: str) -> GRPOOutcome:
        options = [
            option.replace("ORDERS", str(self.folder / "orders.json")) for option in FORGETFUL
        ]
        return grpo(self.make(*options, *more), show_progress=False)

    def assert_as_uninterrupted(self, *options: str) -> None:
        """It came to what the run with these options comes to when nothing stops it."""
        if (key := " ".join(options)) not in UNINTERRUPTED:
            folder = UNINTERRUPTED[key] = self.temporary.mktemp("uninterrupted")
            self.start(
                *options,
                f"checkpointing.checkpoint_dir={folder}/checkpoints",
                f"logger.log_dir={folder}/logs",
            )
        assert_same_run(self.folder, UNINTERRUPTED[key])


@pytest.fixture
def trial(tiny_grpo: Make, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    made = Trial(tiny_grpo, tmp_path, tmp_path_factory)
    made.order()
    return made


AFTER_A_VALIDATION = (loop.Loop, "save", lambda loop: loop.state.step == 4)


@pytest.mark.slow
def test_without_validation_prompts_the_completions_of_steps_are_kept(trial: Trial) -> None:
    alone = ("data.validation=null", "checkpointing.metric_name=null")
    for number in (4, 5):
        with dying(GRPORun, "step", lambda run, step, number=number: step == number):
            trial.start(*alone)
    outcome = trial.start(*alone)
    trial.assert_as_uninterrupted(*alone)
    samples = read_metrics(trial.folder / "logs" / "samples.jsonl")
    assert [line["step"] for line in samples] == [1] * 4 + [2] * 4 + [4] * 4 + [6] * 4
    assert outcome.report is not None and "Completions over time" in outcome.report.read_text(
        "utf-8"
    )


@pytest.mark.slow
def test_failures_and_signals_change_nothing(trial: Trial) -> None:
    trial.order(after=60, fail=0.8)  # in the middle of a step's draws
    with pytest.raises(
        ModelError, match="(?s)too many completions have no reward.*told to fail.*max_failed_share"
    ):
        trial.start()
    trial.order()
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(ModelError, match="loss or its gradient is not finite"),
    ):
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
    # killed before the made-up validation is saved, it writes none of its lines twice
    for _ in range(2):
        with dying(loop, "write_state", lambda folder, state: state.validation_step == 4):
            trial.start()
    assert trial.start().step == 6
    trial.assert_as_uninterrupted()


@pytest.mark.slow
def test_masters_of_bfloat16_weights_and_skipped_steps_go_on_exactly(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect = grpo_module.collect
    clip = SkippedSteps.clip
    step = -1

    def noted(run: Any, **at: int) -> Any:
        nonlocal step
        step = at["step"]
        return collect(run, **at)

    def broken(
        skipped: SkippedSteps, model: Any, max_norm: float, loss: float, **named: Any
    ) -> float:
        return clip(skipped, model, max_norm, float("nan") if step == 1 else loss, **named)

    monkeypatch.setattr(grpo_module, "collect", noted)
    monkeypatch.setattr(SkippedSteps, "clip", broken)
    with dying(*AFTER_A_VALIDATION):
        trial.start("policy.precision=bfloat16")
    assert trial.start("policy.precision=bfloat16").step == 6
    trial.assert_as_uninterrupted("policy.precision=bfloat16")
    lines = read_metrics(trial.folder / "logs" / "metrics.jsonl")
    assert [line["train/skipped_steps"] for line in lines if "train/skipped_steps" in line] == [
        0,
        4,
        4,
        4,
        4,
        4,
    ]


@pytest.mark.slow
def test_adapters_go_on_exactly_and_the_frozen_model_is_the_reference(trial: Trial) -> None:
    lora = ("policy.dtensor_cfg.lora_cfg={enabled: true, dim: 4, alpha: 8}", "policy.optimizer.kwargs.lr=0.03",
            "grpo.val_at_start=true")  # fmt: skip
    with dying(*AFTER_A_VALIDATION):
        trial.start(*lora)
    assert trial.start(*lora).step == 6
    trial.assert_as_uninterrupted(*lora)
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
        return (
            None
            if self.dies_at is not None and self.asked >= self.dies_at
            else super().__call__(asked)
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "count", "saved"),
    [
        ("/v1/completions", 39, 1),  # each change of weights takes 16, and step 2 is the second
        ("/collective_rpc", 4, 3),  # after the update of step 3
    ],
)
def test_a_generator_that_dies_ends_the_run_which_goes_on_from_its_checkpoint(
    tiny_grpo: Make, tiny_tokenizer: Any, tmp_path: Path, path: str, count: int, saved: int
) -> None:
    vllm = Dying(None, tiny_tokenizer)
    with Loopback(vllm) as loopback:

        def serve(folder: Path) -> GRPOOutcome:
            generation = f"{{backend: vllm, url: {loopback.url}, model: m, max_new_tokens: 8, max_retries: 1}}"
            folders = (
                f"checkpointing.checkpoint_dir={folder}/checkpoints",
                f"logger.log_dir={folder}/logs",
            )
            periods = (
                "grpo.max_num_steps=4",
                "checkpointing.save_period=1",
                "checkpointing.keep_top_k=1",
            )
            return grpo(
                tiny_grpo(*periods, f"policy.generation={generation}", *folders),
                show_progress=False,
            )

        if "served" not in UNINTERRUPTED:
            UNINTERRUPTED["served"] = tmp_path / "whole"
            serve(tmp_path / "whole")
        vllm.asked, vllm.policy, vllm.dies_in, vllm.dies_at = 0, None, path, count
        with pytest.raises(GenerationError, match="generator has failed"):
            serve(tmp_path)
        assert (
            max(folder.name for folder in (tmp_path / "checkpoints").glob("step_*"))
            == f"step_{saved}"
        )
        vllm.dies_at, vllm.policy = None, None  # a new server, without the weights
        assert serve(tmp_path).step == 4
    assert_same_run(tmp_path, UNINTERRUPTED["served"])
    # The trainer finds the same log-probabilities: the weights are those of the step, and not of
    # one before.
    lines = [
        line for line in read_metrics(tmp_path / "logs" / "metrics.jsonl") if "train/loss" in line
    ]
    assert len(lines) == 4
    assert all(
        line["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4) for line in lines
    )


def test_a_resumed_run_keeps_the_samples_and_alarms_of_another_that_has_used_its_log_folder(
    tiny_grpo: Make, tmp_path: Path
) -> None:
    short = ("grpo.max_num_steps=2", "grpo.num_prompts_per_step=2")
    with dying(GRPORun, "step", lambda run, number: number == 3):
        grpo(tiny_grpo(*short, "grpo.max_num_steps=3"), show_progress=False)
    grpo(
        tiny_grpo(*short, "grpo.seed=8", f"checkpointing.checkpoint_dir={tmp_path}/other"),
        show_progress=False,
    )
    names = ("metrics.jsonl", "samples.jsonl", "alarms.json")
    other = [(tmp_path / "logs" / name).read_bytes() for name in names]
    assert grpo(tiny_grpo(*short, "grpo.max_num_steps=3"), show_progress=False).step == 3
    kept = ("metrics.2.jsonl", "samples.2.jsonl", "alarms.2.json")
    assert [(tmp_path / "logs" / name).read_bytes() for name in kept] == other
