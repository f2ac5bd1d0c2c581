"""Blocks: what a report is made of; each is a JSON object whose `kind` says how the page shows it.

    {"kind": "headline", "items": [{"label": "RewardBench", "value": 0.71, "low": 0.62, "high": 0.79, "count": 100,
                                    "format": "percent", "reference": 0.5, "note": "four sections"}]}
    {"kind": "text", "title": "Length", "markdown": "**Longer** completions win. See `lengths`."}   (opens a chapter)
    {"kind": "bars", "title": "Subsets", "reference": 0.5, "x_range": [0, 1],
     "series": [{"name": "A", "items": [{"label": "Chat", "value": 0.9, "low": 0.8, "high": 0.95, "count": 358}]}]}
    {"kind": "histogram", "title": "Margins", "edges": [-1, 0, 1], "mark": 0,
     "series": [{"name": "A", "counts": [3, 9]}]}
    {"kind": "reliability", "title": "Calibration", "series": [{"name": "A", "bins": [
        {"probability": 0.6, "frequency": 0.55, "low": 0.4, "high": 0.7, "count": 40}]}]}
    {"kind": "scatter", "title": "Length", "x_label": "characters", "y_label": "score", "series": [{"name": "A",
     "points": [{"x": 120, "y": 0.5, "text": "Yes.", "id": "7", "group": "chosen"}],
     "line": {"x": [0, 9], "y": [0, 1]}}]}   (a click on a point opens the example of that id)
    {"kind": "matrix", "title": "Styles", "rows": ["plain"], "columns": ["plain"], "values": [[0.8]],
     "format": "percent", "row_label": "chosen", "column_label": "rejected"}
    {"kind": "curves", "title": "Best of N", "series": [{"name": "gold", "x": [1, 2], "y": [0, 1], "low": [0, 0.9],
     "high": [0, 1.1]}]}
    {"kind": "table", "title": "Shifts", "columns": [{"key": "name", "label": "Change", "format": "text"}],
     "rows": [{"name": "flattery"}]}
    {"kind": "samples", "title": "Completions over time", "items": [{"prompt": [{"role": "user", "content": "Hi"}],
     "rows": [{"name": "a run", "colour": 0, "completions": [{"label": "step 0", "text": "Hello.", "flags": ["cut"],
     "numbers": [{"label": "reward", "value": 0.3, "format": "signed"}]}]}]}]}
    {"kind": "examples", "title": "Mistakes", "source": "rewardbench"}

Every kind takes a `title` and a `note` (a sentence below the title). A block with a title may be `folded`: readers open
it, and the contents do not list it. A number that is None or not finite shows as a dash. Formats: percent (of a
fraction), points (a difference of fractions, in percentage points), number, signed, integer, text. A table's cell may
be an object {"value", "low", "high", "count"}, with its own "format" where it is not the column's. A column may name
the column that it `explains`: narrow screens show it below that one's cells. `most` is the number of rows on a table's
first page. An item of bars may have its own `reference`, where chance differs. Curves may name places of the x axis,
`x_ticks` [{"x", "label"}], and points, `labels` beside x and y; mark places, `lines` [{"x", "label", "colour"}]; and be
`spoken`, a description for screen readers in place of all numbers. A series of curves may have the `colour` and the
`dash` of another, by number, and `dots` or none. The rows of `examples` are those of
`treeward.evaluation.examples.to_row`, with a `model` where there is more than one.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from treeward.config.base import nearest_name
from treeward.errors import DataError

__all__ = ["BLOCK_KINDS", "FORMATS", "check_blocks", "format_interval", "format_number", "is_number", "plain"]

ABSENT = "–"
FORMATS = ("percent", "points", "number", "signed", "integer", "text")

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
    "examples": (("title", "source"), ()),
}
"""The fields that each kind needs and those that it may have, beside `kind`, `title`, `note` and `folded`."""

_EVERY = ("kind", "title", "note", "folded")
# The number of decimals by size: at least three significant digits.
_DECIMALS = ((1000, 0), (100, 1), (10, 2), (0.1, 3), (0.01, 4), (1e-4, 5), (0, 3))


def check_blocks(blocks: Sequence[Mapping[str, Any]], sources: Sequence[str]) -> None:
    """Raise `DataError` for the first block that the page could not show, naming it as `blocks[3]`.

    `sources`: the names that blocks of kind `examples` may refer to.
    """
    for number, block in enumerate(blocks):
        where = f"blocks[{number}]"
        _one_of(block.get("kind"), tuple(BLOCK_KINDS), where, "kind")
        needed, optional = BLOCK_KINDS[block["kind"]]
        for name in (*needed, *(["title"] if block.get("folded") else [])):
            if block.get(name) is None:
                summary = f"a block of kind {block['kind']} lacks {name}"
                raise DataError(summary, where=where, field=name, need=f"the fields {', '.join(needed)}")
        for name in block:
            _one_of(name, (*_EVERY, *needed, *optional), where, str(name))
        for path, form in _formats(block, ""):
            _one_of(form, FORMATS, where, path)
        if block["kind"] == "examples":
            _one_of(block["source"], sources, where, "source")


def _formats(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every `format` of a block, with the place where it is."""
    if isinstance(value, Mapping):
        for key, inside in value.items():
            if key == "format" and inside is not None:
                yield f"{path}format", inside
            else:
                yield from _formats(inside, f"{path}{key}.")
    elif isinstance(value, list | tuple):
        for index, inside in enumerate(value):
            yield from _formats(inside, f"{path[:-1]}[{index}].")


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


def is_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def format_number(value: float | None, format: str = "number", size: float | None = None) -> str:
    """`value` as the page writes it; a dash for None and for a number that is not finite.

    `size`: the largest of the numbers beside it, from which the number of decimals follows; None: its own.
    """
    if value is None or not math.isfinite(value):
        return ABSENT
    own = abs(value)
    size = own if size is None else size
    if format == "percent":
        text = f"{own * 100:.1f}%"
    elif format == "points":
        text = f"{own * 100:.1f} points"
    elif format == "integer" or (own == round(own) and own >= 100):
        text = f"{math.floor(own + 0.5):,}"
    elif own != 0 and (own < 1e-4 or own >= 1e6):
        mantissa, exponent = f"{own:.2e}".split("e")
        text = f"{mantissa}e{int(exponent):+d}"
    else:
        text = f"{own:,.{next(decimals for least, decimals in _DECIMALS if size >= least)}f}"
    text = text.replace("e-", "e\N{MINUS SIGN}")
    negative = value < 0 and any(digit in "123456789" for digit in text)
    return ("\N{MINUS SIGN}" if negative else "+" if format in ("signed", "points") and value > 0 else "") + text


def format_interval(item: Mapping[str, Any], format: str, *, with_count: bool = True) -> tuple[str, str]:
    """A number of an item, and its interval and count in brackets: "71.0%" and "(62.1% to 79.0%, n = 100)".

    The second text is empty where neither is known.
    """
    known = {name: item[name] for name in ("value", "low", "high") if is_number(item.get(name))}
    size = max((abs(value) for value in known.values()), default=0.0)
    value, low, high = (format_number(known.get(name), format, size) for name in ("value", "low", "high"))
    parts = [f"{low} to {high}".replace(" points", "")] if {"low", "high"} & known.keys() else []
    if with_count and is_number(item.get("count")):
        parts.append(f"n = {format_number(item['count'], 'integer')}")
    return value, f"({', '.join(parts)})" if parts else ""
