"""Blocks: what a report is made of. Each is a JSON object whose `kind` says how the page shows it.

    {"kind": "headline", "items": [{"label": "RewardBench", "value": 0.71, "low": 0.62, "high": 0.79, "count": 100,
                                    "format": "percent", "reference": 0.5, "note": "four sections"}]}
    {"kind": "text", "title": "Length", "markdown": "**Longer** completions win. See `lengths`."}   (opens a chapter)
    {"kind": "bars", "title": "Subsets", "reference": 0.5, "x_range": [0, 1],
     "series": [{"name": "A", "items": [{"label": "Chat", "value": 0.9, "low": 0.8, "high": 0.95, "count": 358}]}]}
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
first page. Curves may have a `y_scale` (symlog), be shares against shares (`is_square`), name places of the x axis,
`x_ticks` [{"x", "label"}], and points, `labels` beside x and y, and mark places, `lines` [{"x", "label", "colour"}]. A
series of curves may have the `colour` and the `dash` of another, by number, and `dots` or none. The rows of `examples`
are those of `treeward.evaluation.examples.to_row`, with a `model` where there is more than one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from treeward.evaluation.results import Block, Metric

ABSENT = "–"

# The number of decimals by size: at least three significant digits.
_DECIMALS = ((1000, 0), (100, 1), (10, 2), (0.1, 3), (0.01, 4), (1e-4, 5), (0, 3))


def bar_item(label: str, metric: Metric, note: str | None = None) -> Block:
    """A metric as an item of a `bars` or `headline` block."""
    item = {"label": label, "value": metric.value, "low": metric.low, "high": metric.high, "count": metric.count}
    return item if note is None else item | {"note": note}


def bars_block(title: str, model: str, items: Sequence[Block], note: str | None = None, **more: Any) -> Block:
    """Items of one model as a `bars` block from 0 to 1; `more`: fields of the block in place of these."""
    series = [{"name": model, "items": list(items)}]
    axis: Block = {"x_range": [0, 1], "reference": 0.5, "format": "percent"}
    return {"kind": "bars", "title": title, "note": note, "series": series} | axis | more


def table_block(
    title: str, columns: Mapping[str, tuple[str, str]], rows: Sequence[Block], note: str | None = None, **more: Any
) -> Block:
    """Rows as a `table` block; `columns`: label and format by key. `more`: further fields of the block."""
    shown = [{"key": key, "label": label, "format": format} for key, (label, format) in columns.items()]
    return {"kind": "table", "title": title, "note": note, "columns": shown, "rows": list(rows)} | more


def plain(value: Any, of_text: Callable[[str], str] = str) -> Any:
    """`value` as JSON holds it: numpy's numbers and arrays become Python's, and what is not finite becomes None.

    `of_text`: applied to every text.
    """
    if isinstance(value, Mapping):
        return {of_text(str(key)): plain(item, of_text) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, of_text) for item in value]
    if isinstance(value, str):
        return of_text(value)
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
