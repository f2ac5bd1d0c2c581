"""The samples of a file: several completions of each prompt, and their numbers in the rows.

    samples = list(sampled_rows(read_rows("samples.jsonl")))
    scores_of(samples, "gold_scores")           # [(0.1, None, 0.7), ...]

Scores are a number for each completion of each row, None where there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treeward.config.data import DatasetConfig
from treeward.data.columns import (
    CONVERSATION_COLUMNS,
    EVERY_CONVERSATION,
    PROMPT_COLUMNS,
    named_columns,
)
from treeward.data.conversation import parse_json_list
from treeward.data.formats import conversations_of, is_single
from treeward.data.preference import Completion, Preference, split_common_prefix
from treeward.data.sources import Row
from treeward.errors import DataError
from treeward.evaluation.report.intervals import is_number

# Columns that make the conversations. Any other may hold a number for each completion.
_CONVERSATION = (
    "responses",
    "completions",
    "messages",
    "chosen",
    "rejected",
    *PROMPT_COLUMNS,
    *CONVERSATION_COLUMNS,
    *EVERY_CONVERSATION,
)


@dataclass(frozen=True, slots=True)
class Samples:
    """A row of the file. `example`: its completions, all of one rank. `fields`: the numbers by
    name, one for each completion, None where it has none."""

    example: Preference
    fields: Mapping[str, tuple[float | None, ...]]


def sampled_rows(rows: Iterable[Row], config: DatasetConfig | None = None) -> Iterator[Samples]:
    """Rows of several completions, as `conversations_of` reads them. `config`: names columns, as
    `prompt_key`. Raises `DataError` for any other row."""
    for number, row in enumerate(rows, 1):
        values = row.values
        if config is not None:
            values = named_columns(values, config, row.where)
        # A table has None where a row lacks a column.
        keys = {key: value for key, value in values.items() if value is not None}
        if is_single(keys, row.where):
            raise DataError(
                "the row has one completion, and no list",
                where=row.where,
                got=sorted(keys),
                need="a prompt with completions or responses, or chosen and rejected; "
                "docs/data.md has the keys",
            )
        conversations = conversations_of(keys, row.where)
        context, ends = split_common_prefix([tuple(messages) for messages in conversations])
        # All have one rank: which is the better is what the two rewards are asked.
        completions = tuple(Completion(0, end) for end in ends)
        info = {}
        fields: dict[str, tuple[float | None, ...]] = {}
        for name, value in row.values.items():
            if name in _CONVERSATION:
                continue
            info[name] = value
            numbers = _numbers(value, name, row.where)
            if numbers is not None and len(numbers) == len(ends):
                fields[name] = numbers
        example = Preference(
            context,
            completions,
            id=str(number),
            info=info,
            where=row.where,
            template_kwargs=conversations[0].template_kwargs,
        )
        yield Samples(example, fields)


def _numbers(value: Any, name: str, where: str) -> tuple[float | None, ...] | None:
    """The numbers of a column that is a list of them; None for any other column."""
    try:
        values = parse_json_list(value, name, where)
    except DataError:  # text that begins with a bracket
        return None
    if not isinstance(values, list):
        return None
    numbers: list[float | None] = []
    for number in values:
        if not isinstance(number, int | float | None):
            return None
        # NaN, which JSON and pandas write for nothing, is no score.
        numbers.append(number if is_number(number) else None)
    return tuple(numbers)


def scores_of(samples: Iterable[Samples], name: str) -> list[Sequence[float | None]]:
    """The numbers of a field. Raises `DataError` for a row without one for each of its samples."""
    scores: list[Sequence[float | None]] = []
    for row in samples:
        if name not in row.fields:
            columns = row.example.info
            raise DataError(
                f"the row has no {name} with a number for each completion",
                where=row.example.where,
                field=name,
                got=columns.get(name, f"keys {sorted(map(str, columns))}"),
                need=f"a list of {len(row.example.completions)} numbers",
            )
        scores.append(row.fields[name])
    return scores
