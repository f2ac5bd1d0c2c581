"""`open_session`: one start of a run, of reward models and of policies alike.

    with open_session(config, config.rm, ranked_by="eval/rm/loss", show_progress=True) as session:
        run = RewardModelRun(set_up(config, session.checkpoint, session.shows_progress))
        outcome = session.run_to_end(run)

A session checks the machine, locks the run's folders, and finds the checkpoint to resume from. The
run is set up for that checkpoint, and the session's loop takes it to the end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from treeward import processes
from treeward.config.grpo import GRPOConfig
from treeward.config.grpo_run import GRPORunConfig
from treeward.config.load import config_yaml
from treeward.config.policy import TrainedModelConfig
from treeward.config.run import LoggerConfig, RewardModelRunConfig, RMConfig
from treeward.errors import ConfigError, ModelError
from treeward.model.pretrained import quiet_transformers
from treeward.parallel.stopping import StopRequest
from treeward.progress import ShownProgress, show_logs
from treeward.storage import write_text
from treeward.training.checkpoints import Checkpoint, CheckpointStore, open_store
from treeward.training.loop import CONFIG_FILE, Loop, Outcome, Run
from treeward.training.optimisation import be_deterministic
from treeward.training.ranking import warn_of_rare_metric, warn_of_unranked
from treeward.training.state import RunState, check_files, load_state, stored_metric
from treeward.training.tracking import (
    begin_log,
    continued_step,
    id_of_run,
    log_folder,
    open_trackers,
)

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def open_session(
    config: RewardModelRunConfig | GRPORunConfig,
    schedule: RMConfig | GRPOConfig,
    *,
    ranked_by: str | None,
    show_progress: bool,
) -> Iterator[Session]:
    """Check the machine and the folders of a run, and lock the folders while the block runs.

    `ranked_by`: the logged name of the metric that ranks checkpoints. Raises a `TreewardError`; in
    the block also a `ModelError` for a GPU whose memory is too small.
    """
    # Its deadline counts from here.
    stop = StopRequest(deadline_seconds=config.checkpointing.checkpoint_must_save_by)
    show_progress = show_progress and processes.is_main()
    if show_progress:
        show_logs()
    _check_gpu(config.policy)
    _check_processes(config.training_cluster.num_processes)
    metric_of = None
    if ranked_by is not None:
        metric_of = partial(stored_metric, name=ranked_by)
    # Both folders are locked before anything in them is read or changed.
    with (
        _memory_suffices(),
        log_folder(config.logger),
        open_store(config.checkpointing, metric_of) as store,
        quiet_transformers(),
    ):
        checkpoint = None
        if store is not None:
            checkpoint = store.latest()
        # Nothing is loaded from a damaged one.
        if checkpoint is not None:
            check_files(checkpoint.path)
        if store is not None:
            warn_of_unranked(store)
        torch.set_float32_matmul_precision(config.policy.matmul_precision)
        if config.policy.deterministic:
            be_deterministic()
        # For optimisers that round at random, as torchao's: weights are drawn from seeds of their
        # own, and the order of the data follows from the step.
        torch.manual_seed(schedule.seed)
        yield Session(
            checkpoint=checkpoint,
            shows_progress=show_progress,
            schedule=schedule,
            logger=config.logger,
            store=store,
            stop=stop,
            settings=config.model_dump(mode="json", by_alias=True),
            config_text=config_yaml(config),
        )


def _check_gpu(policy: TrainedModelConfig) -> None:
    """Raise `ConfigError`, before anything is read, for a key that needs a GPU where there is
    none."""
    wanted = {
        "dtensor_cfg.cpu_offload": policy.dtensor_cfg.cpu_offload,
        "torch_compile": policy.torch_compile,
    }
    for key, value in wanted.items():
        if value and not torch.cuda.is_available():
            raise ConfigError(
                "there is no GPU for this",
                field=f"policy.{key}",
                got=value,
                need="a GPU that torch sees",
                fix=f"set policy.{key}=false",
            )


def _check_processes(num_configured: int) -> None:
    """Raise `ConfigError` where several processes are to train, and this one is alone."""
    # A caller of `train` in Python may have left out `launch`, which joins the processes.
    num_processes = int(os.environ.get("WORLD_SIZE") or num_configured)
    if num_processes > 1 and processes.size() == 1:
        raise ConfigError(
            "the processes of this run are not one group",
            field="cluster",
            got=f"{num_processes} processes",
            fix="call launch(train, config) of treeward.parallel.launch",
        )


@contextlib.contextmanager
def _memory_suffices() -> Iterator[None]:
    """Raise `ModelError` if the GPU's memory is too small for the weights, a step or a
    validation."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        where = None
        if processes.size() > 1:
            where = f"rank {processes.rank()}"
        raise ModelError(
            "the GPU's memory is too small",
            where=where,
            got=str(error).splitlines()[0],
            fix="lower policy.train_micro_batch_tokens, or set "
            "policy.dtensor_cfg.activation_checkpointing=true; "
            "`treeward plan --config FILE` says what takes it",
        ) from error


@dataclass(frozen=True)
class Session:
    """One start of a run; made by `open_session`.

    `checkpoint`: the one to resume from, None in a new run. `shows_progress`: whether to show it,
    on the main process alone. `store`: None where nothing is saved. `settings` and `config_text`:
    the configuration, for people and trackers.
    """

    checkpoint: Checkpoint | None
    shows_progress: bool
    schedule: RMConfig | GRPOConfig
    logger: LoggerConfig
    store: CheckpointStore | None
    stop: StopRequest
    settings: dict[str, Any]
    config_text: str

    def run_to_end(self, run: Run) -> Outcome:
        """Resume a run that was set up for `checkpoint`, and take it to its end, or to a request to
        stop. Raises a `TreewardError`."""
        if self.store is not None:
            warn_of_rare_metric(self.store, self.schedule, run.total_steps)
        # Signals are heeded from here on: before, there is nothing to save, and they may end the
        # process at once.
        with self.stop, contextlib.ExitStack() as opened:
            opened.callback(run.close)
            state = self._resumed(run)
            folder = None
            if self.store is not None:
                folder = self.store.folder
            is_new = self.checkpoint is None
            run_id = processes.on_main(partial(id_of_run, folder, is_new=is_new))
            last_step = None
            if self.checkpoint is not None:
                last_step = self.checkpoint.step
            # None where the log folder has another run's log: its files are set aside then.
            resume_step = continued_step(self.logger, run_id, last_step)
            trackers = open_trackers(self.logger, self.settings, resume_step)
            opened.enter_context(trackers)
            config_file = Path(self.logger.log_dir) / CONFIG_FILE
            processes.on_main(partial(write_text, config_file, self.config_text))
            run.begin(state, trackers)
            # After the files of another run were set aside.
            processes.on_main(partial(begin_log, self.logger, run_id))
            progress = ShownProgress(unit="steps", enabled=self.shows_progress)
            opened.enter_context(progress)
            loop = Loop(
                run,
                state,
                self.schedule,
                self.store,
                trackers,
                progress,
                self.stop,
                config_text=self.config_text,
            )
            outcome = loop.run_to_end()
            trackers.status = "finished"
            if outcome.interrupted_by:
                trackers.status = "interrupted"
            return run.finish(outcome)

    def _resumed(self, run: Run) -> RunState:
        """The state from which the run goes on; optimiser and schedule are put back."""
        if self.checkpoint is None:
            # As it will be read back from a checkpoint: tuples are lists there, paths texts.
            identity = json.loads(json.dumps(run.identity, default=str))
            return RunState(0, identity)
        path = self.checkpoint.path
        state = load_state(path, run.optimizer, run.scheduler)
        if state.step <= run.total_steps:
            logger.info("Resuming after step %d of %d from %s.", state.step, run.total_steps, path)
        else:
            logger.warning(
                "This run has taken %d steps (%s), and the configuration now asks for %d: there is "
                "nothing left to train, and no step is undone.",
                state.step,
                path,
                run.total_steps,
            )
            run.total_steps = state.step
        return state
