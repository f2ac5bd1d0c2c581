from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeward.config.checkpointing import GRPOCheckpointingConfig
from treeward.errors import CheckpointError
from treeward.training.checkpoints import CheckpointStore, opened_store


class Killed(BaseException):
    """As near as a test in one process comes to kill -9: nothing that handles exceptions handles it."""


def write(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_bytes(bytes(1000))
    (folder / "state.json").write_text("{}")


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.all()]


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_a_checkpoint_is_found_and_sound(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.latest() is None and store.best() is None
    saved = store.save(200, write, metric=0.5)
    store.close()
    again = CheckpointStore(tmp_path)
    assert saved == again.latest() == again.best()
    saved.verify()
    assert leftovers(tmp_path) == []


@settings(deadline=None, max_examples=12)
@given(
    st.lists(st.one_of(st.none(), st.sampled_from([0.1, 0.5, 0.9]), st.just(math.nan)), min_size=1, max_size=9),
    st.integers(1, 4),
    st.booleans(),
)
def test_the_best_stay_and_the_latest(
    tmp_path_factory: pytest.TempPathFactory, metrics: list[float | None], keep: int, higher: bool
) -> None:
    folder = tmp_path_factory.mktemp("store")
    store = CheckpointStore(folder, keep_top_k=keep, higher_is_better=higher)
    values = dict(enumerate(metrics, start=1))

    def rank(step: int) -> tuple[float, int]:
        value = values[step]
        missing = value is None or math.isnan(value)
        return (math.inf if missing else -value if higher else value, -step)  # type: ignore[operator]

    kept: set[int] = set()
    for step, metric in values.items():
        store.save(step, write, metric=metric)
        kept = set(sorted(kept | {step}, key=rank)[:keep]) | {step}
        assert set(steps(store)) == kept
    best = store.best()
    assert best is not None and best.step == min(kept, key=rank)
    shutil.rmtree(folder)


def test_all_stay_where_nothing_is_said(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 10):
        store.save(step, write)
    assert steps(store) == [1, 2, 10]


def test_a_metric_of_another_name_is_not_compared(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, metric_name="val_loss", higher_is_better=False).save(1, write, metric=0.7)
    store = CheckpointStore(tmp_path, metric_name="val_accuracy")
    store.save(2, write, metric=0.6)
    best = store.best()
    assert best is not None and best.step == 2


@pytest.mark.parametrize(("keep", "spelt"), [(1, "val:reward"), (2, "val:reward"), (None, "val:reward"), (2, None)])
def test_checkpoints_without_the_metric_that_now_ranks_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keep: int | None, spelt: str | None
) -> None:
    before = CheckpointStore(tmp_path)
    many = range(2, 22, 2)
    for step in many:
        before.save(step, write)
    before.close()
    ranked = CheckpointStore(tmp_path, metric_name=spelt)
    ranked.save(25, write)  # between two validations: of the same run as those that follow
    ranked.close()
    config = GRPOCheckpointingConfig(checkpoint_dir=str(tmp_path), keep_top_k=keep, metric_name=spelt)
    with opened_store(config, metric_name=spelt) as store:
        assert store is not None
        store.close()
    told = [record.getMessage() for record in caplog.records if "pruned first" in record.getMessage()]
    if keep is None or spelt is None:
        assert told == []
    else:
        (text,) = told
        assert text.startswith("10 checkpoints have no val:reward and are pruned first (step 2, 4, 6, ")
        assert "14, 16, ...): to keep one" in text


def test_a_stored_metric_ranks_what_was_saved_when_none_ranked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        before.save(step, write)
    before.close()
    stored = {"step_1": 0.9, "step_2": 0.1, "step_3": math.nan}
    config = GRPOCheckpointingConfig(checkpoint_dir=str(tmp_path), keep_top_k=2, metric_name="val:reward")
    with opened_store(config, metric_name="reward", stored_metric=lambda folder: stored[folder.name]) as store:
        assert store is not None
        assert [checkpoint.metric for checkpoint in store.all()] == [0.9, 0.1, None]
        store.save(4, write, metric=0.5)
        best = store.best()
        assert steps(store) == [1, 4] and best is not None and best.step == 1
        store.close()
    assert "1 checkpoint has no val:reward and is pruned first (step 3)" in caplog.text


def test_a_folder_serves_one_run_at_a_time(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="another run is using"):
        CheckpointStore(tmp_path)
    store.close()
    CheckpointStore(tmp_path).close()


@pytest.mark.parametrize("moment", ["writing", "manifest", "rename", "after"])
def test_a_kill_during_a_save_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    store = CheckpointStore(tmp_path, keep_top_k=1)
    store.save(1, write, metric=0.9)

    def die(*arguments: Any, **options: Any) -> Any:
        raise Killed

    def write_half(folder: Path) -> None:
        write(folder)
        if moment == "writing":
            raise Killed

    if moment == "manifest":
        monkeypatch.setattr(Path, "write_text", die)
    elif moment == "rename":
        monkeypatch.setattr(os, "rename", die)
    elif moment == "after":
        monkeypatch.setattr(CheckpointStore, "_prune", die)
    with pytest.raises(Killed):
        store.save(2, lambda folder: (folder / "file").touch() if moment == "manifest" else write_half(folder))
    monkeypatch.undo()
    assert moment == "after" or leftovers(tmp_path) == [".saving_step_2"]
    store.close()  # a kill does it too
    again = CheckpointStore(tmp_path, keep_top_k=1)
    assert leftovers(tmp_path) == []
    assert steps(again) == ([1, 2] if moment == "after" else [1])
    for checkpoint in again.all():
        checkpoint.verify()
    again.save(3, write, metric=0.95)
    assert steps(again) == [3]


def test_a_kill_while_an_old_one_is_removed_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep_top_k=1)
    store.save(1, write, metric=0.1)

    def remove_half(folder: Path) -> None:
        (folder / "state.json").unlink()
        raise Killed

    monkeypatch.setattr(shutil, "rmtree", remove_half)
    with pytest.raises(Killed):
        store.save(2, write, metric=0.9)
    monkeypatch.undo()
    assert leftovers(tmp_path) == [".removing_step_1"]
    store.close()
    assert steps(CheckpointStore(tmp_path)) == [2]
    assert leftovers(tmp_path) == []


def test_a_folder_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    store.write_folder("final", lambda folder: (folder / "old").touch())

    def fail(folder: Path) -> None:
        (folder / "new").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left"):
        store.write_folder("final", fail)
    assert [path.name for path in (tmp_path / "final").iterdir()] == ["old"]
    store.write_folder("final", lambda folder: (folder / "new").touch())
    assert [path.name for path in (tmp_path / "final").iterdir()] == ["new"]
    assert leftovers(tmp_path) == []
    assert steps(store) == []  # a folder beside the checkpoints is none


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_told_and_what_was_there_stands(tmp_path: Path, error: Exception) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, write)

    def fail(folder: Path) -> None:
        write(folder)
        raise error

    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        store.save(2, fail)
    assert "step_2: cannot be saved" in str(caught.value) and "make room" in str(caught.value)
    assert steps(store) == [1]
    assert leftovers(tmp_path) == []
    store.save(2, write).verify()


def test_a_fault_of_ours_is_not_called_a_full_disk(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise KeyError("a fault")

    with pytest.raises(KeyError, match="a fault"):
        CheckpointStore(tmp_path).save(1, fail)
    assert leftovers(tmp_path) == []


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "got"), [(cut, "999 bytes"), (flip, "other content"), (Path.unlink, "no such file")]
)
def test_damage_is_noticed(tmp_path: Path, damage: Callable[[Path], Any], got: str) -> None:
    checkpoint = CheckpointStore(tmp_path).save(1, write)
    damage(checkpoint.path / "model" / "weights")
    with pytest.raises(CheckpointError, match=got) as caught:
        checkpoint.verify()
    assert str(checkpoint.path / "model" / "weights") in str(caught.value)
    assert f"remove {checkpoint.path}" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_damaged_manifest_is_told(tmp_path: Path, text: str) -> None:
    checkpoint = CheckpointStore(tmp_path).save(1, write)
    (checkpoint.path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="no readable manifest"):
        CheckpointStore(tmp_path).latest()


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be used"):
        CheckpointStore(tmp_path / "file" / "checkpoints")


def test_files_are_as_readable_as_their_folder(tmp_path: Path) -> None:
    def write_for_the_owner(folder: Path) -> None:
        (folder / "weights").touch(mode=0o600)
        folder.chmod(0o750)

    checkpoint = CheckpointStore(tmp_path).save(1, write_for_the_owner)
    assert (checkpoint.path / "weights").stat().st_mode & 0o777 == 0o640
