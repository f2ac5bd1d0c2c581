"""`StepFile`: a file of JSON lines, one or more to a step, that a killed and resumed run continues as if never killed.

    samples = StepFile(log_dir / "samples.jsonl", resume_step=None)      # a new run; an earlier file is set aside
    samples.append({"step": 20, "text": "..."})
    read_steps(log_dir / "samples.jsonl")

A step's lines must be appended before the checkpoint of that step is saved: a run that resumes from the checkpoint
takes out the lines of later steps, which the killed run has left.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from treeward.errors import ConfigError, DataError
from treeward.storage import atomic_file

__all__ = ["StepFile", "read_steps"]

logger = logging.getLogger(__name__)


class StepFile:
    """Appends objects with a whole number `step`, each handed to the operating system before `append` returns.

    `resume_step`: the step of the checkpoint that the run continues from; None: it starts anew, and a file that is
    there is kept as `<name>.1.jsonl`. Raises `DataError` for a line, found on resume, that is no such object.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is None:
            _set_aside(path)
        elif path.exists():
            _cut_after(path, resume_step)
        # Unbuffered: a buffer that a full disk refused once would be written in the middle of a later line.
        self._file = path.open("ab", buffering=0)

    def append(self, record: Mapping[str, Any]) -> None:
        """Raises `ConfigError` where it cannot be written; the file then ends as before."""
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        start = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes were written; the disk may be full")
        except OSError as error:
            self._file.truncate(start)
            raise ConfigError(
                f"{self._path.name} cannot be written",
                where=str(self._path),
                got=str(error),
                need="space and permission to write",
                fix="make room and start the same command again: it resumes from the last checkpoint",
            ) from error

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, also of a run that is still writing: an unfinished last line is left out.

    Raises `DataError` naming the line if one is not an object with a whole number `step`.
    """
    return [record for record, _ in _read_lines(path)]


def _read_lines(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The objects, each with its line; a last line that a killed run has left half is passed over."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except ValueError:
                if not line.endswith(b"\n"):
                    return
                record = None
            step = record.get("step") if isinstance(record, dict) else None
            if not isinstance(step, int):
                raise DataError(
                    "a line is not a record of metrics",
                    where=f"{path}:{number}",
                    got=line.decode(errors="replace").rstrip("\n"),
                    need='{"step": 12, "time": ..., "train/rm/loss": ...}',
                    fix="remove the line",
                )
            yield record, line


def _cut_after(path: Path, step: int) -> None:
    """Take out the lines of later steps; a kill leaves the old file or the new one."""
    num_kept = num_cut = 0
    with atomic_file(path, "wb") as file:
        for record, line in _read_lines(path):
            if record["step"] <= step:
                file.write(line.rstrip(b"\n") + b"\n")
                num_kept += 1
            else:
                num_cut += 1
    if num_cut:
        logger.info("%s: cut %d lines after step %d, kept %d", path.name, num_cut, step, num_kept)


def _set_aside(path: Path) -> None:
    """Rename the file of an earlier run to the first free of `metrics.1.jsonl`, `metrics.2.jsonl`, ..."""
    if not path.exists() or path.stat().st_size == 0:
        return
    names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
    kept = next(name for name in names if not name.exists())
    path.rename(kept)
    logger.info("%s of an earlier run is kept as %s", path, kept.name)
