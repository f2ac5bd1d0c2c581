"""`CheckpointStore`: checkpoints that are either whole or absent, at any moment at which a run may be killed.

    with open_store(config.checkpointing, metric_of=partial(stored_metric, name="eval/rm/loss")) as store:
        store.save(step=200, write=lambda folder: ...)              # results/rm/step_200
        checkpoint = store.latest()                                 # None, or the newest

A checkpoint is written into a folder whose name begins with a dot, flushed to the disk, and renamed: one rename makes
it exist, and no step is written twice. The best `keep_top_k` by the metric stay, and the latest always; checkpoints
without the metric rank last.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from treeward.config.checkpointing import CheckpointingConfig
from treeward.errors import CheckpointError, ConfigError
from treeward.storage import folder_lock, remove_leftovers, sync_folder

logger = logging.getLogger(__name__)

_FINISHED = re.compile(r"step_(\d+)")
_PARTIAL, _REMOVING = ".saving_", ".removing_"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A finished checkpoint. `metric`: the value that ranks it, None without one."""

    path: Path
    step: int
    metric: float | None = None


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
            for leftover in folder.glob(".*_*") if locked else ():  # parts that a killed session has left
                if leftover.name.startswith((_PARTIAL, _REMOVING)):
                    shutil.rmtree(leftover)
            remove_leftovers(*((folder, *folder.glob("step_*")) if locked else ()))
        except OSError as error:
            summary, fix = "the checkpoint folder cannot be used", "set checkpointing.checkpoint_dir"
            raise CheckpointError(summary, where=str(folder), got=str(error), fix=fix) from error
        if not locked:
            fix = "wait until it has ended, or set checkpointing.checkpoint_dir"
            raise CheckpointError("another run is using this checkpoint folder", where=str(folder), fix=fix)
        yield CheckpointStore(folder, config, metric_of)


class CheckpointStore:
    """The checkpoints of one run in one folder; made by `open_store`."""

    def __init__(
        self, folder: Path, config: CheckpointingConfig, metric_of: Callable[[Path], float | None] | None
    ) -> None:
        self.folder, self.config, self._metric_of = folder, config, metric_of
        unranked = [str(one.step) for one in self.all() if one.metric is None]
        if metric_of is not None and config.keep_top_k is not None and unranked:
            logger.warning(
                "Checkpoints without %s are pruned first (step %s): to keep one, copy it elsewhere, or set "
                "checkpointing.keep_top_k=null.", config.metric_name, ", ".join(unranked),
            )  # fmt: skip

    def save(self, step: int, write: Callable[[Path], None]) -> Checkpoint:
        """Have `write` fill a folder, and make it the checkpoint of `step`; then remove those that need not stay.

        Raises `CheckpointError` when it cannot be written (a full disk): what was there before stands.
        """
        assert not (self.folder / f"step_{step}").exists()
        checkpoint = self._checkpoint(self.write_folder(f"step_{step}", write))
        self.prune()
        return checkpoint

    def write_folder(self, name: str, write: Callable[[Path], None]) -> Path:
        """Have `write` fill a folder of any `name` beside the checkpoints, whole or absent; it replaces an older one.

        Raises `CheckpointError` when it cannot be written: what was there before stands.
        """
        final, partial = self.folder / name, self.folder / f"{_PARTIAL}{name}"
        try:
            partial.mkdir()
            write(partial)
            readable = partial.stat().st_mode & 0o666
            for path in [*partial.rglob("*"), partial]:
                if path.is_file():
                    path.chmod(readable)  # safetensors writes for the owner alone; a model is read by servers too
                sync_folder(path)
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            # safetensors and tokenizers report a full disk by exceptions of their own, with the text of Rust's.
            if not isinstance(error, OSError) and "(os error " not in str(error):
                raise
            fix = "make room and start the same command again: it resumes from the last checkpoint"
            raise CheckpointError("cannot be saved", where=str(final), got=str(error), fix=fix) from error
        if final.exists():
            self._remove(final)
        os.rename(partial, final)
        sync_folder(self.folder)
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
        """The latest; None in a new run. Raises `ConfigError` where there is one and `resume` is false."""
        latest = self.latest()
        if latest is not None and not self.config.resume:
            summary = "there are checkpoints of an earlier run, and checkpointing.resume is false"
            raise ConfigError(summary, where=str(latest.path), fix="set another checkpointing.checkpoint_dir")
        return latest

    def _checkpoint(self, path: Path) -> Checkpoint:
        step = int(path.name.removeprefix("step_"))
        return Checkpoint(path, step, None if self._metric_of is None else self._metric_of(path))

    def _ranked(self) -> list[Checkpoint]:
        """Best first. Of equals the later one is better."""
        sign = -1.0 if self.config.metric_is_better_when_higher else 1.0
        return sorted(self.all(), key=lambda c: (math.inf if c.metric is None else sign * c.metric, -c.step))

    def prune(self) -> None:
        """Remove those that need not stay."""
        keep, latest = self.config.keep_top_k, self.latest()
        for checkpoint in [] if keep is None else self._ranked()[keep:]:
            if latest is not None and checkpoint.step != latest.step:
                self._remove(checkpoint.path)

    def _remove(self, folder: Path) -> None:
        # Renamed first: were it killed half-way, a part of a checkpoint would look like a whole one.
        doomed = folder.with_name(f"{_REMOVING}{folder.name}")
        os.rename(folder, doomed)
        shutil.rmtree(doomed)
