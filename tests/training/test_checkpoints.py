"""Checkpoints are whole or absent, whenever a run is killed; the best stay."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from killed_run import Killed

from treeward.config.checkpointing import CheckpointingConfig
from treeward.errors import CheckpointError
from treeward.storage import write_text
from treeward.training.checkpoints import CheckpointStore, open_store

WRITES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree"}


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


def writer(text: str) -> Callable[[Path], Callable[[Any], None]]:
    def prepare(folder: Path) -> Callable[[Any], None]:
        (folder / "model").mkdir()
        (folder / "state.json").write_text(text)
        return lambda _: (folder / "model" / "weights.safetensors").write_text(text * 100) and None

    return prepare


def filler(text: str) -> Callable[[Path], None]:
    return lambda folder: writer(text)(folder)(None)


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
    assert leftovers(tmp_path) == leftovers(tmp_path / "step_1") == leftovers(tmp_path / "step_2") == []


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


def content(folder: Path) -> str:
    (text,) = {(folder / "state.json").read_text(), (folder / "model" / "weights.safetensors").read_text()[:3]}
    return text


@pytest.mark.parametrize("name", ["step_2", "final"])
def test_killed_at_any_operation_of_a_save_a_whole_checkpoint_is_found(tmp_path: Path, name: str) -> None:
    """At its first operation on files, at its second, ...: of a new step, with the old one pruned; of the export."""
    found: set[tuple[int, ...]] = set()
    for number in range(99):
        folder = tmp_path / str(number)
        with opened(folder, keep_top_k=1) as store:
            store.save(1, writer("old"))
            store.write_folder("final", filler("old"))
        with contextlib.suppress(Killed), opened(folder, keep_top_k=1) as store, KILLER.armed(folder, number):
            if name == "final":
                store.write_folder("final", filler("new"))
            else:
                store.save(2, writer("new"))
        killed = KILLER.count > number
        with opened(folder, keep_top_k=1) as store:
            assert leftovers(folder) == []
            found.add(tuple(steps(store)))
            assert [content(one.path) for one in store.all()] == ["old" if n == 1 else "new" for n in steps(store)]
            if (folder / "final").exists():
                assert content(folder / "final") in {"old", "new"}
        if not killed:
            break
    assert number > 9
    assert found == ({(1,)} if name == "final" else {(1,), (1, 2), (2,)})
