"""The rows of a published suite: from the hub, a downloaded copy or a file, checked against a schema.

    class PairRow(BaseModel):
        prompt: Prompt
        chosen: str
        subset: Annotated[str, one_of("chat", "code")]

    for row in suite_rows(source, "allenai/reward-bench", split="filtered"):
        pair = read_as(PairRow, row)

A copy is what the hub's download gives (`data/filtered-00000-of-00001.parquet` beside a README), or what
`save_to_disk` wrote.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ValidationError

from treeward.data.preference import check_messages
from treeward.data.sources import KINDS, Row, file_suffix, read_rows
from treeward.errors import DataError
from treeward.evaluation.examples import EvalExample

Schema = TypeVar("Schema", bound=BaseModel)


def suite_rows(source: str | None, hub_path: str, *, split: str | None) -> Iterator[Row]:
    """The rows of one split of the hub's `hub_path` (None), of a copy of it, or of a file, which is taken whole.

    Raises `DataError` as `read_rows` does.
    """
    is_file = source is not None and (os.path.isfile(source) or file_suffix(source) in KINDS)
    return read_rows(source or hub_path, split=None if is_file else split)


def read_as(schema: type[Schema], row: Row) -> Schema:
    """The row's values as a schema; columns that it does not name are ignored.

    Raises `DataError` with place and field for a value that is missing, None or not of the field's type.
    """
    try:
        return schema.model_validate(row.values)
    except ValidationError as error:
        first = error.errors()[0]
    field = ".".join(map(str, first["loc"]))
    is_there = row.values.get(str(first["loc"][0])) is not None
    raise DataError(
        f"the row's {field} does not fit the suite",
        where=row.where,
        field=field,
        got=first["input"] if is_there else f"keys {sorted(map(str, row.values))}",
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
    return ({"role": "user", "content": value},) if isinstance(value, str) else check_messages(value, "prompt", None)


Prompt = Annotated[tuple[dict[str, Any], ...], BeforeValidator(_messages)]
"""A prompt: text, read as one user message, or a list of messages."""


def example(
    where: str, subset: str, id: str | int, prompt: Any, texts: Sequence[str], ranks: Sequence[int], **suite_data: Any
) -> EvalExample:
    """An example whose completions are one message each; `id`: the published one."""
    completions = tuple(({"role": "assistant", "content": text},) for text in texts)
    return EvalExample(f"{subset}/{id}", subset, prompt, completions, tuple(ranks), {"id": id, **suite_data}, where)
