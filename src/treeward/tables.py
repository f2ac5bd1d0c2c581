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
    widths = [max(map(cell_len, column)) for column in zip(titles, *cells, strict=True)]
    lines = [titles, ["─" * width for width in widths], *cells]
    padded = [map(_pad, line, widths, right) for line in lines]
    return "\n".join(_GAP.join(line).rstrip() for line in padded)


def markdown_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str | Column]) -> str:
    """The same table in GitHub's Markdown, with bars inside cells escaped."""
    titles, cells, right = _layout(rows, columns)
    rule = ["---:" if at_right else ":---" for at_right in right]
    escaped = [
        [cell.replace("\\", "\\\\").replace("|", "\\|") for cell in line]
        for line in (titles, *cells)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in (escaped[0], rule, *escaped[1:]))


def _layout(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str | Column]
) -> tuple[list[str], list[list[str]], list[bool]]:
    """Headings, cells row by row, and for each column whether it aligns right."""
    if not columns:
        raise ValueError("a table needs at least one column")
    resolved = [Column(column) if isinstance(column, str) else column for column in columns]
    titles = [_plain(column.key if column.title is None else column.title) for column in resolved]
    cells: list[list[str]] = []
    right: list[bool] = []
    for column in resolved:
        values = [row.get(column.key) for row in rows]
        present = [value for value in values if value is not None]
        right.append(bool(present) and all(map(_is_number, present)))
        cells.append([_cell(value, column.format) for value in values])
    return titles, [list(line) for line in zip(*cells, strict=True)], right


def _cell(value: Any, specification: str | None) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not _is_number(value):
        return _plain(str(value))
    if specification in FORMATS:
        return format_number(float(value), specification)
    is_whole = isinstance(value, numbers.Integral)
    return format(
        int(value) if is_whole else float(value), specification or ("," if is_whole else ".4g")
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _plain(text: str) -> str:
    """One line without control characters: a name out of a data file must not move the cursor or
    break the table."""
    return "".join(
        " " if char.isspace() else char for char in text if char.isspace() or char.isprintable()
    )


def _pad(text: str, width: int, at_right: bool) -> str:
    fill = " " * (width - cell_len(text))
    return fill + text if at_right else text + fill
