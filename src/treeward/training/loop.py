"""The loop of every run: steps, validations, checkpoints, metrics, progress, and a clean stop.

    outcome = Loop(run, state, schedule, store, trackers, progress, stop, config_text).run_to_end()

A `Run` defines a step, a validation and its state; the loop does everything else. A run that is
stopped at any moment, kill -9 included, and started again with the same command continues exactly
as an uninterrupted one: the data of a step follow from its number, and everything else is in the
checkpoint. `treeward.training.session` finds that checkpoint, and calls the loop.
"""

from __future__ import annotations

import logging
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from treeward import processes
from treeward.config.grpo import GRPOConfig
from treeward.config.run import RMConfig
from treeward.parallel.stopping import StopRequest
from treeward.progress import ShownProgress
from treeward.storage import write_text
from treeward.training.checkpoints import CheckpointStore
from treeward.training.state import (
    RunState,
    check_files,
    read_state,
    save_state,
    write_state,
)
from treeward.training.tracking import TrackerGroup, read_metrics

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
"""The resolved configuration, in the log folder and in every checkpoint."""
_EXPORTED = ".exported"  # beside `final`, with the name of its checkpoint
_VALIDATION_SECONDS = "timing/validation/total_validation_time"


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of a step: `logged` by name; `shown` in the progress; tokens, as plain rows."""

    logged: Mapping[str, float]
    shown: Mapping[str, float]
    row_tokens: int


@dataclass(frozen=True, slots=True)
class Validation:
    """The results of a validation: `metrics`, logged and kept in the state; `logged`, not kept;
    lines for people."""

    metrics: Mapping[str, float]
    logged: Mapping[str, float] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    `validation`: the metrics of the exported model (or of the last step). `model_folder`: the
    exported model, of step `model_step`; None if the run was interrupted. `interrupted_by`: a
    signal or the deadline.
    """

    step: int
    total_steps: int
    validation: Mapping[str, Any]
    model_folder: Path | None = None
    model_step: int | None = None
    interrupted_by: str | None = None
    exit_code: int = 0


class Run(ABC):
    """A run, for the loop. Steps are counted from 1; `step` below is the number of finished steps.

    `identity`: values that a resumed run must share with the run that it continues. `validates`:
    whether there is anything to validate on. `is_rounded`: whether a saved model has fewer bits
    than the weights that are trained, so that a checkpoint needs these too.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler,
        identity: dict[str, Any],
        *,
        total_steps: int,
        validates: bool,
        is_rounded: bool,
    ) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.identity = identity
        self.total_steps = total_steps
        self.validates = validates
        self.is_rounded = is_rounded

    @abstractmethod
    def begin(self, state: RunState, trackers: TrackerGroup) -> None:
        """Restore `state.run`, the `state()` of an earlier session; {} in a new run."""

    @abstractmethod
    def step(self, number: int) -> StepMetrics:
        """Take the step of this number."""

    @abstractmethod
    def validate(self, step: int, should_stop: Callable[[], str | None]) -> Validation | None:
        """Measure the model after so many steps; None if `should_stop` gave a reason on the way."""

    @abstractmethod
    def save_model(self, folder: Path) -> None:
        """Write the model of a checkpoint, a folder `model` in `folder`."""

    @abstractmethod
    def complete_export(self, folder: Path, state: RunState) -> None:
        """Write what the exported model in `folder`, a copy of the checkpoint with this `state`,
        has beside it. Called on the main process."""

    @abstractmethod
    def finish(self, outcome: Outcome) -> Outcome:
        """The work after the loop."""

    def is_done(self, step: int) -> bool:
        """Whether the run ends after so many steps."""
        return step >= self.total_steps

    def state(self) -> dict[str, Any]:
        """The state beside model, optimiser and schedule, as JSON."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Free resources outside this object."""


@dataclass
class Loop:
    """Runs from `state` to the end of the run, or to a request to stop; saves on the way, and
    exports the best model. `store`: None where nothing is saved. `config_text`: the configuration,
    for the checkpoints."""

    run: Run
    state: RunState
    schedule: RMConfig | GRPOConfig
    store: CheckpointStore | None
    trackers: TrackerGroup
    progress: ShownProgress
    stop: StopRequest
    config_text: str
    longest_step: float = 0.0
    longest_save: float = 0.0

    def __post_init__(self) -> None:
        self.first_step = self.state.step
        self.saved_step: int | None = self.state.step or None  # step 0 has no checkpoint

    def run_to_end(self) -> Outcome:
        run = self.run
        state = self.state
        # Only then may the best checkpoint have been exported already.
        was_done = run.is_done(state.step)
        if state.step >= run.total_steps:
            logger.info(
                "All %d steps are done. A new run needs its own checkpointing.checkpoint_dir.",
                state.step,
            )
        self.progress.show("training", state.step, run.total_steps)
        if self.schedule.val_at_start and state.step == 0:
            self.validate()
        elif self._misses_validation():
            self._validate_saved_step()
        while not (run.is_done(state.step) or self.stop.agree()):
            started = time.monotonic()
            self.take_step()
            # Validated before it is saved: the checkpoint has the metric that ranks it.
            if self._validation_is_due():
                self.validate()
            if self._save_is_due():
                self.save()
            self.longest_step = max(self.longest_step, time.monotonic() - started)
            # A deadline leaves time for one more step and its save.
            self.stop.reserved_seconds = self.longest_step + self.longest_save
        if self.stop.reason:
            self.save()
        outcome = Outcome(state.step, run.total_steps, state.own_validation)
        is_interrupted = not run.is_done(state.step)
        # The best checkpoint is not known before the last one is validated.
        if self.stop.reason and self._misses_validation():
            is_interrupted = True
        if is_interrupted:
            return replace(outcome, interrupted_by=self.stop.reason, exit_code=self.stop.exit_code)
        return self._export(outcome, was_done=was_done)

    def _validation_is_due(self) -> bool:
        step = self.state.step
        if not self.run.validates or step == 0:
            return False
        is_last = self.schedule.val_at_end and self.run.is_done(step)
        return is_last or self.schedule.is_validated(step)

    def _misses_validation(self) -> bool:
        return self._validation_is_due() and self.state.validation_step != self.state.step

    def _validate_saved_step(self) -> None:
        """Validate the step from which the run goes on: a signal came between its save and this."""
        assert self.store is not None  # the step was loaded from it
        state = self.state
        logger.info("Step %d was saved before its validation, which is done now.", state.step)
        self.validate()
        self._complete_state()
        # The model and the optimiser are those of the checkpoint; only the metrics are new.
        folder = self.store.folder / f"step_{state.step}"
        processes.on_main(lambda: write_state(folder, state))
        self.store.prune()

    def _save_is_due(self) -> bool:
        if self.store is None:
            return False
        return self.run.is_done(self.state.step) or self.store.is_due(self.state.step)

    def take_step(self) -> None:
        run = self.run
        state = self.state
        started = time.monotonic()
        number = state.step + 1
        processes.doing(f"step {number}")
        if state.step == self.first_step:
            # Kernels are compiled and memory is taken in it, which looks like a run that hangs.
            self.progress.message(
                f"Step {number} of {run.total_steps} begins; the first one is the slowest."
            )
        metrics = run.step(number)
        state.step = number
        self.progress.show(
            "training", number, run.total_steps, metrics.shown, tokens=metrics.row_tokens
        )
        if number % self.schedule.log_period == 0 or run.is_done(number):
            logged = dict(metrics.logged)
            logged["timing/train/total_step_time"] = time.monotonic() - started
            self.trackers.log(logged, step=number)

    def validate(self) -> None:
        """Validate, log, and keep the metrics for the checkpoint; a request to stop ends it without
        results."""
        state = self.state
        if not self.run.validates:
            return
        started = time.monotonic()
        processes.doing(f"the validation after step {state.step}")
        with self.progress.paused("validating"):
            validation = self.run.validate(state.step, self.stop.agree)
        if validation is None:
            return  # a resumed run repeats it
        if processes.is_main() and not self._validation_is_logged():
            logged = {**validation.metrics, **validation.logged}
            logged[_VALIDATION_SECONDS] = time.monotonic() - started
            self.trackers.log(logged, step=state.step)
        state.validation_step = state.step
        state.validation = dict(validation.metrics)
        for line in validation.lines:
            self.progress.message(line)

    def _validation_is_logged(self) -> bool:
        """Whether an earlier session has logged the validation of this step, and was killed before
        it was saved."""
        step = self.state.step
        if step != self.first_step or step == 0:
            return False
        for line in read_metrics(self.trackers.metrics_file):
            if line["step"] == step and _VALIDATION_SECONDS in line:
                return True
        return False

    def save(self) -> None:
        """Save a checkpoint, unless this step has one."""
        step = self.state.step
        if self.store is None or self.saved_step == step or step == 0:
            return
        processes.doing(f"the save after step {step}")
        started = time.monotonic()
        with self.progress.paused("saving"):
            checkpoint = self.store.save(step, self._write)
        self.saved_step = step
        self.longest_save = max(self.longest_save, time.monotonic() - started)
        logger.info("Saved %s.", checkpoint.path)

    def _write(self, folder: Path) -> None:
        run = self.run
        run.save_model(folder)
        self._complete_state()
        processes.on_main(lambda: write_text(folder / CONFIG_FILE, self.config_text))
        # Last, because it has the digests of all other files.
        save_state(folder, self.state, run.optimizer, run.scheduler, with_weights=run.is_rounded)

    def _complete_state(self) -> None:
        self.state.run = self.run.state()
        # A checkpoint of a signal is never the best: the uninterrupted run has none there.
        self.state.ranked = self._save_is_due()

    def _export(self, outcome: Outcome, *, was_done: bool) -> Outcome:
        """Export the best checkpoint, without a ranking metric the last, unless an earlier session
        has."""
        store = self.store
        if store is None:
            return outcome
        best = store.best()
        if best is None:
            return outcome
        store.prune()  # a session that was killed after its last save has not
        state = self.state
        if best.step != state.step:
            state = read_state(best.path)
        final = store.folder / "final"
        mark = store.folder / _EXPORTED
        name = best.path.name

        def is_exported() -> bool:
            # The run may be longer than before, or rank by another metric.
            if not was_done or not final.is_dir() or not mark.exists():
                return False
            return mark.read_text(encoding="utf-8") == name

        def write(folder: Path) -> None:
            shutil.copytree(best.path / "model", folder, dirs_exist_ok=True)
            self.run.complete_export(folder, state)

        if not processes.on_main(is_exported):
            # It may be older than the checkpoint that the run has resumed from, which was checked.
            check_files(best.path, within="model/")
            # First, so that a kill during the export leaves no mark of an older one.
            processes.on_main(lambda: mark.unlink(missing_ok=True))
            # A copy of a large model takes longer than the others would wait for a step.
            with processes.patience() as group:
                store.write_folder(
                    "final", lambda folder: processes.on_main(partial(write, folder), group)
                )
            processes.on_main(lambda: write_text(mark, name))
            logger.info("Exported the model of step %d to %s.", best.step, final)
        return replace(
            outcome, validation=state.own_validation, model_folder=final, model_step=best.step
        )
