"""Figures of the report: a block of numbers becomes an Altair chart, a legend, a description and a table.

    figure = draw({"kind": "bars", "title": "Subsets", "series": [...]})
    figure.chart["layer"]          # Vega-Lite, which the page's bundle draws at the width of the screen

Colours are CSS variables of the page, so that one chart serves light, dark and print. A row of a chart's data says how
its mark looks (`colour`, `dash`) and has a text `tip`, which the page shows under the pointer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from treeward.evaluation.report.blocks import format_interval, format_number, is_number
from treeward.evaluation.results import Block

__all__ = ["THEME", "Figure", "draw"]

Columns = Mapping[str, tuple[str, str]]
Legend = list[tuple[str, Sequence[int] | str | None, str]]
Drawn = tuple[dict[str, Any], Legend, Columns, list[Block]]

_NUM_COLOURS = 6
_DASHES: tuple[list[int], ...] = ([], [7, 4], [2, 3], [9, 3, 2, 3], [4, 2], [1, 4])
_SHAPES = {"circle": "●", "triangle-up": "▲", "square": "■", "diamond": "◆"}
_WIDE = "width > 480"
_FONT = '"Inter", "Segoe UI", -apple-system, "Roboto", "Noto Sans", "Liberation Sans", Arial, sans-serif'
_COLOUR, _DASH = alt.Color("colour:N", scale=None), alt.StrokeDash("dash:N", scale=None)
_PLAIN_SCALE = alt.Scale(zero=False, nice=False, padding=12)

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

    `legend`: (colour, dash or None for a filled square, name), or (colour, a sign, name). `columns` and `rows`: its
    numbers, as a block of kind `table` has them.
    """

    chart: dict[str, Any] | None
    legend: Legend
    description: str
    columns: Sequence[Mapping[str, str]]
    rows: Sequence[Block]


def draw(block: Block) -> Figure:
    """The figure of a block of kind bars, histogram, reliability, scatter or curves."""
    function, name = _KINDS[block["kind"]]
    chart, legend, columns, rows = function(block)
    shown = [{"key": key, "label": label, "format": form} for key, (label, form) in columns.items()]
    axes = " against ".join(filter(None, (block.get("y_label"), block.get("x_label"))))
    words = f"{name}: {block['title']}{f', {axes}' if axes else ''}. The table below has its numbers."
    is_empty = not any(is_number(value) for row in rows for key, value in row.items() if key in columns)
    return Figure(None if is_empty else chart, legend, words, shown, rows)


# --- parts of charts -------------------------------------------------------------------------------------------------


def _look(series: Block, order: int) -> dict[str, Any]:
    """What rows of a series have in common; `colour` and `dash` are numbers in the block."""
    colour, dash = series.get("colour", order), series.get("dash", order)
    look = {"colour": f"var(--s{colour % _NUM_COLOURS})", "dash": _DASHES[dash % len(_DASHES)]}
    return {"series": series["name"], "order": order, **look}


def _legend(series: Sequence[Block], *, filled: bool) -> Legend:
    looks = [_look(one, order) for order, one in enumerate(series)]
    return [(one["colour"], None if filled else one["dash"], one["series"]) for one in looks if len(looks) > 1]


def _named(series: Block, text: str) -> str:
    return f"{series['name']}: {text}" if series["name"] else text


def _layer(rows: Iterable[Mapping[str, Any]]) -> alt.Chart:
    return alt.Chart(alt.InlineData(list(rows)))


def _axis(format: str | None, **options: Any) -> alt.Axis:
    if format == "percent":
        return alt.Axis(format="~%", **options)
    if format == "points":
        return alt.Axis(labelExpr="format(datum.value * 100, '~f')", **options)
    return alt.Axis(**options)


def _finish(layers: Sequence[alt.Chart], title: str | None = None, height: int = 340) -> dict[str, Any]:
    chart = alt.layer(*layers).properties(width="container", height=height)
    if title:
        chart = chart.properties(title=alt.TitleParams(title, frame="bounds", offset=8))
    made: dict[str, Any] = chart.to_dict(validate=False)  # its JSON schema would take half the time of a report
    return {key: value for key, value in made.items() if key not in ("$schema", "config")}


def _rules(lines: Sequence[Block]) -> list[alt.Chart]:
    """Dashed vertical lines, each with its name at the top, on the side where there is room."""
    rows = [{"colour": "var(--ink)", **line, "place": 4 + 17 * row} for row, line in enumerate(lines)]
    base = _layer(rows).encode(x="x:Q")
    at_right = "scale('x', datum.x) > width * 0.6"
    text = base.mark_text(
        align=alt.ExprRef(f"{at_right} ? 'right' : 'left'"), dx=alt.ExprRef(f"{at_right} ? -6 : 6"), color="var(--soft)"
    )
    return [
        base.mark_rule(strokeDash=[4, 4], strokeWidth=1.4).encode(color=_COLOUR),
        text.encode(y=alt.Y("place:Q", scale=None, axis=None), text="label:N"),
    ]


# --- the kinds -------------------------------------------------------------------------------------------------------


def _bars(block: Block) -> Drawn:
    """Horizontal bars in groups of one label, with whiskers, the numbers in words, and the line of chance."""
    low, high = block.get("x_range") or (0, 1)
    form, series = block.get("format") or "percent", block["series"]
    many = len(series) > 1
    labels = list(dict.fromkeys(item["label"] for one in series for item in one["items"]))
    rows = [_bar(item, _look(one, order), form, (low, high), many)
            for order, one in enumerate(series) for item in one["items"]]  # fmt: skip
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
        base.mark_bar(height=alt.RelativeBandSize(0.72)).encode(
            x=x, x2=alt.X2Datum(min(max(0, low), high)), color=_COLOUR, tooltip="tip:N"
        ),
        spans.mark_rule(color="var(--paper)", strokeWidth=4, opacity=0.75),
        spans.mark_rule(color="var(--ink)", strokeWidth=1.4),
        *(ends.mark_tick(color="var(--ink)", thickness=1.4, height=7).encode(x=f"{end}:Q") for end in ("low", "high")),
        names.mark_text(align="left", dy=3, fontSize=13.5, limit=alt.ExprRef("width * 0.55")).encode(
            x=alt.value(0), text="label:N"),
        said.mark_text(align="right", text=in_words).encode(x=alt.value("width")),
        *_chance(rows, block, form, place),
    ]  # fmt: skip
    height = round(20.5 * len(lanes) * len(labels))
    columns = {"label": ("Label", "text"), "series": ("Series", "text"), "value": ("Value", form)}
    columns |= {"low": ("Low", form), "high": ("High", form), "count": ("n", "integer")}
    return _finish(layers, height=height), _legend(series, filled=True), columns, rows


def _bar(item: Block, look: Block, form: str, span: tuple[float, float], many: bool) -> Block:
    value, interval = format_interval(item, form)
    within = {
        name: min(max(item[name], span[0]), span[1]) if is_number(item.get(name)) else None
        for name in ("value", "low", "high", "reference")
    }
    lane = f"s{look['order']}"
    return look | within | {
        "label": item["label"], "count": item.get("count"), "lane": lane, "text_lane": lane if many else "head",
        "shown": value, "brief": f"{value}  {format_interval(item, form, with_count=False)[1]}",
        "words": f"{value}  {interval}",
        "tip": f"{_named({'name': look['series']}, item['label'])}\n{value} {interval}",
    }  # fmt: skip


def _chance(rows: Sequence[Block], block: Block, form: str, place: Mapping[str, Any]) -> list[alt.Chart]:
    """A line through all bars where they share a reference, else a mark at each bar that has its own."""

    def rounded(value: float) -> str:
        """A number that is given, not measured: without decimals that say nothing."""
        text = format_number(value, form)
        return text.replace(".0%", "%") if form == "percent" else text.rstrip("0").rstrip(".") or "0"

    if is_number(block.get("reference")):
        value = block["reference"]
        name = block.get("reference_label") or ("chance" if form == "percent" and value > 0 else "")
        line = _layer([{"value": value, "label": f"{name} {rounded(value) if value else '0'}".strip()}])
        line = line.encode(x="value:Q")
        dashed = line.mark_rule(color="var(--ink)", strokeDash=[4, 4], strokeWidth=1.4)
        return [dashed, line.mark_text(color="var(--soft)", baseline="bottom").encode(y=alt.value(-4), text="label:N")]
    own = [row | {"tip": f"chance {rounded(row['reference'])}"} for row in rows if row["reference"] is not None]
    ticks = _layer(own).encode(**place).mark_tick(color="var(--ink)", thickness=2, height=18)
    return [ticks.encode(x="reference:Q", tooltip="tip:N")]


def _histogram(block: Block) -> Drawn:
    """Counts in bins; several series overlap as outlined steps."""
    edges, series, mark = block["edges"], block["series"], block.get("mark")
    alone = len(series) == 1
    rows = []
    for order, one in enumerate(series):
        for start, end, count in zip(edges[:-1], edges[1:], one["counts"], strict=True):
            below = alone and is_number(mark) and (start + end) / 2 < mark
            tip = f"{_named(one, f'{format_number(start)} to {format_number(end)}')}\n{count:,}"
            rows.append(_look(one, 1 if below else order) | {"from": start, "to": end, "count": count, "tip": tip})
    scale = alt.Scale(domain=[edges[0], edges[-1]], nice=False)
    x = alt.X("from:Q", bin="binned", title=block.get("x_label"), axis=_axis(None), scale=scale)
    y = alt.Y("count:Q", title=None, axis=alt.Axis(tickMinStep=1), scale=alt.Scale(zero=True), stack=None)
    bins = _layer(rows).mark_bar(fillOpacity=1 if alone else 0.22, binSpacing=1 if alone else 0)
    layers = [bins.encode(x=x, x2="to:Q", y=y, color=_COLOUR, tooltip="tip:N")]
    if not alone:
        last = [_look(one, order) | {"from": edges[-1], "count": one["counts"][-1]} for order, one in enumerate(series)]
        outline = _layer([*rows, *last]).mark_line(strokeWidth=2.2, interpolate="step-after")
        layers.append(outline.encode(x="from:Q", y=y, color=_COLOUR, strokeDash=_DASH, detail="series:N"))
    if mark is not None:
        layers += _rules([{"x": mark, "label": block.get("mark_label") or ""}])
    columns = {"series": ("Series", "text"), "from": ("From", "number"), "to": ("To", "number")}
    columns |= {"count": ("Count", "integer")}
    chart = _finish(layers, block.get("y_label") or "examples", height=280)
    return chart, _legend(series, filled=True), columns, rows


def _reliability(block: Block) -> Drawn:
    """Frequency against predicted probability; the diagonal is calibrated."""
    series = [
        {"name": one["name"], "x": [bin["probability"] for bin in one["bins"]]}
        | {"y": [bin["frequency"] for bin in one["bins"]]}
        | {end: [bin.get(end) for bin in one["bins"]] for end in ("low", "high")}
        | {"labels": [f"predicted {format_number(bin['probability'], 'percent')}, n = {bin['count']}"
                      for bin in one["bins"]]}
        for one in block["series"]
    ]  # fmt: skip
    names = {"x_label": "predicted probability", "y_label": "how often it was right", "format": "percent"}
    return _curves({**names, "series": series, "is_square": True})


def _scatter(block: Block) -> Drawn:
    """Points, and lines: a colour and a shape for each series, or for each group of a single series."""
    series = block["series"]
    x_name, y_name = block.get("x_label") or "x", block.get("y_label") or "y"
    key = "group" if len(series) == 1 else "series"
    points = [
        {**point, "series": one["name"], "of": one["name"]}
        for one in series
        for point in one["points"]
        if is_number(point["x"]) and is_number(point["y"])
    ]
    kinds = [kind for kind in dict.fromkeys(point.get(key) for point in points) if kind is not None]
    kinds = kinds if len(kinds) <= _NUM_COLOURS else []
    looks = {
        kind: {"colour": f"var(--s{i})", "shape": list(_SHAPES)[i % len(_SHAPES)]}
        for i, kind in enumerate(kinds or [None])
    }
    rows = []
    for point in points:
        look = looks[point.get(key) if kinds else None]
        named = " · ".join(str(point[name]) for name in ("group", "id") if point.get(name) is not None)
        place = f"{x_name} {format_number(point['x'])} · {y_name} {format_number(point['y'])}"
        tip = "\n".join(filter(None, (named, place, str(point.pop("text", ""))[:360])))
        rows.append(point | look | {"tip": tip})
    x = alt.X("x:Q", title=block.get("x_label"), axis=_axis(None), scale=_PLAIN_SCALE)
    y = alt.Y("y:Q", title=None, axis=_axis(None), scale=_PLAIN_SCALE)
    faint = 0.4 if len(points) > 1500 else 0.55 if len(points) > 300 else 0.75
    dots = _layer(rows).mark_point(filled=True, opacity=faint, size=18 if len(points) > 300 else 32)
    layers = [dots.encode(x=x, y=y, color=_COLOUR, shape=alt.Shape("shape:N", scale=None), tooltip="tip:N")]
    for order, one in enumerate(series):
        line = one.get("line") or {"x": [], "y": []}
        fit = _layer({"x": a, "y": b} for a, b in zip(line["x"], line["y"], strict=True)).encode(x=x, y=y)
        colour = "var(--ink)" if len(kinds) > 1 and key == "group" else f"var(--s{order})"
        layers += [fit.mark_line(color=ink, strokeWidth=width) for ink, width in (("var(--paper)", 5.5), (colour, 2.2))]
    legend: Legend = [(looks[kind]["colour"], _SHAPES[looks[kind]["shape"]], str(kind)) for kind in kinds]
    columns = {key: ("Group", "text"), "id": ("Example", "text"), "x": (x_name, "number"), "y": (y_name, "number")}
    return _finish(layers, block.get("y_label"), height=420), legend if len(legend) > 1 else [], columns, rows


def _curves(block: Block) -> Drawn:
    """Lines with bands, named places on the x axis, and marked places; `is_square`: shares, and the diagonal."""
    series, form = block["series"], block.get("format") or "number"
    x_name, y_name = block.get("x_label") or "x", block.get("y_label") or "y"
    rows = [row for order, one in enumerate(series) for row in _points(one, order, form, x_name)]
    logarithmic = block.get("x_scale") == "log" and min((row["x"] for row in rows), default=1.0) > 0
    scale = alt.Scale(type="log", base=2, nice=False) if logarithmic else alt.Scale(zero=False, nice=False)
    y_scale = alt.Scale(type=block.get("y_scale") or "linear", zero=False)
    x_axis, height = _x_axis(block.get("x_ticks"), logarithmic), 340
    if block.get("is_square"):
        scale = y_scale = alt.Scale(domain=[0, 1], nice=False)
        x_axis, height = _axis(form), 400
    x = alt.X("x:Q", title=block.get("x_label"), axis=x_axis, scale=scale)
    y = alt.Y("y:Q", title=None, axis=_axis(form), scale=y_scale)
    band = _layer(row for row in rows if is_number(row["low"]) and is_number(row["high"])).encode(x=x, color=_COLOUR)
    base = _layer(rows).encode(x=x, y=y)
    dots = _layer(row for row in rows if row["dots"]).encode(x=x, y=y, color=_COLOUR)
    layers = [
        band.mark_area(opacity=0.16).encode(y=alt.Y("low:Q"), y2="high:Q", detail="order:N"),
        base.mark_line(strokeWidth=2.2).encode(color=_COLOUR, strokeDash=_DASH, detail="order:N", order="x:Q"),
        dots.mark_circle(opacity=1, size=36, stroke="var(--paper)", strokeWidth=1.2),
        base.mark_circle(opacity=0, size=160).encode(tooltip="tip:N"),  # room for the pointer
    ]
    lines = [
        {"x": one["x"], "label": one["label"]}
        | ({"colour": _look({"name": "", **one}, 0)["colour"]} if is_number(one.get("colour")) else {})
        for one in block.get("lines") or ()
    ]
    layers += _rules(lines) if lines else []
    if block.get("is_square"):
        diagonal = _layer([{"x": end, "y": end} for end in (0, 1)]).encode(x=x, y=y)
        layers.insert(0, diagonal.mark_line(color="var(--edge)", strokeDash=[3, 4], strokeWidth=1.2))
    columns = {"series": ("Series", "text"), "label": ("Point", "text"), "x": (x_name, "number"), "y": (y_name, form)}
    columns |= {"low": ("Low", form), "high": ("High", form)}
    if not any(one.get("labels") for one in series):
        del columns["label"]
    return _finish(layers, block.get("y_label"), height), _legend(series, filled=False), columns, rows


def _points(series: Block, order: int, form: str, x_name: str) -> list[Block]:
    """The known points of a curve."""
    num = len(series["y"])
    labels, lows, highs = (series.get(name) or [None] * num for name in ("labels", "low", "high"))
    rows = []
    for x, y, label, low, high in zip(series["x"], series["y"], labels, lows, highs, strict=True):
        if is_number(x) and is_number(y):
            row = {"x": x, "y": y, "low": low, "high": high, "label": label or ""}
            said = " ".join(format_interval(row | {"value": y}, form))
            tip = _named(series, f"{label or f'{x_name} {format_number(x)}'}\n{said}")
            rows.append(_look(series, order) | row | {"tip": tip, "dots": series.get("dots", num <= 40)})
    return rows


def _x_axis(ticks: Sequence[Block] | None, logarithmic: bool) -> alt.Axis:
    if not ticks:
        return _axis(None, values=[2**n for n in range(21)]) if logarithmic else _axis(None)
    places = [tick["x"] for tick in ticks]
    names = "[" + ", ".join(f"'{tick['label']}'" for tick in ticks) + "]"
    return alt.Axis(values=places, labelExpr=f"{names}[round(datum.index * {max(1, len(ticks) - 1)})]")


_KINDS: Mapping[str, tuple[Callable[[Block], Drawn], str]] = {
    "bars": (_bars, "Bar chart"),
    "histogram": (_histogram, "Histogram"),
    "reliability": (_reliability, "Reliability diagram"),
    "scatter": (_scatter, "Scatter plot"),
    "curves": (_curves, "Curves"),
}
