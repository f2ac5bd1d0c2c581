"""Results tables: what a run prints at its end, what `treeward score` sums up, and what the model
card shows.

    rows = [
        {"set": "plain", "pairs": 1200, "accuracy": 0.9125},
        {"set": "length-controlled", "pairs": 800, "accuracy": 0.84},
    ]
    print(results_table(rows, ["set", "pairs", Column("accuracy", format="percent")]))

    set                pairs  accuracy
    ─────────────────  ─────  ────────
    plain              1,200     91.2%
    length-controlled    800     84.0%

A row is a mapping; a key that it lacks, or a value of None, shows as a dash. The text has no
trailing newline and no control characters, whatever the cells hold. `markdown_table` gives the same
cells as a GitHub table.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len

from treeward.formatting import ABSENT, FORMATS, format_number

_GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """One column: the rows' `key`, its heading (`title`, else the key), and the format of its
    numbers: one of `formatting.FORMATS`, or a specification of Python.

    Without `format` whole numbers get thousands separators and the others four digits.
    """

    key: str
    title: str | None = None
    format: str | None = None


def results_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str | Column]) -> str:
    """An aligned plain-text table; columns of numbers align right, all others left."""
    titles, cells, right = _layout(rows, columns)
    # In columns of the terminal: a Chinese character takes two.
    widths = [max(map(cell_len, column)) for column in zip(titles, *cells, strict=True)]
    rule = ["─" * width for width in widths]
    lines = []
    for line in (titles, rule, *cells):
        padded = []
        for text, width, at_right in zip(line, widths, right, strict=True):
            fill = " " * (width - cell_len(text))
            padded.append(fill + text if at_right else text + fill)
        lines.append(_GAP.join(padded).rstrip())
    return "\n".join(lines)


def markdown_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str | Column]) -> str:
    """The same table in GitHub's Markdown, with bars inside cells escaped."""
    titles, cells, right = _layout(rows, columns)
    rule = []
    for at_right in right:
        rule.append("---:" if at_right else ":---")
    lines = []
    for line in (titles, rule, *cells):
        # A bar would begin another cell, and a backslash before it would undo the escape.
        escaped = [cell.replace("\\", "\\\\").replace("|", "\\|") for cell in line]
        lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines)


def _layout(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str | Column]
) -> tuple[list[str], list[list[str]], list[bool]]:
    """Headings, cells row by row, and for each column whether it aligns right."""
    if not columns:
        raise ValueError("a table needs at least one column")
    titles: list[str] = []
    right: list[bool] = []
    by_column: list[list[str]] = []
    for column in columns:
        if isinstance(column, str):
            column = Column(column)
        titles.append(_plain(column.key if column.title is None else column.title))
        values = [row.get(column.key) for row in rows]
        present = [value for value in values if value is not None]
        right.append(bool(present) and all(map(_is_number, present)))
        by_column.append([_cell(value, column.format) for value in values])
    by_row = [list(line) for line in zip(*by_column, strict=True)]
    return titles, by_row, right


def _cell(value: Any, specification: str | None) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not _is_number(value):
        return _plain(str(value))
    if specification in FORMATS:
        return format_number(float(value), specification)
    if isinstance(value, numbers.Integral):
        return format(int(value), specification or ",")
    return format(float(value), specification or ".4g")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _plain(text: str) -> str:
    """One line without control characters: a name out of a data file must not move the cursor or
    break the table."""
    characters = []
    for character in text:
        if character.isspace():
            characters.append(" ")
        elif character.isprintable():
            characters.append(character)
    return "".join(characters)
