"""Trackers: where a run's metrics go. `metrics.jsonl` always; TensorBoard, Weights & Biases and
MLflow when enabled.

    with open_trackers(config.logger, resolved_config, resume_step=None) as trackers:
        trackers.log({"train/rm/loss": 0.64, "train/rm/accuracy": 0.61}, step=1)

A step's metrics must be logged before the checkpoint of that step is saved; a run that resumes from
it removes the lines of later steps, from a log folder of its own: `log_folder` locks it, and
`run_id` beside the metrics names the run. A tracker that cannot start stops the run with a
`ConfigError`; one that fails later is dropped with a warning.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import textwrap
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
_RUN_ID = "run_id"
_LOCK = ".lock"

RunStatus = Literal["finished", "failed", "interrupted"]
"""How a run ended; an `interrupted` run was stopped, has saved, and can be resumed."""

logger = logging.getLogger(__name__)

_MLFLOW_REFUSES = re.compile(r"[^\w.\-: /]")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MOST_IN_A_VALUE = 6000
"""Characters of a parameter's value that MLflow takes."""
_MOST_IN_A_CALL = 100
"""Parameters that MLflow takes in one call."""


class Tracker(Protocol):
    """Receives the metrics of one run, in the order of their steps; several calls may share a
    step."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self, status: RunStatus) -> None: ...


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, each with `step`, `time` (seconds since the epoch) and
    metrics (float), without an unfinished last line. Raises `DataError` naming the line if one is
    not such an object."""
    lines = read_steps(path)
    for line in lines:
        for name, value in line.items():
            if isinstance(value, str):
                # JSON has no numbers that are not finite: `TrackerGroup.log` writes their names.
                line[name] = _NOT_FINITE.get(value, value)
    return lines


class TensorBoardTracker:
    """Scalars as TensorBoard event files; TensorBoard hides values after the resumed step."""

    def __init__(
        self, config: LoggerConfig, settings: Mapping[str, Any], resume_step: int | None
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(config.log_dir) / (config.tensorboard.log_dir or "tensorboard")
        # A new run in a used folder hides the whole of the old one: two curves in one cannot be
        # told apart.
        first_step = 0 if resume_step is None else resume_step + 1
        self._writer: Any = SummaryWriter(folder, purge_step=first_step)
        text = json.dumps(settings, indent=2, default=str)
        # TensorBoard shows Markdown, in which indented lines are code.
        self._writer.add_text("config", textwrap.indent(text, "    "))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        # A killed run must not lose the metrics of a step that has a checkpoint.
        self._writer.flush()

    def close(self, status: RunStatus) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run; WANDB_MODE=offline writes it to `log_dir`/wandb. It takes no step
    twice: steps after the last checkpoint of a killed run keep their first values."""

    def __init__(
        self, config: LoggerConfig, settings: Mapping[str, Any], resume_step: int | None
    ) -> None:
        import wandb

        file = Path(config.log_dir) / "wandb_run_id"
        run_id = _read_id(file, resume_step)
        options: dict[str, Any] = {"dir": config.log_dir, "id": run_id, "resume": None}
        if run_id is not None:
            options["resume"] = "allow"
        # The user's keys come last: they may name the run.
        self._run = wandb.init(**(options | config.wandb))
        write_text(file, f"{self._run.id}\n")
        run_config: Any = self._run.config
        run_config.update(dict(settings), allow_val_change=True)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, status: RunStatus) -> None:
        exit_code = 1
        if status == "finished":
            exit_code = 0
        self._run.finish(exit_code=exit_code)


class MLflowTracker:
    """An MLflow run, on the server of the configuration or as files in `log_dir`/mlflow. The steps
    that a killed run had logged after its last checkpoint are there twice, with the same values."""

    _STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}

    def __init__(
        self, config: LoggerConfig, settings: Mapping[str, Any], resume_step: int | None
    ) -> None:
        from mlflow import MlflowClient

        log_dir = Path(config.log_dir).absolute()
        uri = config.mlflow.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = (log_dir / "mlflow").as_uri()
        if uri.startswith("file:") or "://" not in uri:
            # Since 3.x MLflow refuses the file store unless told so; sqlite needs packages that
            # mlflow-skinny lacks.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(tracking_uri=uri)
        id_file = log_dir / "mlflow_run_id"
        run_id = _read_id(id_file, resume_step)
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
        else:
            from mlflow.entities import Param

            section = config.mlflow
            name = section.experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "treeward"
            experiment = self._client.get_experiment_by_name(name)
            if experiment is None:
                number = self._client.create_experiment(name)
            else:
                number = experiment.experiment_id
            run = self._client.create_run(number, run_name=section.run_name)
            run_id = str(run.info.run_id)
            # Written at once: a run that is killed from here on is found again.
            write_text(id_file, f"{run_id}\n")
            params = []
            for key, value in flattened(settings):
                params.append(Param(_MLFLOW_REFUSES.sub("_", key), str(value)[:_MOST_IN_A_VALUE]))
            for start in range(0, len(params), _MOST_IN_A_CALL):
                self._client.log_batch(run_id, params=params[start : start + _MOST_IN_A_CALL])
        self._run_id = run_id

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        milliseconds = int(time.time() * 1000)
        points = []
        for name, value in metrics.items():
            # One character that MLflow refuses would lose every metric of the call.
            points.append(Metric(_MLFLOW_REFUSES.sub("_", name), value, milliseconds, step))
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
    """Writes `metrics_file`, and hands all to `trackers`; one that fails is warned of and left out.

    Of several processes only the main one does. `resume_step`: None where nothing of this run was
    logged before. Numbers that are not finite are texts in the file, which `read_metrics` turns
    back. Leaving its `with` block closes it, as `status` if that is set.
    """

    def __init__(self, metrics_file: Path, resume_step: int | None = None) -> None:
        self.metrics_file = metrics_file
        self.resume_step = resume_step
        self._file: StepFile | None = None
        if processes.is_main():
            self._file = StepFile(metrics_file, resume_step=resume_step)
        self.trackers: dict[str, Tracker] = {}
        self.status: RunStatus | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        status: RunStatus = "failed"
        if self.status is not None:
            status = self.status
        elif error is None:
            status = "finished"
        elif isinstance(error, KeyboardInterrupt | SystemExit):
            status = "interrupted"
        self.close(status)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._file is None:
            return
        numbers: dict[str, float] = {}
        line: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        for name, metric in metrics.items():
            value = float(metric)
            numbers[name] = value
            line[name] = value
            if not math.isfinite(value):
                line[name] = json.dumps(value)
        # The file first: it is complete whatever becomes of a tracker.
        self._file.append(line)
        self._call("log", numbers, step)

    def close(self, status: RunStatus) -> None:
        if self._file is not None:
            self._file.close()
        self._call("close", status)

    def _call(self, method: str, *arguments: Any) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                getattr(tracker, method)(*arguments)
            # Whatever a client library raises: a plot is not worth the run.
            except Exception as error:
                del self.trackers[name]
                logger.warning(
                    "%s failed, training goes on without it: %s: %s. Its run continues when this "
                    "run is resumed.",
                    name,
                    type(error).__name__,
                    error,
                )


@contextlib.contextmanager
def log_folder(config: LoggerConfig) -> Iterator[None]:
    """Lock the log folder for this run while the block runs; every process calls it. Raises
    `ConfigError` for a folder that cannot be written, or that another run is writing."""
    folder = Path(config.log_dir)
    with contextlib.ExitStack() as opened:

        def open_folder() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            # A log that cannot be written is told now, and not after the model was loaded.
            (folder / METRICS_FILE).open("ab").close()
            lock = folder / _LOCK  # not the folder, which may be that of the checkpoints
            lock.touch()
            if not is_locked(lock, until=opened):
                raise ConfigError(
                    "another run is writing this log folder",
                    where="logger.log_dir",
                    got=str(folder),
                    fix="give each run a logger.log_dir of its own, or wait until the other one "
                    "has ended",
                )

        try:
            processes.on_main(open_folder)
        except OSError as error:
            raise ConfigError(
                "the log folder cannot be used",
                where="logger.log_dir",
                got=str(error),
                need="a folder that can be written",
            ) from error
        yield


def id_of_run(checkpoints: Path | None, *, is_new: bool) -> str:
    """The name of a run, which lies in its folder of checkpoints with the folder's path.

    It is a new one for a new run, for one without a folder, and for a folder that was copied, whose
    original may go on too: its later lines of the log would be cut. A folder that was moved keeps
    it.
    """
    run_id = uuid.uuid4().hex
    if checkpoints is None:
        return run_id
    file = checkpoints / f".{_RUN_ID}"
    if file.exists() and not is_new:
        saved_id, _, original = file.read_text(encoding="utf-8").partition("\n")
        if not _has_run(Path(original), saved_id, besides=checkpoints):
            run_id = saved_id
    write_text(file, f"{run_id}\n{checkpoints.resolve()}")
    return run_id


def _has_run(folder: Path, run_id: str, *, besides: Path) -> bool:
    """Whether a folder of checkpoints, other than `besides`, is still there and of this run."""
    file = folder / f".{_RUN_ID}"
    try:
        first_line = file.read_text(encoding="utf-8").partition("\n")[0]
        return first_line == run_id and not folder.samefile(besides)
    except OSError:
        return False


def continued_step(config: LoggerConfig, run_id: str, step: int | None) -> int | None:
    """The step from which the log goes on: `step`, that of the checkpoint from which a run resumes.
    None in a new run, and where the log folder is of another run."""
    if step is None:
        return None
    file = Path(config.log_dir) / _RUN_ID

    def is_of_run() -> bool:
        return file.exists() and file.read_text(encoding="utf-8") == run_id

    if processes.on_main(is_of_run):
        return step
    logger.warning(
        "logger.log_dir=%s has the log of another run. Its files are set aside, and this run's log "
        "begins at step %d: give each run a log folder of its own.",
        config.log_dir,
        step,
    )
    return None


def begin_log(config: LoggerConfig, run_id: str) -> None:
    """Name the run that the log folder is of from now on; after the files of another are set
    aside."""
    write_text(Path(config.log_dir) / _RUN_ID, run_id)


def open_trackers(
    config: LoggerConfig, settings: Mapping[str, Any], resume_step: int | None
) -> TrackerGroup:
    """The trackers that `config` enables, all writing below its `log_dir`; none on a process that
    is not the main one.

    `settings`: the run's configuration, to show. Raises `ConfigError` naming its key for a tracker
    that cannot start.
    """
    log_dir = Path(config.log_dir)
    if processes.is_main():
        remove_leftovers(log_dir)
    group = TrackerGroup(log_dir / METRICS_FILE, resume_step)
    # Each tracker would make a run of its own for each process.
    if not processes.is_main():
        return group
    for name, (make_tracker, fix) in _TRACKERS.items():
        if not getattr(config, f"{name}_enabled"):
            continue
        try:
            group.trackers[name] = make_tracker(config, settings, resume_step)
        # Of a client library: no network, no key, no permission.
        except Exception as error:
            group.close("failed")
            raise ConfigError(
                f"{name} could not start",
                where=f"logger.{name}_enabled",
                got=f"{type(error).__name__}: {error}",
                fix=f"{fix}, or disable it",
            ) from error
    return group


def _read_id(path: Path, resume_step: int | None) -> str | None:
    """The id of the run that is resumed; None for a new run, or if a kill came before it was
    written."""
    if resume_step is None or not path.exists():
        return None
    return path.read_text().strip() or None
