import importlib.util
import json
import math
import resource
import shutil
import time
import types
from pathlib import Path

import pytest

from treeward.config.run import LoggerConfig
from treeward.errors import ConfigError, DataError
from treeward.training.step_file import StepFile, read_steps
from treeward.training.tracking import TrackerGroup, log_folder, open_trackers, read_metrics


def needs(package):
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None, reason=f"{package} is not installed"
    )


@pytest.fixture(autouse=True)
def hermetic(monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        # Set before it is deleted: so pytest also removes what a tracker sets.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def logger_config(folder, **values):
    return LoggerConfig.model_validate({"log_dir": str(folder), **values})


def log_steps(tracker, first, last):
    for step in range(first, last + 1):
        tracker.log({"train/rm/loss": 1 / step, "lr": 3e-6}, step)
        if step % 2 == 0:
            tracker.log({"validation-default/accuracy": 0.5 + step / 100}, step)


def test_values_that_are_not_finite_are_strict_json_and_come_back_as_soon_as_they_are_logged(
    tmp_path,
):
    path = tmp_path / "logs" / "metrics.jsonl"
    group = TrackerGroup(path)
    before = time.time()
    group.log({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1}, step=12)

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    raw = json.loads(path.read_text(), parse_constant=refuse)
    assert (raw["a"], raw["b"], raw["c"]) == ("NaN", "Infinity", "-Infinity")
    (record,) = read_metrics(path)
    assert record.pop("time") == pytest.approx(before, abs=5) and math.isnan(record.pop("a"))
    assert record == {"step": 12, "b": math.inf, "c": -math.inf, "d": 1.0}
    group.close("finished")


class Failing:
    """A tracker that fails from its second call on."""

    def __init__(self):
        self.calls = []

    def log(self, metrics, step):
        self.calls.append(step)
        if len(self.calls) > 1:
            raise ConnectionError("no route to host")

    def close(self, status):
        self.calls.append(status)


def test_a_failing_tracker_is_left_out_with_a_warning(tmp_path, caplog):
    failing = Failing()
    path = tmp_path / "m.jsonl"
    group = TrackerGroup(path)
    group.trackers["gone"] = failing
    log_steps(group, 1, 4)
    group.close("finished")
    assert len(read_metrics(path)) == 6 and failing.calls == [1, 2]
    (said,) = caplog.messages
    assert said.startswith(
        "gone failed, training goes on without it: ConnectionError: no route to host"
    )


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder)).Reload()
    scalars = {}
    for tag in accumulator.Tags()["scalars"]:
        scalars[tag] = [(event.step, event.value) for event in accumulator.Scalars(tag)]
    return scalars, accumulator


@needs("tensorboard")
def test_tensorboard_reads_back_and_a_resume_leaves_no_trace(tmp_path):
    config = logger_config(tmp_path, tensorboard_enabled=True)
    with open_trackers(config, {"rm": {"seed": 42}}, None) as first:
        log_steps(first, 1, 8)
    with open_trackers(config, {"rm": {"seed": 42}}, 6) as second:
        second.log({"train/rm/loss": 70.0}, 7)
        second.log({"train/rm/loss": math.nan}, 8)
    scalars, accumulator = read_tensorboard(tmp_path / "tensorboard")
    steps = [step for step, _ in scalars["train/rm/loss"]]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8]
    values = [value for _, value in scalars["train/rm/loss"]]
    assert values[:7] == pytest.approx([1 / step for step in range(1, 7)] + [70.0])
    assert math.isnan(values[7])
    assert [step for step, _ in scalars["validation-default/accuracy"]] == [2, 4, 6]
    assert (
        b'"seed": 42' in accumulator.Tensors("config/text_summary")[-1].tensor_proto.string_val[0]
    )


class WandbRun:
    """What Weights & Biases is told: its service takes seconds, and its file format is its own."""

    def __init__(self, **options):
        self.options = options
        self.id = options["id"] or "new"
        self.rows = []
        self.exit_code = None
        self.config = types.SimpleNamespace(update=lambda settings, allow_val_change: None)

    def log(self, metrics, step):
        self.rows.append((step, metrics))

    def finish(self, exit_code):
        self.exit_code = exit_code


@needs("wandb")
def test_a_run_of_wandb_is_continued(tmp_path, monkeypatch):
    import wandb

    runs = []
    monkeypatch.setattr(
        wandb, "init", lambda **options: runs.append(WandbRun(**options)) or runs[-1]
    )
    config = logger_config(tmp_path, wandb_enabled=True, wandb={"project": "rm", "name": "first"})
    with open_trackers(config, {"rm": {"seed": 42}}, None) as first:
        log_steps(first, 1, 2)
    with pytest.raises(RuntimeError), open_trackers(config, {}, 2) as second:
        second.log({"a": math.nan}, 3)
        raise RuntimeError
    one, other = runs
    assert one.options == {
        "dir": str(tmp_path),
        "id": None,
        "resume": None,
        "project": "rm",
        "name": "first",
    }
    assert [step for step, _ in one.rows] == [1, 2, 2] and one.rows[0][1]["train/rm/loss"] == 1.0
    assert one.exit_code == 0 and other.exit_code == 1 and math.isnan(other.rows[0][1]["a"])
    assert (other.options["id"], other.options["resume"]) == ("new", "allow")


def read_mlflow(folder, experiment):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(folder / "mlflow").as_uri())
    runs = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return client, runs


@needs("mlflow")
def test_mlflow_files_read_back_and_a_resume_continues_the_run(tmp_path, caplog):
    config = logger_config(
        tmp_path, mlflow_enabled=True, mlflow={"experiment_name": "rm", "run_name": "first"}
    )
    settings = {
        "rm": {"seed": 42, "num": 2},
        "long": "x" * 10_000,
        "many": {f"k{i}": i for i in range(150)},
    }
    with pytest.raises(KeyboardInterrupt), open_trackers(config, settings, None) as first:
        log_steps(first, 1, 6)
        raise KeyboardInterrupt
    client, (run,) = read_mlflow(tmp_path, "rm")
    assert run.info.run_name == "first" and run.info.status == "KILLED"
    assert run.data.params["rm.num"] == "2" and run.data.params["long"] == "x" * 6000
    assert len(run.data.params) == 153

    with open_trackers(config, {"rm": {"num": 3}}, 6) as second:
        assert client.get_run(run.info.run_id).info.status == "RUNNING"
        log_steps(second, 7, 10)
        second.log({"set (odd)/loss": math.nan}, 10)
    client, (run,) = read_mlflow(tmp_path, "rm")
    assert run.info.status == "FINISHED" and "failed" not in caplog.text
    history = client.get_metric_history(run.info.run_id, "train/rm/loss")
    assert [point.step for point in history] == list(range(1, 11))
    assert all(point.value == 1 / point.step for point in history)
    assert math.isnan(run.data.metrics["set _odd_/loss"]) and run.data.params["rm.num"] == "2"


def written(path: Path, steps: range, *, resume_step: int | None = None) -> None:
    file = StepFile(path, resume_step=resume_step)
    for step in steps:
        file.append({"step": step, "text": f"completion {step}"})
        file.append({"step": step, "text": "ünïcode 🙂"})
        assert read_steps(path)[-1]["step"] == step  # as soon as it is appended
    file.close()


@pytest.mark.parametrize(
    "tail", ["", '{"step": 7, "te', '{"step": 6, "text": "late"}', '{"step": 9}\n', "\x00\x00"]
)
@pytest.mark.parametrize("resume_step", [-1, 3, 5])
def test_a_resumed_file_equals_that_of_a_run_that_was_not_killed(
    tmp_path: Path, tail: str, resume_step: int
) -> None:
    whole = tmp_path / "whole.jsonl"
    killed = tmp_path / "killed.jsonl"
    written(whole, range(9))
    written(killed, range(resume_step + 3))
    with killed.open("a") as file:
        file.write(tail)
    written(killed, range(resume_step + 1, 9), resume_step=resume_step)
    assert killed.read_bytes() == whole.read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_new_run_keeps_the_files_of_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    for number in range(3):
        written(path, range(number + 1))
    names = ("samples.1.jsonl", "samples.2.jsonl", "samples.jsonl")
    assert [len(read_steps(tmp_path / name)) for name in names] == [2, 4, 6]


def test_one_run_writes_a_log_folder(tmp_path: Path) -> None:
    with log_folder(logger_config(tmp_path / "logs")):
        words = "another run is writing this log folder"
        with (
            pytest.raises(ConfigError, match=words) as caught,
            log_folder(logger_config(tmp_path / "logs")),
        ):
            pass
        assert caught.value.got == str(tmp_path / "logs") and "logger.log_dir" in str(caught.value)
    with log_folder(logger_config(tmp_path / "logs")):
        pass


def test_a_log_that_is_deleted_while_it_is_written_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "logs" / "metrics.jsonl"
    file = StepFile(path)
    file.append({"step": 1})
    shutil.rmtree(path.parent)
    file.append({"step": 2})
    file.append({"step": 3})
    file.close()
    assert caplog.text.count(f"{path} was deleted while the run writes it") == 1
    assert read_steps(path) == [{"step": 2}, {"step": 3}]


def test_a_disk_that_is_full_while_a_line_is_written_is_told(tmp_path: Path) -> None:
    """A limit of file sizes stands for the disk. What was half written is cut when the run
    resumes."""
    path = tmp_path / "metrics.jsonl"
    file = StepFile(path)
    file.append({"step": 1, "text": "x" * 600})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(ConfigError, match="metrics.jsonl cannot be written(?s:.*)make room"):
            file.append({"step": 2, "text": "x" * 600})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.close()
    written(path, range(2, 3), resume_step=1)
    assert [record["step"] for record in read_steps(path)] == [1, 2, 2]


@pytest.mark.parametrize("line", ["[]", "{}", '{"step": "2"}', "x"])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(DataError, match="not an object with a step") as caught:
        StepFile(path, resume_step=3)
    assert caught.value.where == f"{path}:2" and caught.value.got == line
