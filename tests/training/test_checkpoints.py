"""Checkpoints are whole or absent, whenever a run is killed; the best stay, by any diagnostic of an
evaluation."""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from killed_run import Killed

from treeward.config.checkpointing import CheckpointingConfig, GRPOCheckpointingConfig
from treeward.config.data import DatasetConfig
from treeward.config.grpo import GRPOConfig
from treeward.data.datasets import open_dataset
from treeward.data.preference import preference_to_dict
from treeward.errors import CheckpointError, ConfigError
from treeward.evaluation.diagnostics.scores import GATE_METRICS
from treeward.evaluation.session import Candidate, run_evaluation
from treeward.evaluation.suites import PreferenceSuite
from treeward.scoring.scorer import Scorer
from treeward.storage import write_text
from treeward.training.checkpoints import CheckpointStore, open_store
from treeward.training.ranking import warn_of_rare_metric
from treeward.training.setup import set_up
from treeward.training.tracking import read_metrics
from treeward.training.train import TrainingOutcome, train

WRITES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree"}


class Killer:
    """Kills at the operation number `at` on files below `folder`; whatever is tried after that dies
    too."""

    def __init__(self) -> None:
        self.folder = ""
        self.at = math.inf
        self.count = 0
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        # Removals name a file by a descriptor of its folder, so those count wherever they are.
        if event in WRITES and (
            event in ("os.remove", "os.rmdir") or str(arguments[0]).startswith(self.folder)
        ):
            self.count += 1
            if self.count > self.at:
                raise Killed

    @contextlib.contextmanager
    def armed(self, folder: Path, at: float) -> Iterator[None]:
        self.folder = str(folder)
        self.at = at
        self.count = 0
        try:
            yield
        finally:
            self.at = math.inf


KILLER = Killer()  # a hook cannot be taken back: one for all tests


def opened(folder: Path, metric_of: Any = None, **options: Any) -> Any:
    """The store in a folder."""
    return open_store(CheckpointingConfig(checkpoint_dir=str(folder), **options), metric_of)


def writer(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "state.json").write_text(text)
        (folder / "model" / "weights.safetensors").write_text(text * 100)

    return write


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.all()]


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def killed(*_: Any) -> None:
    raise Killed


def test_a_checkpoint_is_found_and_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, keep_top_k=None) as store:
        assert store.latest() is None and store.best() is None
        for step in (1, 2, 10):
            saved = store.save(step, writer("x"))
    for name in (".saving_step_11", ".removing_step_0"):  # of a session that was killed
        (tmp_path / name).mkdir()
    for path in (tmp_path, tmp_path / "step_1", tmp_path / "step_2"):
        with contextlib.suppress(Killed), monkeypatch.context() as patch:
            patch.setattr("os.replace", killed)
            patch.setattr("os.unlink", killed)
            write_text(path / "state.json", "new")
        assert leftovers(path) != []
    with opened(tmp_path, keep_top_k=None) as again:
        assert saved == again.latest() == again.best() and steps(again) == [1, 2, 10]
        with pytest.raises(CheckpointError, match="another run is using"), opened(tmp_path):
            pass
    assert (
        leftovers(tmp_path)
        == leftovers(tmp_path / "step_1")
        == leftovers(tmp_path / "step_2")
        == []
    )


@settings(deadline=None, max_examples=12)
@given(
    st.lists(st.one_of(st.none(), st.sampled_from([0.1, 0.5, 0.9])), min_size=1, max_size=9),
    st.integers(1, 4),
    st.booleans(),
)
def test_the_best_stay_and_the_latest(
    tmp_path_factory: pytest.TempPathFactory, metrics: list[float | None], keep: int, higher: bool
) -> None:
    folder = tmp_path_factory.mktemp("store")
    values = dict(enumerate(metrics, start=1))

    def rank(step: int) -> tuple[float, int]:
        value = values[step]
        if value is None:
            return math.inf, -step
        return -value if higher else value, -step

    kept: set[int] = set()
    name = "val_accuracy" if higher else "val_loss"
    ranking = {"metric_name": name, "metric_of": lambda path: values[int(path.name[5:])]}
    with opened(folder, keep_top_k=keep, **ranking) as store:
        for step in values:
            store.save(step, writer("x"))
            kept = set(sorted(kept | {step}, key=rank)[:keep]) | {step}
            assert set(steps(store)) == kept
        best = store.best()
        assert best is not None and best.step == min(kept, key=rank)
    shutil.rmtree(folder)


def content(folder: Path) -> str:
    (text,) = {
        (folder / "state.json").read_text(),
        (folder / "model" / "weights.safetensors").read_text()[:3],
    }
    return text


@pytest.mark.parametrize("name", ["step_2", "final"])
def test_killed_at_any_operation_of_a_save_a_whole_checkpoint_is_found(
    tmp_path: Path, name: str
) -> None:
    """At its first operation on files, at its second, ...: of a new step, with the old one pruned;
    of the export."""
    found: set[tuple[int, ...]] = set()
    for number in range(99):
        folder = tmp_path / str(number)
        with opened(folder, keep_top_k=1) as store:
            store.save(1, writer("old"))
            store.write_folder("final", writer("old"))
        with (
            contextlib.suppress(Killed),
            opened(folder, keep_top_k=1) as store,
            KILLER.armed(folder, number),
        ):
            if name == "final":
                store.write_folder("final", writer("new"))
            else:
                store.save(2, writer("new"))
        killed = KILLER.count > number
        with opened(folder, keep_top_k=1) as store:
            assert leftovers(folder) == []
            found.add(tuple(steps(store)))
            for checkpoint in store.all():
                assert content(checkpoint.path) == ("old" if checkpoint.step == 1 else "new")
            if (folder / "final").exists():
                assert content(folder / "final") in {"old", "new"}
        if not killed:
            break
    assert number > 9
    assert found == ({(1,)} if name == "final" else {(1,), (1, 2), (2,)})


METRIC = "checkpointing.metric_name=val:validation-held_out_length_controlled_accuracy"


def evaluated(outcome: TrainingOutcome, config: DatasetConfig) -> dict[str, float]:
    """The numbers of `treeward eval` of an exported model on a set."""
    scorer = Scorer.load(str(outcome.model_folder), device="cpu")
    suite = PreferenceSuite("held_out", config)
    candidate = Candidate("model", lambda: (scorer, {"model": "model"}))
    [summary], _ = run_evaluation([candidate], [(suite, None)])
    metrics = [*summary.statistics.numbers.values(), *summary.length.numbers.values()]
    found = {metric.name: metric.value for metric in metrics if metric.value is not None}
    return found | {"accuracy": found["pair_accuracy"]}


@pytest.mark.slow
def test_validation_says_what_an_evaluation_of_the_exported_model_says(
    tiny_run: Callable[..., Any], write_rows: Callable[..., Path]
) -> None:
    stream = open_dataset(DatasetConfig(dataset_name="Bundled", split="length_controlled"))
    rows = [preference_to_dict(preference) for preference, _ in stream]
    file = write_rows(
        "sets.jsonl", (row | {"task_name": f"task {i % 7}"} for i, row in enumerate(rows[:140]))
    )
    options = ["rm.val_batches=null", "rm.val_period=0", "policy.optimizer.kwargs.lr=0.01"]
    config = tiny_run(*options, f"data.validation=[{{data_path: {file}, name: held_out}}]")
    outcome = train(config, show_progress=False)
    measured = outcome.validation["held_out"]
    expected = evaluated(outcome, config.data.validation[0])
    for name in (*GATE_METRICS, "accuracy"):
        assert measured[name] == pytest.approx(expected[name], abs=1e-6), name
    # The numbers differ where they should: the test would not see one that stands for another.
    assert measured["worst_subset"] < measured["accuracy"]
    assert measured["accuracy_shorter_right"] < measured["length_controlled_accuracy"]
    assert abs(measured["kendall_tau"]) > 1e-3


def test_validation_data_that_is_trained_on_is_said_before_the_first_step(
    tiny_run: Callable[..., Any], caplog: pytest.LogCaptureFixture, write_rows: Callable[..., Path]
) -> None:
    def rows(numbers: Iterable[int]) -> list[dict[str, str]]:
        return [
            {"prompt": f"{n} + 1?", "chosen": f"It is {n + 1}.", "rejected": "No."} for n in numbers
        ]

    binary = "dataset_name: BinaryPreferenceDataset"
    train_file = write_rows("train.jsonl", rows(range(30)))
    val_file = write_rows("val.jsonl", rows(range(20, 36)))
    options = [
        f"data.train={{{binary}, data_path: {train_file}, split: null}}",
        f"data.validation=[{{{binary}, data_path: {val_file}, name: held_out}}]",
        "rm.val_batches=null",
    ]
    set_up(tiny_run(*options))
    said = [
        record.getMessage() for record in caplog.records if "training data" in record.getMessage()
    ]
    assert len(said) == 1 and said[0].startswith(
        "10 of 16 comparisons of the validation set held_out"
    )


def test_a_metric_without_a_value_ranks_last_and_says_why_once(
    tiny_run: Callable[..., Any],
    write_rows: Callable[..., Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = [
        {"prompt": f"{i}?", "chosen": "a long completion " * 4 + str(i), "rejected": "no"}
        for i in range(8)
    ]
    file = write_rows("held_out.jsonl", rows)
    data = f"[{{dataset_name: BinaryPreferenceDataset, data_path: {file}, name: held_out}}]"
    with caplog.at_level(logging.WARNING, logger="treeward.training.train"):
        outcome = train(tiny_run(f"data.validation={data}", METRIC), show_progress=False)
    (warned,) = [
        record.getMessage() for record in caplog.records if "rank last" in record.getMessage()
    ]
    assert 'no scored pair whose better completion is "shorter"' in warned
    assert outcome.model_step == 6 and outcome.caveats == {}, "the latest, as without a metric"
    lines = read_metrics(tmp_path / "logs" / "metrics.jsonl")
    assert any("validation-held_out/accuracy_longer_right" in line for line in lines)
    names = chain.from_iterable(lines)
    assert not any("length_controlled_accuracy" in name for name in names)


def warnings_of(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


def test_a_metric_that_ranks_few_checkpoints_is_told(
    tiny_run: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    train(tiny_run("checkpointing.save_period=2", "rm.val_period=3"), show_progress=False)
    (warning,) = warnings_of(caplog, "rank last")
    assert (
        "1 of the 3 checkpoints of this run" in warning
        and "save_period is 2 and val_period 3" in warning
    )


def test_checkpoints_before_the_first_validation_of_grpo_count_as_without_metric(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = GRPOCheckpointingConfig(
        checkpoint_dir=str(tmp_path), save_period=10, metric_name="val:reward"
    )
    with open_store(config, lambda folder: None) as store:
        assert store is not None
        warn_of_rare_metric(store, GRPOConfig(val_period=10), total_steps=100)
        assert not warnings_of(caplog, "rank last")
        warn_of_rare_metric(store, GRPOConfig(val_period=10, val_start_at=50), total_steps=100)
    (warning,) = warnings_of(caplog, "rank last")
    assert "6 of the 10 checkpoints of this run" in warning


def test_checkpoints_without_the_metric_are_told_before_they_are_pruned(
    tiny_run: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    period = "checkpointing.save_period=1"
    without = (
        period,
        "checkpointing.metric_name=null",
        "checkpointing.keep_top_k=null",
        "rm.val_period=null",
    )
    train(tiny_run(*without, "rm.max_num_steps=3", "rm.val_at_end=false"), show_progress=False)
    assert not warnings_of(caplog, "pruned first") and not warnings_of(caplog, "rank last")
    with_metric = (period, "checkpointing.keep_top_k=2", "rm.val_period=1")
    train(tiny_run(*with_metric, "rm.max_num_steps=5"), show_progress=False)
    (warning,) = warnings_of(caplog, "pruned first")
    assert "(step 1, 2, 3)" in warning and "keep_top_k=null" in warning
    names = {path.name for path in (tmp_path / "checkpoints").glob("step_*")}
    assert names == {"step_4", "step_5"}


@pytest.mark.parametrize("key", ["dtensor_cfg.cpu_offload", "torch_compile"])
def test_a_key_that_needs_a_gpu_is_refused_before_anything_is_read(
    tiny_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no GPU for this") as caught:
        train(tiny_run(f"policy.{key}=true", "data.train_data_path=/nowhere"), show_progress=False)
    assert caught.value.field == f"policy.{key}"
