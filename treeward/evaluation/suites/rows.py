"""The rows of a published suite: from the hub, a downloaded copy or a file, checked against a schema.

    class PairRow(BaseModel):
        prompt: Prompt
        chosen: str
        subset: Annotated[str, one_of("chat", "code")]

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
from dataclasses import replace
from itertools import chain, count
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ValidationError

from treeward.data.preference import check_messages
from treeward.data.sources import KINDS, Row, file_suffix, read_file, read_rows
from treeward.errors import DataError
from treeward.evaluation.examples import EvalExample

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
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, DataError):  # of `check_messages`
        raise DataError(cause.summary, where=row.where, field=cause.field, got=cause.got, need=cause.need)
    field = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("function-", "list[")))
    raise DataError(
        f"the row's {field} does not fit the suite",
        where=row.where,
        field=field,
        got=first["input"]
        if row.values.get(field.split(".")[0]) is not None
        else f"keys {sorted(map(str, row.values))}",
        need=first["msg"],
        fix="is this the data of another suite?",
    )


def one_of(*known: str) -> AfterValidator:
    """A text that is one of these."""

    def check(value: str) -> str:
        if value not in known:
            raise ValueError(f"one of {', '.join(known)}")
        return value

    return AfterValidator(check)


def _messages(value: Any) -> Any:
    """Text as one user message, or a checked list of messages."""
    if value is None:
        return value
    return ({"role": "user", "content": value},) if isinstance(value, str) else check_messages(value, "prompt", None)


Prompt = Annotated[tuple[dict[str, Any], ...], BeforeValidator(_messages)]
"""A prompt: text, or a list of messages; read as messages."""


def example(
    where: str, name: str, subset: str, prompt: Any, texts: Sequence[str], ranks: Sequence[int], **suite_data: Any
) -> EvalExample:
    """An example whose completions are one message each."""
    completions = tuple(({"role": "assistant", "content": text},) for text in texts)
    return EvalExample(name, subset, prompt, completions, tuple(ranks), suite_data, where)


def with_distinct_ids(examples: Sequence[EvalExample]) -> list[EvalExample]:
    """The same examples; the second of an id becomes `id#2`, and so on. The published id is in `suite_data`."""
    given, taken = {one.id for one in examples}, set[str]()
    distinct = []
    for one in examples:
        name = one.id
        if name in taken:
            name = next(new for n in count(2) if (new := f"{one.id}#{n}") not in taken | given)
        taken.add(name)
        distinct.append(replace(one, id=name))
    return distinct
