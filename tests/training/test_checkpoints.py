"""Checkpoints are whole or absent, whenever a run is killed; the best stay; damage is noticed."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeward.config.checkpointing import CheckpointingConfig
from treeward.errors import CheckpointError
from treeward.training.checkpoints import CheckpointStore, open_store

WRITES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree"}


class Killed(BaseException):
    """As near as a test in one process comes to kill -9: nothing that handles exceptions handles it."""


class Killer:
    """Kills at the operation number `at` on files below `folder`; whatever is tried after that dies too."""

    def __init__(self) -> None:
        self.folder, self.at, self.count = "", math.inf, 0
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        # Removals name a file by a descriptor of its folder, so those count wherever they are.
        if event in WRITES and (event in ("os.remove", "os.rmdir") or str(arguments[0]).startswith(self.folder)):
            self.count += 1
            if self.count > self.at:
                raise Killed

    @contextlib.contextmanager
    def armed(self, folder: Path, at: float) -> Iterator[None]:
        self.folder, self.at, self.count = str(folder), at, 0
        try:
            yield
        finally:
            self.at = math.inf


KILLER = Killer()  # a hook cannot be taken back: one for all tests


def opened(folder: Path, metrics: dict[int, float | None] | None = None, **options: Any) -> Any:
    """The store in a folder; `metrics` by step."""
    if metrics is not None:
        options |= {"metric_name": "val_accuracy", "metric_of": lambda path: metrics[int(path.name[5:])]}
    metric_of = options.pop("metric_of", None)
    return open_store(CheckpointingConfig(checkpoint_dir=str(folder), **options), metric_of)


def writer(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_text(text * 100)
        (folder / "state.json").write_text(text)

    return write


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.all()]


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_a_checkpoint_is_found_and_sound(tmp_path: Path) -> None:
    with opened(tmp_path, keep_top_k=None) as store:
        assert store.latest() is None and store.best() is None and store.to_resume() is None
        for step in (1, 2, 10):
            saved = store.save(step, writer("x"))
    with opened(tmp_path, keep_top_k=None) as again:
        assert saved == again.latest() == again.best() == again.to_resume() and steps(again) == [1, 2, 10]
    assert leftovers(tmp_path) == []


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
        return (math.inf if value is None else -value if higher else value, -step)

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


@pytest.mark.parametrize("keep", [2, None])
def test_checkpoints_without_the_metric_that_ranks_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keep: int | None
) -> None:
    with opened(tmp_path, keep_top_k=None) as before:
        for step in range(2, 22, 2):
            before.save(step, writer("x"))
    assert "pruned first" not in caplog.text
    values: dict[int, float | None] = {step: None for step in range(2, 22, 2)} | {20: 0.5}
    with opened(tmp_path, values, keep_top_k=keep):
        told = [record.getMessage() for record in caplog.records if "pruned first" in record.getMessage()]
    start = "Checkpoints without val_accuracy are pruned first (step 2, 4, 6, 8, 10, 12, 14, 16, ...)"
    assert [text.startswith(start) for text in told] == ([] if keep is None else [True])


def test_a_folder_serves_one_run_at_a_time(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(CheckpointError, match="another run is using"), opened(tmp_path):
        pass
    with opened(tmp_path) as store:
        assert store is not None


def kill_everywhere(folder: Path, act: Callable[[CheckpointStore], Any], check: Callable[[CheckpointStore], None],
                    **options: Any) -> int:  # fmt: skip
    """Kill `act` at its first operation on files, at its second, ...; `check` the folder each time. The operations."""
    template, number = folder / "template", 0
    with opened(template, **options) as store:
        store.save(1, writer("old"))
        store.write_folder("final", writer("old"))
    while True:
        copy = folder / str(number)
        shutil.copytree(template, copy)
        try:
            with opened(copy, **options) as store, KILLER.armed(copy, number):
                act(store)
            done = True
        except Killed:
            done = False
        with opened(copy, **options) as store:
            assert leftovers(copy) == []
            for checkpoint in store.all():
                checkpoint.verify()
            check(store)
        if done:
            return number
        number += 1


def content(folder: Path) -> str:
    (text,) = {(folder / "state.json").read_text(), (folder / "model" / "weights").read_text()[:3]}
    return text


def test_killed_at_any_operation_of_a_save_one_whole_checkpoint_is_found(tmp_path: Path) -> None:
    """A new step, with the old one pruned; the same step again; and the folder of the export again."""
    found: set[tuple[int, ...]] = set()

    def check_next(store: CheckpointStore) -> None:
        found.add(tuple(steps(store)))
        assert {content(checkpoint.path) for checkpoint in store.all() if checkpoint.step == 1} <= {"old"}

    assert kill_everywhere(tmp_path / "next", lambda store: store.save(2, writer("new")), check_next, keep_top_k=1) > 9
    assert found == {(1,), (1, 2), (2,)}

    again: set[str] = set()

    def check_again(store: CheckpointStore) -> None:
        assert steps(store) == [1]
        again.add(content(store.folder / "step_1"))

    kill_everywhere(tmp_path / "again", lambda store: store.save(1, writer("new")), check_again)
    final: set[str] = set()
    kill_everywhere(
        tmp_path / "final",
        lambda store: store.write_folder("final", writer("new")),
        lambda store: final.add(content(store.folder / "final")),
    )
    assert again == final == {"old", "new"}


def test_killed_while_it_cleans_up_it_cleans_up_the_next_time(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.save(1, writer("old"))
    (tmp_path / "step_1").rename(tmp_path / ".replaced_step_1")
    for name in (".saving_step_1", ".removing_step_0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").touch()
    for number in range(99):
        with contextlib.suppress(Killed), KILLER.armed(tmp_path, number), opened(tmp_path):
            break
    with opened(tmp_path) as store:
        store.to_resume().verify()
        assert number > 3 and leftovers(tmp_path) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_told_and_what_was_there_stands(tmp_path: Path, error: Exception) -> None:
    def fail(folder: Path) -> None:
        writer("new")(folder)
        raise error

    with opened(tmp_path) as store:
        store.save(1, writer("old"))
        store.write_folder("final", writer("old"))
        for save in (lambda: store.save(2, fail), lambda: store.write_folder("final", fail)):
            with pytest.raises(CheckpointError, match="No space left on device") as caught:
                save()
            assert "cannot be saved" in str(caught.value) and "make room" in str(caught.value)
        assert steps(store) == [1] and leftovers(tmp_path) == [] and content(tmp_path / "final") == "old"
        store.save(2, writer("new")).verify()


def test_a_fault_of_ours_is_not_called_a_full_disk(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise KeyError("a fault")

    with opened(tmp_path) as store, pytest.raises(KeyError, match="a fault"):
        store.save(1, fail)
    assert leftovers(tmp_path) == []


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(("damage", "got"), [(cut, "99 bytes"), (flip, "other content"), (Path.unlink, "no such file")])
def test_damage_is_noticed(tmp_path: Path, damage: Callable[[Path], Any], got: str) -> None:
    with opened(tmp_path) as store:
        checkpoint = store.save(1, writer("x"))
        damage(checkpoint.path / "model" / "weights")
        with pytest.raises(CheckpointError, match=got) as caught:
            store.to_resume()
    assert str(checkpoint.path / "model" / "weights") in str(caught.value)
    assert f"remove {checkpoint.path}" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_damaged_manifest_is_told(tmp_path: Path, text: str) -> None:
    with opened(tmp_path) as store:
        checkpoint = store.save(1, writer("x"))
        assert json.loads((checkpoint.path / "manifest.json").read_text())["step"] == 1
        (checkpoint.path / "manifest.json").write_text(text)
        with pytest.raises(CheckpointError, match="no readable manifest"):
            store.to_resume()


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be used"), opened(tmp_path / "file" / "checkpoints"):
        pass


def test_files_are_as_readable_as_their_folder(tmp_path: Path) -> None:
    def write_for_the_owner(folder: Path) -> None:
        (folder / "weights").touch(mode=0o600)
        folder.chmod(0o750)

    with opened(tmp_path) as store:
        checkpoint = store.save(1, write_for_the_owner)
    assert (checkpoint.path / "weights").stat().st_mode & 0o777 == 0o640
