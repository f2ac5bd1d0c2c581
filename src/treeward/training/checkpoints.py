"""`CheckpointStore`: checkpoints that are whole or absent, whenever a run is killed.

    metric_of = partial(stored_metric, name="eval/rm/loss")
    with open_store(config.checkpointing, metric_of) as store:
        store.save(step=200, write=lambda folder: ...)              # results/rm/step_200
        checkpoint = store.latest()                                 # None, or the newest

A checkpoint is written into a folder whose name begins with a dot, flushed to the disk, and
renamed. The best `keep_top_k` by the metric stay, and the latest always. Every process of a run
makes the same calls; the main one makes, renames and removes folders, which all nodes must share.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from treeward import processes
from treeward.config.checkpointing import CheckpointingConfig
from treeward.errors import CheckpointError
from treeward.storage import folder_lock, remove_leftovers, sync_folder

logger = logging.getLogger(__name__)

_FINISHED = re.compile(r"step_(\d+)")
_PARTIAL = ".saving_"
_REMOVING = ".removing_"
_PATIENCE_SECONDS = 30  # for a folder that another node has made
_LEASE_SECONDS = 100  # NFS frees the locks of a lost node after 90


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
    """The store of a run, locked while the block runs; None where checkpointing is off.

    `metric_of` reads the ranking metric from a checkpoint's folder; None: the latest are the best.
    Raises `CheckpointError` for an unusable or locked folder.
    """
    if not config.enabled:
        logger.warning(
            "checkpointing.enabled is false: nothing of this run will be kept but its metrics."
        )
        yield None
        return
    folder = Path(config.checkpoint_dir)
    with ExitStack() as opened:

        def open_folder() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            if not is_locked(folder, until=opened):
                raise CheckpointError(
                    "another run is using this checkpoint folder",
                    where=str(folder),
                    fix="wait until it has ended, or set checkpointing.checkpoint_dir",
                )
            # Of a session that was killed.
            leftovers = [*folder.glob(f"{_PARTIAL}*"), *folder.glob(f"{_REMOVING}*")]
            for leftover in leftovers:
                shutil.rmtree(leftover)
            # Finished checkpoints too: the state of one is written anew after a validation that a
            # signal had stopped.
            remove_leftovers(folder, *folder.glob("step_*"))

        try:
            processes.on_main(open_folder)
        except OSError as error:
            raise CheckpointError(
                "the checkpoint folder cannot be used",
                where=str(folder),
                got=str(error),
                fix="set checkpointing.checkpoint_dir",
            ) from error
        yield CheckpointStore(folder, config, metric_of)


def is_locked(path: Path, *, until: ExitStack) -> bool:
    """Lock a folder or a file of a run until the stack closes; False where another run holds it."""
    # The main process of a run that was lost with its node may hold it a while yet.
    patience = 0
    if processes.size() > 1:
        patience = _LEASE_SECONDS
    end = time.monotonic() + patience
    while not until.enter_context(folder_lock(path)):
        if time.monotonic() >= end:
            return False
        time.sleep(1)
    return True


class CheckpointStore:
    """The checkpoints of one run in one folder; made by `open_store`."""

    def __init__(
        self,
        folder: Path,
        config: CheckpointingConfig,
        metric_of: Callable[[Path], float | None] | None,
    ) -> None:
        self.folder = folder
        self.config = config
        self._metric_of = metric_of

    @property
    def is_ranked(self) -> bool:
        """Whether a metric says which checkpoints are the best."""
        return self._metric_of is not None

    def is_due(self, step: int) -> bool:
        """Whether `save_period` asks for a checkpoint after a step, counted from 1."""
        period = self.config.save_period
        return period is not None and step % period == 0

    def save(self, step: int, write: Callable[[Path], object]) -> Checkpoint:
        """Have `write` fill a folder, and make it the checkpoint of `step`; then prune. Raises
        `CheckpointError` if it cannot be written; earlier ones stay."""
        path = self.folder / f"step_{step}"
        assert not path.exists()
        self.write_folder(path.name, write)
        self.prune()
        return processes.on_main(lambda: self._checkpoint(path))

    def write_folder(self, name: str, write: Callable[[Path], object]) -> Path:
        """Have `write` fill a folder of any `name` beside the checkpoints, whole or absent; it
        replaces an older one. Raises `CheckpointError` if it cannot be written; the older one
        stays."""
        final = self.folder / name
        partial = self.folder / f"{_PARTIAL}{name}"
        try:
            processes.on_main(partial.mkdir)
            # Folders of a network may show late on another node.
            end = time.monotonic() + _PATIENCE_SECONDS
            while not partial.is_dir() and time.monotonic() < end:
                time.sleep(0.2)
            if not all(processes.gather(partial.is_dir())):
                raise CheckpointError(
                    "a process does not see the checkpoint folder",
                    where=f"checkpointing.checkpoint_dir: {self.folder}",
                    need="a folder that all nodes share",
                )
            write(partial)
            processes.on_main(lambda: self._end(partial, final))
        except Exception as error:
            if processes.is_main():
                shutil.rmtree(partial, ignore_errors=True)
            # safetensors and tokenizers report a full disk by exceptions of their own, with the
            # text of Rust's.
            if not isinstance(error, OSError) and "(os error " not in str(error):
                raise
            raise CheckpointError(
                "cannot be saved",
                where=str(final),
                got=str(error),
                fix="make room and start the same command again: it resumes from the last "
                "checkpoint",
            ) from error
        return final

    def _end(self, partial: Path, final: Path) -> None:
        """Flush the partial folder, and give it its final name."""
        # As the folder, which was made by the user's umask.
        readable = partial.stat().st_mode & 0o666
        for path in [*partial.rglob("*"), partial]:
            if path.is_file():
                # safetensors writes for the owner alone; a model is read by servers too
                path.chmod(readable)
            sync_folder(path)
        if final.exists():
            self._remove(final)
        # All of it is on the disk by now, so the name never stands for a part. The name itself
        # lasts when its folder is flushed too.
        os.rename(partial, final)
        sync_folder(self.folder)

    def all(self) -> list[Checkpoint]:
        """Every finished checkpoint, oldest first."""
        checkpoints: list[Checkpoint] = []
        for path in self.folder.iterdir():
            if _FINISHED.fullmatch(path.name):
                checkpoints.append(self._checkpoint(path))
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)

    def latest(self) -> Checkpoint | None:
        return processes.on_main(lambda: next(reversed(self.all()), None))

    def best(self) -> Checkpoint | None:
        """The best by the metric; without metrics the latest."""
        return processes.on_main(lambda: next(iter(self._ranked()), None))

    def _checkpoint(self, path: Path) -> Checkpoint:
        step = int(path.name.removeprefix("step_"))
        metric = None
        if self._metric_of is not None:
            metric = self._metric_of(path)
        return Checkpoint(path, step, metric)

    def _ranked(self) -> list[Checkpoint]:
        """Best first. Of equals the later one is better."""
        sign = 1.0
        if self.config.metric_is_better_when_higher:
            sign = -1.0

        def order(checkpoint: Checkpoint) -> tuple[float, int]:
            # A checkpoint without a value ranks behind all that have one.
            value = math.inf
            if checkpoint.metric is not None:
                value = sign * checkpoint.metric
            return (value, -checkpoint.step)

        return sorted(self.all(), key=order)

    def prune(self) -> None:
        """Remove checkpoints that are neither among the best nor the latest."""

        def remove_others() -> None:
            latest = self.all()[-1:]
            for checkpoint in self._ranked()[self.config.keep_top_k :]:
                if checkpoint not in latest:
                    self._remove(checkpoint.path)

        if self.config.keep_top_k is not None:
            processes.on_main(remove_others)

    def _remove(self, folder: Path) -> None:
        # Renamed first: were it killed half-way, a part of a checkpoint would look like a whole
        # one.
        doomed = folder.with_name(f"{_REMOVING}{folder.name}")
        os.rename(folder, doomed)
        shutil.rmtree(doomed)
