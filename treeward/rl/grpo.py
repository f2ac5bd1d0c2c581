"""`grpo`: the loop. Rollouts, updates, validations, the watch, checkpoints, and a clean way to stop and go on.

    outcome = grpo(load_grpo_config("examples/configs/grpo_rm_1B.yaml", []))
    outcome.policy_folder     # a Hugging Face folder, None if the run was interrupted
    outcome.alarms            # what the watch has said

A step is: sample G completions to each prompt, reward them, compare each with the others of its group, update the
policy. A run that is stopped at any moment, kill -9 included, and started again with the same command goes on exactly
as if it had not been: what is drawn and sampled follows from the step and the seed, and everything else is in the
checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from treeward.config.grpo_run import GRPORunConfig
from treeward.config.load import save_config
from treeward.errors import ConfigError, TreewardError
from treeward.progress import ShownProgress
from treeward.rl.advantages import advantages
from treeward.rl.experience import completion_lengths
from treeward.rl.policy_loss import UpdateMetrics
from treeward.rl.report.build import write_rl_report
from treeward.rl.report.reading import SAMPLES_FILE, RLRun
from treeward.rl.rollouts import Rollouts, collect
from treeward.rl.setup import GRPORun, set_up
from treeward.rl.state import RLState, save_checkpoint
from treeward.rl.validation import ranking_remark, validate
from treeward.rl.watch import ALARMS_FILE, Alarm, write_alarms
from treeward.training.checkpoints import Checkpoint
from treeward.training.step_file import StepFile
from treeward.training.stopping import StopRequest
from treeward.training.tracking import TrackerGroup, log_folder, open_trackers, read_metrics

__all__ = ["GRPOOutcome", "grpo"]

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class GRPOOutcome:
    """How a run ended. `total_steps`: of the whole run, or where dynamic sampling has drawn all prompts before, `step`.

    `validation`: the metrics of the validation after the last step, with the names under which they are logged; empty
    where there was none.
    `interrupted_by`: a signal or the deadline, None if it finished; `stopped_by`: the alarm that ended it.
    `policy_folder`: the exported policy, of `policy_step`. `report`: the page that shows the run.
    """

    step: int
    total_steps: int
    validation: Mapping[str, float]
    alarms: tuple[Alarm, ...]
    policy_folder: Path | None = None
    policy_step: int | None = None
    report: Path | None = None
    interrupted_by: str | None = None
    stopped_by: str | None = None
    exit_code: int = 0


def grpo(config: GRPORunConfig, *, show_progress: bool = True) -> GRPOOutcome:
    """Optimise a policy as configured, resuming where an earlier run of the same configuration stopped.

    Raises a `TreewardError` for what the user can mend. Whatever fails in a step before the weights have changed, an
    environment, a generator or the first update, the state before the step is saved first.
    """
    if not isinstance(config, GRPORunConfig):
        raise ConfigError(
            "grpo takes a configuration that is loaded",
            got=config,
            need="what load_grpo_config returns",
            fix='write grpo(load_grpo_config("grpo.yaml"))',
        )
    stop = StopRequest(deadline_seconds=config.checkpointing.checkpoint_must_save_by)
    log_dir = log_folder(config.logger)
    run = set_up(config, show_progress=show_progress)
    resumed_at = run.state.step or None
    with contextlib.closing(run), stop, open_trackers(config.logger, log_dir, resume_step=resumed_at) as trackers:
        trackers.log_config(config.model_dump(mode="json", by_alias=True))
        save_config(config, log_dir / "config.yaml")
        # Samples are of validations: one that is made up for writes its own again.
        validated_at = -1 if run.state.validation_step is None else run.state.validation_step
        samples = StepFile(log_dir / SAMPLES_FILE, resume_step=None if resumed_at is None else validated_at)
        with contextlib.closing(samples):
            outcome = _Loop(run, trackers, samples, stop, log_dir, show_progress).run_to_end()
        trackers.close("interrupted" if outcome.interrupted_by else "finished")
    if not read_metrics(log_dir / METRICS_FILE):
        return outcome  # stopped before anything was measured
    where = Path(config.checkpointing.checkpoint_dir) if config.checkpointing.enabled else log_dir
    name = where.name or "run"
    try:
        report = write_rl_report(
            [RLRun.read(name, log_dir)], where / "report.html", title=f"{name}: policy optimisation"
        )
    except (OSError, TreewardError) as error:
        logger.error("What was trained is kept, but its report cannot be written: %s", error)
        return replace(outcome, exit_code=outcome.exit_code or 1)
    return replace(outcome, report=report)


@dataclass(slots=True)
class _SinceValidation:
    """Means over the steps since the last validation, of what a validation with one completion a prompt cannot
    measure.
    """

    sums: dict[str, float] = field(default_factory=dict)

    def add(self, values: Mapping[str, float | None]) -> None:
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                self.sums[name] = self.sums.get(name, 0.0) + value
                self.sums[f"num/{name}"] = self.sums.get(f"num/{name}", 0.0) + 1

    def mean(self, name: str) -> float | None:
        return self.sums[name] / self.sums[f"num/{name}"] if name in self.sums else None


class _Loop:
    """One session of a run: from `run.state.step` to the last step, to an alarm that stops, or to a request to stop."""

    def __init__(
        self,
        run: GRPORun,
        trackers: TrackerGroup,
        samples: StepFile,
        stop: StopRequest,
        log_dir: Path,
        show_progress: bool,
    ) -> None:
        self.run, self.trackers, self.samples, self.stop = run, trackers, samples, stop
        self.log_dir, self.show_progress = log_dir, show_progress
        self.state: RLState = run.state
        self.saved_step: int | None = run.state.step or None
        self.since = _SinceValidation(dict(run.state.since_validation))
        self.version_given: int | None = None
        self.longest_step = self.longest_save = 0.0

    def run_to_end(self) -> GRPOOutcome:
        run, config = self.run, self.run.config
        with ShownProgress(unit="steps", enabled=self.show_progress) as progress:
            self.progress = progress
            progress.show("training", self.state.step, run.total_steps)
            self._begin()
            if config.grpo.val_at_start and run.validation and self.state.step == 0:
                self.validate()
            elif self._validation_is_due() and self.state.validation_step != self.state.step:
                logger.info("Step %d was saved before it was validated: that is made up for.", self.state.step)
                self.validate()
                self.saved_step = None
                self.save()
            while not (self.is_done or self.stop.reason or self.state.stopped_by):
                started = time.monotonic()
                self.take_step()
                if self._validation_is_due():
                    self.validate()
                period = config.checkpointing.save_period
                is_last = self.is_done or self.state.stopped_by is not None
                if is_last or (period and self.state.step % period == 0):
                    self.save()
                self.longest_step = max(self.longest_step, time.monotonic() - started)
                self.stop.reserved_seconds = self.longest_step + self.longest_save
            if self.stop.reason:
                self.save()
        if self.is_done and self.state.step < run.total_steps:
            epochs = config.grpo.max_num_epochs
            logger.info("Dynamic sampling has drawn the prompts of all %d epochs in %d steps.", epochs, self.state.step)
        return self.finish()

    @property
    def is_done(self) -> bool:
        """Whether all steps are taken, or all prompts are drawn, which dynamic sampling does in fewer steps."""
        return self.state.step >= self.run.total_steps or self.state.prompts_drawn >= self.run.prompt_limit

    def _begin(self) -> None:
        """Say where an earlier session has left the run; an alarm that stops no longer lets it go on."""
        run, stopped_by = self.run, self.state.stopped_by
        if remark := ranking_remark(run):
            logger.warning("%s.", remark)
        # Those of a run that was killed after its last checkpoint are raised again.
        self._write_alarms()
        watch = run.config.grpo.watch
        if stopped_by is not None and not (watch.stop and stopped_by in watch.stop_on):
            logger.info("The alarm %s has ended this run; grpo.watch lets it go on.", stopped_by)
            self.state = replace(self.state, stopped_by=None)
        elif stopped_by is not None:
            logger.info("The alarm %s has ended this run after step %d (grpo.watch.stop).", stopped_by, self.state.step)
        elif self.is_done:
            logger.info("All %d steps are done. A new run needs its own checkpointing.checkpoint_dir.", self.state.step)

    def _validation_is_due(self) -> bool:
        grpo, step = self.run.config.grpo, self.state.step
        period = grpo.val_period is not None and step % grpo.val_period == 0
        return bool(self.run.validation) and step > 0 and (period or (grpo.val_at_end and self.is_done))

    def take_step(self) -> None:
        """Rollouts and the update from them."""
        run, grpo, loss_fn = self.run, self.run.config.grpo, self.run.config.loss_fn
        started = time.monotonic()
        with self._saved_if_it_fails(f"step {self.state.step + 1} cannot be taken"):
            self._give_weights()
            given = time.monotonic()
            rollouts = collect(run, step=self.state.step, drawn=self.state.prompts_drawn)
            sampled = time.monotonic()
            evaluated = run.updater.evaluate(rollouts.groups, for_reward=loss_fn.kl_in_reward)
            rewards_PG, extra = rollouts.rewards_PG, {}
            if loss_fn.kl_in_reward and evaluated.kl_PG is not None:
                penalty_PG = loss_fn.reference_policy_kl_penalty * evaluated.kl_PG
                rewards_PG = rewards_PG - penalty_PG
                extra["train/kl_penalty"] = float(penalty_PG.nanmean())
            advantages_PG = advantages(rewards_PG, grpo)
            learning_rate = run.updater.optimizer.param_groups[0]["lr"]
            metrics = run.updater.update(evaluated, advantages_PG, rollouts.used_PG)
        self.state = replace(
            self.state,
            step=self.state.step + 1,
            prompts_drawn=self.state.prompts_drawn + rollouts.prompts_drawn,
            version=self.state.version + 1,
        )
        self._note(rollouts)
        extra |= {
            "timing/train/generation": rollouts.seconds["generation"],
            "timing/train/rewards": rollouts.seconds["rewards"],
            "timing/train/policy_training": time.monotonic() - sampled,
            "timing/train/weight_sync": given - started,
            "timing/train/total_step_time": time.monotonic() - started,
        }
        shown = {
            "reward": rollouts.metrics.get("train/reward", math.nan),
            "length": rollouts.metrics["train/mean_gen_tokens_per_sample"],
        }
        if run.config.needs_reference:
            shown["kl"] = _means(run, rollouts, metrics).get("kl", math.nan)
        tokens = sum(group.num_row_tokens for group in rollouts.groups)
        self.progress.show("training", self.state.step, run.total_steps, shown, tokens=tokens)
        if self.state.step % grpo.log_period == 0 or self.is_done:
            self._log_step(rollouts, advantages_PG, metrics, learning_rate, extra)

    def _log_step(
        self,
        rollouts: Rollouts,
        advantages_PG: Tensor,
        metrics: UpdateMetrics,
        learning_rate: float,
        extra: Mapping[str, float],
    ) -> None:
        used = advantages_PG[rollouts.used_PG]
        self.trackers.log(
            dict(rollouts.metrics)
            | {f"train/{name}": value for name, value in _means(self.run, rollouts, metrics).items()}
            | {
                "train/lr": learning_rate,
                "train/advantages_mean": float(used.mean()) if len(used) else 0.0,
                "train/advantages_std": float(used.std(unbiased=False)) if len(used) else 0.0,
                "train/prompts_drawn": self.state.prompts_drawn,
                "train/computed_tokens": metrics.computed_tokens,
                "train/row_tokens": metrics.row_tokens,
                "epoch": self.state.prompts_drawn / self.run.order.prompts_per_epoch,
            }
            | dict(extra),
            step=self.state.step,
        )

    def _note(self, rollouts: Rollouts) -> None:
        self.since.add(
            {
                "groups_without_signal": rollouts.metrics["train/groups_without_signal"],
                "length_correlation": rollouts.length_correlation,
            }
        )
        self.state = replace(self.state, since_validation=dict(self.since.sums))

    def _give_weights(self) -> None:
        """The generator samples from the weights as they are now; asked for only where something is sampled."""
        if self.version_given != self.state.version:
            self.run.generator.load_weights(self.run.policy, self.state.version)
            self.version_given = self.state.version

    @contextlib.contextmanager
    def _saved_if_it_fails(self, what: str) -> Iterator[None]:
        """Whatever fails leaves a checkpoint of the state before it, if that is whole: no weight has changed since."""
        rewards, steps_begun = self.run.rewards.state_dict(), self.run.updater.steps_begun
        try:
            yield
        except Exception as error:
            said = error.summary if isinstance(error, TreewardError) else f"{type(error).__name__}: {error}"
            logger.error("%s%s: %s", what[0].upper(), what[1:], said)
            if self.run.updater.steps_begun != steps_begun:
                logger.error("The weights have changed in this step: the last checkpoint stands.")
                raise
            self.run.rewards.load_state_dict(rewards)
            self.save()
            if self.saved_step == self.state.step:
                logger.error("Step %d is saved: the same command goes on from there.", self.state.step)
            raise

    def validate(self) -> None:
        """Validate, log, and let the watch see it; or nothing if told to stop."""
        started = time.monotonic()
        what = f"the policy of step {self.state.step} cannot be validated"
        with self.progress.paused(), self._saved_if_it_fails(what):
            self._give_weights()
            found = validate(self.run, should_stop=lambda: self.stop.reason)
        if found is None:
            return  # it is made up for when the run goes on
        watched: dict[str, Any] = dict(found.watched)
        watched["groups_without_signal"] = self.since.mean("groups_without_signal")
        if watched["length_correlation"] is None:
            watched["length_correlation"] = self.since.mean("length_correlation")
        alarms = self.run.watch.observe(self.state.step, **watched)
        self.since = _SinceValidation()
        seconds = time.monotonic() - started
        metrics = dict(found.metrics) | self.run.watch.metrics()
        if not self._validation_is_logged():
            self.trackers.log(metrics | {"timing/validation/total_validation_time": seconds}, step=self.state.step)
        for sample in found.samples:
            self.samples.append({"step": self.state.step, **sample})
        self.state = replace(
            self.state, validation_step=self.state.step, validation=dict(found.metrics), since_validation={}
        )
        shown = "  ".join(
            f"{name} {found.metrics[f'validation/{name}']:.3f}"
            for name in ("reward", "gold_reward", "kl", "mean_gen_tokens_per_sample", "truncation_rate")
            if f"validation/{name}" in found.metrics
        )
        self.progress.message(f"validation after step {self.state.step}: {shown}")
        self._heed(alarms)

    def _validation_is_logged(self) -> bool:
        """By a session that was killed before it saved what it had made up for; the numbers are the same."""
        if self.state.step != self.run.state.step:
            return False
        lines = read_metrics(self.log_dir / METRICS_FILE)
        return any(line["step"] == self.state.step and "watch/alarm" in line for line in lines)

    def _heed(self, alarms: list[Alarm]) -> None:
        for alarm in alarms:
            logger.warning("ALARM after step %d: %s", alarm.step, alarm.sentence)
            if alarm.stops and self.state.stopped_by is None:
                self.state = replace(self.state, stopped_by=alarm.kind)
                logger.warning("The run ends here (grpo.watch.stop).")
        self._write_alarms()

    def _write_alarms(self) -> None:
        path = self.log_dir / ALARMS_FILE
        try:
            write_alarms(path, self.run.watch.alarms)
        except OSError as error:
            raise ConfigError(
                "the alarms cannot be written",
                where=str(path),
                got=str(error),
                need="space and permission to write",
                fix="make room and start the same command again: it resumes from the last checkpoint",
            ) from error

    def save(self) -> Checkpoint | None:
        """Save a checkpoint, unless this step has one."""
        store = self.run.store
        if store is None or self.saved_step == self.state.step or self.state.step == 0:
            return None
        started = time.monotonic()
        metric = self.run.config.ranking_metric
        measured = None
        if metric is not None and self.state.validation_step == self.state.step:
            measured = self.state.validation.get(f"validation/{metric}")
        with self.progress.paused():
            checkpoint = store.save(
                self.state.step, lambda folder: save_checkpoint(folder, self.run, self.state), metric=measured
            )
        self.saved_step = self.state.step
        self.longest_save = max(self.longest_save, time.monotonic() - started)
        logger.info("Saved %s.", checkpoint.path)
        return checkpoint

    def finish(self) -> GRPOOutcome:
        run = self.run
        outcome = GRPOOutcome(
            self.state.step,
            self.state.step if self.is_done else run.total_steps,
            self.state.validation if self.state.validation_step == self.state.step else {},
            tuple(run.watch.alarms),
            stopped_by=self.state.stopped_by,
        )
        if not self.is_done and self.state.stopped_by is None:
            return replace(outcome, interrupted_by=self.stop.reason, exit_code=self.stop.exit_code)
        if run.store is None:
            return outcome
        best = run.store.best()
        if best is None:
            return outcome  # an alarm has ended the run before its first step
        final = run.store.folder / "final"
        best.verify()
        source = best.path / "model"

        def copy(folder: Path) -> None:
            shutil.copytree(source, folder, dirs_exist_ok=True)

        run.store.write_folder("final", copy)
        logger.info("Exported the policy of step %d to %s.", best.step, final)
        return replace(outcome, policy_folder=final, policy_step=best.step)


def _means(run: GRPORun, rollouts: Rollouts, metrics: UpdateMetrics) -> dict[str, float]:
    """As the updater has them, but `kl` is that of a completion, as at validations; `kl_per_token` of a token."""
    means = metrics.means()
    per_token = means.pop("kl", None)
    lengths = completion_lengths(rollouts.groups)
    learnt = rollouts.used_PG & (lengths > 0)
    if per_token is None or run.updater.reference is None:
        return means
    return means | {"kl_per_token": per_token, "kl": per_token * float(lengths[learnt].float().mean())}
