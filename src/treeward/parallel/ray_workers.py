"""`run`: the processes of a run as workers of Ray Train, on this machine or on the cluster of
`RAY_ADDRESS`.

Ray Train places them, joins them in a process group and restarts all when one is lost: the run goes
on from its last checkpoint. Errors that a restart would repeat (a `TreewardError`, a fault of the
code) end the run at once.
"""

from __future__ import annotations

import logging
import os
import re
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch
from ray.exceptions import RayError
from ray.train import (
    ControllerError,
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
    UserCallback,
    WorkerGroupError,
)
from ray.train.torch import TorchConfig, TorchTrainer

from treeward import processes
from treeward.config.run import ClusterConfig
from treeward.errors import ConfigError, LostProcessError, TreewardError
from treeward.parallel import stopping
from treeward.progress import show_logs

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
# Variables of the environment that workers get, on other machines too, by how their names begin.
_PASSED_ON = ("HF_", "NCCL_", "TORCH", "TREEWARD_", "WANDB_", "MLFLOW_", "TOKENIZERS_", "CUBLAS_")
# Errors that a restart would repeat. Errors of users are ValueErrors.
_LASTING = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ImportError,
    torch.OutOfMemoryError,
)
_OF_THE_DASHBOARD = (
    "PlacementGroupCleanerCallback",
    "ControllerMetricsCallback",
    "WorkerMetricsCallback",
)
_STARTS = 10  # a minute each, in which Ray waits for machines that are not there yet


def run(work: Callable[[], _T], config: Any) -> _T | None:
    """`work()` on a worker for each process of the configuration's `training_cluster`; the result
    of the first. Raises what a worker raises, `ConfigError` where there are too few machines, and
    `LostProcessError` after too many restarts."""
    cluster = config.training_cluster
    logs = Path(config.logger.log_dir).resolve()
    logs.mkdir(parents=True, exist_ok=True)
    is_ours = not ray.is_initialized()
    if is_ours:
        _start_ray(config.cluster)
    try:
        on_gpu = _has_gpus(cluster)
        os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # relative paths stay what they are
        passed_on = {
            name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)
        }
        backend = "gloo"
        if on_gpu:  # tensors of the host are exchanged by gloo
            backend = "cpu:gloo,cuda:nccl"
        placement_strategy = "PACK"
        if cluster.num_nodes == 1:  # on one machine, or not at all
            placement_strategy = "STRICT_PACK"
        trainer = _Trainer(
            _work,
            train_loop_config={"work": work, "folder": os.getcwd(), "began": time.time()},
            torch_config=TorchConfig(
                backend=backend,
                timeout_s=round(cluster.timeout_minutes * 60),
            ),
            scaling_config=ScalingConfig(
                num_workers=cluster.num_processes,
                use_gpu=on_gpu,
                placement_strategy=placement_strategy,
            ),
            run_config=RunConfig(
                name="ray",
                storage_path=str(logs),
                failure_config=FailureConfig(
                    cluster.max_restarts, controller_failure_limit=_STARTS
                ),
                callbacks=[_Restarts(cluster.max_restarts)],
                worker_runtime_env={"env_vars": passed_on},
                # Ray Train would log each failure at length; `_Restarts` and `_fit` say it once.
                logging_config=LoggingConfig(log_level="CRITICAL"),
            ),
        )
        result: _T | None = _fit(trainer)
        return result
    finally:
        if is_ours:
            ray.shutdown()


def _start_ray(cluster: ClusterConfig) -> None:
    """Join the cluster of RAY_ADDRESS, or start Ray here, with as many processors as there are
    processes."""
    address = os.environ.get("RAY_ADDRESS")
    if address is None and cluster.num_nodes > 1:
        raise ConfigError(
            "several nodes need a cluster",
            field="cluster.num_nodes",
            got=f"{cluster.num_nodes} and no RAY_ADDRESS",
            need="RAY_ADDRESS of a Ray cluster",
            fix="examples/slurm.sub starts one; or start this by torchrun",
        )
    if address is None:
        # no one takes this machine away
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        num_cpus = max(cluster.num_processes, os.cpu_count() or 1)
        ray.init("local", num_cpus=num_cpus, include_dashboard=False, logging_level=logging.ERROR)
    else:
        ray.init(address, logging_level=logging.ERROR)


def _has_gpus(cluster: ClusterConfig) -> bool:
    """Whether each process gets a GPU. Raises `ConfigError` where this machine has fewer; a cluster
    may yet grow."""
    if cluster.gpus_per_node == 0:
        return False
    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    num_processes = cluster.num_processes
    if num_gpus >= num_processes:
        return True
    if num_gpus and "RAY_ADDRESS" not in os.environ:
        raise ConfigError(
            "this machine has too few GPUs",
            field="cluster.gpus_per_node",
            got=cluster.gpus_per_node,
            need=f"{num_gpus}",
            fix=f"set cluster.gpus_per_node={num_gpus}",
        )
    if num_gpus:
        logger.warning("Ray has %d GPUs now for %d processes: it waits.", num_gpus, num_processes)
        return True
    logger.warning("Ray has no GPU now for %d processes: they run on CPUs.", num_processes)
    return False


def _fit(trainer: TorchTrainer) -> Any:
    try:
        return trainer.fit().return_value
    except (ControllerError, RayError) as error:
        failure = getattr(error, "controller_failure", error)
        # A user's error, which `_Restarts` has wrapped: Ray's own frames say nothing about it.
        if isinstance(failure, _LASTING):
            raise failure from None
        raise LostProcessError(
            "Ray Train could not run the workers", got=_reason(failure)
        ) from error
    except WorkerGroupError as error:
        reasons = [f"rank {rank}: {_reason(lost)}" for rank, lost in error.worker_failures.items()]
        most = trainer.run_config.failure_config.max_failures
        raise LostProcessError(
            "the run has lost processes too often",
            got="; ".join(reasons),
            need=f"at most {most} losses (cluster.max_restarts)",
            fix="the same command goes on from the last checkpoint",
        ) from error


class _Trainer(TorchTrainer):  # type: ignore[misc]
    """Without the callbacks that poll the dashboard and warn if there is none."""

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()
        return [
            callback for callback in callbacks if type(callback).__name__ not in _OF_THE_DASHBOARD
        ]

    def _register_sigint_handler(self, controller: Any) -> None:
        """None: Ray's would leave with the exit code 0."""


def _work(settings: Mapping[str, Any]) -> Any:
    """The run, in a worker: in the folder of the command."""
    logging.getLogger().handlers.clear()  # Ray's: they show all that any library says
    # The deadline of `checkpoint_must_save_by` counts from the start of the command, also in a
    # worker that was restarted hours later.
    stopping.seconds_before = time.time() - settings["began"]
    try:
        os.chdir(settings["folder"])
    except OSError as error:
        need = "a folder that all nodes share: data, checkpoints and logs are files in it"
        raise ConfigError(
            "this node lacks the folder of the command", got=str(error), need=need
        ) from error
    try:
        return settings["work"]()
    except Exception as error:
        if not isinstance(error, TreewardError):  # its traceback is shown where the command runs
            error.add_note(f"On rank {processes.rank()}:\n{traceback.format_exc()}")
        raise


class _Restarts(UserCallback):  # type: ignore[misc]
    """Logs why workers restart, in Ray Train's controller; ends the run if a restart would not
    help."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        for error in worker_exceptions.values():
            if isinstance(error, _LASTING) and not isinstance(error, LostProcessError):
                raise ControllerError(error)  # the one error that Ray Train does not try again
        self._count += 1
        if self._count > self._most:  # no restart follows, and `_fit` says why
            return
        # Processes that only wait for the lost one know less.
        causes = {
            rank: error
            for rank, error in worker_exceptions.items()
            if not isinstance(error, LostProcessError)
        }
        rank, error = next(iter((causes or worker_exceptions).items()))
        show_logs()
        logger.warning(
            "Rank %d is lost: %s. Restart %d of %d, from the last checkpoint.",
            rank,
            _reason(error),
            self._count,
            self._most,
        )


def _reason(error: Exception) -> str:
    """An error in one line; for a dead process, how it died."""
    text = str(error).strip()
    # Ray says how a process died in the middle of a paragraph of advice.
    detail = re.search(r"exit detail: (.*?)\.? (?:Some|There)", text)
    if detail is not None:
        return f"its process has died ({detail[1]})"
    if not text:
        return type(error).__name__
    return text.splitlines()[0]
