"""Trackers: where a run's metrics go. `metrics.jsonl` always; TensorBoard, Weights & Biases and MLflow when enabled.

    with open_trackers(config.logger, resolved_config, resume_step=None) as trackers:
        trackers.log({"train/rm/loss": 0.64, "train/rm/accuracy": 0.61}, step=1)

A step's metrics must be logged before the checkpoint of that step is saved; a run that resumes from it removes the
lines of later steps, from a log folder of its own: `log_folder` locks it, and `run_id` beside the metrics names the
run. A tracker that cannot start stops the run with a `ConfigError`; one that fails later is dropped
with a warning.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from treeward import processes
from treeward.config.run import LoggerConfig
from treeward.errors import ConfigError
from treeward.storage import remove_leftovers, write_text
from treeward.training.checkpoints import is_locked
from treeward.training.step_file import StepFile, flattened, read_steps

METRICS_FILE = "metrics.jsonl"
_RUN_ID, _LOCK = "run_id", ".lock"

RunStatus = Literal["finished", "failed", "interrupted"]
"""How a run ended; an `interrupted` run was stopped, has saved, and can be resumed."""

logger = logging.getLogger(__name__)

_MLFLOW_REFUSES = re.compile(r"[^\w.\-: /]")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Tracker(Protocol):
    """Receives the metrics of one run, in the order of their steps; several calls may share a step."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self, status: RunStatus) -> None: ...


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, each with `step`, `time` (seconds since the epoch) and metrics (float), without
    an unfinished last line. Raises `DataError` naming the line if one is not such an object."""
    return [
        {
            name: _NOT_FINITE.get(value, value) if isinstance(value, str) else value
            for name, value in record.items()
        }
        for record in read_steps(path)
    ]


class TensorBoardTracker:
    """Scalars as TensorBoard event files; TensorBoard hides values after the resumed step."""

    def __init__(
        self, config: LoggerConfig, settings: Mapping[str, Any], resume_step: int | None
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(config.log_dir) / (config.tensorboard.log_dir or "tensorboard")
        # A new run in a used folder hides the whole of the old one: two curves in one cannot be told apart.
        self._writer: Any = SummaryWriter(
            folder, purge_step=0 if resume_step is None else resume_step + 1
        )
        text = json.dumps(settings, indent=2, default=str)
        self._writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a killed run must not lose the metrics of a step that has a checkpoint

    def close(self, status: RunStatus) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run; WANDB_MODE=offline writes it to `log_dir`/wandb. It takes no step twice: steps after the
    last checkpoint of a killed run keep their first values."""

    def __init__(
        self, config: LoggerConfig, settings: Mapping[str, Any], resume_step: int | None
    ) -> None:
        import wandb

        file = Path(config.log_dir) / "wandb_run_id"
        run_id = _read_id(file, resume_step)
        options: dict[str, Any] = {
            "dir": config.log_dir,
            "id": run_id,
            "resume": None if run_id is None else "allow",
        }
        self._run = wandb.init(**(options | config.wandb))
        write_text(file, f"{self._run.id}\n")
        self._run.config.update(dict(settings), allow_val_change=True)  # type: ignore[no-untyped-call]

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, status: RunStatus) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


class MLflowTracker:
    """An MLflow run, on the server of the configuration or as files in `log_dir`/mlflow. The steps that a killed run
    had logged after its last checkpoint are there twice, with the same values."""

    _STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}

    def __init__(
        self, config: LoggerConfig, settings: Mapping[str, Any], resume_step: int | None
    ) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        section, log_dir = config.mlflow, Path(config.log_dir).absolute()
        uri = (
            section.tracking_uri
            or os.environ.get("MLFLOW_TRACKING_URI")
            or (log_dir / "mlflow").as_uri()
        )
        if uri.startswith("file:") or "://" not in uri:
            # Since 3.x MLflow refuses the file store unless told so; sqlite needs packages that mlflow-skinny lacks.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(tracking_uri=uri)
        run_id = _read_id(log_dir / "mlflow_run_id", resume_step)
        if run_id is None:
            name = section.experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "treeward"
            experiment = self._client.get_experiment_by_name(name)
            number = (
                experiment.experiment_id if experiment else self._client.create_experiment(name)
            )
            run_id = str(self._client.create_run(number, run_name=section.run_name).info.run_id)
            write_text(log_dir / "mlflow_run_id", f"{run_id}\n")
            params = [
                Param(_MLFLOW_REFUSES.sub("_", key), str(value)[:6000])
                for key, value in flattened(settings)
            ]
            for start in range(0, len(params), 100):  # its limits of a value, and of a call
                self._client.log_batch(run_id, params=params[start : start + 100])
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._run_id = run_id

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # One character that MLflow refuses would lose every metric of the call.
        points = [
            Metric(_MLFLOW_REFUSES.sub("_", name), value, now, step)
            for name, value in metrics.items()
        ]
        self._client.log_batch(self._run_id, metrics=points)

    def close(self, status: RunStatus) -> None:
        self._client.set_terminated(self._run_id, self._STATUS[status])


_TRACKERS: dict[str, tuple[Callable[..., Tracker], str]] = {
    "tensorboard": (
        TensorBoardTracker,
        "set logger.tensorboard.log_dir to a folder that can be written",
    ),
    "wandb": (WandbTracker, "run `wandb login`, or set WANDB_MODE=offline in the environment"),
    "mlflow": (
        MLflowTracker,
        "set logger.mlflow.tracking_uri to a server that answers, or leave it out",
    ),
}
"""Each tracker by its name in the configuration, and what to do when it does not start."""


class TrackerGroup:
    """Writes `metrics_file`, and hands all to `trackers`; one that fails is warned of and left out. Of several
    processes only the main one does. `resume_step`: None where nothing of this run was logged before. Numbers that are
    not finite are texts in the file, which `read_metrics` turns back. Leaving its `with` block closes it, as `status`
    if that is set."""

    def __init__(self, metrics_file: Path, resume_step: int | None = None) -> None:
        self.metrics_file, self.resume_step = metrics_file, resume_step
        self._file = (
            StepFile(metrics_file, resume_step=resume_step) if processes.is_main() else None
        )
        self.trackers: dict[str, Tracker] = {}
        self.status: RunStatus | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        self.close(
            self.status
            or ("finished" if error is None else "interrupted" if interrupted else "failed")
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._file is None:
            return
        numbers = {name: float(value) for name, value in metrics.items()}
        line = {
            name: value if math.isfinite(value) else json.dumps(value)
            for name, value in numbers.items()
        }
        self._file.append({"step": step, "time": round(time.time(), 3), **line})
        self._call("log", numbers, step)

    def close(self, status: RunStatus) -> None:
        if self._file is not None:
            self._file.close()
        self._call("close", status)

    def _call(self, method: str, *arguments: Any) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                getattr(tracker, method)(*arguments)
            except (
                Exception
            ) as error:  # whatever a client library raises; a plot is not worth the run
                del self.trackers[name]
                logger.warning(
                    "%s failed, training goes on without it: %s: %s. Its run continues when this run is resumed.",
                    name, type(error).__name__, error,
                )  # fmt: skip


@contextlib.contextmanager
def log_folder(config: LoggerConfig) -> Iterator[None]:
    """Lock the log folder for this run while the block runs; every process calls it. Raises `ConfigError` for a folder
    that cannot be written, or that another run is writing."""
    folder = Path(config.log_dir)
    with contextlib.ExitStack() as opened:

        def opens() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / METRICS_FILE).open("ab").close()
            lock = folder / _LOCK  # not the folder, which may be that of the checkpoints
            lock.touch()
            if not is_locked(lock, until=opened):
                summary = "another run is writing this log folder"
                fix = "give each run a logger.log_dir of its own, or wait until the other one has ended"
                raise ConfigError(summary, where="logger.log_dir", got=str(folder), fix=fix)

        try:
            processes.on_main(opens)
        except OSError as error:
            summary, need = "the log folder cannot be used", "a folder that can be written"
            raise ConfigError(summary, where="logger.log_dir", got=str(error), need=need) from error
        yield


def id_of_run(checkpoints: Path | None, *, is_new: bool) -> str:
    """The name of a run, which lies in its folder of checkpoints with the folder's path; a new one for a new run, for
    one without a folder, and for a folder that was copied, whose original may go on too: its later lines of the log
    would be cut. A folder that was moved keeps it."""
    if checkpoints is None:
        return uuid.uuid4().hex
    file = checkpoints / f".{_RUN_ID}"
    if file.exists() and not is_new:
        run_id, _, original = file.read_text(encoding="utf-8").partition("\n")
        if not _has_run(Path(original), run_id, besides=checkpoints):
            write_text(file, f"{run_id}\n{checkpoints.resolve()}")
            return run_id
    run_id = uuid.uuid4().hex
    write_text(file, f"{run_id}\n{checkpoints.resolve()}")
    return run_id


def _has_run(folder: Path, run_id: str, *, besides: Path) -> bool:
    """Whether a folder of checkpoints, other than `besides`, is still there and of this run."""
    file = folder / f".{_RUN_ID}"
    try:
        is_of_run = file.read_text(encoding="utf-8").partition("\n")[0] == run_id
        return is_of_run and not folder.samefile(besides)
    except OSError:
        return False


def logs_run(config: LoggerConfig, run_id: str) -> bool:
    """Whether the log folder has the metrics of this run, and not those of another."""
    file = Path(config.log_dir) / _RUN_ID
    return file.exists() and file.read_text(encoding="utf-8") == run_id


def begin_log(config: LoggerConfig, run_id: str) -> None:
    """Name the run that the log folder is of from now on; after the files of another are set aside."""
    write_text(Path(config.log_dir) / _RUN_ID, run_id)


def open_trackers(
    config: LoggerConfig, settings: Mapping[str, Any], resume_step: int | None
) -> TrackerGroup:
    """The trackers that `config` enables, all writing below its `log_dir`; none on a process that is not the main one.
    `settings`: the run's configuration, to show. Raises `ConfigError` naming its key for a tracker that cannot start.
    """
    if processes.is_main():
        remove_leftovers(Path(config.log_dir))
    group = TrackerGroup(Path(config.log_dir) / METRICS_FILE, resume_step)
    if not processes.is_main():
        return group
    for name, (made, fix) in _TRACKERS.items():
        if not getattr(config, f"{name}_enabled"):
            continue
        try:
            group.trackers[name] = made(config, settings, resume_step)
        except Exception as error:  # of a client library: no network, no key, no permission
            group.close("failed")
            where, got = f"logger.{name}_enabled", f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"{name} could not start", where=where, got=got, fix=f"{fix}, or disable it"
            ) from error
    return group


def _read_id(path: Path, resume_step: int | None) -> str | None:
    """The id of the run that is resumed; None for a new run, or if a kill came before it was written."""
    return path.read_text().strip() or None if resume_step is not None and path.exists() else None
