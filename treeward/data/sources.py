"""Rows from where data lies: a file, a folder of files, a glob, a saved `datasets` folder, or the Hugging Face hub.

    for row in read_rows("train.jsonl.gz"):
        row.values, row.where        # {"prompt": ..., "chosen": ...}, "train.jsonl.gz:17"

The kinds of file are those of `treeward.data.files`: jsonl, json, csv, tsv, parquet, arrow, each also gzipped. A
folder is what `save_to_disk` wrote, or files of one kind (read in the order of their names; names such as
`validation.jsonl` say their split), or a copy of a dataset on the hub. The hub (`org/name`), and such a copy, is read
by `datasets.load_dataset`; code from the hub is never run.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import importlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from treeward.data.files import KINDS, Row, file_suffix, parse_json_line, read_file, read_jsonl_stream
from treeward.errors import DataError

__all__ = ["Row", "fingerprint", "parse_json_line", "read_jsonl_stream", "read_rows"]

# What `datasets` and the hub keep beside the data under a data suffix.
_NOT_DATA = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
# The words by which file names say their split; the same that `datasets` looks for.
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_CHUNK_BYTES = 1 << 20


class _Files(NamedTuple):
    """Local files of one kind, read one after another."""

    paths: tuple[str, ...]


class _Saved(NamedTuple):
    """A folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""

    folder: str
    split: str | None


class _Repository(NamedTuple):
    """What only `datasets.load_dataset` can read: a hub name, or a local folder laid out like one on the hub."""

    path: str
    subset: str | None
    split: str | None


def read_rows(path: str, *, split: str | None = None, subset: str | None = None) -> Iterator[Row]:
    """The rows of a file, a folder, a glob, a saved dataset or a hub dataset (`org/name`), in order.

    A file is a single split: `split` may be None, "train" (what `datasets` calls any lone file) or the split that the
    file's own name says, as in `validation.jsonl`. In a folder `split` selects the files so named. `subset` is the
    configuration name of a hub dataset. The path is looked up at once, the rows are read as they are asked for.

    Raises `DataError` naming the file and line for a missing or empty file, an ambiguous or unknown split, text that
    is not UTF-8, malformed JSON, CSV or Arrow data, a truncated gzip, and rows that are not objects.
    """
    rows: Iterator[Row]
    match _locate(path, split, subset):
        case _Files(paths):
            rows = (row for file in paths for row in read_file(file))
        case _Saved(folder, part):
            rows = _table_rows(*_load_saved(folder, part))
        case _Repository(name, part_of, part):
            rows = _table_rows(*_load_repository(name, part_of, part))
    return _at_least_one(rows, path)


def fingerprint(path: str, *, split: str | None = None, subset: str | None = None) -> str:
    """A hex digest (128 bits) that changes when the content does.

    For local data it is made from the bytes of the files, and in a folder from their names too; for the hub from the
    name, subset, split and the dataset's own fingerprint. Raises `DataError` as `read_rows` does.
    """
    digest = hashlib.blake2b(digest_size=16)
    match _locate(path, split, subset):
        case _Files(paths) if len(paths) == 1:
            _add_bytes(digest, paths[0])
        case _Files(paths):
            for file in paths:
                _add_text(digest, os.path.basename(file))
                _add_bytes(digest, file)
        case _Saved(folder, part):
            _add_text(digest, f"saved split {part}")
            _add_folder(digest, folder)
        case _Repository(name, part_of, part) if os.path.isdir(name):
            _add_text(digest, f"subset {part_of} split {part}")
            _add_folder(digest, name)
        case _Repository(name, part_of, part):
            table, label = _load_repository(name, part_of, part)
            _add_text(digest, f"{label} subset {part_of} {table._fingerprint}")
    return digest.hexdigest()


# --- what a path means -----------------------------------------------------------------------------------------------


def _locate(path: str, split: str | None, subset: str | None) -> _Files | _Saved | _Repository:
    if os.path.isdir(path):
        return _locate_folder(path, split, subset)
    files: tuple[str, ...] = ()
    if os.path.exists(path):
        files = (path,)
    elif glob.has_magic(path):
        files = tuple(sorted(file for file in glob.glob(path, recursive=True) if os.path.isfile(file)))
    elif re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path) and file_suffix(path) not in KINDS:
        return _Repository(path, subset, split)
    if not files:
        raise _missing(path)
    if subset is not None:
        raise DataError(
            "a file has no subset", where=path, field="subset", got=subset, need="null", fix="remove subset"
        )
    _one_kind(files, path)
    if split not in (None, "train") and {_split_in_name(file) for file in files} != {split}:
        raise DataError(
            f"a file has no split {split!r}",
            where=path,
            field="split",
            got=split,
            need="null or train: whatever it is for, a file is one split",
            fix="remove split, or give the file that holds those rows",
        )
    return _Files(files)


def _locate_folder(path: str, split: str | None, subset: str | None) -> _Files | _Saved | _Repository:
    entries = {entry.name for entry in os.scandir(path)}
    if "dataset_dict.json" in entries or {"state.json", "dataset_info.json"} <= entries:
        if subset is not None:
            raise DataError(
                "a saved dataset has no subset", where=path, field="subset", got=subset, fix="remove subset"
            )
        return _Saved(path, split)
    files = sorted(
        os.path.join(path, name)
        for name in entries
        if file_suffix(name) in KINDS and name not in _NOT_DATA and not name.startswith((".", "_"))
    )
    files = [file for file in files if os.path.isfile(file)]
    if subset is not None or _has_hub_card(path) or (not files and _holds_data(path)):
        return _Repository(path, subset, split)
    if not files:
        raise DataError(
            "the folder holds no data",
            where=path,
            got=", ".join(sorted(entries)) or "an empty folder",
            need=f"files that end in {_suffixes()}, or what save_to_disk writes",
        )
    _one_kind(files, path)
    return _Files(_files_of_split(files, split, path))


def _files_of_split(files: Sequence[str], split: str | None, folder: str) -> tuple[str, ...]:
    """The files whose names say `split`; all of them if no name says any split and train, or nothing, is asked for."""
    splits = {file: _split_in_name(file) for file in files}
    named = sorted({name for name in splits.values() if name is not None})
    if split is None and len(named) > 1:
        raise _ambiguous(folder, named)
    if split is None or (split == "train" and not named):
        return tuple(files)
    if split not in named:
        raise _no_such_split(folder, split, named or ["train"])
    return tuple(file for file in files if splits[file] == split)


def _split_in_name(file: str) -> str | None:
    words = re.split(r"[^a-z]+", os.path.basename(file).lower())
    return next((split for split, names in _SPLIT_WORDS.items() if set(names) & set(words)), None)


def _one_kind(files: Sequence[str], where: str) -> None:
    by_kind: dict[str, str] = {}
    for file in files:
        suffix = file_suffix(file)
        if suffix not in KINDS:
            raise DataError(
                "the kind of file is not known",
                where=file,
                got=f"the suffix {os.path.splitext(file)[1] or 'is missing'}",
                need=f"{_suffixes()}, each also with .gz",
                fix="rename the file, or convert it",
            )
        by_kind.setdefault(KINDS[suffix], file)
    if len(by_kind) > 1:
        raise DataError(
            "the files are of several kinds",
            where=where,
            got=", ".join(map(os.path.basename, by_kind.values())),
            need="one kind of file: the same rows may be there twice",
            fix=f"choose with a pattern, as {os.path.join(where, '*' + file_suffix(files[0]))}"
            if os.path.isdir(where)
            else "give a narrower pattern",
        )
    unpacked = {file.removesuffix(".gz") for file in files}
    if len(unpacked) < len(files):
        twice = next(file for file in files if file + ".gz" in files)
        raise DataError(
            "a file is there twice, packed and unpacked",
            where=where,
            got=f"{os.path.basename(twice)} and {os.path.basename(twice)}.gz",
            need="each row once",
            fix="remove one of them",
        )


def _suffixes() -> str:
    return ", ".join(KINDS)


def _has_hub_card(folder: str) -> bool:
    """Whether a README like those on the hub says which files belong to which split."""
    card = Path(folder, "README.md")
    if not card.is_file():
        return False
    text = card.read_text("utf-8", errors="replace")
    return text.startswith("---") and re.search(r"^configs:", text.split("\n---", 1)[0], re.MULTILINE) is not None


def _holds_data(folder: str) -> bool:
    return any(
        file_suffix(name) in KINDS and name not in _NOT_DATA for _, _, names in os.walk(folder) for name in names
    )


def _missing(path: str) -> DataError:
    folder = os.path.dirname(path) or "."
    if glob.has_magic(path):
        return DataError("no file fits the pattern", where=path, need="at least one file", fix="check the path")
    if not os.path.isdir(folder):
        return DataError("there is no such file, and no such folder", where=path, got=folder, fix="check the path")
    near = difflib.get_close_matches(os.path.basename(path), os.listdir(folder), n=3)
    return DataError(
        "there is no such file",
        where=path,
        need="a file, a folder, a pattern such as data/*.jsonl, or a hub name such as org/name",
        fix=f"did you mean {' or '.join(os.path.join(os.path.dirname(path), name) for name in near)}?"
        if near
        else "check the path",
    )


def _ambiguous(path: str, splits: Sequence[str]) -> DataError:
    return DataError(
        "there are several splits and none is chosen",
        where=path,
        field="split",
        got=", ".join(splits),
        need="one of them",
        fix=f"add split: {'train' if 'train' in splits else splits[0]}",
    )


def _no_such_split(path: str, split: str, splits: Sequence[str]) -> DataError:
    near = difflib.get_close_matches(split, splits, n=1)
    return DataError(
        f"there is no split {split!r}",
        where=path,
        field="split",
        got=split,
        need=f"one of {', '.join(splits)}",
        fix=f"did you mean {near[0]}?" if near else None,
    )


# --- tables that the datasets library reads --------------------------------------------------------------------------


def _load_saved(folder: str, split: str | None) -> tuple[Any, str]:
    library = importlib.import_module("datasets")
    try:
        loaded = library.load_from_disk(folder)
    except (OSError, ValueError) as error:  # Arrow's errors are ValueErrors
        raise DataError(
            "the saved dataset cannot be read", where=folder, got=str(error), fix="write it again with save_to_disk"
        ) from error
    if not isinstance(loaded, Mapping):
        own = str(loaded.split) if loaded.split is not None else "train"
        if split not in (None, "train", own):
            raise _no_such_split(folder, str(split), [own])
        return loaded, folder
    return _pick(loaded, split, folder)


def _load_repository(path: str, subset: str | None, split: str | None) -> tuple[Any, str]:
    library = importlib.import_module("datasets")
    is_local = os.path.isdir(path)
    try:
        loaded = library.load_dataset(path, subset, split=split, streaming=False)
    except (OSError, ValueError, library.exceptions.DatasetsError) as error:
        raise DataError(
            "the folder cannot be read as a dataset" if is_local else "no such file, and the hub does not give it",
            where=path,
            got=f"{type(error).__name__}: {error}",
            need="a folder that datasets.load_dataset can read" if is_local else "a local path, or a hub dataset",
            fix="check path, subset and split"
            if is_local
            else "check name, subset, split and network; a private or gated dataset needs HF_TOKEN; offline, give a "
            "local copy as data_path",
        ) from error
    return _pick(loaded, split, path) if isinstance(loaded, Mapping) else (loaded, f"{path}[{split}]")


def _pick(tables: Mapping[str, Any], split: str | None, path: str) -> tuple[Any, str]:
    names = list(tables)
    if split is None and len(names) > 1:
        raise _ambiguous(path, names)
    chosen = split if split is not None else names[0]
    if chosen not in tables:
        raise _no_such_split(path, chosen, names)
    return tables[chosen], f"{path}[{chosen}]"


def _table_rows(table: Any, label: str) -> Iterator[Row]:
    # A dataset may have been saved with a torch or numpy format; rows are plain Python values.
    for number, values in enumerate(table.with_format(None), 1):
        yield Row(values, f"{label}:row {number}")


def _at_least_one(rows: Iterator[Row], path: str) -> Iterator[Row]:
    is_empty = True
    for row in rows:
        is_empty = False
        yield row
    if is_empty:
        raise DataError(
            "there are no rows", where=path, got="empty data", need="at least one row", fix="check the path"
        )


# --- fingerprints ----------------------------------------------------------------------------------------------------


def _add_text(digest: hashlib.blake2b, text: str) -> None:
    raw = text.encode("utf-8", errors="surrogateescape")
    digest.update(f"{len(raw)}:".encode() + raw)


def _add_bytes(digest: hashlib.blake2b, path: str) -> None:
    digest.update(f"{os.path.getsize(path)}:".encode())
    with open(path, "rb") as handle:
        while chunk := handle.read(_CHUNK_BYTES):
            digest.update(chunk)


def _add_folder(digest: hashlib.blake2b, folder: str) -> None:
    """Names and bytes of everything below, but not of what begins with a dot (as `.git`, `.cache`)."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            path = os.path.join(parent, name)
            _add_text(digest, os.path.relpath(path, folder))
            _add_bytes(digest, path)
