"""Tables of a report: how columns are laid out, and what a cell shows.

columns = [TableColumn("suite", "Suite"), TableColumn("value", "Value", "percent")]
columns = table_layout(columns, rows)
cell_text({"suite": "llmbar", "value": Metric("accuracy", 0.71)}, columns[1])  # ("71.0%", "")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from treeward.evaluation.report.intervals import interval_text, is_number
from treeward.evaluation.results import Metric

_MOST_SIDE_BY_SIDE = 3  # columns with intervals, or columns on a phone


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column: the rows' `key`, its heading and the format of its numbers, or "text".

    `explains`: the column whose cells this one explains; narrow screens show it below them.
    `with_count`: whether metrics show what they count. `size`: of all numbers of the table, where
    they share their number of decimals. `is_dense`: intervals stand below their values, as there
    are many columns. `is_wide`: on a narrow screen each row is a list, because its cells do not fit
    side by side.
    """

    key: str
    label: str
    format: str = "text"
    explains: str | None = None
    with_count: bool = True
    size: float | None = None
    is_dense: bool = False
    is_wide: bool = False

    @property
    def is_text(self) -> bool:
        return self.format == "text"


def table_layout(
    columns: Sequence[TableColumn], rows: Sequence[Mapping[str, Any]]
) -> list[TableColumn]:
    """The columns with what their cells share: the format of a column of counts, and how wide the
    table is."""
    num_with_intervals = 0  # columns
    num_side_by_side = 0  # columns on a narrow screen
    formats = []
    for column in columns:
        is_whole = True
        has_intervals = False
        for row in rows:
            value = row.get(column.key)
            if isinstance(value, Metric) and is_number(value.low):
                has_intervals = True
            if value is not None and not (is_number(value) and value == round(value)):
                is_whole = False
        num_with_intervals += has_intervals
        num_side_by_side += column.explains is None
        format = column.format
        if format == "number" and is_whole:
            format = "integer"  # a column of counts has no decimals
        formats.append(format)
    # A value with its interval beside it takes the room of two columns.
    is_dense = num_with_intervals > _MOST_SIDE_BY_SIDE or len(columns) > 2 * _MOST_SIDE_BY_SIDE
    is_wide = num_side_by_side > _MOST_SIDE_BY_SIDE
    laid_out = []
    for column, format in zip(columns, formats, strict=True):
        laid_out.append(replace(column, format=format, is_dense=is_dense, is_wide=is_wide))
    return laid_out


def cell_text(row: Mapping[str, Any], column: TableColumn) -> tuple[str, str]:
    """A cell's value and, in brackets, its interval and count. A metric has its row's own "format"
    where there is one, because a table may list metrics of several units."""
    value = row.get(column.key)
    if isinstance(value, str):
        return value, ""
    format = column.format
    if column.is_text:
        format = "number"  # a number in a column of names
    elif isinstance(value, Metric):
        format = row.get("format", format)
    # A plain number is a metric without an interval.
    metric = value if isinstance(value, Metric) else Metric(column.key, value)
    return interval_text(metric, format, with_count=column.with_count, size=column.size)
