"""Rows that survive a kill: every item is scored once, each row is kept at once, and the next run
goes on.

    identity = {"model": "sha of the weights", "data": "sha of the file", "truncation": "drop"}
    with resumable_rows(Path("out/rows.jsonl"), identity, parse) as rows:
        done = {row.id for row in rows.kept}  # rows of an earlier run with the same identity
        for item in items:
            if item.id not in done:
                rows.add(score(item))  # in the file when it returns

The identity is everything that a row depends on besides its item. It lies beside the rows
(`rows.identity.json`), and rows of another identity are refused, so that no file mixes two models.
While the block runs the file is locked: two processes would write every row twice.
`rows.finish(path)` gives the file its final name once it is complete.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

from treeward.errors import CheckpointError, DataError
from treeward.storage import folder_lock, sync_folder, write_text

logger = logging.getLogger(__name__)

Row = TypeVar("Row")
_LONGEST_VALUE = 24


class ResumableRows(Generic[Row]):
    """`kept`: the parsed rows of earlier runs, in the order of the file."""

    def __init__(
        self, kept: list[Row], stream: IO[str] | None = None, path: Path | None = None
    ) -> None:
        self.kept = kept
        self._stream = stream
        self._path = path

    def add(self, row: object) -> None:
        """Write one row, a mapping or a dataclass; it survives the process from here on.

        Raises `DataError` where it cannot be written.
        """
        if self._stream is None:
            return
        try:
            self._stream.write(as_line(row) + "\n")
            self._stream.flush()
        except BrokenPipeError:
            raise  # whoever reads along has enough
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def finish(self, path: Path) -> None:
        """Move the complete file to `path` and drop its identity: nothing is left to resume."""
        assert self._stream is not None and self._path is not None
        try:
            os.fsync(self._stream.fileno())
            os.replace(self._path, path)
            _identity_path(self._path).unlink(missing_ok=True)
            sync_folder(path.parent)
        except OSError as error:
            raise _unwritable(path, error) from error


@contextmanager
def resumable_rows(
    path: Path | None,
    identity: Mapping[str, Any],
    parse: Callable[[Any, str], Row | None],
    *,
    identity_path: Path | None = None,
    can_resume: bool = True,
) -> Iterator[ResumableRows[Row]]:
    """Open a file of JSON lines to go on with. A path of None keeps nothing.

    `identity`: JSON values by name; the error names those that differ. `parse(row, "file:line")`
    makes a row of JSON values into what `kept` holds; None for a row that is not to be kept, and
    then it and all after it are cut off. A last line that a killed process left incomplete is cut
    off too. `can_resume`: whether the next run can read the same items, which an interrupted one
    then tells.

    Raises `CheckpointError` for rows of another identity and where another process writes the file,
    `DataError` for a line that is no JSON and for a file that cannot be written.
    """
    if path is None:
        yield ResumableRows([])
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise _unwritable(path, error) from error
    with folder_lock(path) as locked:
        if not locked:
            raise CheckpointError(
                "another process is writing these rows",
                where=str(path),
                need="one process for each file",
                fix="wait until it has ended and start the same command again, or choose another "
                "--output",
            )
        try:
            _check_identity(path, identity_path or _identity_path(path), identity)
            kept = list(_read(path, parse))
            # A lone surrogate is written as JSON has it.
            stream = path.open("a", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            yield ResumableRows(kept, stream, path)
        except KeyboardInterrupt:
            if can_resume:
                logger.info(
                    "The rows that are done are kept in %s: the same command goes on from there.",
                    path,
                )
            raise
        finally:
            with suppress(OSError):  # a full disk refuses once more what `add` has raised for
                stream.close()


def _identity_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}.identity.json")


def _check_identity(path: Path, file: Path, identity: Mapping[str, Any]) -> None:
    """Write the identity of new rows, or compare it with that of the rows that are there."""
    # As it comes back from the file: a tuple would differ from the list that it was written as.
    now = json.loads(json.dumps(identity, default=str))
    if path.stat().st_size == 0:
        write_text(file, json.dumps(now, indent=2, ensure_ascii=False) + "\n")
        return
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
        values_of = {key: (before.get(key), now.get(key)) for key in {**now, **before}}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise _of_another(path, f"{file.name} is missing or damaged: {error}") from error
    changes = []
    for key, (old, new) in values_of.items():
        if old == new:
            continue
        old_text = old if isinstance(old, str) else json.dumps(old)
        new_text = new if isinstance(new, str) else json.dumps(new)
        # Long values, as digests, would tell nobody anything.
        change = f"another {key}"
        if max(len(old_text), len(new_text)) <= _LONGEST_VALUE:
            change = f"{key} {old_text} -> {new_text}"
        changes.append(change)
    if changes:
        raise _of_another(path, ", ".join(changes))


def _read(path: Path, parse: Callable[[Any, str], Row | None]) -> Iterator[Row]:
    num_whole_bytes = 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            # The last line of a process that was killed while it wrote.
            if not line.endswith(b"\n"):
                break
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(
                    "the row is damaged", where=where, got=str(error), need="a line of JSON"
                ) from error
            parsed = parse(row, where)
            if parsed is None:
                break
            num_whole_bytes += len(line)
            yield parsed
    # When the caller has taken every row, which `list` does before the file is opened to append.
    if num_whole_bytes < path.stat().st_size:
        os.truncate(path, num_whole_bytes)


def _of_another(path: Path, got: str) -> CheckpointError:
    return CheckpointError(
        "these rows were made by another model, from other data or with other settings",
        where=str(path),
        got=got,
        need="an empty folder, or that of the run to be continued",
        fix="choose another --output, or remove the file",
    )


def _unwritable(path: Path | None, error: OSError) -> DataError:
    return DataError(
        "the rows cannot be written",
        where=str(path),
        got=str(error),
        need="a folder that can be written, and room in it",
        fix="choose another --output, or make room and start the same command again: it goes on "
        "where it stopped",
    )


def as_line(row: object) -> str:
    """A row, a mapping or a dataclass, as the line of JSON that `add` writes, without its end."""

    def plain(value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            return asdict(value)
        if hasattr(value, "tolist"):  # of numpy or torch
            return value.tolist()
        return str(value)

    return json.dumps(row, ensure_ascii=False, default=plain)
