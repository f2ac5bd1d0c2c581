"""Figures of the report: a block of numbers becomes an Altair chart, a legend, a description and a table.

    draw({"kind": "bars", "title": "Subsets", "series": [...]}).chart["layer"]        # Vega-Lite

Colours are CSS variables of the page, so that one chart serves light, dark and print. A row of a chart's data says how
its mark looks (`colour`, `dash`) and has a text `tip`, which the page shows under the pointer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from treeward.evaluation.report.blocks import format_interval, is_number, size_of
from treeward.evaluation.results import Block
from treeward.formatting import format_number

_NUM_COLOURS = 6
_DASHES: tuple[list[int], ...] = ([], [7, 4], [2, 3], [9, 3, 2, 3], [4, 2], [1, 4])
_WIDE = "width > 480"
_FONT = '"Inter", "Segoe UI", -apple-system, "Roboto", "Noto Sans", "Liberation Sans", Arial, sans-serif'
_COLOUR, _DASH = alt.Color("colour:N", scale=None), alt.StrokeDash("dash:N", scale=None)
_STROKE = alt.Stroke("colour:N", scale=None)

THEME: dict[str, Any] = {
    "background": None,
    "aria": False,  # the figure has a description of its own
    "font": _FONT,
    "view": {"stroke": None},
    "text": {"font": _FONT, "fontSize": 12.5, "color": "var(--ink)"},
    "title": {"font": _FONT, "fontSize": 12.5, "fontWeight": "normal", "color": "var(--soft)", "anchor": "start"},
    "axis": {
        "labelFontSize": 12.5, "titleFontSize": 12.5, "titleFontWeight": "normal", "labelColor": "var(--soft)",
        "titleColor": "var(--soft)", "gridColor": "var(--rule)", "domainColor": "var(--edge)",
        "tickColor": "var(--edge)", "titlePadding": 10, "labelOverlap": "greedy", "labelSeparation": 6,
    },
    "axisX": {"grid": False, "tickCount": {"expr": "ceil(width / 90)"}},
    "axisY": {"domain": False, "ticks": False, "labelPadding": 8, "tickCount": 5},
}  # fmt: skip
"""The configuration of every chart."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart (None where there is nothing to draw) and what stands around it.

    `legend`: (colour, dash or None for a filled square, name). `columns` and `rows`: its numbers, as a block of kind
    `table` has them.
    """

    chart: dict[str, Any] | None
    legend: list[tuple[str, Sequence[int] | None, str]]
    description: str
    columns: Sequence[Block]
    rows: Sequence[Block]


def draw(block: Block) -> Figure:
    """The figure of a block of kind bars or curves."""
    is_bars = block["kind"] == "bars"
    chart, columns, rows = _bars(block) if is_bars else _curves(block)
    looks = [_look(of_model, order) for order, of_model in enumerate(block["series"])]
    legend = [(look["colour"], None if is_bars else look["dash"], look["series"]) for look in looks if len(looks) > 1]
    shown: list[Block] = [{"key": key, "label": label, "format": form} for key, (label, form) in columns.items()]
    axes = " against ".join(filter(None, (block.get("y_label"), block.get("x_label"))))
    if is_bars:
        for column in shown:
            column["size"] = size_of(rows)
    name = "Bar chart" if is_bars else "Curves"
    words = f"{name}: {block['title']}{f', {axes}' if axes else ''}. The table below has its numbers."
    is_empty = not any(is_number(row["value"]) for row in rows)
    return Figure(None if is_empty else chart, legend, words, shown, rows)


def _look(series: Block, order: int) -> dict[str, Any]:
    """What rows of a series have in common; `colour` and `dash` are numbers in the block."""
    colour, dash = series.get("colour", order), series.get("dash", order)
    look = {"colour": f"var(--s{colour % _NUM_COLOURS})", "dash": _DASHES[dash % len(_DASHES)]}
    return {"series": series["name"], "order": order, **look}


def _layer(rows: Iterable[Mapping[str, Any]]) -> alt.Chart:
    return alt.Chart(alt.InlineData(list(rows)))


def _axis(format: str | None, **options: Any) -> alt.Axis:
    return alt.Axis(format="~%", **options) if format == "percent" else alt.Axis(**options)


def _finish(layers: Sequence[alt.Chart], title: str | None, height: int) -> dict[str, Any]:
    chart = alt.layer(*layers).properties(width="container", height=height)
    if title:
        chart = chart.properties(title=alt.TitleParams(title, frame="bounds", offset=8))
    made: dict[str, Any] = chart.to_dict(validate=False)  # its JSON schema would take half the time of a report
    return {key: value for key, value in made.items() if key not in ("$schema", "config")}


# --- bars ------------------------------------------------------------------------------------------------------------


def _bars(block: Block) -> tuple[dict[str, Any], dict[str, tuple[str, str]], list[Block]]:
    """Horizontal bars in groups of one label, with whiskers, the numbers in words, and the line of chance."""
    low, high = block.get("x_range") or (0, 1)
    form, series = block.get("format") or "percent", block["series"]
    many = len(series) > 1
    labels = list(dict.fromkeys(item["label"] for one in series for item in one["items"]))
    size = size_of(item for one in series for item in one["items"])
    rows = []
    for order, one in enumerate(series):
        for item in one["items"]:
            rows.append(_bar(item, _look(one, order), form, (low, high), many, size))
    lanes = ["head", *(f"s{order}" for order in range(len(series)))]
    room = f"width - ({_WIDE} ? 205 : 52)" if many else "width"
    scale = alt.Scale(domain=[low, high], nice=False, rangeMax=alt.ExprRef(room))
    x = alt.X("value:Q", title=block.get("x_label"), axis=_axis(form, grid=True), scale=scale)
    place: dict[str, Any] = {
        "y": alt.Y("label:N", sort=None, axis=None,
                   scale=alt.Scale(domain=labels, paddingInner=0.12, paddingOuter=0.04)),
        "yOffset": alt.YOffset("lane:N", sort=None, scale=alt.Scale(domain=lanes)),
    }  # fmt: skip
    base = _layer(row for row in rows if row["value"] is not None).encode(**place)
    ends = _layer(row for row in rows if row["low"] is not None and row["high"] is not None).encode(**place)
    spans = ends.encode(x="low:Q", x2="high:Q")
    names = _layer({"label": label, "lane": "head"} for label in labels).encode(**place)
    said = _layer({**row, "lane": row["text_lane"]} for row in rows).encode(**place)
    in_words = alt.ExprRef(f"{_WIDE} ? datum.words : datum.{'shown' if many else 'brief'}")
    layers = [
        # Half transparent, with an edge: a whisker in the colour of text is seen on it, in light and dark.
        base.mark_bar(size=13, fillOpacity=0.4, strokeWidth=1).encode(
            x=x, x2=alt.X2Datum(min(max(0, low), high)), color=_COLOUR, stroke=_STROKE, tooltip="tip:N"
        ),
        spans.mark_rule(color="var(--ink)", strokeWidth=1.6),
        *(ends.mark_tick(color="var(--ink)", thickness=1.6, height=9).encode(x=f"{end}:Q") for end in ("low", "high")),
        names.mark_text(align="left", dy=3, fontSize=13.5, limit=alt.ExprRef("width * 0.55")).encode(
            x=alt.value(0), text="label:N"),
        said.mark_text(align="right", text=in_words).encode(x=alt.value("width")),
    ]  # fmt: skip
    if is_number(block.get("reference")):
        value = block["reference"]
        label = f"chance {100 * value:g}%" if form == "percent" and value else f"{value:g}"
        line = _layer([{"value": value, "label": label}]).encode(x="value:Q")
        layers += [
            line.mark_rule(color="var(--ink)", strokeDash=[4, 4], strokeWidth=1.4),
            line.mark_text(color="var(--soft)", baseline="bottom").encode(y=alt.value(-4), text="label:N"),
        ]
    columns = {"label": ("Label", "text"), "series": ("Series", "text"), "value": ("Value", form)}
    columns |= {"low": ("Low", form), "high": ("High", form), "count": ("n", "integer")}
    return _finish(layers, None, round(20.5 * len(lanes) * len(labels))), columns, rows


def _bar(item: Block, look: Block, form: str, span: tuple[float, float], many: bool, size: float) -> Block:
    value, interval = format_interval(item, form, size=size)
    _, without_count = format_interval(item, form, with_count=False, size=size)
    within = {
        name: min(max(item[name], span[0]), span[1]) if is_number(item.get(name)) else None
        for name in ("value", "low", "high")
    }
    lane = f"s{look['order']}"
    return look | within | {
        "label": item["label"], "count": item.get("count"), "lane": lane, "text_lane": lane if many else "head",
        "shown": value, "brief": f"{value}  {without_count}",
        "words": f"{value}  {interval}", "tip": f"{_named(look, item['label'])}\n{value} {interval}",
    }  # fmt: skip


def _named(look: Block, text: str) -> str:
    return f"{look['series']}: {text}" if look["series"] else text


# --- curves ----------------------------------------------------------------------------------------------------------


def _curves(block: Block) -> tuple[dict[str, Any], dict[str, tuple[str, str]], list[Block]]:
    """Lines with bands, named places on the x axis, and marked places; `is_square`: shares, and the diagonal."""
    series, form = block["series"], block.get("format") or "number"
    x_name, y_name = block.get("x_label") or "x", block.get("y_label") or "y"
    rows = [row for order, one in enumerate(series) for row in _points(one, _look(one, order), form, x_name)]
    scale = alt.Scale(zero=False, nice=False)
    y_scale = alt.Scale(zero=False)
    x_axis, height = _axis(None), 340
    if ticks := block.get("x_ticks"):
        names = json.dumps([tick["label"] for tick in ticks])
        places = [tick["x"] for tick in ticks]
        x_axis = alt.Axis(values=places, labelExpr=f"{names}[round(datum.index * {max(1, len(ticks) - 1)})]")
    if block.get("is_square"):
        scale = y_scale = alt.Scale(domain=[0, 1], nice=False)
        x_axis, height = _axis(form), 240
    x = alt.X("x:Q", title=block.get("x_label"), axis=x_axis, scale=scale)
    y = alt.Y("value:Q", title=None, axis=_axis(form), scale=y_scale)
    band = _layer(row for row in rows if is_number(row["low"]) and is_number(row["high"])).encode(x=x, color=_COLOUR)
    base = _layer(rows).encode(x=x, y=y)
    dots = _layer(row for row in rows if row["dots"]).encode(x=x, y=y, color=_COLOUR)
    layers = [
        band.mark_area(opacity=0.16).encode(y=alt.Y("low:Q"), y2="high:Q", detail="order:N"),
        base.mark_line(strokeWidth=2.2).encode(color=_COLOUR, strokeDash=_DASH, detail="order:N", order="x:Q"),
        dots.mark_circle(opacity=1, size=36, stroke="var(--paper)", strokeWidth=1.2),
        base.mark_circle(opacity=0, size=160).encode(tooltip="tip:N"),  # room for the pointer
        *_rules(block.get("lines") or ()),
    ]
    if block.get("is_square"):
        diagonal = _layer([{"x": end, "value": end} for end in (0, 1)]).encode(x=x, y=y)
        layers.insert(0, diagonal.mark_line(color="var(--edge)", strokeDash=[3, 4], strokeWidth=1.2))
    columns = {"series": ("Series", "text"), "label": ("Point", "text"), "x": (x_name, "number")}
    columns |= {"value": (y_name, form), "low": ("Low", form), "high": ("High", form)}
    if not any(one.get("labels") for one in series):
        del columns["label"]
    return _finish(layers, block.get("y_label"), height), columns, rows


def _points(series: Block, look: Block, form: str, x_name: str) -> list[Block]:
    """The known points of a curve."""
    num = len(series["y"])
    labels, lows, highs = (series.get(name) or [None] * num for name in ("labels", "low", "high"))
    rows = []
    for x, y, label, low, high in zip(series["x"], series["y"], labels, lows, highs, strict=True):
        if is_number(x) and is_number(y):
            row = {"x": x, "value": y, "low": low, "high": high, "label": label or ""}
            said = " ".join(format_interval(row, form))
            tip = _named(look, f"{label or f'{x_name} {format_number(x)}'}\n{said}")
            rows.append(look | row | {"tip": tip, "dots": series.get("dots", num <= 40)})
    return rows


def _rules(lines: Sequence[Block]) -> list[alt.Chart]:
    """Dashed vertical lines, each with its name at the top, on the side where there is room."""
    if not lines:
        return []
    rows = [{**line, "colour": f"var(--s{line.get('colour', 0) % _NUM_COLOURS})", "place": 4 + 17 * row}
            for row, line in enumerate(lines)]  # fmt: skip
    base = _layer(rows).encode(x="x:Q")
    at_right = "scale('x', datum.x) > width * 0.6"
    text = base.mark_text(
        align=alt.ExprRef(f"{at_right} ? 'right' : 'left'"), dx=alt.ExprRef(f"{at_right} ? -6 : 6"), color="var(--soft)"
    )
    return [
        base.mark_rule(strokeDash=[4, 4], strokeWidth=1.4).encode(color=_COLOUR),
        text.encode(y=alt.Y("place:Q", scale=None, axis=None), text="label:N"),
    ]
