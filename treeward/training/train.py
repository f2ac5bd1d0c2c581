"""`train`: the loop. Steps, validations, checkpoints, metrics, and a clean way to stop and go on.

    outcome = train(load_config("examples/configs/quickstart.yaml", []))
    outcome.model_folder      # a Hugging Face folder, None if the run was interrupted
    outcome.validation        # {"plain": {"accuracy": 0.95, ...}, ...}

A run that is stopped at any moment, kill -9 included, and started again with the same command goes on exactly as if it
had not been: the order of the data follows from the step, and everything else is in the checkpoint.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from treeward.config.load import save_config
from treeward.config.run import RewardModelRunConfig
from treeward.data.encoding import Comparison
from treeward.errors import ConfigError, ModelError
from treeward.metrics import METRIC_NAMES, RewardMetrics
from treeward.model.export import export_model, push_folder
from treeward.model.loading import load_reward_model
from treeward.progress import ShownProgress
from treeward.scoring.golden import sign_folder
from treeward.training.checkpoints import Checkpoint, CheckpointStore
from treeward.training.choice import Choice
from treeward.training.exporting import export_final
from treeward.training.reporting import ReportPlan, check_report, plan_report
from treeward.training.setup import Run, set_up
from treeward.training.state import TrainingState, read_state, save_state
from treeward.training.stopping import REPORTING, StopRequest
from treeward.training.tracking import TrackerGroup, log_folder, open_trackers
from treeward.training.validation import SetValidation, pooled, robust_accuracy, validate, values_of
from treeward.tree.parts import backward_in_parts, split_group

__all__ = ["TrainingOutcome", "train"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """How a run ended.

    `interrupted_by`: why it stopped early, None if it finished; `exit_code` as a process should report it.
    `validation`: the metrics of each set in the model that was exported (of the last step where none was), empty if it
    was not validated; `validation_sizes`: how many comparisons they are of.
    `model_folder`: the exported model, of step `model_step`; `choice`: how that was chosen, None where it is the last.
    `num_trained_on`: by set, how many of its comparisons are in the training data too.
    `report`: the page that says what it has learnt, None if there is none, and `report_error` is why one that was asked
    for is missing or lacks a suite; the exit code is 1 then.
    """

    step: int
    total_steps: int
    validation: dict[str, dict[str, float]]
    validation_sizes: dict[str, int]
    model_folder: Path | None = None
    model_step: int | None = None
    interrupted_by: str | None = None
    exit_code: int = 0
    report: Path | None = None
    report_error: str | None = None
    choice: Choice | None = None
    num_trained_on: Mapping[str, int] = field(default_factory=dict)


def train(config: RewardModelRunConfig, *, show_progress: bool = True) -> TrainingOutcome:
    """Train a reward model as configured, resuming where an earlier run of the same configuration stopped.

    Raises a `TreewardError` for what the user can mend; the last checkpoint stands.
    """
    if not isinstance(config, RewardModelRunConfig):
        raise ConfigError(
            "train takes a configuration that is loaded",
            got=config,
            need="what load_config returns",
            fix='write train(load_config("rm.yaml"))',
        )
    stop = StopRequest(deadline_seconds=config.checkpointing.checkpoint_must_save_by)
    log_dir = log_folder(config.logger)
    check_report(config)
    run = set_up(config, show_progress=show_progress)
    resumed_at = run.state.step or None
    # Signals are heeded from here on: before, there is nothing to save, and they may end the process at once.
    store = contextlib.nullcontext() if run.store is None else contextlib.closing(run.store)
    with store, stop, open_trackers(config.logger, log_dir, resume_step=resumed_at) as trackers:
        trackers.log_config(config.model_dump(mode="json", by_alias=True))
        save_config(config, log_dir / "config.yaml")
        if resumed_at is None:
            for role, sets in (("train", run.training_sets), ("validation", run.validation_sets)):
                for name, dataset in sets.items():
                    counts = dataset.counts.as_metrics()
                    trackers.log({f"data/{role}/{name}/{key}": value for key, value in counts.items()}, step=0)
        if run.state.step >= run.total_steps:
            logger.info("All %d steps are done. A new run needs its own checkpointing.checkpoint_dir.", run.state.step)
        loop = _Loop(run, trackers, stop, show_progress)
        outcome = loop.run_to_end()
        if config.evaluation.enabled and outcome.model_folder is not None:
            plan = plan_report(run, outcome.model_folder)
            del run, loop  # the report loads the exported model: two in memory at once may be one too many
            outcome = _with_report(outcome, plan, stop, show_progress)
        trackers.close("interrupted" if outcome.interrupted_by else "finished")
    return outcome


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


class _Loop:
    """One session of a run: from `run.state.step` to the last step, or to a request to stop."""

    def __init__(self, run: Run, trackers: TrackerGroup, stop: StopRequest, show_progress: bool) -> None:
        self.run, self.trackers, self.stop, self.show_progress = run, trackers, stop, show_progress
        self.state: TrainingState = run.state
        self.saved_step: int | None = run.state.step or None
        self.longest_step = self.longest_save = 0.0
        self.warned_of_ranking = False

    def run_to_end(self) -> TrainingOutcome:
        run, rm = self.run, self.run.config.rm
        run.model.train()
        with ShownProgress(unit="steps", enabled=self.show_progress) as progress:
            self.progress = progress
            progress.show("training", self.state.step, run.total_steps)
            if rm.val_at_start and self.state.step == 0:
                self.validate()
            elif self._validation_is_due() and self.state.validation_step != self.state.step:
                logger.info("Step %d was saved before it was validated: that is made up for.", self.state.step)
                self.validate()
                self.saved_step = None
                self.save()
            while self.state.step < run.total_steps and not self.stop.reason:
                started = time.monotonic()
                self.take_step()
                if self._validation_is_due():
                    self.validate()
                period = run.config.checkpointing.save_period
                if self.state.step == run.total_steps or (period and self.state.step % period == 0):
                    self.save()
                self.longest_step = max(self.longest_step, time.monotonic() - started)
                self.stop.reserved_seconds = self.longest_step + self.longest_save
            if self.stop.reason:
                self.save()
        return self.finish()

    def _validation_is_due(self) -> bool:
        rm, step = self.run.config.rm, self.state.step
        return step > 0 and bool(
            (rm.val_period and step % rm.val_period == 0) or (rm.val_at_end and step == self.run.total_steps)
        )

    def take_step(self) -> int:
        """One optimiser step; returns how many are done."""
        started = time.monotonic()
        run = self.run
        comparisons = run.order.comparisons(self.state.step)
        num_groups = run.pairs_of(comparisons).num_groups
        total, computed_tokens, row_tokens = RewardMetrics(), 0, 0
        for members in run.plan(comparisons):
            chosen = [comparisons[i] for i in members]
            sums, computed, rows = _backward(run, chosen, num_groups)
            total, computed_tokens, row_tokens = total + sums, computed_tokens + computed, row_tokens + rows
        learning_rate = run.optimizer.param_groups[0]["lr"]
        grad_norm = self._update_weights(total)
        step = self.state.step + 1
        self.state = replace(self.state, step=step)
        means, seconds = total.means(), time.monotonic() - started
        shown = {"loss": means["loss"], "accuracy": means["accuracy"], "margin": means["reward_margin"]}
        self.progress.show("training", step, run.total_steps, shown, tokens=row_tokens)
        if step % run.config.rm.log_period == 0 or step == run.total_steps:
            self.trackers.log(
                {f"train/rm/{name}": value for name, value in means.items()}
                | {
                    "train/rm/lr": learning_rate,
                    "train/rm/grad_norm": grad_norm,
                    "episode": run.order.episodes(step),
                    "epoch": run.order.episodes(step) / run.order.comparisons_per_epoch,
                    "train/rm/computed_tokens": computed_tokens,
                    "train/rm/row_tokens": row_tokens,
                    "timing/train/total_step_time": seconds,
                    "timing/train/row_tokens_per_second": row_tokens / seconds,
                },
                step=step,
            )
        return step

    def _update_weights(self, total: RewardMetrics) -> float:
        """Clip, step, and return the gradients' norm before clipping. Raises `ModelError` if it is not finite."""
        run = self.run
        limit = run.config.policy.max_grad_norm
        norm = float(torch.nn.utils.clip_grad_norm_(run.model.parameters(), math.inf if limit is None else limit))
        if not (math.isfinite(norm) and math.isfinite(total.loss_sum)):
            step = self.state.step + 1
            raise ModelError(
                f"the loss is not finite at {'the first step' if step == 1 else f'step {step}'}",
                got=f"loss {total.means()['loss']}, gradient norm {norm}",
                need="finite numbers; the weights were not changed by this step",
                fix="start anew in another checkpointing.checkpoint_dir with a lower policy.optimizer.kwargs.lr, or in "
                "policy.precision=float32",
            )
        run.optimizer.step()
        run.scheduler.step()
        run.optimizer.zero_grad(set_to_none=True)
        return norm

    def validate(self) -> None:
        """Validate on every set, log the metrics, and keep them for the checkpoint; or nothing if told to stop."""
        run = self.run
        if not run.validation_sets:
            return
        started = time.monotonic()
        measured: dict[str, SetValidation] = {}
        logged: dict[str, float] = {}
        with self.progress.paused():
            for name in run.validation_sets:
                set_started = time.monotonic()
                of_set = self._measure(name)
                if of_set is None:
                    return  # it is made up for when the run goes on
                measured[name] = of_set
                logged[f"timing/validation/{name}"] = time.monotonic() - set_started
            metrics = {name: one.metrics() for name, one in measured.items()} | {"": pooled(list(measured.values()))}
        results = {name: values_of(of_set) for name, of_set in metrics.items()}
        for name, values in results.items():
            prefix = f"validation-{name}" if name else "eval/rm"
            logged |= {f"{prefix}/{key}": value for key, value in values.items()}
        logged["timing/validation/total_validation_time"] = time.monotonic() - started
        self.trackers.log(logged, step=self.state.step)
        self.state = replace(self.state, validation_step=self.state.step, validation=results)
        self._tell_of_validation(results)
        key = run.config.ranking_metric
        if key is not None and not self.warned_of_ranking:
            ranking = metrics[key.validation or ""].get(key.metric)
            if ranking is None or ranking.value is None or not math.isfinite(ranking.value):
                self.warned_of_ranking = True
                logger.warning(
                    "%s (checkpointing.metric_name) has no value after step %d: %s. Checkpoints without it rank last.",
                    run.config.checkpointing.metric_name,
                    self.state.step,
                    (ranking and ranking.note) or "it is not a number",
                )

    def _measure(self, name: str) -> SetValidation | None:
        """One validation set, or None if told to stop."""
        run, policy = self.run, self.run.config.policy
        measured = validate(
            run.model,
            run.validation_sets[name],
            run.pairs_of,
            run.loss_of,
            partial(run.plan, validation=True),
            limit=run.validation_limit,
            should_stop=lambda: self.stop.reason,
        )
        if measured is None or name not in run.perturbed:
            return measured
        tokens, groups = policy.micro_batch_tokens, run.config.rm.val_micro_batch_size or policy.train_micro_batch_size
        robust = robust_accuracy(
            run.model,
            run.renderer,
            run.perturbed[name],
            batch_tokens=tokens,
            max_sequences=None if groups is None else 2 * groups,
            should_stop=lambda: self.stop.reason,
        )
        return None if robust is None else replace(measured, robust=robust)

    def _tell_of_validation(self, results: Mapping[str, Mapping[str, float]]) -> None:
        key = self.run.config.ranking_metric
        for name in self.run.validation_sets:
            means = results[name]
            text = f"loss {means['loss']:.4f}  accuracy {means['accuracy']:.3f}  margin {means['reward_margin']:.2f}"
            if key is not None and key.validation in (None, name) and key.metric not in METRIC_NAMES:
                value = means.get(key.metric)
                text += f"  {key.metric} {'-' if value is None else format(value, '.3f')}"
            self.progress.message(f"validation-{name} after step {self.state.step}: {text}")

    def save(self) -> Checkpoint | None:
        """Save a checkpoint, unless this step has one."""
        store = self.run.store
        if store is None or self.saved_step == self.state.step or self.state.step == 0:
            return None
        started = time.monotonic()
        with self.progress.paused():
            checkpoint = store.save(self.state.step, self._write, metric=self._ranking_metric())
        self.saved_step = self.state.step
        self.longest_save = max(self.longest_save, time.monotonic() - started)
        logger.info("Saved %s.", checkpoint.path)
        return checkpoint

    def _write(self, folder: Path) -> None:
        run = self.run
        renderer = run.renderer
        export_model(
            run.model,
            run.tokenizer,
            folder / "model",
            rendering=renderer.settings,
        )
        sign_folder(folder / "model", model=run.model, renderer=renderer, may_be_broken=True)
        optimizer = run.optimizer if run.config.checkpointing.save_optimizer else None
        save_state(folder, self.state, optimizer, run.scheduler, run.parameter_names)
        save_config(run.config, folder / "config.yaml")

    def _ranking_metric(self) -> float | None:
        """The metric that ranks checkpoints, if it was measured at this very step."""
        key = self.run.config.ranking_metric
        if key is None or self.state.validation_step != self.state.step:
            return None
        return self.state.validation.get(key.validation or "", {}).get(key.metric)

    def finish(self) -> TrainingOutcome:
        run = self.run
        outcome = TrainingOutcome(
            self.state.step,
            run.total_steps,
            _validation_of(self.state),
            run.validation_sizes,
            num_trained_on=run.num_trained_on,
        )
        if self.state.step < run.total_steps:
            return replace(outcome, interrupted_by=self.stop.reason, exit_code=self.stop.exit_code)
        return outcome if run.store is None else self._export(run.store, outcome)

    def _export(self, store: CheckpointStore, outcome: TrainingOutcome) -> TrainingOutcome:
        """Export the best checkpoint (without a ranking metric the last) as `final`."""
        run = self.run
        best = store.best()
        assert best is not None  # the last step was saved
        final = store.folder / "final"
        choice = None if best.metric is None else run.choice
        if run.state.step == run.total_steps and final.is_dir():  # an earlier session has finished the run
            validation = _validation_of(read_state(best.path))
            return replace(outcome, validation=validation, model_folder=final, model_step=best.step, choice=choice)
        model, state = run.model, self.state
        if best.step != self.state.step:
            best.verify()
            model = load_reward_model(
                best.path / "model",
                tokenizer=run.tokenizer,
                attention=run.config.policy.attention,
                trust_remote_code=run.config.policy.trust_remote_code,
            ).model
            state = read_state(best.path)
        validation = _validation_of(state)
        store.write_folder("final", partial(export_final, run, model, best.step, validation))
        logger.info("Exported the model of step %d to %s.", best.step, final)
        hub = run.config.hub
        if hub.push_to_hub:
            assert hub.repo_id is not None  # the schema sees to it
            push_folder(final, hub.repo_id, private=hub.private)
        return replace(outcome, validation=validation, model_folder=final, model_step=best.step, choice=choice)


def _backward(run: Run, comparisons: Sequence[Comparison], num_groups: int) -> tuple[RewardMetrics, int, int]:
    """The gradient of one micro-batch, for a step of `num_groups`; its metrics, computed tokens and row tokens.

    A single comparison that is larger than the budget of tokens goes through the model in parts.
    """
    policy, groups = run.config.policy, [one.token_ids for one in comparisons]
    pairs = run.pairs_of(comparisons).to(run.model.device)
    members: list[Sequence[int]] = [range(sum(map(len, groups)))]
    batches = [run.model.make_batch(groups)]
    if len(groups) == 1 and policy.micro_batch_tokens is not None:
        share = run.model.layout == "tree"
        members = [part.members for part in split_group(groups[0], max_tokens=policy.micro_batch_tokens, share=share)]
        batches = [run.model.make_batch([[groups[0][i] for i in part]]) for part in members]
    with _memory_error_explained(max(batch.num_computed_tokens for batch in batches), len(groups)):
        scores_S, loss_sum = backward_in_parts(
            list(zip(members, [partial(run.model, batch) for batch in batches], strict=True)),
            lambda scores: run.loss_of(scores, pairs),
            scale=1 / max(num_groups, 1),
        )
    metrics = RewardMetrics.of(scores_S, pairs, loss_sum)
    return metrics, sum(one.num_computed_tokens for one in batches), sum(one.num_row_tokens for one in batches)


@contextlib.contextmanager
def _memory_error_explained(num_tokens: int, num_comparisons: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ModelError(
            "the GPU's memory is too small for a forward and backward pass",
            got=f"{num_tokens} tokens of {num_comparisons} comparisons at once: {str(error).splitlines()[0]}",
            fix="lower policy.train_micro_batch_tokens, or set policy.activation_checkpointing_enabled=true",
        ) from error


def _validation_of(state: TrainingState) -> dict[str, dict[str, float]]:
    """The metrics of each set in this state's own model; those of an earlier step are not."""
    return {name: means for name, means in state.validation.items() if name and state.validation_step == state.step}
