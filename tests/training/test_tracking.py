import contextlib
import importlib.util
import json
import math
import struct
import time

import pytest

from treeward.config.logger import LoggerConfig
from treeward.errors import ConfigError
from treeward.training.tracking import TrackerGroup, open_trackers, read_metrics


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.fixture(autouse=True)
def hermetic(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb_home"))
    for name in ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
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


def test_values_that_are_not_finite_are_strict_json_and_come_back_as_soon_as_they_are_logged(tmp_path):
    path = tmp_path / "logs" / "metrics.jsonl"
    group, before = TrackerGroup(path), time.time()
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
    failing, path = Failing(), tmp_path / "m.jsonl"
    group = TrackerGroup(path)
    group.trackers["gone"] = failing
    log_steps(group, 1, 4)
    group.close("finished")
    assert len(read_metrics(path)) == 6 and failing.calls == [1, 2]
    (said,) = caplog.messages
    assert said.startswith("gone failed, training goes on without it: ConnectionError: no route to host")


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "finished"), (KeyboardInterrupt, "interrupted"), (SystemExit, "interrupted"), (RuntimeError, "failed")],
)
def test_leaving_the_block_closes_with_the_status(error, status, tmp_path):
    tracker = Failing()
    with (
        contextlib.suppress(KeyboardInterrupt, SystemExit, RuntimeError),
        open_trackers(logger_config(tmp_path), {}, None) as group,
    ):
        group.trackers["one"] = tracker
        if error is not None:
            raise error
    assert tracker.calls == [status]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]  # all, when nothing is enabled


@needs("mlflow")
def test_a_tracker_that_cannot_start_is_a_config_error(tmp_path):
    config = logger_config(tmp_path, mlflow_enabled=True, mlflow={"tracking_uri": "nonsense://x"})
    with pytest.raises(ConfigError) as caught:
        open_trackers(config, {}, None)
    assert caught.value.where == "logger.mlflow_enabled" and "tracking_uri" in str(caught.value)


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder)).Reload()
    scalars = {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }
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
    assert b'"seed": 42' in accumulator.Tensors("config/text_summary")[-1].tensor_proto.string_val[0]


def read_wandb(file):
    """History rows, configuration and exit code of a .wandb file: protobuf records in LevelDB's log format."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # `finish` returns before its service has written the file; this waits, as a process's end does
    data, position, payload = file.read_bytes(), 7, b""
    rows, config, exit_code = [], {}, None
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        payload += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind not in (1, 4):  # the first or a middle part of a record
            continue
        record = wandb_internal_pb2.Record.FromString(payload)
        payload = b""
        if record.HasField("history"):
            rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
        elif record.HasField("config"):
            config |= {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.config.update}
        elif record.HasField("exit"):
            exit_code = record.exit.exit_code
    return rows, config, exit_code


@needs("wandb")
def test_wandb_offline_has_the_values_and_a_resume_continues_the_run(tmp_path):
    config = logger_config(tmp_path, wandb_enabled=True, wandb={"project": "rm", "name": "first"})
    with open_trackers(config, {"rm": {"seed": 42}}, None) as first:
        log_steps(first, 1, 4)
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    rows, stored_config, exit_code = read_wandb(file)
    assert [row["_step"] for row in rows] == [1, 2, 3, 4]
    assert [row["train/rm/loss"] for row in rows] == [1.0, 0.5, 1 / 3, 0.25]
    assert rows[3]["validation-default/accuracy"] == pytest.approx(0.54)
    assert stored_config["rm"] == {"seed": 42} and exit_code == 0

    run_id = (tmp_path / "wandb_run_id").read_text().strip()
    assert file.name == f"run-{run_id}.wandb"
    file.rename(tmp_path / "first.wandb")
    with pytest.raises(RuntimeError), open_trackers(config, {}, 4) as second:
        second.log({"a": math.nan}, 5)
        raise RuntimeError
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    rows, _, exit_code = read_wandb(file)
    assert file.name == f"run-{run_id}.wandb" and exit_code == 1
    assert [row["_step"] for row in rows] == [5] and math.isnan(rows[0]["a"])


def read_mlflow(folder, experiment):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(folder / "mlflow").as_uri())
    runs = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return client, runs


@needs("mlflow")
def test_mlflow_files_read_back_and_a_resume_continues_the_run(tmp_path, caplog):
    config = logger_config(tmp_path, mlflow_enabled=True, mlflow={"experiment_name": "rm", "run_name": "first"})
    settings = {"rm": {"seed": 42, "num": 2}, "long": "x" * 10_000, "many": {f"k{i}": i for i in range(150)}}
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
    assert [(point.step, point.value) for point in history] == [(step, 1 / step) for step in range(1, 11)]
    assert math.isnan(run.data.metrics["set _odd_/loss"]) and run.data.params["rm.num"] == "2"
