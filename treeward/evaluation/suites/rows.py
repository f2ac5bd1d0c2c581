"""The rows of a published suite: from the hub, a downloaded copy or a file, checked against a schema.

    class PairRow(BaseModel):
        prompt: Prompt
        chosen: str
        subset: Annotated[str, OneOf(("chat", "code"), "subset of the suite")]

    for row in repository_rows(source, "allenai/reward-bench", split="filtered"):
        pair = read_as(PairRow, row)

A copy is what the hub's download gives (`data/filtered-00000-of-00001.parquet` beside a README), or any folder that
holds a file whose name begins with the split.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ValidationError
from pydantic_core import CoreSchema, core_schema

from treeward.config.base import nearest_name
from treeward.data.preference import Message, check_messages
from treeward.data.sources import KINDS, Row, file_suffix, read_file, read_rows
from treeward.errors import DataError
from treeward.evaluation.examples import EvalExample

__all__ = ["OneOf", "Prompt", "assistant", "data_files", "read_as", "repository_rows", "with_distinct_ids"]

Schema = TypeVar("Schema", bound=BaseModel)

# Files that `datasets` and the hub keep beside the data under a data suffix.
_NOT_DATA = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
_SAVED = ("dataset_dict.json", "state.json")
# `raw-00000-of-00002.parquet`: such a name says its split, so a lone one of another split is not the one asked for.
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.")


def repository_rows(
    source: str | None, hub_path: str, *, split: str | None, subset: str | None = None
) -> Iterator[Row]:
    """The rows of one split: of the hub's `hub_path` (None), of a copy on the hub, of a folder, or of a file.

    A file (or a pattern) is taken whole. In a folder the files count whose names begin with `split`; a lone file of
    data needs no such name. Raises `DataError` as `read_rows` does.
    """
    if source is None or not (os.path.exists(source) or glob.has_magic(source)):
        return read_rows(source or hub_path, split=split, subset=subset)
    if not os.path.isdir(source):
        return read_rows(source)
    if any(os.path.exists(os.path.join(source, mark)) for mark in _SAVED):
        return read_rows(source, split=split)
    files = data_files(source)
    own = [file for file in files if split is not None and re.match(rf"{split}(?![^\W_])", os.path.basename(file))]
    if own:  # the same split deeper down would be the same rows again
        nearest = [file for file in own if os.path.dirname(file) == os.path.dirname(own[0])]
        return chain.from_iterable(map(read_file, nearest))
    is_lone = len(files) == 1 and (split is None or not _SHARD.search(os.path.basename(files[0])))
    return read_rows(files[0]) if is_lone else read_rows(source, split=split, subset=subset)


def data_files(folder: str) -> list[str]:
    """Every data file in and below a folder, the nearest first, then by name; hidden folders are passed over."""
    found: list[str] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        found += [
            os.path.join(parent, name)
            for name in names
            if file_suffix(name) in KINDS and name not in _NOT_DATA and not name.startswith((".", "_"))
        ]
    return sorted(found, key=lambda file: (file.count(os.sep), file))


# --- schemas ---------------------------------------------------------------------------------------------------------


def read_as(schema: type[Schema], row: Row) -> Schema:
    """The row's values as a schema; columns that it does not name are ignored.

    Raises `DataError` with place and field for a value that is missing, None or not of the field's type.
    """
    try:
        return schema.model_validate(row.values)
    except ValidationError as error:
        first = error.errors()[0]
    name, *rest = (str(part) for part in first["loc"] if not str(part).startswith(("function-", "list[")))
    field = name + "".join(f"[{part}]" if part.isdecimal() else "" for part in rest[:1])
    if row.values.get(name) is None:
        near = nearest_name(name, map(str, row.values))
        raise DataError(
            f"the row has no {name}",
            where=row.where,
            field=name,
            got="null" if name in row.values else f"keys {sorted(map(str, row.values))}",
            fix=f"is it {near}?" if near and near != name else "is this the data of another suite?",
        )
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, DataError):  # of a validator here
        fields = {"field": cause.field or field, "got": cause.got, "need": cause.need, "fix": cause.fix}
        raise DataError(cause.summary, where=row.where, **{key: value for key, value in fields.items() if value})
    raise DataError(f"{field} does not fit the suite's schema", where=row.where, field=field, got=first["input"],
                    need=first["msg"].removeprefix("Input should be ").removeprefix("List should have "))  # fmt: skip


@dataclass(frozen=True)
class OneOf:
    """One of `known`, whatever its case; `what` is the noun for the error."""

    known: Sequence[str]
    what: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._canonical, handler(source))

    def _canonical(self, value: str) -> str:
        found = next((name for name in self.known if name.lower() == value.lower()), None)
        if found is None:
            near = nearest_name(value, self.known)
            raise DataError(
                f"there is no such {self.what}",
                got=value,
                need=f"one of {', '.join(self.known)}",
                fix=f"did you mean {near}?" if near else "evaluate data of your own as a preference file",
            )
        return found


def _messages(value: Any) -> Any:
    """Text as one user message, or a checked list of messages."""
    if value is None:
        return value
    return ({"role": "user", "content": value},) if isinstance(value, str) else check_messages(value, "prompt", None)


Prompt = Annotated[tuple[dict[str, Any], ...], BeforeValidator(_messages)]
"""A prompt: text, or a list of messages; read as messages."""


def assistant(text: str) -> tuple[Message, ...]:
    """A completion of one message."""
    return ({"role": "assistant", "content": text},)


def with_distinct_ids(examples: Sequence[EvalExample]) -> list[EvalExample]:
    """The same examples; the second of an id becomes `id#2`, and so on. The published id is in `suite_data`."""
    given, taken = {example.id for example in examples}, set[str]()
    distinct = []
    for example in examples:
        name = example.id
        if name in taken:
            name = next(new for n in count(2) if (new := f"{example.id}#{n}") not in taken | given)
        taken.add(name)
        distinct.append(replace(example, id=name))
    return distinct
