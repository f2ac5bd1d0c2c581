"""`CheckpointStore`: checkpoints that are either whole or absent, at any moment at which a run may be killed.

    store = CheckpointStore(Path("results/rm"), keep_top_k=3, higher_is_better=False)
    store.save(step=200, write=lambda folder: ..., metric=0.41)     # results/rm/step_200
    checkpoint = store.latest()                                      # None, or the newest whole one

A checkpoint is written into a folder whose name begins with a dot, flushed to the disk, and renamed: one rename makes
it exist. Its manifest lists every file with its size and digest, so a folder that was damaged later is noticed when it
is used. The best `keep_top_k` by the metric stay, and the latest always; a metric that is missing or NaN ranks last,
and so does one of another name than the store's: numbers of two metrics cannot be compared. `stored_metric` may find
the right one in such a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeward.config.checkpointing import CheckpointingConfig
from treeward.errors import CheckpointError, ConfigError
from treeward.locks import lock_folder
from treeward.model.contract import CONTRACT_FILE

__all__ = ["Checkpoint", "CheckpointStore", "checkpoint_to_resume", "opened_store"]

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_FINISHED = re.compile(r"step_(\d+)")
_SAVING, _REMOVING = ".saving_", ".removing_"
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A finished checkpoint. `metric`: the value it is ranked by, None if it was saved without one."""

    path: Path
    step: int
    metric: float | None

    def verify(self) -> None:
        """Compare every file with the manifest. Raises `CheckpointError` naming the first that differs."""
        for name, expected in _read_manifest(self.path)["files"].items():
            file = self.path / name
            size = file.stat().st_size if file.is_file() else None
            if size != expected["bytes"]:
                raise self._damaged(
                    name, "no such file" if size is None else f"{size} bytes", f"{expected['bytes']} bytes"
                )
            if _digest(file) != expected["blake2b"]:
                raise self._damaged(name, "other content", "the content that was saved")

    def _damaged(self, name: str, got: str, need: str) -> CheckpointError:
        return CheckpointError(
            "the checkpoint is damaged",
            where=str(self.path / name),
            got=got,
            need=need,
            fix=f"remove {self.path}: the run resumes from the checkpoint before it, or begins anew without one",
        )


class CheckpointStore:
    """The checkpoints of one run in one folder, which no other process may use at the same time."""

    def __init__(
        self,
        folder: Path,
        *,
        keep_top_k: int | None = None,
        higher_is_better: bool = True,
        metric_name: str | None = None,
        stored_metric: Callable[[Path], float | None] | None = None,
    ) -> None:
        self.folder = folder
        self.keep_top_k = keep_top_k
        self.higher_is_better = higher_is_better
        self.metric_name = metric_name
        self.stored_metric = stored_metric
        self._lock: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(folder)
            for leftover in [*folder.glob(f"{_SAVING}*"), *folder.glob(f"{_REMOVING}*")]:
                shutil.rmtree(leftover)
        except OSError as error:
            raise CheckpointError(
                "the checkpoint folder cannot be used",
                where=str(folder),
                got=str(error),
                need="a folder that can be written",
                fix="set checkpointing.checkpoint_dir",
            ) from error

    def close(self) -> None:
        """Let another run use the folder. Safe to repeat."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __del__(self) -> None:
        self.close()

    def save(self, step: int, write: Callable[[Path], None], *, metric: float | None = None) -> Checkpoint:
        """Have `write` fill a folder, and make it the checkpoint of `step`; then remove those that need not stay.

        Raises `CheckpointError` when it cannot be written (a full disk): what was there before stands.
        """

        def write_with_manifest(partial: Path) -> None:
            write(partial)
            files = {
                file.relative_to(partial).as_posix(): {"bytes": file.stat().st_size, "blake2b": _digest(file)}
                for file in sorted(partial.rglob("*"))
                if file.is_file() and file.name != CONTRACT_FILE  # `treeward calibrate` may write to it; none resumes
            }
            manifest = {"step": step, "metric_name": self.metric_name, "metric": _finite(metric), "files": files}
            (partial / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")

        final = self.write_folder(f"step_{step}", write_with_manifest)
        self._prune()
        return Checkpoint(final, step, _finite(metric))

    def write_folder(self, name: str, write: Callable[[Path], None]) -> Path:
        """Have `write` fill a folder of any `name` beside the checkpoints, which is whole or absent too.

        Raises `CheckpointError` when it cannot be written: what was there before stands.
        """
        final, partial = self.folder / name, self.folder / f"{_SAVING}{name}"
        try:
            partial.mkdir()
            write(partial)
            _replace_folder(partial, final)
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            # safetensors and tokenizers report a full disk by exceptions of their own, with the text of Rust's.
            if not isinstance(error, OSError) and "(os error " not in str(error):
                raise
            raise CheckpointError(
                "cannot be saved",
                where=str(final),
                got=str(error),
                need="space and permission to write",
                fix="make room and start the same command again: it resumes from the last checkpoint",
            ) from error
        return final

    def all(self) -> list[Checkpoint]:
        """Every finished checkpoint, oldest first."""
        found = []
        for path in self.folder.iterdir():
            if (match := _FINISHED.fullmatch(path.name)) and path.is_dir():
                manifest = _read_manifest(path)
                found.append(Checkpoint(path, int(match[1]), self._metric_of(path, manifest)))
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def _metric_of(self, path: Path, manifest: Mapping[str, Any]) -> float | None:
        if manifest.get("metric_name") == self.metric_name:
            metric: float | None = manifest.get("metric")
            return metric
        # It was saved when another metric ranked, or none did.
        return None if self.metric_name is None or self.stored_metric is None else _finite(self.stored_metric(path))

    def latest(self) -> Checkpoint | None:
        checkpoints = self.all()
        return checkpoints[-1] if checkpoints else None

    def best(self) -> Checkpoint | None:
        """The best by the metric; without metrics the latest."""
        ranked = self._ranked()
        return ranked[0] if ranked else None

    def _ranked(self) -> list[Checkpoint]:
        """Best first. Of equals the later one is better."""
        sign = -1.0 if self.higher_is_better else 1.0
        return sorted(self.all(), key=lambda c: (math.inf if c.metric is None else sign * c.metric, -c.step))

    def _prune(self) -> None:
        if self.keep_top_k is None:
            return
        latest = self.latest()
        for checkpoint in self._ranked()[self.keep_top_k :]:
            if latest is None or checkpoint.step == latest.step:
                continue
            # Renamed first: were it killed half-way, a part of a checkpoint would look like a whole one.
            doomed = self.folder / f"{_REMOVING}{checkpoint.path.name}"
            os.rename(checkpoint.path, doomed)
            shutil.rmtree(doomed)


@contextmanager
def opened_store(
    config: CheckpointingConfig,
    *,
    metric_name: str | None,
    stored_metric: Callable[[Path], float | None] | None = None,
) -> Iterator[CheckpointStore | None]:
    """The store of a run, locked; None where checkpointing is off, with a warning. `metric_name`: what ranks them.
    `stored_metric` finds it in the folder of a checkpoint that was saved when something else ranked.

    It stays open for the run that is assembled in the body, and is closed where that fails.
    """
    if not config.enabled:
        logger.warning("checkpointing.enabled is false: nothing of this run will be kept but its metrics.")
        yield None
        return
    store = CheckpointStore(
        Path(config.checkpoint_dir),
        keep_top_k=config.keep_top_k,
        higher_is_better=config.metric_is_better_when_higher,
        metric_name=metric_name,
        stored_metric=stored_metric,
    )
    try:
        _tell_of_unranked(store, str(config.metric_name))
        yield store
    except BaseException:
        store.close()
        raise


def _tell_of_unranked(store: CheckpointStore, name: str) -> None:
    """Warn of checkpoints that were saved when another metric ranked, or none, and lack the one that now does. `name`:
    as the user spells it.
    """
    if store.metric_name is None or store.keep_top_k is None:
        return
    steps = [
        checkpoint.step
        for checkpoint in store.all()
        if checkpoint.metric is None and _read_manifest(checkpoint.path).get("metric_name") != store.metric_name
    ]
    if steps:
        named = ", ".join(map(str, steps[:_MOST_NAMED])) + (", ..." if len(steps) > _MOST_NAMED else "")
        has, is_ = ("checkpoint has", "is") if len(steps) == 1 else ("checkpoints have", "are")
        logger.warning(
            "%d %s no %s and %s pruned first (step %s): to keep one, copy it elsewhere, or set "
            "checkpointing.keep_top_k=null.", len(steps), has, name, is_, named,
        )  # fmt: skip


def checkpoint_to_resume(store: CheckpointStore, config: CheckpointingConfig) -> Checkpoint | None:
    """The latest one, None in a new run. Raises `ConfigError` where there is one and `resume` is false."""
    latest = store.latest()
    if latest is not None and not config.resume:
        raise ConfigError(
            "there are checkpoints of an earlier run, and checkpointing.resume is false",
            where=str(store.folder),
            got=latest.path.name,
            fix="set another checkpointing.checkpoint_dir, or move the folder away",
        )
    return latest


def _lock(folder: Path) -> int:
    """Lock a folder until the descriptor is closed, at the latest when the process ends, however it ends."""
    descriptor = lock_folder(folder)
    if descriptor is None:
        raise CheckpointError(
            "another run is using this checkpoint folder",
            where=str(folder),
            fix="wait until it has ended, or set checkpointing.checkpoint_dir",
        )
    return descriptor


def _replace_folder(partial: Path, final: Path) -> None:
    """Flush all files of `partial` to the disk and rename it to `final`, removing what was there."""
    readable = partial.stat().st_mode & 0o666
    for path in [*partial.rglob("*"), partial]:
        if path.is_file():
            path.chmod(readable)  # safetensors writes for the owner alone; a model is read by servers and colleagues
        _sync(path)
    doomed = final.parent / f"{_REMOVING}{final.name}"
    if final.exists():
        os.rename(final, doomed)
    os.rename(partial, final)
    _sync(final.parent)
    if doomed.exists():
        shutil.rmtree(doomed)


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(manifest.get("files"), dict):
            raise ValueError("it has no list of files")
        return manifest
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            "the checkpoint has no readable manifest",
            where=str(folder / _MANIFEST),
            got=str(error),
            need="a folder that treeward has saved",
            fix=f"move {folder} away",
        ) from error


def _finite(metric: float | None) -> float | None:
    return metric if metric is not None and math.isfinite(metric) else None


def _digest(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for chunk in _chunks(file):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(file: Path, size: int = 1 << 22) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while chunk := stream.read(size):
            yield chunk


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
