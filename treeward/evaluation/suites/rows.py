"""The rows of a published suite, from the hub, a downloaded copy or a file, and their fields, checked.

    for row in repository_rows(source, "allenai/reward-bench", split="filtered"):
        prompt = text_field(row, "prompt")

A copy is what the hub's download gives (`data/filtered-00000-of-00001.parquet` beside a README), or any folder that
holds a file whose name begins with the split.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from treeward.config.base import nearest_name
from treeward.data.preference import Message, check_messages
from treeward.data.sources import KINDS, Row, file_suffix, read_rows
from treeward.errors import DataError
from treeward.evaluation.examples import EvalExample

__all__ = [
    "assistant",
    "data_files",
    "field_of",
    "id_field",
    "name_field",
    "prompt_field",
    "repository_rows",
    "text_field",
    "texts_field",
    "with_distinct_ids",
]

# What `datasets` and the hub keep beside the data under a data suffix.
_NOT_DATA = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
# `raw-00000-of-00002.parquet`: such a name says its split, so a lone one of another split is not the one asked for.
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.")
_SAVED = ("dataset_dict.json", "state.json")


def repository_rows(
    source: str | None, hub_path: str, *, split: str | None, subset: str | None = None
) -> Iterator[Row]:
    """The rows of one split: of the hub's `hub_path` (None), of a copy on the hub, of a folder, or of a file.

    A file (or a pattern) is taken whole. In a folder the files count whose names begin with `split`; a lone file of
    data needs no such name. Raises `DataError` as `read_rows` does, and for a split that is there in two kinds of file.
    """
    if source is None or not (os.path.exists(source) or glob.has_magic(source)):
        return read_rows(source or hub_path, split=split, subset=subset)
    if not os.path.isdir(source):
        return read_rows(source)
    if any(os.path.exists(os.path.join(source, mark)) for mark in _SAVED):
        return read_rows(source, split=split)
    files = data_files(source)
    own = [file for file in files if split is not None and _begins_with(file, split)]
    if own:
        return _rows_of(_in_one_folder(own), source)
    is_lone = len(files) == 1 and (split is None or not _SHARD.search(os.path.basename(files[0])))
    return read_rows(files[0]) if is_lone else read_rows(source, split=split, subset=subset)


def data_files(folder: str) -> list[str]:
    """Every data file in and below a folder, the nearest first, then by name; hidden folders are passed over."""
    found: list[str] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
        found += [
            os.path.join(parent, name)
            for name in sorted(names)
            if file_suffix(name) in KINDS and name not in _NOT_DATA and not name.startswith((".", "_"))
        ]
    return sorted(found, key=lambda file: (file.count(os.sep), file))


def _begins_with(file: str, split: str) -> bool:
    name = os.path.basename(file).lower()
    return name.startswith(split.lower()) and not name[len(split) :][:1].isalnum()


def _in_one_folder(files: Sequence[str]) -> list[str]:
    """Those in the folder of the first: the same split deeper down would be the same rows again."""
    return [file for file in files if os.path.dirname(file) == os.path.dirname(files[0])]


def _rows_of(files: Sequence[str], source: str) -> Iterator[Row]:
    suffixes = {"".join(Path(file).suffixes[-2:]) if file.endswith(".gz") else file_suffix(file) for file in files}
    if len(suffixes) > 1:
        raise DataError(
            "the split is there in several kinds of file",
            where=source,
            got=", ".join(map(os.path.basename, files)),
            need="one kind of file: the same rows may be there twice",
            fix="give the file itself",
        )
    return chain.from_iterable(read_rows(file) for file in files)


# --- fields ----------------------------------------------------------------------------------------------------------


def field_of(row: Row, name: str, need: str) -> Any:
    """The value of a field that must be there; `need` says what it should be."""
    value = row.values.get(name)
    if value is None:
        near = nearest_name(name, map(str, row.values))
        raise DataError(
            f"the row has no {name}",
            where=row.where,
            field=name,
            got="null" if name in row.values else f"keys {sorted(map(str, row.values))}",
            need=need,
            fix=f"is it {near}?" if near and near != name else "is this the data of another suite?",
        )
    return value


def text_field(row: Row, name: str) -> str:
    """A string, which may be empty."""
    value = field_of(row, name, "a string")
    if not isinstance(value, str):
        raise DataError(f"{name} is not text", where=row.where, field=name, got=value, need="a string")
    return value


def id_field(row: Row, name: str) -> str:
    """A string or a whole number, as a string."""
    value = field_of(row, name, "a string or a whole number")
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise DataError(f"{name} is no id", where=row.where, field=name, got=value, need="a string or a whole number")
    return str(value)


def name_field(row: Row, name: str, known: Sequence[str], what: str) -> str:
    """One of `known`, whatever its case; `what` is the noun for the error."""
    value = text_field(row, name)
    by_lower = {each.lower(): each for each in known}
    if value.lower() not in by_lower:
        near = nearest_name(value, known)
        raise DataError(
            f"there is no such {what}",
            where=row.where,
            field=name,
            got=value,
            need=f"one of {', '.join(known)}",
            fix=f"did you mean {near}?" if near else "evaluate data of your own as a preference file",
        )
    return by_lower[value.lower()]


def texts_field(row: Row, name: str, *, count: int | None = None) -> list[str]:
    """At least one string, or exactly `count`."""
    need = "a list of strings" if count is None else f"a list of {count} strings"
    value = field_of(row, name, need)
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if not is_list or not value or (count is not None and len(value) != count):
        raise DataError(f"{name} is not {need}", where=row.where, field=name, got=value, need=need)
    for i, text in enumerate(value):
        if not isinstance(text, str):
            raise DataError(f"{name} is not {need}", where=row.where, field=f"{name}[{i}]", got=text, need="a string")
    return list(value)


def prompt_field(row: Row, name: str) -> tuple[Message, ...]:
    """Text as one user message, or a checked list of messages."""
    value = field_of(row, name, "a string or a list of messages")
    return ({"role": "user", "content": value},) if isinstance(value, str) else check_messages(value, name, row.where)


def assistant(text: str) -> tuple[Message, ...]:
    """A completion of one message."""
    return ({"role": "assistant", "content": text},)


def with_distinct_ids(examples: Sequence[EvalExample]) -> list[EvalExample]:
    """The same examples; the second of an id becomes `id#2`, and so on. The published id is in `suite_data`."""
    taken, seen = {example.id for example in examples}, Counter[str]()
    distinct = []
    for example in examples:
        name, first = example.id, not seen[example.id]
        seen[example.id] += 1
        number = seen[example.id]
        while not first and (name := f"{example.id}#{number}") in taken:
            number += 1
        taken.add(name)
        distinct.append(example if first else replace(example, id=name))
    return distinct
