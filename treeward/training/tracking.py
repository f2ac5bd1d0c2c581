"""Trackers: where a run's metrics go. `metrics.jsonl` always; TensorBoard, Weights & Biases and MLflow when enabled.

    with open_trackers(config.logger, resume_step=None) as trackers:
        trackers.log_config(resolved_config)
        trackers.log({"train/rm/loss": 0.64, "train/rm/accuracy": 0.61}, step=1)

    read_metrics(log_dir / "metrics.jsonl")    # [{"step": 1, "time": 1767225600.0, "train/rm/loss": 0.64, ...}]

A step's metrics must be logged before the checkpoint of that step is saved. A run that resumes from the checkpoint of
step S then finds every line up to S and takes out the later ones, which the killed run has left: the file becomes that
of a run that was never killed, times apart. With `resume_step=None` a run starts anew, and the file of an earlier run
in the same folder is kept as `metrics.1.jsonl`.

A tracker that cannot start stops the run with a `ConfigError`. One that fails later is left out from then on, with a
warning: `metrics.jsonl` has everything.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from treeward.config.logger import LoggerConfig, MlflowConfig, WandbConfig
from treeward.errors import ConfigError
from treeward.storage import write_text
from treeward.training.step_file import StepFile, flattened, read_steps

__all__ = ["METRICS_FILE", "RunStatus", "TrackerGroup", "check_log_folder", "open_trackers", "read_metrics"]

METRICS_FILE = "metrics.jsonl"

RunStatus = Literal["finished", "failed", "interrupted"]
"""How a run ended; an `interrupted` run was stopped, has saved, and can be resumed."""

logger = logging.getLogger(__name__)

_MLFLOW_REFUSES = re.compile(r"[^\w.\-: /]")
_MLFLOW_LONGEST_VALUE, _MLFLOW_MOST_PARAMS = 6000, 100
_START_FIXES = {
    "tensorboard": "set logger.tensorboard.log_dir to a folder that can be written",
    "wandb": "run `wandb login`, or set WANDB_MODE=offline in the environment",
    "mlflow": "set logger.mlflow.tracking_uri to a server that answers, or leave it out to write files",
}
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Tracker(Protocol):
    """Receives the metrics of one run, in the order of their steps; several calls may share a step."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def log_config(self, config: Mapping[str, Any]) -> None: ...

    def close(self, status: RunStatus) -> None: ...


class JsonlTracker:
    """One JSON object a line, in a `StepFile`; numbers that are not finite are texts, which `read_metrics` turns back.

    The configuration is a file of its own.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        self._file = StepFile(path, resume_step=resume_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values: dict[str, float | str] = {"step": step, "time": round(time.time(), 3)}
        for name, value in metrics.items():
            number = float(value)
            values[name] = number if math.isfinite(number) else json.dumps(number)
        self._file.append(values)

    def log_config(self, config: Mapping[str, Any]) -> None: ...

    def close(self, status: RunStatus) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, also of a run that is still writing: an unfinished last line is left out.

    Each has `step` (int), `time` (seconds since the epoch) and the metrics (float). Raises `DataError` naming the line
    if one is not such an object.
    """
    return [
        {name: _NOT_FINITE.get(value, value) if isinstance(value, str) else value for name, value in record.items()}
        for record in read_steps(path)
    ]


class TensorBoardTracker:
    """Scalars as TensorBoard event files in `log_dir`; TensorBoard hides values after the resumed step."""

    def __init__(self, log_dir: Path, *, resume_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A new run in a used folder hides the whole of the old one: two curves in one cannot be told apart.
        self._writer: Any = SummaryWriter(log_dir, purge_step=0 if resume_step is None else resume_step + 1)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()  # a killed run must not lose the metrics of a step that has a checkpoint

    def log_config(self, config: Mapping[str, Any]) -> None:
        text = json.dumps(config, indent=2, default=str)
        self._writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()))

    def close(self, status: RunStatus) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run; WANDB_MODE=offline writes it to `log_dir`/wandb for a later `wandb sync`.

    Weights & Biases takes no step twice: the steps that a killed run had logged after its last checkpoint keep their
    first values, which a resumed run only repeats. Offline each session has a folder of its own, all with the same id.
    """

    def __init__(self, config: WandbConfig, log_dir: Path, *, resume_step: int | None = None) -> None:
        import wandb

        file = log_dir / "wandb_run_id"
        run_id = _read_id(file, resume_step)
        options: dict[str, Any] = {"dir": str(log_dir), "id": run_id, "resume": None if run_id is None else "allow"}
        self._run = wandb.init(**(options | config.model_dump(exclude_none=True)))
        write_text(file, f"{self._run.id}\n")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)  # type: ignore[no-untyped-call]

    def close(self, status: RunStatus) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


class MLflowTracker:
    """An MLflow run, on the server of the configuration or as files in `log_dir`/mlflow.

    Points that a killed run had logged after its last checkpoint are not logged twice, and parameters keep their first
    values.
    """

    _STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}

    def __init__(self, config: MlflowConfig, log_dir: Path, *, resume_step: int | None = None) -> None:
        from mlflow import MlflowClient

        uri = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or (log_dir / "mlflow").absolute().as_uri()
        if uri.startswith("file:") or "://" not in uri:
            # Since 3.x MLflow refuses the file store unless told so; sqlite needs packages that mlflow-skinny lacks.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(tracking_uri=uri)
        self._last_steps: dict[str, int] = {}
        file = log_dir / "mlflow_run_id"
        run_id = _read_id(file, resume_step)
        if run_id is None:
            run_id = self._create_run(config)
            write_text(file, f"{run_id}\n")
        else:
            self._client.update_run(run_id, status="RUNNING")
            for name in self._client.get_run(run_id).data.metrics:
                self._last_steps[name] = max(point.step for point in self._client.get_metric_history(run_id, name))
        self._run_id = run_id

    def _create_run(self, config: MlflowConfig) -> str:
        name = config.experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "treeward"
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            experiment_id = self._client.create_experiment(name, artifact_location=config.artifact_location)
        else:
            experiment_id = experiment.experiment_id
        return str(self._client.create_run(experiment_id, run_name=config.run_name).info.run_id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        # One character that MLflow refuses would lose every metric of the call.
        named = {_MLFLOW_REFUSES.sub("_", name): float(value) for name, value in metrics.items()}
        now = int(time.time() * 1000)
        new = [Metric(name, value, now, step) for name, value in named.items() if step > self._last_steps.get(name, -1)]
        self._client.log_batch(self._run_id, metrics=new)

    def log_config(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        present = self._client.get_run(self._run_id).data.params
        named = {_MLFLOW_REFUSES.sub("_", name): str(value) for name, value in flattened(config)}
        new = [Param(key, value[:_MLFLOW_LONGEST_VALUE]) for key, value in named.items() if key not in present]
        for start in range(0, len(new), _MLFLOW_MOST_PARAMS):
            self._client.log_batch(self._run_id, params=new[start : start + _MLFLOW_MOST_PARAMS])

    def close(self, status: RunStatus) -> None:
        self._client.set_terminated(self._run_id, self._STATUS[status])


class TrackerGroup:
    """Hands everything to each of `trackers` (by name); one that fails is warned about and left out.

    Leaving its `with` block without `close` closes it: as finished, as interrupted after Ctrl-C or an exit, else as
    failed. `metrics_file`: what the run has logged.
    """

    def __init__(self, trackers: Mapping[str, Tracker], metrics_file: Path) -> None:
        self._trackers, self.metrics_file = dict(trackers), metrics_file

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        self.close("finished" if error is None else "interrupted" if interrupted else "failed")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._call(lambda tracker: tracker.log(metrics, step))

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._call(lambda tracker: tracker.log_config(config))

    def close(self, status: RunStatus) -> None:
        """Close every tracker. A second call does nothing."""
        self._call(lambda tracker: tracker.close(status))
        self._trackers.clear()

    def _call(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # whatever a client library raises; a plot is not worth the run
                if isinstance(tracker, JsonlTracker):  # but its own record is: a resume relies on it
                    raise
                del self._trackers[name]
                logger.warning(
                    "%s failed, training goes on without it: %s: %s. Its run continues when this run is resumed.",
                    name, type(error).__name__, error,
                )  # fmt: skip


def check_log_folder(config: LoggerConfig) -> None:
    """Raise `ConfigError` for a log folder that cannot be written."""
    try:
        Path(config.log_dir).mkdir(parents=True, exist_ok=True)
        (Path(config.log_dir) / METRICS_FILE).open("ab").close()
    except OSError as error:
        raise ConfigError(
            "the log folder cannot be used",
            where="logger.log_dir",
            got=str(error),
            need="a folder that can be written",
        ) from error


def open_trackers(config: LoggerConfig, resume_step: int | None) -> TrackerGroup:
    """The trackers that `config` enables, all writing below its `log_dir`; call it on one process only.

    `resume_step` is the step of the checkpoint that the run continues from, None for a new run. Raises `ConfigError`
    naming the key that enabled it for a tracker that cannot start.
    """
    log_dir = Path(config.log_dir)
    openers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoardTracker(
            log_dir / (config.tensorboard.log_dir or "tensorboard"), resume_step=resume_step
        ),
        "wandb": lambda: WandbTracker(config.wandb, log_dir, resume_step=resume_step),
        "mlflow": lambda: MLflowTracker(config.mlflow, log_dir, resume_step=resume_step),
    }
    file = log_dir / METRICS_FILE
    started: dict[str, Tracker] = {METRICS_FILE: JsonlTracker(file, resume_step=resume_step)}
    for name, opener in openers.items():
        if not getattr(config, f"{name}_enabled"):
            continue
        try:
            started[name] = opener()
        except Exception as error:  # of a client library: no network, no key, no permission
            TrackerGroup(started, file).close("failed")
            raise ConfigError(
                f"{name} could not start",
                where=f"logger.{name}_enabled",
                got=f"{type(error).__name__}: {error}",
                fix=f"{_START_FIXES[name]}, or set logger.{name}_enabled=false",
            ) from error
    return TrackerGroup(started, file)


def _read_id(path: Path, resume_step: int | None) -> str | None:
    """The id of the run that is resumed; None for a new run, or if a kill came before it was written."""
    return path.read_text().strip() or None if resume_step is not None and path.exists() else None
