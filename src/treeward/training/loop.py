"""The loop of every run: steps, validations, checkpoints, metrics, progress, and a clean way to stop and go on.

    outcome = start(config, config.rm, set_up)           # reward models; with config.grpo, policies

A `Run` defines a step, a validation and its state; the loop does everything else. A run that is stopped at any moment,
kill -9 included, and started again with the same command continues exactly as an uninterrupted one: the data of a step
follow from its number, and everything else is in the checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from treeward import processes
from treeward.config.grpo import GRPOConfig
from treeward.config.grpo_run import GRPORunConfig
from treeward.config.load import save_config
from treeward.config.policy import TrainedModelConfig
from treeward.config.run import RewardModelRunConfig, RMConfig
from treeward.errors import ConfigError, ModelError
from treeward.model.pretrained import quiet_transformers
from treeward.parallel.stopping import StopRequest
from treeward.progress import ShownProgress, show_logs
from treeward.storage import write_text
from treeward.training.checkpoints import Checkpoint, CheckpointStore, open_store
from treeward.training.optimisation import be_deterministic
from treeward.training.ranking import warn_of_rare_metric, warn_of_unranked
from treeward.training.state import (
    RunState,
    check_files,
    load_state,
    read_state,
    save_state,
    stored_metric,
    write_state,
)
from treeward.training.tracking import (
    TrackerGroup,
    begin_log,
    id_of_run,
    log_folder,
    logs_run,
    open_trackers,
    read_metrics,
)

logger = logging.getLogger(__name__)

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
    """The results of a validation: `metrics`, logged and kept in the state; `logged`, not kept; lines for people."""

    metrics: Mapping[str, float]
    logged: Mapping[str, float] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    `validation`: the metrics of the exported model (or of the last step). `model_folder`: the exported model, of step
    `model_step`; None if the run was interrupted. `interrupted_by`: a signal or the deadline.
    """

    step: int
    total_steps: int
    validation: Mapping[str, Any]
    model_folder: Path | None = None
    model_step: int | None = None
    interrupted_by: str | None = None
    exit_code: int = 0


class Run(ABC):
    """A run, for the loop. Steps are counted from 1; `step` below is the number of finished steps. `identity`: values
    that a resumed run must share with the run that it continues. `validates`: whether there is anything to validate on.
    """

    def __init__(
        self,
        config: RewardModelRunConfig | GRPORunConfig,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler,
        identity: dict[str, Any],
        *,
        total_steps: int,
        validates: bool,
    ) -> None:
        self.run_config, self.optimizer, self.scheduler, self.identity = (
            config,
            optimizer,
            scheduler,
            identity,
        )
        self.total_steps, self.validates = total_steps, validates

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
        """Write what the exported model in `folder`, a copy of the checkpoint with this `state`, has beside it. Called
        on the main process."""

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


def start(
    config: RewardModelRunConfig | GRPORunConfig,
    schedule: RMConfig | GRPOConfig,
    set_up: Callable[[Checkpoint | None, bool], Run],
    *,
    ranked_by: str | None,
    show_progress: bool,
) -> Outcome:
    """Check, set a run up, resume where an earlier one of the same configuration stopped, and run to the end.
    `ranked_by`: the logged name of the metric that ranks checkpoints. `set_up` gets the checkpoint that the run resumes
    from, and whether to show progress. Raises a `TreewardError`."""
    stop = StopRequest(deadline_seconds=config.checkpointing.checkpoint_must_save_by)
    metric_of = None if ranked_by is None else partial(stored_metric, name=ranked_by)
    show_progress = show_progress and processes.is_main()
    if show_progress:
        show_logs()
    _check_gpu(config.policy)
    with _memory_suffices():
        num_processes = int(os.environ.get("WORLD_SIZE") or config.training_cluster.num_processes)
        if num_processes > 1 and processes.size() == 1:
            summary, fix = (
                "the processes of this run are not one group",
                "call launch(train, config) of treeward.parallel.launch",
            )
            raise ConfigError(summary, field="cluster", got=f"{num_processes} processes", fix=fix)
        with (
            log_folder(config.logger),
            open_store(config.checkpointing, metric_of) as store,
            quiet_transformers(),
        ):
            checkpoint = None if store is None else store.latest()
            if checkpoint is not None:
                check_files(checkpoint.path)
            if store is not None and ranked_by is not None and processes.is_main():
                warn_of_unranked(store, ranked_by, config.checkpointing)
            torch.set_float32_matmul_precision(config.policy.matmul_precision)
            if config.policy.deterministic:
                be_deterministic()
            torch.manual_seed(schedule.seed)
            run = set_up(checkpoint, show_progress)
            if store is not None and ranked_by is not None and processes.is_main():
                warn_of_rare_metric(config.checkpointing, schedule, run.total_steps)
            # Signals are heeded from here on: before, there is nothing to save, and they may end the process at once.
            with stop, contextlib.ExitStack() as opened:
                opened.callback(run.close)
                state = _resumed(run, checkpoint)
                run_id = _run_id(store, checkpoint)
                resume_step = _logged_step(config, run_id, checkpoint)
                settings = config.model_dump(mode="json", by_alias=True)
                trackers = opened.enter_context(open_trackers(config.logger, settings, resume_step))
                processes.on_main(
                    lambda: save_config(config, Path(config.logger.log_dir) / "config.yaml")
                )
                run.begin(state, trackers)
                processes.on_main(lambda: begin_log(config.logger, run_id))
                progress = opened.enter_context(ShownProgress(unit="steps", enabled=show_progress))
                outcome = Loop(run, state, schedule, store, trackers, progress, stop).run_to_end()
                trackers.status = "interrupted" if outcome.interrupted_by else "finished"
                return run.finish(outcome)


def _check_gpu(policy: TrainedModelConfig) -> None:
    """Raise `ConfigError`, before anything is read, for a key that needs a GPU where there is none."""
    wanted = {
        "dtensor_cfg.cpu_offload": policy.dtensor_cfg.cpu_offload,
        "torch_compile": policy.torch_compile,
    }
    for key, value in wanted.items():
        if value and not torch.cuda.is_available():
            need, fix = "a GPU that torch sees", f"set policy.{key}=false"
            raise ConfigError(
                "there is no GPU for this", field=f"policy.{key}", got=value, need=need, fix=fix
            )


@contextlib.contextmanager
def _memory_suffices() -> Iterator[None]:
    """Raise `ModelError` if the GPU's memory is too small for the weights, a step or a validation."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        where = f"rank {processes.rank()}" if processes.size() > 1 else None
        got = str(error).splitlines()[0]
        fix = "lower policy.train_micro_batch_tokens, or set policy.dtensor_cfg.activation_checkpointing=true; "
        fix += "`treeward plan --config FILE` says what takes it"
        raise ModelError("the GPU's memory is too small", where=where, got=got, fix=fix) from error


def _resumed(run: Run, checkpoint: Checkpoint | None) -> RunState:
    if checkpoint is None:
        return RunState(0, json.loads(json.dumps(run.identity, default=str)))
    state = load_state(checkpoint.path, run.optimizer, run.scheduler)
    if state.step <= run.total_steps:
        logger.info(
            "Resuming after step %d of %d from %s.", state.step, run.total_steps, checkpoint.path
        )
    else:
        logger.warning(
            "This run has taken %d steps (%s), and the configuration now asks for %d: there is nothing left to train, "
            "and no step is undone.", state.step, checkpoint.path, run.total_steps,
        )  # fmt: skip
        run.total_steps = state.step
    return state


def _run_id(store: CheckpointStore | None, checkpoint: Checkpoint | None) -> str:
    folder = None if store is None else store.folder
    return processes.on_main(lambda: id_of_run(folder, is_new=checkpoint is None))


def _logged_step(
    config: RewardModelRunConfig | GRPORunConfig, run_id: str, checkpoint: Checkpoint | None
) -> int | None:
    """The step from which the log goes on; None in a new run, and where the log folder is of another run."""
    if checkpoint is None:
        return None
    if not processes.on_main(lambda: logs_run(config.logger, run_id)):
        logger.warning(
            "logger.log_dir=%s has the log of another run. Its files are set aside, and this run's log begins at step "
            "%d: give each run a log folder of its own.", config.logger.log_dir, checkpoint.step,
        )  # fmt: skip
        return None
    return checkpoint.step


@dataclass
class Loop:
    """Runs from `state` to the end of the run, or to a request to stop; saves on the way, and exports the best model.
    `store`: None where nothing is saved."""

    run: Run
    state: RunState
    schedule: RMConfig | GRPOConfig
    store: CheckpointStore | None
    trackers: TrackerGroup
    progress: ShownProgress
    stop: StopRequest
    longest_step: float = 0.0
    longest_save: float = 0.0

    def __post_init__(self) -> None:
        self.first_step = self.state.step
        self.saved_step: int | None = self.state.step or None

    def run_to_end(self) -> Outcome:
        run, state = self.run, self.state
        was_done = run.is_done(state.step)
        if state.step >= run.total_steps:
            logger.info(
                "All %d steps are done. A new run needs its own checkpointing.checkpoint_dir.",
                state.step,
            )
        self.progress.show("training", state.step, run.total_steps)
        if self.schedule.val_at_start and state.step == 0:
            self.validate()
        elif self._validation_is_due() and state.validation_step != state.step:
            logger.info("Step %d was saved before its validation, which is done now.", state.step)
            self.validate()
            assert self.store is not None  # the step was loaded from it
            self._complete_state()
            folder = self.store.folder / f"step_{state.step}"
            processes.on_main(lambda: write_state(folder, state))
            self.store.prune()
        while not (run.is_done(state.step) or self.stop.agree()):
            started = time.monotonic()
            self.take_step()
            if self._validation_is_due():
                self.validate()
            if self._save_is_due():
                self.save()
            self.longest_step = max(self.longest_step, time.monotonic() - started)
            self.stop.reserved_seconds = self.longest_step + self.longest_save
        if self.stop.reason:
            self.save()
        outcome = Outcome(state.step, run.total_steps, state.own_validation)
        is_unvalidated = self._validation_is_due() and state.validation_step != state.step
        if not run.is_done(state.step) or (self.stop.reason and is_unvalidated):
            return replace(outcome, interrupted_by=self.stop.reason, exit_code=self.stop.exit_code)
        return self._export(outcome, was_done=was_done)

    def _validation_is_due(self) -> bool:
        schedule, step = self.schedule, self.state.step
        if not self.run.validates or step == 0:
            return False
        return schedule.is_validated(step) or (schedule.val_at_end and self.run.is_done(step))

    def _save_is_due(self) -> bool:
        period, step = self.run.run_config.checkpointing.save_period, self.state.step
        return self.run.is_done(step) or bool(period and step % period == 0)

    def take_step(self) -> None:
        run, state = self.run, self.state
        started = time.monotonic()
        processes.doing(f"step {state.step + 1}")
        if state.step == self.first_step:
            self.progress.message(
                f"Step {state.step + 1} of {run.total_steps} begins; the first one is the slowest."
            )
        metrics = run.step(state.step + 1)
        state.step += 1
        self.progress.show(
            "training", state.step, run.total_steps, metrics.shown, tokens=metrics.row_tokens
        )
        if state.step % self.schedule.log_period == 0 or run.is_done(state.step):
            seconds = {"timing/train/total_step_time": time.monotonic() - started}
            self.trackers.log({**metrics.logged, **seconds}, step=state.step)

    def validate(self) -> None:
        """Validate, log, and keep the metrics for the checkpoint; a request to stop ends it without results."""
        state = self.state
        if not self.run.validates:
            return
        started = time.monotonic()
        processes.doing(f"the validation after step {state.step}")
        with self.progress.paused("validating"):
            validation = self.run.validate(state.step, self.stop.agree)
        if validation is None:
            return  # a resumed run repeats it
        is_logged = False
        # perhaps by a session that was killed then
        if processes.is_main() and state.step == self.first_step > 0:
            lines = read_metrics(self.trackers.metrics_file)
            is_logged = any(
                line["step"] == state.step and _VALIDATION_SECONDS in line for line in lines
            )
        if processes.is_main() and not is_logged:
            seconds = {_VALIDATION_SECONDS: time.monotonic() - started}
            self.trackers.log(
                {**validation.metrics, **validation.logged, **seconds}, step=state.step
            )
        state.validation_step, state.validation = state.step, dict(validation.metrics)
        for line in validation.lines:
            self.progress.message(line)

    def save(self) -> None:
        """Save a checkpoint, unless this step has one."""
        if self.store is None or self.saved_step == self.state.step or self.state.step == 0:
            return
        processes.doing(f"the save after step {self.state.step}")
        started = time.monotonic()
        with self.progress.paused("saving"):
            checkpoint = self.store.save(self.state.step, self._write)
        self.saved_step = self.state.step
        self.longest_save = max(self.longest_save, time.monotonic() - started)
        logger.info("Saved %s.", checkpoint.path)

    def _write(self, folder: Path) -> None:
        run, config = self.run, self.run.run_config
        run.save_model(folder)
        self._complete_state()
        is_rounded = config.policy.precision != "float32"
        processes.on_main(lambda: save_config(config, folder / "config.yaml"))
        # Last, because it has the digests of all other files.
        save_state(folder, self.state, run.optimizer, run.scheduler, with_weights=is_rounded)

    def _complete_state(self) -> None:
        self.state.run, self.state.ranked = self.run.state(), self._save_is_due()

    def _export(self, outcome: Outcome, *, was_done: bool) -> Outcome:
        """Export the best checkpoint, without a ranking metric the last, unless an earlier session has."""
        best = None if self.store is None else self.store.best()
        if self.store is None or best is None:
            return outcome
        self.store.prune()  # a session that was killed after its last save has not
        state = self.state if best.step == self.state.step else read_state(best.path)
        final = self.store.folder / "final"
        # The run may be longer than before, or rank by another metric.
        mark, name = self.store.folder / _EXPORTED, best.path.name

        def is_exported() -> bool:
            return (
                was_done
                and final.is_dir()
                and mark.exists()
                and mark.read_text(encoding="utf-8") == name
            )

        if not processes.on_main(is_exported):
            # It may be older than the checkpoint that the run has resumed from, which was checked.
            check_files(best.path, within="model/")
            processes.on_main(lambda: mark.unlink(missing_ok=True))

            def write(folder: Path) -> None:
                shutil.copytree(best.path / "model", folder, dirs_exist_ok=True)
                self.run.complete_export(folder, state)

            with processes.patience() as group:
                self.store.write_folder(
                    "final", lambda folder: processes.on_main(partial(write, folder), group)
                )
            processes.on_main(lambda: write_text(mark, name))
            logger.info("Exported the model of step %d to %s.", best.step, final)
        return replace(
            outcome, validation=state.own_validation, model_folder=final, model_step=best.step
        )
