"""`train`: the run of a reward model. `treeward.training.loop` takes its steps, validates, saves, stops and resumes.

outcome = train(load_config("examples/configs/quickstart.yaml", []))
outcome.model_folder      # a Hugging Face folder, None if the run was interrupted
outcome.validation        # {"plain": {"accuracy": 0.95, ...}, ...}
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from treeward.config.checkpointing import MetricKey
from treeward.config.preflight import check_packages
from treeward.config.run import RewardModelRunConfig
from treeward.data.encoding import Comparison
from treeward.evaluation.results import Metric
from treeward.metrics import METRIC_NAMES, RewardMetrics
from treeward.model.export import export_model, push_folder
from treeward.model.loading import load_reward_model
from treeward.scoring.golden import sign_folder
from treeward.training.checkpoints import Checkpoint, CheckpointStore
from treeward.training.export import export_final
from treeward.training.loop import Outcome, Run, StepMetrics, Validation, start
from treeward.training.optimisation import clip_gradients
from treeward.training.reporting import ReportPlan, check_report, plan_report
from treeward.training.setup import Choice, RewardModelSetup, set_up
from treeward.training.state import RunState
from treeward.training.stopping import REPORTING, StopRequest
from treeward.training.tracking import TrackerGroup
from treeward.training.validation import SetValidation, pooled, validate, values_of
from treeward.tree.parts import backward_in_parts

__all__ = ["RewardModelRun", "TrainingOutcome", "train"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingOutcome(Outcome):
    """How a run ended. `validation`: the metrics of each set; `validation_sizes`: how many comparisons they are of.

    `choice`: how the exported model was chosen, None where it is the last. `num_trained_on`: by set, how many of its
    comparisons are in the training data too. `report_error`: why a report is missing or lacks a suite; the exit code is
    1 then.
    """

    validation_sizes: Mapping[str, int] = field(default_factory=dict)
    choice: Choice | None = None
    num_trained_on: Mapping[str, int] = field(default_factory=dict)
    report_error: str | None = None


def train(config: RewardModelRunConfig, *, show_progress: bool = True) -> TrainingOutcome:
    """Train a reward model as configured, resuming where an earlier run of the same configuration stopped.

    Raises a `TreewardError` for what the user can mend; the last checkpoint stands.
    """
    check_packages(config)
    check_report(config)
    key = config.ranking_metric

    ranked_by = None if key is None else _logged_name(key)
    outcome = start(
        config,
        config.rm,
        lambda checkpoint, shown: RewardModelRun(set_up(config, checkpoint, shown)),
        ranked_by=ranked_by,
        show_progress=show_progress,
    )
    assert isinstance(outcome, TrainingOutcome)
    return outcome


class RewardModelRun(Run):
    """A `Run` of the loop: Bradley-Terry steps on comparisons, and validation on every named set."""

    def __init__(self, setup: RewardModelSetup) -> None:
        super().__init__(
            *(setup.config, setup.optimizer, setup.scheduler, setup.identity),
            total_steps=setup.total_steps,
            validates=bool(setup.validation_sets),
        )
        self.setup, self.config, self.model = setup, setup.config, setup.model
        self._changed = self._warned_of_ranking = False

    def begin(self, state: RunState, trackers: TrackerGroup) -> None:
        self.model.train()
        if state.step > 0:
            return
        for role, sets in (("train", self.setup.training_sets), ("validation", self.setup.validation_sets)):
            for name, dataset in sets.items():
                counts = dataset.counts.as_metrics()
                trackers.log({f"data/{role}/{name}/{key}": value for key, value in counts.items()}, step=0)

    def weights_changed(self) -> bool:
        return self._changed

    def step(self, number: int) -> StepMetrics:
        setup, self._changed = self.setup, False
        started = time.monotonic()
        comparisons = setup.order.comparisons(number - 1)
        num_groups = setup.pairs_of(comparisons).num_groups
        total, computed_tokens, row_tokens = RewardMetrics(), 0, 0
        for members in setup.plan(comparisons):
            sums, computed, rows = _backward(setup, [comparisons[i] for i in members], num_groups)
            total, computed_tokens, row_tokens = total + sums, computed_tokens + computed, row_tokens + rows
        learning_rate = self.optimizer.param_groups[0]["lr"]
        grad_norm = self._update_weights(number, total)
        means, episodes = total.means(), setup.order.episodes(number)
        logged = {f"train/rm/{name}": value for name, value in means.items()} | {
            "train/rm/lr": learning_rate,
            "train/rm/grad_norm": grad_norm,
            "episode": episodes,
            "epoch": episodes / setup.order.comparisons_per_epoch,
            "train/rm/computed_tokens": computed_tokens,
            "train/rm/row_tokens": row_tokens,
            "timing/train/row_tokens_per_second": row_tokens / (time.monotonic() - started),
        }
        shown = {"loss": means["loss"], "accuracy": means["accuracy"], "margin": means["reward_margin"]}
        return StepMetrics(logged, shown, row_tokens)

    def _update_weights(self, number: int, total: RewardMetrics) -> float:
        """Clip, step, and return the gradients' norm before clipping. Raises `ModelError` if it is not finite."""
        norm = clip_gradients(
            self.model,
            self.config.policy.max_grad_norm,
            total.loss_sum,
            what=f"the loss of step {number}",
            fix="start anew in another checkpointing.checkpoint_dir with a lower policy.optimizer.kwargs.lr, or in "
            "policy.precision=float32",
        )
        self._changed = True
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def validate(self, step: int, should_stop: Callable[[], str | None]) -> Validation | None:
        self._changed = False
        sets: dict[str, SetValidation] = {}
        seconds: dict[str, float] = {}
        for name in self.setup.validation_sets:
            started = time.monotonic()
            of_set = validate(self.setup, name, should_stop)
            if of_set is None:
                return None
            sets[name] = of_set
            seconds[f"timing/validation/{name}"] = time.monotonic() - started
        metrics = {name: one.metrics() for name, one in sets.items()}
        everything = pooled(list(sets.values()))
        logged = {f"eval/rm/{key}": value for key, value in values_of(everything).items()}
        for name, of_name in metrics.items():
            logged |= {f"validation-{name}/{key}": value for key, value in values_of(of_name).items()}
        key = self.config.ranking_metric
        if key is not None:
            ranking = (everything if key.validation is None else metrics[key.validation]).get(key.metric)
            self._warn_of_ranking(step, ranking)
        lines = [_line(name, step, values_of(of_name), key) for name, of_name in metrics.items()]
        return Validation(logged, seconds, tuple(lines))

    def _warn_of_ranking(self, step: int, metric: Metric | None) -> None:
        """Say once why a checkpoint has no value of the metric that ranks it."""
        if self._warned_of_ranking or (metric and metric.value is not None and math.isfinite(metric.value)):
            return
        self._warned_of_ranking = True
        logger.warning(
            "%s (checkpointing.metric_name) has no value after step %d: %s. Checkpoints without it rank last.",
            self.config.checkpointing.metric_name, step, (metric and metric.note) or "it is not a number",
        )  # fmt: skip

    def save_model(self, folder: Path) -> None:
        setup = self.setup
        export_model(setup.model, setup.tokenizer, folder / "model", rendering=setup.renderer.settings)
        sign_folder(folder / "model", model=setup.model, renderer=setup.renderer, may_be_broken=True)

    def export(self, best: Checkpoint, state: RunState, store: CheckpointStore, *, is_current: bool) -> None:
        setup, policy, hub = self.setup, self.config.policy, self.config.hub
        model = setup.model
        if not is_current:
            model = load_reward_model(
                best.path / "model",
                tokenizer=setup.tokenizer,
                attention=policy.attention,
                trust_remote_code=policy.trust_remote_code,
            ).model
        validation = self._by_set(state.own_validation)
        final = store.write_folder("final", partial(export_final, setup, model, best.step, validation))
        if hub.push_to_hub:
            assert hub.repo_id is not None  # the schema sees to it
            push_folder(final, hub.repo_id, private=hub.private)

    def _by_set(self, validation: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """Logged metrics, by validation set; empty without any."""
        heads = {name: f"validation-{name}/" for name in self.setup.validation_sets if validation}
        return {
            name: {
                key.removeprefix(head): value
                for key, value in validation.items()
                if key.startswith(head) and "/" not in key.removeprefix(head)
            }
            for name, head in heads.items()
        }

    def finish(self, outcome: Outcome) -> Callable[[StopRequest, bool], Outcome]:
        setup, key = self.setup, self.config.ranking_metric
        is_chosen = key is not None and outcome.model_folder is not None and _logged_name(key) in outcome.validation
        ended = TrainingOutcome(
            **{**vars(outcome), "validation": self._by_set(outcome.validation)},
            validation_sizes=setup.validation_sizes,
            choice=setup.choice if is_chosen else None,
            num_trained_on=setup.num_trained_on,
        )
        if not self.config.evaluation.enabled or outcome.model_folder is None:
            return lambda stop, show_progress: ended
        return partial(_with_report, ended, plan_report(setup, outcome.model_folder))


def _with_report(outcome: TrainingOutcome, plan: ReportPlan, stop: StopRequest, show_progress: bool) -> TrainingOutcome:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    stop.doing = REPORTING
    report = plan.write(should_stop=lambda: stop.reason, show_progress=show_progress)
    if report.stopped_by is not None:
        return replace(outcome, interrupted_by=report.stopped_by, exit_code=stop.exit_code)
    exit_code = outcome.exit_code if report.error is None else 1
    return replace(outcome, report=report.path, report_error=report.error, exit_code=exit_code)


def _logged_name(key: MetricKey) -> str:
    return f"eval/rm/{key.metric}" if key.validation is None else f"validation-{key.validation}/{key.metric}"


def _line(name: str, step: int, means: Mapping[str, float], key: MetricKey | None) -> str:
    text = f"loss {means['loss']:.4f}  accuracy {means['accuracy']:.3f}  margin {means['reward_margin']:.2f}"
    if key is not None and key.validation in (None, name) and key.metric not in METRIC_NAMES:
        value = means.get(key.metric)
        text += f"  {key.metric} {'-' if value is None else format(value, '.3f')}"
    return f"validation-{name} after step {step}: {text}"


def _backward(
    setup: RewardModelSetup, comparisons: Sequence[Comparison], num_groups: int
) -> tuple[RewardMetrics, int, int]:
    """The gradient of one micro-batch, for a step of `num_groups`; its metrics, computed tokens and row tokens.

    A single comparison that is larger than the budget of tokens goes through the model in parts.
    """
    policy, groups = setup.config.policy, [one.token_ids for one in comparisons]
    pairs = setup.pairs_of(comparisons).to(setup.model.device)
    parts = setup.model.make_parts(groups, max_tokens=policy.micro_batch_tokens)
    batches = [batch for _, batch in parts]
    scores_S, loss_sum = backward_in_parts(
        [(members, partial(setup.model, batch)) for members, batch in parts],
        lambda scores: setup.loss_of(scores, pairs),
        scale=1 / max(num_groups, 1),
    )
    metrics = RewardMetrics.of(scores_S, pairs, loss_sum)
    return metrics, sum(one.num_computed_tokens for one in batches), sum(one.num_row_tokens for one in batches)
