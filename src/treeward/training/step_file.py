"""`StepFile`: a file of JSON lines, one or more to a step, that a killed and resumed run continues
as if never killed.

    # In a new run; the file of another is set aside.
    samples = StepFile(log_dir / "samples.jsonl", resume_step=None)
    samples.append({"step": 20, "text": "..."})

A step's lines must be appended before its checkpoint is saved; a run that resumes from it takes out
those of later steps.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from treeward.errors import ConfigError, DataError
from treeward.storage import atomic_file

logger = logging.getLogger(__name__)


class StepFile:
    """Appends objects with a whole number `step`, each handed to the operating system before
    `append` returns. `resume_step`: the step to continue from; None keeps an existing file as
    `<name>.1.jsonl`. A file that is deleted meanwhile begins again, with a warning. Raises
    `DataError` on resume for a line that is not such an object."""

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and resume_step is not None:
            records = read_steps(path)
            kept_records = [record for record in records if record["step"] <= resume_step]
            # A kill leaves the old file or the new one.
            with atomic_file(path) as file:
                for record in kept_records:
                    file.write(json.dumps(record) + "\n")
            num_cut = len(records) - len(kept_records)
            if num_cut > 0:
                logger.info("%s: cut %d lines after step %d", path.name, num_cut, resume_step)
        else:
            set_aside(path)
        # Unbuffered: a kill -9 must lose no line of a step that has a checkpoint.
        self._file = path.open("ab", buffering=0)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a line. Raises `ConfigError` if that fails; half a line is cut when the run
        resumes."""
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            # What is written into a deleted file is lost, without an error: a new one begins.
            if os.fstat(self._file.fileno()).st_nlink == 0:
                logger.warning(
                    "%s was deleted while the run writes it: its lines are lost, and it begins "
                    "again here.",
                    self._path,
                )
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file.close()
                self._file = self._path.open("ab", buffering=0)
            if self._file.write(line) != len(line):
                raise OSError("only a part of a line was written; the disk may be full")
        except OSError as error:
            summary = f"{self._path.name} cannot be written"
            fix = "make room and start the same command again: it resumes from the last checkpoint"
            raise ConfigError(summary, where=str(self._path), got=str(error), fix=fix) from error

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def set_aside(path: Path) -> None:
    """Keep a file of another run, unless it is empty, as `<name>.1<suffix>`, or the next number
    that is free."""
    if not path.exists() or path.stat().st_size == 0:
        return
    number = 1
    kept = path.with_name(f"{path.stem}.{number}{path.suffix}")
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.stem}.{number}{path.suffix}")
    path.rename(kept)
    logger.info("%s of another run is kept as %s", path, kept.name)


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, also of a run that is still writing: an unfinished last line is left
    out. Raises `DataError` naming the line if one is not an object with a whole number `step`."""
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        try:
            record = json.loads(line)
        except ValueError:
            if not line.endswith(b"\n"):
                break  # a killed run has left it half
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            got = line.decode(errors="replace").rstrip("\n")
            raise DataError(
                "a line is not an object with a step", where=f"{path}:{number}", got=got
            )
        records.append(record)
    return records


def flattened(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`{"rm": {"seed": 1}}` as `("rm.seed", 1)`."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
