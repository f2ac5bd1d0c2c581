"""`CheckpointStore`: checkpoints that are either whole or absent, at any moment at which a run may be killed.

    with open_store(config.checkpointing, metric_of=partial(stored_metric, name="eval/rm/loss")) as store:
        store.save(step=200, write=lambda folder: ...)              # results/rm/step_200
        checkpoint = store.latest()                                 # None, or the newest whole one

A checkpoint is written into a folder whose name begins with a dot, flushed to the disk, and renamed: one rename makes
it exist. A step that is saved again is set aside first and put back by the next session, should the run be killed
before the new folder is in place. A manifest lists every file with its size and digest, so damage is noticed when a
checkpoint is used. The best `keep_top_k` by the metric stay, and the latest always; without the metric they rank last.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeward.config.checkpointing import CheckpointingConfig
from treeward.errors import CheckpointError, ConfigError
from treeward.model.contract import CONTRACT_FILE
from treeward.storage import folder_lock, sync_folder

__all__ = ["Checkpoint", "CheckpointStore", "open_store"]

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_FINISHED = re.compile(r"step_(\d+)")
_SAVING, _REPLACED, _REMOVING = ".saving_", ".replaced_", ".removing_"
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A finished checkpoint. `metric`: the value that ranks it, None without one."""

    path: Path
    step: int
    metric: float | None = None

    def verify(self) -> None:
        """Compare every file with the manifest. Raises `CheckpointError` naming the first that differs."""
        for name, expected in _read_manifest(self.path).items():
            file = self.path / name
            size = file.stat().st_size if file.is_file() else None
            if size != expected["bytes"]:
                got = "no such file" if size is None else f"{size} bytes"
                raise self._damaged(name, got, f"{expected['bytes']} bytes")
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


@contextmanager
def open_store(
    config: CheckpointingConfig, metric_of: Callable[[Path], float | None] | None = None
) -> Iterator[CheckpointStore | None]:
    """The store of a run, locked while the block runs; None where checkpointing is off, with a warning.

    `metric_of` reads the metric that ranks checkpoints from the folder of one; None: the latest are the best. Raises
    `CheckpointError` for a folder that cannot be used, or that another process uses.
    """
    if not config.enabled:
        logger.warning("checkpointing.enabled is false: nothing of this run will be kept but its metrics.")
        yield None
        return
    folder = Path(config.checkpoint_dir)
    with ExitStack() as opened:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            locked = opened.enter_context(folder_lock(folder))
        except OSError as error:
            raise _unusable(folder, error) from error
        if not locked:
            raise CheckpointError(
                "another run is using this checkpoint folder",
                where=str(folder),
                fix="wait until it has ended, or set checkpointing.checkpoint_dir",
            )
        yield CheckpointStore(folder, config, metric_of)


class CheckpointStore:
    """The checkpoints of one run in one folder; made by `open_store`."""

    def __init__(
        self, folder: Path, config: CheckpointingConfig, metric_of: Callable[[Path], float | None] | None
    ) -> None:
        self.folder, self.config, self._metric_of = folder, config, metric_of
        try:
            _clean_up(folder)
        except OSError as error:
            raise _unusable(folder, error) from error
        self._warn_of_unranked()

    def save(self, step: int, write: Callable[[Path], None]) -> Checkpoint:
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
            text = json.dumps({"step": step, "files": files}, indent=2)
            (partial / _MANIFEST).write_text(text + "\n", encoding="utf-8")

        checkpoint = self._checkpoint(self.write_folder(f"step_{step}", write_with_manifest))
        self._prune()
        return checkpoint

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
        found = [self._checkpoint(path) for path in self.folder.iterdir() if _FINISHED.fullmatch(path.name)]
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def latest(self) -> Checkpoint | None:
        checkpoints = self.all()
        return checkpoints[-1] if checkpoints else None

    def best(self) -> Checkpoint | None:
        """The best by the metric; without metrics the latest."""
        ranked = self._ranked()
        return ranked[0] if ranked else None

    def to_resume(self) -> Checkpoint | None:
        """The latest, verified; None in a new run. Raises `ConfigError` where there is one and `resume` is false."""
        latest = self.latest()
        if latest is None:
            return None
        if not self.config.resume:
            raise ConfigError(
                "there are checkpoints of an earlier run, and checkpointing.resume is false",
                where=str(self.folder),
                got=latest.path.name,
                fix="set another checkpointing.checkpoint_dir, or move the folder away",
            )
        latest.verify()
        return latest

    def _checkpoint(self, path: Path) -> Checkpoint:
        step = int(path.name.removeprefix("step_"))
        return Checkpoint(path, step, None if self._metric_of is None else self._metric_of(path))

    def _ranked(self) -> list[Checkpoint]:
        """Best first. Of equals the later one is better."""
        sign = -1.0 if self.config.metric_is_better_when_higher else 1.0
        return sorted(self.all(), key=lambda c: (math.inf if c.metric is None else sign * c.metric, -c.step))

    def _prune(self) -> None:
        keep, latest = self.config.keep_top_k, self.latest()
        for checkpoint in [] if keep is None else self._ranked()[keep:]:
            if latest is not None and checkpoint.step != latest.step:
                # Renamed first: were it killed half-way, a part of a checkpoint would look like a whole one.
                doomed = self.folder / f"{_REMOVING}{checkpoint.path.name}"
                os.rename(checkpoint.path, doomed)
                shutil.rmtree(doomed)

    def _warn_of_unranked(self) -> None:
        unranked = [c.step for c in self.all() if c.metric is None]
        if self._metric_of is None or self.config.keep_top_k is None or not unranked:
            return
        named = ", ".join(map(str, unranked[:_MOST_NAMED])) + (", ..." if len(unranked) > _MOST_NAMED else "")
        logger.warning(
            "Checkpoints without %s are pruned first (step %s): to keep one, copy it elsewhere, or set "
            "checkpointing.keep_top_k=null.", self.config.metric_name, named,
        )  # fmt: skip


def _clean_up(folder: Path) -> None:
    """Remove parts that a killed session has left, and put back a folder that it did not live to replace."""
    for leftover in [*folder.glob(f"{_SAVING}*"), *folder.glob(f"{_REMOVING}*")]:
        shutil.rmtree(leftover)
    for old in folder.glob(f"{_REPLACED}*"):
        final = folder / old.name.removeprefix(_REPLACED)
        if final.exists():
            _remove_replaced(old)
        else:
            os.rename(old, final)


def _replace_folder(partial: Path, final: Path) -> None:
    """Flush all files of `partial` to the disk and rename it to `final`; a folder that was there is removed."""
    readable = partial.stat().st_mode & 0o666
    for path in [*partial.rglob("*"), partial]:
        if path.is_file():
            path.chmod(readable)  # safetensors writes for the owner alone; a model is read by servers and colleagues
        sync_folder(path)
    old = final.parent / f"{_REPLACED}{final.name}"
    if final.exists():
        os.rename(final, old)
    os.rename(partial, final)
    sync_folder(final.parent)
    if old.exists():
        _remove_replaced(old)


def _remove_replaced(old: Path) -> None:
    # Renamed first: `final` could be removed by hand, and half of the old folder would be taken for it.
    doomed = old.with_name(old.name.replace(_REPLACED, _REMOVING, 1))
    os.rename(old, doomed)
    shutil.rmtree(doomed)


def _unusable(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        "the checkpoint folder cannot be used",
        where=str(folder),
        got=str(error),
        need="a folder that can be written",
        fix="set checkpointing.checkpoint_dir",
    )


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The size and digest of each file, by its name."""
    try:
        files: dict[str, Any] = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["files"]
        return dict(files)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            "the checkpoint has no readable manifest",
            where=str(folder / _MANIFEST),
            got=str(error),
            need="a folder that treeward has saved",
            fix=f"move {folder} away",
        ) from error


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
