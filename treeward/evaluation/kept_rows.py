"""Rows that outlive a killed run: a folder that belongs to one identity, and a file of JSON lines in it.

    names = {"identity_file": "evaluation.json", "rows": "examples.jsonl", "summary": "of another model"}
    with keeping(folder, {"model": "...", "examples": "..."}, parse, **names) as (done, keep):
        for row in missing(done):
            keep(row)                                              # on the disk when it returns

The identity says what the rows depend on. A folder of another one is refused, so that no table mixes two models.
`settings` are the parts that a value of it is made of, one by one: kept beside it, so that the refusal says which of
them is another. While rows are kept the folder is locked: two processes in one would write every row twice, and each
could cut off what the other is writing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from treeward.errors import CheckpointError, DataError
from treeward.locks import lock_folder

__all__ = ["alone_in", "claim", "keeping", "read_kept"]

_Row = TypeVar("_Row")
_SETTINGS, _WEIGHTS = "settings", "weights"


@contextmanager
def keeping(
    folder: Path | None,
    identity: Mapping[str, str],
    parse: Callable[[Any, str], _Row],
    *,
    identity_file: str,
    rows: str,
    summary: str,
    settings: Mapping[str, str] | None = None,
) -> Iterator[tuple[list[_Row], Callable[[Mapping[str, Any]], None]]]:
    """The rows that are in the folder already, and a function that writes one more as soon as it is given it.

    Of None nothing is read or kept. Raises as `alone_in`, `claim` and `read_kept`, and `DataError` where nothing can be
    written.
    """
    if folder is None:
        yield [], lambda row: None
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(alone_in(folder))  # before anything is read: what is half written is cut off
            claim(folder, identity, identity_file, rows=rows, summary=summary, settings=settings)
            done = list(read_kept(folder / rows, parse))
            stream = (folder / rows).open("a", encoding="utf-8")
        except OSError as error:
            raise _unwritable(folder, error) from error

        def keep(row: Mapping[str, Any]) -> None:
            try:
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
                stream.flush()
            except OSError as error:
                raise _unwritable(folder, error) from error

        try:
            yield done, keep
        finally:
            with suppress(OSError):  # it tries to write once more what a full disk has refused
                stream.close()


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock a folder, made where it is missing; the lock ends with the process too, however that ends.

    Raises `CheckpointError` where another process has locked it, and `OSError` where it cannot be made or locked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = lock_folder(folder)
    if descriptor is None:
        raise CheckpointError(
            "another process is writing rows into this folder",
            where=str(folder),
            need="one process for each folder",
            fix="wait until it has ended: the same command then goes on with its rows; or choose another --output",
        )
    try:
        yield
    finally:
        os.close(descriptor)


def claim(
    folder: Path,
    identity: Mapping[str, str],
    file_name: str,
    *,
    rows: str,
    summary: str,
    settings: Mapping[str, str] | None = None,
) -> None:
    """Make the folder that of `identity`, kept in `file_name` beside `rows`, or see that it is that already.

    `settings`: what `identity["model"]` is made of, by name; only an error tells them. Raises `CheckpointError`, with
    `summary`, for rows of another identity or of none; `OSError` where the folder cannot be written.
    """
    file = folder / file_name
    folder.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        if (folder / rows).exists():
            raise _of_another(folder, summary, f"{rows} without {file_name}")
        partial = file.with_suffix(".partial")
        content = dict(identity) | ({_SETTINGS: dict(settings)} if settings else {})
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, file)
        return
    try:
        before: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _of_another(folder, summary, f"{file_name} is damaged: {error}") from error
    before = before if isinstance(before, dict) else {}
    known = before.pop(_SETTINGS, None)
    differing = [key for key in {**identity, **before} if before.get(key) != identity.get(key)]
    if differing:
        changed = _changed(known, settings) if "model" in differing else []
        said = [f"another {key}" for key in differing if not (changed and key == "model")]
        said = [f"other settings of the same model: {', '.join(changed)}", *said] if changed else said
        raise _of_another(folder, summary, " and ".join(said))


def _changed(before: object, now: Mapping[str, str] | None) -> list[str]:
    """The settings that differ, as `truncation drop -> truncate_left`; none where the weights do, or none is known."""
    if not isinstance(before, dict) or not now or before.get(_WEIGHTS) != now.get(_WEIGHTS):
        return []
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return [f"{key} {before.get(key, 'none')} -> {now.get(key, 'none')}" for key in keys]


def read_kept(file: Path, parse: Callable[[Any, str], _Row]) -> Iterator[_Row]:
    """The whole rows of a file, as `parse(row, "file:line")` makes them; none where there is no file.

    A last line that a killed process left in two is cut off the file. Raises `DataError` for a line that is no JSON.
    """
    if not file.exists():
        return
    whole = 0
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            where = f"{file}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError("the row is damaged", where=where, got=str(error), need="a line of JSON") from error
            yield parse(row, where)
    if whole < file.stat().st_size:
        os.truncate(file, whole)


def _unwritable(folder: Path, error: OSError) -> DataError:
    return DataError(
        "the evaluation cannot be written",
        where=str(folder),
        got=str(error),
        need="a folder that can be written, and room in it",
        fix="choose another --output, or make room and start the same command again: it goes on where it stopped",
    )


def _of_another(folder: Path, summary: str, got: str) -> CheckpointError:
    return CheckpointError(
        summary,
        where=str(folder),
        got=got,
        need="an empty folder, or that of the run which is to be continued",
        fix="choose another --output, or remove the folder",
    )
