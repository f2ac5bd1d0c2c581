"""Blocks: what a report is made of; each is a JSON object whose `kind` says how the page shows it.

    {"kind": "headline", "items": [{"label": "RewardBench", "value": 0.71, "low": 0.62, "high": 0.79, "count": 100,
                                    "format": "percent", "reference": 0.5, "note": "four sections"}]}
    {"kind": "text", "title": "Length", "markdown": "**Longer** replies win. See `lengths`."}   (opens a chapter)
    {"kind": "bars", "title": "Subsets", "reference": 0.5, "x_range": [0, 1],
     "series": [{"name": "A", "items": [{"label": "Chat", "value": 0.9, "low": 0.8, "high": 0.95, "count": 358}]}]}
    {"kind": "histogram", "title": "Margins", "edges": [-1, 0, 1], "mark": 0,
     "series": [{"name": "A", "counts": [3, 9]}]}
    {"kind": "reliability", "title": "Calibration", "series": [{"name": "A", "bins": [
        {"probability": 0.6, "frequency": 0.55, "low": 0.4, "high": 0.7, "count": 40}]}]}
    {"kind": "scatter", "title": "Length", "x_label": "characters", "y_label": "score", "series": [{"name": "A",
     "points": [{"x": 120, "y": 0.5, "text": "Yes.", "id": "7", "group": "chosen"}],
     "line": {"x": [0, 9], "y": [0, 1]}}]}   (an id that is one of the examples opens it)
    {"kind": "matrix", "title": "Styles", "rows": ["plain"], "columns": ["plain"], "values": [[0.8]],
     "format": "percent", "row_label": "chosen", "column_label": "rejected"}
    {"kind": "curves", "title": "Best of N", "series": [{"name": "gold", "x": [1, 2], "y": [0, 1], "low": [0, 0.9],
     "high": [0, 1.1]}]}
    {"kind": "table", "title": "Shifts", "columns": [{"key": "name", "label": "Change", "format": "text"}],
     "rows": [{"name": "flattery"}]}
    {"kind": "samples", "title": "Answers over time", "items": [{"prompt": [{"role": "user", "content": "Hi"}],
     "rows": [{"name": "a run", "colour": 0, "answers": [{"label": "step 0", "text": "Hello.", "flags": ["cut"],
     "numbers": [{"label": "reward", "value": 0.3, "format": "signed"}]}]}]}]}
    {"kind": "examples", "title": "Mistakes", "source": "rewardbench", "filter": {"outcome": "wrong"}}

Every kind takes a `title` and a `note` (a sentence below the title); with a title it may be `folded`, so that only that
is seen until a reader opens it, and the contents do not list it. A number that is None or not finite shows as a
dash. Formats: percent (of a fraction), points (a difference of fractions, in percentage points), number, signed,
integer, text. A table's cell may be a number's object {"value", "low", "high", "count"}, with a "format" of its own
where it is not the column's; a column may have a key that it `explains`, below whose cells it stands on a narrow
screen; of its rows the first `most` are shown until all are asked for. An item of bars may have
its own `reference`, where chance differs. Curves may name the places of their x axis, `x_ticks` [{"x", "label"}], and
each point, `labels` beside x and y; mark some, `lines` [{"x", "label", "colour"}]; and be `spoken`, in sentences for
those who do not see them, instead of number by number. A series of curves may have the `colour` and the `dash` of
another, by their numbers, and `dots` or none. The rows of `examples` are those of
`treeward.evaluation.examples.to_row`, with a `model` where there is more than one.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from treeward.config.base import nearest_name
from treeward.errors import DataError

__all__ = ["BLOCK_KINDS", "FORMATS", "check_blocks", "format_number", "plain"]

ABSENT = "–"
FORMATS = ("percent", "points", "number", "signed", "integer", "text")

# Of each kind the fields that it needs and those that it may have, besides those of every kind.
_EVERY = ("kind", "title", "note", "folded")
BLOCK_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "headline": (("items",), ()),
    "text": (("markdown",), ()),
    "bars": (("title", "series"), ("x_range", "x_label", "reference", "reference_label", "format")),
    "histogram": (("title", "edges", "series"), ("x_label", "y_label", "mark", "mark_label")),
    "reliability": (("title", "series"), ("x_label", "y_label")),
    "scatter": (("title", "series"), ("x_label", "y_label", "source")),
    "matrix": (("title", "rows", "columns", "values"), ("format", "row_label", "column_label", "range")),
    "curves": (("title", "series"), ("x_label", "y_label", "x_scale", "x_ticks", "format", "lines", "spoken")),
    "samples": (("title", "items"), ()),
    "table": (("title", "columns", "rows"), ("most",)),
    "examples": (("title", "source"), ("filter",)),
}
# Decimals of a number by its size: at least three digits that count.
_DECIMALS = ((1000, 0), (100, 1), (10, 2), (0.1, 3), (0.01, 4), (1e-4, 5), (0, 3))
_SERIES_FIELDS = {"bars": "items", "histogram": "counts", "reliability": "bins", "scatter": "points", "curves": "y"}


def check_blocks(blocks: Sequence[Mapping[str, Any]], sources: Sequence[str]) -> None:
    """Raise `DataError` for the first block that the page could not show, naming it as `blocks[3]`.

    `sources`: the names that blocks of kind `examples` may refer to.
    """
    for number, block in enumerate(blocks):
        where = f"blocks[{number}]"
        _check_fields(block, where)
        kind = block["kind"]
        if block.get("format") is not None:
            _one_of(block["format"], FORMATS, where, "format")
        if kind in _SERIES_FIELDS:
            for index, series in enumerate(block["series"]):
                _check_series(block, series, _SERIES_FIELDS[kind], where, f"series[{index}]")
        elif kind == "matrix":
            _length(block["values"], len(block["rows"]), where, "values")
            for index, row in enumerate(block["values"]):
                _length(row, len(block["columns"]), where, f"values[{index}]")
        elif kind == "table":
            for index, column in enumerate(block["columns"]):
                _one_of(column.get("format", "text"), FORMATS, where, f"columns[{index}].format")
            for index, row in enumerate(block["rows"]):
                for key, cell in row.items():
                    if isinstance(cell, Mapping) and "format" in cell:
                        _one_of(cell["format"], FORMATS, where, f"rows[{index}].{key}.format")
        elif kind == "samples":
            for index, item in enumerate(block["items"]):
                _check_sample(item, where, f"items[{index}]")
        elif kind == "headline":
            for index, item in enumerate(block["items"]):
                _one_of(item.get("format", "number"), FORMATS, where, f"items[{index}].format")
        elif kind == "examples":
            _one_of(block["source"], sources, where, "source")
        if block.get("folded") and not block.get("title"):
            raise DataError("a folded block has no title to open it by", where=where, field="title", need="a title")


def _check_fields(block: Mapping[str, Any], where: str) -> None:
    _one_of(block.get("kind"), tuple(BLOCK_KINDS), where, "kind")
    needed, optional = BLOCK_KINDS[block["kind"]]
    for name in needed:
        if block.get(name) is None:
            raise DataError(
                f"a block of kind {block['kind']} lacks {name}",
                where=where,
                field=name,
                need=f"the fields {', '.join(needed)}",
            )
    for name in block:
        _one_of(name, (*_EVERY, *needed, *optional), where, str(name))


def _check_series(block: Mapping[str, Any], series: Mapping[str, Any], field: str, where: str, path: str) -> None:
    for name in ("name", field):
        if series.get(name) is None:
            raise DataError(f"a series of {block['kind']} lacks {name}", where=where, field=f"{path}.{name}")
    if block["kind"] == "histogram":
        _length(series["counts"], len(block["edges"]) - 1, where, f"{path}.counts")
    for name in ("x", "low", "high", "labels") if block["kind"] == "curves" else ():
        if name == "x" or series.get(name) is not None:
            _length(series.get(name, ()), len(series["y"]), where, f"{path}.{name}")
    line = series.get("line") if block["kind"] == "scatter" else None
    if line is not None:
        _length(line["y"], len(line["x"]), where, f"{path}.line.y")


def _check_sample(item: Mapping[str, Any], where: str, path: str) -> None:
    for name in ("prompt", "rows"):
        if item.get(name) is None:
            raise DataError(f"an item of samples lacks {name}", where=where, field=f"{path}.{name}")
    for row, answers in enumerate(one["answers"] for one in item["rows"]):
        for column, answer in enumerate(answers):
            for number in answer.get("numbers", ()):
                field = f"{path}.rows[{row}].answers[{column}].numbers.format"
                _one_of(number.get("format", "number"), FORMATS, where, field)


def _one_of(value: Any, names: Sequence[str], where: str, field: str) -> None:
    if value in names:
        return
    near = nearest_name(str(value), names)
    raise DataError(
        "the report knows no such name",
        where=where,
        field=field,
        got=value,
        need=f"one of {', '.join(names)}",
        fix=f"did you mean {near}?" if near else None,
    )


def _length(values: Sequence[Any], need: int, where: str, field: str) -> None:
    if len(values) != need:
        raise DataError(
            "two lists that belong together differ in length",
            where=where,
            field=field,
            got=f"{len(values)} values",
            need=f"{need} values",
        )


def plain(value: Any, where: str = "report") -> Any:
    """`value` as JSON holds it: mappings, lists, text, numbers; a number that is not finite becomes None.

    Numbers and arrays of numpy and torch become Python's. Raises `DataError` for anything else.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "tolist"):
        return plain(value.tolist(), where)
    raise DataError(
        "this cannot be written as JSON", where=where, got=repr(value), need="numbers, text, lists, objects"
    )


def format_number(value: float | None, format: str = "number") -> str:
    """`value` as the page writes it (`formatNumber` of elements.js); a dash for None and what is not finite."""
    if value is None or not math.isfinite(value):
        return ABSENT
    size = abs(value)
    if format == "percent":
        text = f"{size * 100:.1f}%"
    elif format == "points":
        text = f"{size * 100:.1f} points"
    elif format == "integer" or (size == round(size) and size >= 100):
        text = f"{math.floor(size + 0.5):,}"
    elif size != 0 and (size < 1e-4 or size >= 1e6):
        mantissa, exponent = f"{size:.2e}".split("e")
        text = f"{mantissa}e{int(exponent):+d}"
    else:
        text = f"{size:,.{next(decimals for least, decimals in _DECIMALS if size >= least)}f}"
    text = text.replace("e-", "e\N{MINUS SIGN}")
    negative = value < 0 and any(digit in "123456789" for digit in text)
    return ("\N{MINUS SIGN}" if negative else "+" if format in ("signed", "points") and value > 0 else "") + text
