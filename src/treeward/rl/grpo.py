"""`grpo`: the run of a policy. `treeward.training.loop` takes its steps, validates, saves, stops
and resumes.

    outcome = grpo(load_grpo_config("grpo_rm_1B", []))
    outcome.model_folder      # a Hugging Face folder, None if the run was interrupted
    outcome.alarms            # of the watch

A step samples G completions of each prompt, rewards them, compares each with the others of its
group, and updates the policy. Prompts and samples follow from the step and the seed; everything
else is in the checkpoint.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from treeward import processes
from treeward.config.grpo_run import GRPORunConfig
from treeward.config.preflight import check_packages
from treeward.errors import TreewardError
from treeward.formatting import metric_text
from treeward.model.export import export_model
from treeward.rl.advantages import advantages, component_advantages
from treeward.rl.generation import completion_lengths
from treeward.rl.logged_run import SAMPLES_FILE, RLRun
from treeward.rl.policy_loss import UpdateMetrics
from treeward.rl.report import write_rl_report
from treeward.rl.rollouts import Rollouts, collect, validate
from treeward.rl.setup import GRPOSetup, set_up_grpo
from treeward.rl.watch import ALARMS_FILE, Alarm, write_alarms
from treeward.scoring.trained_judge import write_judge_contract
from treeward.training.loop import Outcome, Run, StepMetrics, Validation
from treeward.training.models import save_adapted
from treeward.training.optimisation import SkippedSteps
from treeward.training.session import open_session
from treeward.training.state import RunState
from treeward.training.step_file import StepFile, set_aside
from treeward.training.tracking import METRICS_FILE, TrackerGroup, read_metrics

logger = logging.getLogger(__name__)

_MUCH_MISMATCH = 1.2
"""Two ways to compute in bfloat16 differ by less (docs/grpo.md)."""
_SHOWN = ("reward", "gold_reward", "kl", "mean_gen_tokens_per_sample", "truncation_rate")
"""The metrics of a validation in the log's line."""
_PROGRESS = {
    "reward": "train/reward",
    "length": "train/mean_gen_tokens_per_sample",
    "kl": "train/kl",
}
"""The metrics of a step in the line of progress, by the names that it shows."""


@dataclass(frozen=True, kw_only=True)
class GRPOOutcome(Outcome):
    """How a run ended. `total_steps`: of the whole run, or `step` where dynamic sampling drew all
    prompts earlier.

    `validation`: the metrics of the exported policy, by their logged names. `stopped_by`: the alarm
    that ended the run. `report`: its page, if anything was measured.
    """

    alarms: tuple[Alarm, ...]
    stopped_by: str | None
    report: Path | None = None


def grpo(config: GRPORunConfig, *, show_progress: bool = True) -> GRPOOutcome:
    """Optimise a policy as configured, resuming where an earlier run of the same configuration
    stopped.

    Raises a `TreewardError` for what the user can mend.
    """
    check_packages(config)
    ranked_by = None
    if config.ranking_metric is not None:
        ranked_by = f"validation/{config.ranking_metric}"
    with open_session(
        config, config.grpo, ranked_by=ranked_by, show_progress=show_progress
    ) as session:
        run = GRPORun(set_up_grpo(config, session.checkpoint, session.shows_progress))
        outcome = session.run_to_end(run)
    assert isinstance(outcome, GRPOOutcome)
    return outcome


class GRPORun(Run):
    """A `Run` of the loop: steps of sampling, rewarding and updating; validation on held-out
    prompts, and the watch.

    So far `prompts_drawn` prompts were drawn and the weights changed `version` times. `stopped_by`:
    the alarm that ends the run. The main process alone watches, and writes samples, alarms and the
    report.
    """

    def __init__(self, setup: GRPOSetup) -> None:
        super().__init__(
            setup.updater.optimizer,
            setup.scheduler,
            setup.identity,
            total_steps=setup.total_steps,
            validates=bool(setup.validation),
            is_rounded=setup.config.policy.precision != "float32",
        )
        self.setup = setup
        self.grpo = setup.config.grpo
        self.loss_fn = setup.config.loss_fn
        self.prompts_drawn = 0
        self.version = 0
        # A validation with one completion a prompt cannot measure these; the watch gets the means
        # since the last one.
        self.since: dict[str, list[float]] = {}
        self.stopped_by: str | None = None
        self._samples: StepFile | None = None
        self._log_dir = Path(setup.config.logger.log_dir)
        # The version that the generator has; a process that has just started has given it none.
        self._version_given: int | None = None
        self._warned_of_mismatch = False

    def begin(self, state: RunState, trackers: TrackerGroup) -> None:
        """Also opens the file of samples, and stops for an alarm that has ended the run, unless it
        no longer stops."""
        if state.run:
            self.prompts_drawn = state.run["prompts_drawn"]
            self.version = state.run["version"]
            self.since = state.run["since_validation"]
            self.stopped_by = state.run["stopped_by"]
            self.setup.watch.load_state_dict(state.run["watch"])
            self.setup.updater.skipped = SkippedSteps(**state.run.get("skipped_steps", {}))
        written_to = state.step
        if self.setup.validation:
            # A validation that is repeated writes its samples again.
            written_to = -1  # nothing: a validation may be after step 0
            if state.validation_step is not None:
                written_to = state.validation_step
        is_logged = trackers.resume_step is not None
        if processes.is_main():
            resume_step = None
            if is_logged:
                resume_step = written_to
            self._samples = StepFile(self._log_dir / SAMPLES_FILE, resume_step=resume_step)
            if not is_logged:
                # Alarms of an earlier run in this folder are none of this one's.
                set_aside(self._log_dir / ALARMS_FILE)
        # Alarms that a killed run raised after its last checkpoint leave the file; they are raised
        # again.
        self._write_alarms()
        if self.stopped_by is not None:
            alarm = self.stopped_by
            logger.info("The alarm %s has ended this run after step %d.", alarm, state.step)
            if alarm not in self.grpo.watch.stop_on:
                self.stopped_by = None

    def state(self) -> dict[str, Any]:
        return {
            "prompts_drawn": self.prompts_drawn,
            "version": self.version,
            "since_validation": self.since,
            "stopped_by": self.stopped_by,
            "watch": self.setup.watch.state_dict(),
            "skipped_steps": asdict(self.setup.updater.skipped),
        }

    def is_done(self, step: int) -> bool:
        """Whether all steps are taken or all prompts drawn (dynamic sampling draws more a step), or
        an alarm stops."""
        return self._is_through(step, self.prompts_drawn) or self.stopped_by is not None

    def _is_through(self, step: int, prompts_drawn: int) -> bool:
        return step >= self.total_steps or prompts_drawn >= self.setup.prompt_limit

    def close(self) -> None:
        try:
            self.setup.close()
        finally:
            if self._samples is not None:
                self._samples.close()

    def step(self, number: int) -> StepMetrics:
        setup = self.setup
        started = time.monotonic()
        # Completions are of the weights that the last step has left.
        self._sync_weights()
        synced = time.monotonic()

        rollouts = collect(setup, step=number - 1, drawn=self.prompts_drawn)
        sampled = time.monotonic()
        evaluated = setup.updater.evaluate(
            rollouts.groups,
            for_reward=self.loss_fn.kl_in_reward,
            with_errors=self.grpo.seq_logprob_error_threshold is not None,
        )
        rewards_PG = rollouts.rewards_PG
        penalty_PG = None
        loss_fn = self.loss_fn
        if loss_fn.kl_in_reward and evaluated.kl_PG is not None:
            # r - beta KL, of whole completions (Ziegler et al. 2019, arXiv 1909.08593, eq. 2).
            penalty_PG = loss_fn.reference_policy_kl_penalty * evaluated.kl_PG
            rewards_PG = rewards_PG - penalty_PG
        used_PG = rollouts.used_PG
        most_error = self.grpo.seq_logprob_error_threshold
        if most_error is not None and evaluated.error_PG is not None:
            # An error that is not a number masks nothing: `>` is false of it.
            is_mismatched_PG = evaluated.error_PG > most_error
            used_PG = used_PG & ~is_mismatched_PG
        # Of all rewards: a completion that is not learnt from still counts in its group's baseline.
        if rollouts.weights is not None:
            advantages_PG = component_advantages(
                rewards_PG, rollouts.components, rollouts.weights, self.grpo
            )
        else:
            advantages_PG = advantages(rewards_PG, self.grpo)
        # Read before the update, which advances the schedule.
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        drawn = self.prompts_drawn + rollouts.prompts_drawn
        is_logged = number % self.grpo.log_period == 0 or self._is_through(number, drawn)
        update = setup.updater.update(evaluated, advantages_PG, used_PG, entropies=is_logged)
        self.prompts_drawn = drawn
        self.version += 1

        # From here on only names for the log.
        self._keep_for_validation(rollouts, number)
        logged = dict(rollouts.metrics)
        if used_PG is not rollouts.used_PG:
            is_masked_PG = rollouts.used_PG & ~used_PG
            logged["train/num_masked_seqs_by_logprob_error"] = float(is_masked_PG.sum())
        if penalty_PG is not None:
            logged["train/kl_penalty"] = float(penalty_PG.nanmean())
        logged |= self._logged(update, rollouts, advantages_PG[used_PG], used_PG)
        logged["train/lr"] = learning_rate
        logged["timing/train/policy_training"] = time.monotonic() - sampled
        logged["timing/train/weight_sync"] = synced - started
        num_row_tokens = sum(group.num_row_tokens for group in rollouts.groups)
        progress = {name: logged[key] for name, key in _PROGRESS.items() if key in logged}
        return StepMetrics(logged, progress, num_row_tokens)

    def _keep_for_validation(self, rollouts: Rollouts, number: int) -> None:
        """What the next validation reads of this step, and without validations the samples for the
        report."""
        for name in ("groups_without_signal", "length_correlation"):
            value = rollouts.watched[name]
            if value is not None:
                self.since.setdefault(name, []).append(value)
        if self.setup.validation:
            return
        period = self.grpo.val_period or 1
        if number == 1 or number % period == 0:
            self._write_samples(number, rollouts.samples)

    def _logged(
        self, update: UpdateMetrics, rollouts: Rollouts, advantages_N: Tensor, used_PG: Tensor
    ) -> dict[str, float]:
        """The metrics of an update; `advantages_N`: of the completions that were learnt from."""
        means = update.means()
        error = means.get("token_mult_prob_error", 1.0)
        if error > _MUCH_MISMATCH and not self._warned_of_mismatch and processes.is_main():
            self._warned_of_mismatch = True  # once: the metric says it at every step
            logger.warning(
                "Completions are not sampled from the policy: the generator's probability of a "
                "token is off by a factor of %.2f (train/token_mult_prob_error, 1 is equal). "
                "Sample with a server or engines that compute as the trainer does, or with "
                "policy.attention=rows.",
                error,
            )
        per_token = means.pop("kl", None)
        if per_token is not None and self.setup.updater.reference is not None:
            # The name `kl` is of the sum over a completion, as in validations.
            lengths_PG = completion_lengths(rollouts.groups)
            mean_length = float(lengths_PG[used_PG & (lengths_PG > 0)].float().mean())
            means["kl_per_token"] = per_token
            means["kl"] = per_token * mean_length
        advantages_mean = 0.0
        advantages_std = 0.0
        if len(advantages_N) > 0:
            advantages_mean = float(advantages_N.mean())
            advantages_std = float(advantages_N.std(unbiased=False))
        return {
            **{f"train/{name}": value for name, value in means.items()},
            "train/advantages_mean": advantages_mean,
            "train/advantages_std": advantages_std,
            "train/skipped_steps": self.setup.updater.skipped.total,
            "train/prompts_drawn": self.prompts_drawn,
            "train/computed_tokens": update.computed_tokens,
            "train/row_tokens": update.row_tokens,
            "epoch": self.prompts_drawn / self.setup.order.rows_per_epoch,
        }

    def _sync_weights(self) -> None:
        """Give the generator the current weights."""
        if self._version_given != self.version:
            self.setup.generator.load_weights(self.setup.policy, self.version)
            self._version_given = self.version

    def validate(self, step: int, should_stop: Callable[[], str | None]) -> Validation | None:
        """Also shows the measurements to the watch, heeds its alarms, and writes samples."""
        self._sync_weights()
        validation = validate(self.setup, should_stop=should_stop)
        if validation is None:
            return None
        watched: dict[str, Any] = {}
        for name, values in self.since.items():
            watched[name] = statistics.fmean(values)
        # What the validation has measured itself takes precedence over the steps before it.
        for name, value in validation.watched.items():
            if value is not None:
                watched[name] = value
        # The main process alone watches; all get its alarms, because all stop at one step.
        alarms = processes.on_main(lambda: self.setup.watch.observe(step, **watched))
        self.since = {}
        self._write_samples(step, validation.samples)
        for alarm in alarms:
            logger.warning("ALARM after step %d: %s", alarm.step, alarm.sentence)
            if alarm.stops and self.stopped_by is None:
                self.stopped_by = alarm.kind
                logger.warning("The run ends here (grpo.watch.stop_on).")
        self._write_alarms()
        shown = []
        for name in _SHOWN:
            value = validation.metrics.get(f"validation/{name}")
            if value is not None:
                shown.append(f"{name} {metric_text(name, value)}")
        line = f"validation after step {step}: {'  '.join(shown)}"
        return Validation(validation.metrics, self.setup.watch.metrics(), (line,))

    def _write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        if self._samples is not None:
            for sample in samples:
                self._samples.append({"step": step, **sample})

    def _write_alarms(self) -> None:
        if processes.is_main():
            write_alarms(self._log_dir / ALARMS_FILE, self.setup.watch.alarms)

    def save_model(self, folder: Path) -> None:
        """A policy with adapters is merged in `model`, and the adapters lie beside it as peft
        writes them."""
        setup = self.setup
        save_adapted(setup.policy, folder)
        export_model(
            setup.policy,
            setup.tokenizer,
            folder / "model",
            chat_template=setup.renderer.chat_template,
        )

    def complete_export(self, folder: Path, state: RunState) -> None:
        config = self.setup.config
        judged = config.judged_by(config.data.train[0])
        if judged is not None:
            write_judge_contract(folder, judged, config.policy.tokenizer.chat_template_kwargs)

    def finish(self, outcome: Outcome) -> Outcome:
        through = self._is_through(outcome.step, self.prompts_drawn)
        if through and outcome.step < self.total_steps:
            epochs = self.grpo.max_num_epochs
            logger.info(
                "Dynamic sampling has drawn the prompts of all %d epochs in %d steps.",
                epochs,
                outcome.step,
            )
        total_steps = self.total_steps
        if through:
            total_steps = outcome.step
        ended = GRPOOutcome(
            **{**vars(outcome), "total_steps": total_steps},
            alarms=tuple(self.setup.watch.alarms),
            stopped_by=self.stopped_by,
        )
        if not processes.is_main():
            return ended
        if not read_metrics(self._log_dir / METRICS_FILE):
            return ended  # stopped before anything was measured
        # The report lies beside the checkpoints, or else beside the log.
        where = self._log_dir
        checkpointing = self.setup.config.checkpointing
        if checkpointing.enabled:
            where = Path(checkpointing.checkpoint_dir)
        name = where.name or "run"
        try:
            run = RLRun.read(name, self._log_dir)
            title = f"{name}: policy optimisation"
            report = write_rl_report([run], where / "report.html", title=title)
        except (OSError, TreewardError) as error:
            # The run has succeeded all the same: the exit code alone says what is missing.
            logger.error("The policy is saved, but its report cannot be written: %s", error)
            return replace(ended, exit_code=ended.exit_code or 1)
        return replace(ended, report=report)
