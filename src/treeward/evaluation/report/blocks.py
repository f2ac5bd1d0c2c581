"""Blocks: what a report is made of. A report yields them in order, and `report.build` makes a page of them.

    text_block("**Longer** completions win. See `lengths`.", title="Length")        # a title opens a chapter
    headline_block([bar_item("RewardBench", metric, format="percent", reference=0.5)])
    {"kind": "samples", "title": "Completions over time", "items": [{"prompt": [{"role": "user", "content": "Hi"}],
     "rows": [{"name": "a run", "colour": 0, "completions": [{"label": "step 0", "text": "Hello.", "flags": ["cut"],
     "numbers": [{"label": "reward", "value": 0.3, "format": "signed"}]}]}]}]}
    {"kind": "examples", "title": "Mistakes", "source": "rewardbench"}      # rows of `results.to_row`, with a `model`

Each is a JSON object whose `kind` says how the page shows it, with a `title` and a `note` (a sentence below the title).
A block with a title may be `folded`: readers open it, and the contents do not list it. Formats: percent (of a
fraction), points (a difference of fractions, in percentage points), number, signed, integer, text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from treeward.evaluation.results import Block, Metric
from treeward.formatting import format_number


def text_block(markdown: str, title: str | None = None) -> Block:
    """Sentences and lists; with a title they open a chapter."""
    block: Block = {"kind": "text", "markdown": markdown}
    return block if title is None else block | {"title": title}


def headline_block(items: Sequence[Block]) -> Block:
    """Cards of the numbers that a reader needs first."""
    return {"kind": "headline", "items": list(items)}


def bar_item(label: str, metric: Metric, note: str | None = None, **more: Any) -> Block:
    """A metric as an item of a `bars` or `headline` block; `more`: its `format` and `reference`, as chance."""
    item = {"label": label, "value": metric.value, "low": metric.low, "high": metric.high, "count": metric.count}
    return item | ({} if note is None else {"note": note}) | more


def bars_block(title: str, series: Mapping[str, Sequence[Block]], note: str | None = None, **more: Any) -> Block:
    """Items by model as bars from 0 to 1; `more`: fields of the block in place of these."""
    axis: Block = {"x_range": [0, 1], "reference": 0.5, "format": "percent"}
    named = [{"name": name, "items": list(items)} for name, items in series.items()]
    return {"kind": "bars", "title": title, "note": note, "series": named} | axis | more


def curves_block(title: str, series: Sequence[Block], note: str | None = None, **more: Any) -> Block:
    """Lines with bands.

    A series may have `labels` of its points, the `colour` and the `dash` of another, by number, and `dots` or none.
    `more`: `x_label`, `y_label`, `format`, `is_square` (shares against shares), `x_ticks` [{"x", "label"}] (names of
    places on the x axis) and `lines` [{"x", "label", "colour"}] (marked places).
    """
    return {"kind": "curves", "title": title, "note": note, "series": list(series)} | more


def table_block(
    title: str, columns: Mapping[str, tuple[str, str]], rows: Sequence[Block], note: str | None = None
) -> Block:
    """Rows as a table; `columns`: label and format by key.

    A cell may be an object {"value", "low", "high", "count"}, with its own "format" where it is not the column's. A
    column may name the column that it `explains`: narrow screens show it below that one's cells.
    """
    labelled = [{"key": key, "label": label, "format": format} for key, (label, format) in columns.items()]
    return {"kind": "table", "title": title, "note": note, "columns": labelled, "rows": list(rows)}


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


def size_of(items: Iterable[Mapping[str, Any]]) -> float:
    """The largest of the numbers of these items and of their intervals, whatever its sign."""
    size = 0.0
    for item in items:
        for name in ("value", "low", "high"):
            number = item.get(name)
            if is_number(number):
                size = max(size, abs(number))
    return size


def format_interval(
    item: Mapping[str, Any], format: str, *, with_count: bool = True, size: float | None = None
) -> tuple[str, str]:
    """A number of an item, and its interval and count in brackets: "71.0%" and "(62.1% to 79.0%, n = 100)".

    The second text is empty where neither is known. `size`: that of all items beside this one (`size_of`), so that they
    have one number of decimals; None: of this one.
    """
    size = size_of([item]) if size is None else size
    numbers = {name: item[name] for name in ("value", "low", "high") if is_number(item.get(name))}
    value, low, high = (format_number(numbers.get(name), format, size) for name in ("value", "low", "high"))
    parts = [f"{low} to {high}".replace(" points", "")] if {"low", "high"} & numbers.keys() else []
    if with_count and is_number(item.get("count")):
        parts.append(f"n = {format_number(item['count'], 'integer')}")
    return value, f"({', '.join(parts)})" if parts else ""
