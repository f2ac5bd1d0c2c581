"""Figures of the report: a block of numbers becomes an Altair chart, a legend, a description and a table.

    figure = draw({"kind": "bars", "title": "Subsets", "series": [...]})
    figure.chart["layer"]          # Vega-Lite, which the page's bundle draws at the width of the screen
    figure.description             # for readers who do not see the chart

Colours are CSS variables of the page, so that one chart serves light, dark and print. Every series is a layer of its
own, with its colour and dash; every mark has a text `tip`, which the page shows under the pointer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import altair as alt
import numpy as np

from treeward.evaluation.report.blocks import format_interval, format_number, is_number

__all__ = ["THEME", "Figure", "draw"]

Block = Mapping[str, Any]

_NUM_COLOURS = 6
_DASHES: tuple[list[int], ...] = ([], [7, 4], [2, 3], [9, 3, 2, 3], [4, 2], [1, 4])
_SHAPES = ("circle", "triangle-up", "square", "diamond")
_SIGNS = {"circle": "●", "triangle-up": "▲", "square": "■", "diamond": "◆"}
_WIDE = "width > 480"
_HEIGHT = 340
_FONT = '"Inter", "Segoe UI", -apple-system, "Roboto", "Noto Sans", "Liberation Sans", Arial, sans-serif'

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
    legend: Sequence[tuple[str, Sequence[int] | str | None, str]]
    description: str
    columns: Sequence[Mapping[str, str]]
    rows: Sequence[Mapping[str, Any]]


def draw(block: Block) -> Figure:
    """The figure of a block of kind bars, histogram, reliability, scatter or curves."""
    figure = _DRAW[block["kind"]](block)
    drawn = [
        row for row in figure.rows if any(is_number(value) or isinstance(value, Mapping) for value in row.values())
    ]
    return figure if drawn else replace(figure, chart=None)


# --- parts of charts -------------------------------------------------------------------------------------------------


def _colour(index: int) -> str:
    return f"var(--s{index % _NUM_COLOURS})"


def _layer(rows: Iterable[Mapping[str, Any]]) -> alt.Chart:
    return alt.Chart(alt.InlineData(list(rows)))


def _axis(format: str | None, **options: Any) -> alt.Axis:
    if format == "percent":
        return alt.Axis(format="~%", **options)
    if format == "points":
        return alt.Axis(labelExpr="format(datum.value * 100, '~f')", **options)
    return alt.Axis(**options)


def _finish(layers: Sequence[alt.Chart], title: str | None = None, height: int = _HEIGHT) -> dict[str, Any]:
    chart = alt.layer(*layers).properties(width="container", height=height)
    if title:
        chart = chart.properties(title=alt.TitleParams(title, frame="bounds", offset=8))
    made: dict[str, Any] = chart.to_dict()
    return {key: value for key, value in made.items() if key not in ("$schema", "config")}


def _rule(x: float, label: str, colour: str = "var(--ink)", row: int = 0) -> list[alt.Chart]:
    """A dashed vertical line with its name at the top, on the side where there is room."""
    base = _layer([{"x": x, "label": label}])
    text = base.mark_text(
        align=alt.ExprRef("scale('x', datum.x) > width * 0.6 ? 'right' : 'left'"),
        dx=alt.ExprRef("scale('x', datum.x) > width * 0.6 ? -6 : 6"),
        color="var(--soft)",
    )
    return [
        base.mark_rule(color=colour, strokeDash=[4, 4], strokeWidth=1.4).encode(x="x:Q"),
        text.encode(x="x:Q", y=alt.value(4 + 17 * row), text="label:N"),
    ]


def _line(base: alt.Chart, colour: str, dash: int, **options: Any) -> alt.Chart:
    line: alt.Chart = base.mark_line(color=colour, strokeWidth=2.2, strokeDash=_DASHES[dash % len(_DASHES)], **options)
    return line


def _named(series: Mapping[str, Any], text: str) -> str:
    return f"{series['name']}: {text}" if series["name"] else text


def _legend(series: Sequence[Block], filled: bool) -> list[tuple[str, Sequence[int] | str | None, str]]:
    if len(series) < 2:
        return []
    return [
        (_colour(one.get("colour", i)), None if filled else _DASHES[one.get("dash", i) % len(_DASHES)], one["name"])
        for i, one in enumerate(series)
    ]


def _in_words(item: Mapping[str, Any], format: str) -> str:
    return " ".join(filter(None, format_interval(item, format)))


def _columns(*columns: tuple[str, str, str]) -> list[dict[str, str]]:
    return [{"key": key, "label": label, "format": form} for key, label, form in columns]


# --- the kinds -------------------------------------------------------------------------------------------------------


def _bars(block: Block) -> Figure:
    """Horizontal bars in groups of one label, with whiskers, the numbers in words, and the line of chance."""
    low, high = block.get("x_range") or (0, 1)
    form = block.get("format") or ("percent" if (low, high) == (0, 1) else "number")
    series, many = block["series"], len(block["series"]) > 1
    labels = list(dict.fromkeys(item["label"] for one in series for item in one["items"]))
    rows = [
        _bar(item, one, f"s{order}" if many else "head", order, form, (low, high))
        for order, one in enumerate(series)
        for item in one["items"]
    ]
    lanes = ["head", *(f"s{order}" for order in range(len(series)))]
    room = f"width - ({_WIDE} ? 205 : 52)" if many else "width"
    x = alt.X(
        "value:Q",
        title=block.get("x_label"),
        axis=_axis(form, grid=True),
        scale=alt.Scale(domain=[low, high], nice=False, rangeMax=alt.ExprRef(room)),
    )
    y = alt.Y("label:N", sort=None, axis=None, scale=alt.Scale(domain=labels, paddingInner=0.12, paddingOuter=0.04))
    lane = alt.YOffset("lane:N", sort=None, scale=alt.Scale(domain=lanes))
    base = _layer(row for row in rows if row["value"] is not None).encode(y=y, yOffset=lane)
    ends = _layer(row for row in rows if row["low"] is not None and row["high"] is not None).encode(y=y, yOffset=lane)
    spans = ends.encode(x="low:Q", x2="high:Q")
    names = _layer({"label": label, "lane": "head"} for label in labels).encode(y=y, yOffset=lane)
    said = _layer({**row, "lane": row["text_lane"]} for row in rows).encode(y=y, yOffset=lane)
    in_words = alt.ExprRef(f"{_WIDE} ? datum.words : datum.{'shown' if many else 'brief'}")
    layers = [
        base.mark_bar(height=alt.RelativeBandSize(0.72)).encode(
            x=x, x2=alt.X2Datum(min(max(0, low), high)), color=alt.Color("colour:N", scale=None), tooltip="tip:N"
        ),
        spans.mark_rule(color="var(--paper)", strokeWidth=4, opacity=0.75),
        spans.mark_rule(color="var(--ink)", strokeWidth=1.4),
        *(ends.mark_tick(color="var(--ink)", thickness=1.4, height=7).encode(x=f"{end}:Q") for end in ("low", "high")),
        names.mark_text(align="left", dy=3, fontSize=13.5, limit=alt.ExprRef("width * 0.55")).encode(
            x=alt.value(0), text="label:N"),
        said.mark_text(align="right", text=in_words).encode(x=alt.value("width")),
        *_chance(rows, block, form, (y, lane)),
    ]  # fmt: skip
    said_of = [f"{_named(one, '')}{'; '.join(_said(item, form) for item in one['items'])}" for one in series]
    return Figure(
        _finish(layers, height=round(20.5 * len(lanes) * len(labels))),
        _legend(series, filled=True),
        f"Bar chart, {block['title']}. {'. '.join(said_of)}.",
        _columns(("label", "Label", "text"), *((f"s{i}", one["name"], form) for i, one in enumerate(series))),
        [
            {"label": label} | {f"s{i}": next((item for item in one["items"] if item["label"] == label), None)
                                for i, one in enumerate(series)}
            for label in labels
        ],
    )  # fmt: skip


def _bar(item: Block, one: Block, text_lane: str, order: int, form: str, span: tuple[float, float]) -> dict[str, Any]:
    value, interval = format_interval(item, form)
    brief = format_interval(item, form, with_count=False)[1]
    within = {
        name: min(max(item[name], span[0]), span[1]) if is_number(item.get(name)) else None
        for name in ("value", "low", "high", "reference")
    }
    return within | {
        "label": item["label"],
        "lane": f"s{order}",
        "text_lane": text_lane,
        "colour": _colour(order),
        "shown": value,
        "brief": f"{value}  {brief}",
        "words": f"{value}  {interval}",
        "tip": f"{_named(one, item['label'])}\n{value} {interval}",
    }


def _said(item: Block, form: str) -> str:
    chance = f", chance {_rounded(item['reference'], form)}" if is_number(item.get("reference")) else ""
    return f"{item['label']} {_in_words(item, form)}{chance}"


def _rounded(value: float, form: str) -> str:
    """A number that is given, not measured: without decimals that say nothing."""
    text = format_number(value, form)
    return text.replace(".0%", "%") if form == "percent" else text.rstrip("0").rstrip(".") or "0"


def _chance(rows: Sequence[Block], block: Block, form: str, place: tuple[alt.Y, alt.YOffset]) -> list[alt.Chart]:
    """A line through all bars where they share a reference, else a mark at each bar that has its own."""
    if is_number(block.get("reference")):
        value = block["reference"]
        name = block.get("reference_label") or ("chance" if form == "percent" and value > 0 else "")
        line = _layer([{"value": value, "label": f"{name} {_rounded(value, form) if value else '0'}".strip()}])
        line = line.encode(x="value:Q")
        dashed = line.mark_rule(color="var(--ink)", strokeDash=[4, 4], strokeWidth=1.4)
        return [dashed, line.mark_text(color="var(--soft)", baseline="bottom").encode(y=alt.value(-4), text="label:N")]
    own = _layer({**row, "tip": f"chance {_rounded(row['reference'], form)}"}
                 for row in rows if row["reference"] is not None).encode(y=place[0], yOffset=place[1])  # fmt: skip
    return [own.mark_tick(color="var(--ink)", thickness=2, height=18).encode(x="reference:Q", tooltip="tip:N")]


def _histogram(block: Block) -> Figure:
    """Counts in bins; several series overlap as outlined steps."""
    edges, series = block["edges"], block["series"]
    alone, mark = len(series) == 1, block.get("mark")
    x = alt.X("from:Q", bin="binned", title=block.get("x_label"), axis=_axis(None),
              scale=alt.Scale(domain=[edges[0], edges[-1]], nice=False))  # fmt: skip
    y = alt.Y("count:Q", title=None, axis=alt.Axis(tickMinStep=1), scale=alt.Scale(zero=True))
    layers = []
    for order, one in enumerate(series):
        rows = [
            {
                "from": start, "to": end, "count": count,
                "colour": _colour(1 if alone and is_number(mark) and (start + end) / 2 < mark else order),
                "tip": f"{_named(one, f'{format_number(start)} to {format_number(end)}')}\n{count:,}",
            }
            for start, end, count in zip(edges[:-1], edges[1:], one["counts"], strict=True)
        ]  # fmt: skip
        bins = _layer(rows).mark_bar(fillOpacity=1 if alone else 0.22, binSpacing=1 if alone else 0)
        layers.append(
            bins.encode(x=x, x2="to:Q", y=y, color=alt.Color("colour:N", scale=None), tooltip="tip:N")
        )  # fmt: skip
        if not alone:
            steps = [*rows, {"from": edges[-1], "count": one["counts"][-1]}]
            outline = _line(_layer(steps), _colour(order), order, interpolate="step-after")
            layers.append(outline.encode(x="from:Q", y=y))
    if mark is not None:
        layers += _rule(mark, block.get("mark_label") or "")
    said = [_named(one, ", ".join(format_number(count, "integer") for count in one["counts"])) for one in series]
    span = f"{format_number(edges[0])} to {format_number(edges[-1])}"
    return Figure(
        _finish(layers, block.get("y_label") or "examples", height=280),
        _legend(series, filled=True),
        f"Histogram, {block['title']}, {len(edges) - 1} bins from {span}. {'. '.join(said)}.",
        _columns(
            ("from", "From", "number"), ("to", "To", "number"),
            *((f"s{i}", one["name"] or "Count", "integer") for i, one in enumerate(series)),
        ),
        [
            {"from": edges[n], "to": edges[n + 1]} | {f"s{i}": one["counts"][n] for i, one in enumerate(series)}
            for n in range(len(edges) - 1)
        ],
    )  # fmt: skip


def _reliability(block: Block) -> Figure:
    """Frequency against predicted probability, larger points for more predictions; the diagonal is calibrated."""
    series = block["series"]
    shares = alt.Scale(domain=[0, 1], nice=False)
    x = alt.X(
        "probability:Q", axis=_axis("percent"), scale=shares, title=block.get("x_label") or "predicted probability"
    )
    y = alt.Y("frequency:Q", axis=_axis("percent"), scale=shares, title=None)
    diagonal = _layer([{"probability": end, "frequency": end} for end in (0, 1)])
    layers = [diagonal.mark_line(color="var(--edge)", strokeDash=[3, 4], strokeWidth=1.2).encode(x=x, y=y)]
    most = max((one["count"] or 0 for each in series for one in each["bins"]), default=1)
    said = []
    for order, one in enumerate(series):
        rows = [
            {**bin, "tip": _named(one, f"predicted {format_number(bin['probability'], 'percent')}\n"
                                       f"right {_in_words(bin | {'value': bin['frequency']}, 'percent')}")}
            for bin in one["bins"] if is_number(bin["probability"]) and is_number(bin["frequency"])
        ]  # fmt: skip
        said.append("; ".join(row["tip"].replace("\n", ", ") for row in rows))
        base = _layer(rows).encode(x=x)
        size = alt.Size("count:Q", legend=None, scale=alt.Scale(domain=[0, most], range=[30, 160]))
        layers += [
            base.mark_rule(color=_colour(order)).encode(y=alt.Y("low:Q"), y2="high:Q"),
            _line(base, _colour(order), order).encode(y=y),
            base.mark_circle(color=_colour(order), opacity=1, stroke="var(--paper)", strokeWidth=1.2).encode(
                y=y, size=size, tooltip="tip:N"
            ),
        ]
    return Figure(
        _finish(layers, block.get("y_label") or "how often it was right", height=400),
        _legend(series, filled=False),
        f"Reliability diagram, {block['title']}. {'. '.join(said)}. The diagonal is perfect calibration.",
        _columns(
            ("series", "Series", "text"), ("probability", "Predicted", "percent"), ("frequency", "Right", "percent"),
            ("low", "Low", "percent"), ("high", "High", "percent"), ("count", "n", "integer"),
        ),
        [bin | {"series": one["name"]} for one in series for bin in one["bins"]],
    )  # fmt: skip


def _scatter(block: Block) -> Figure:
    """Points, with shapes for groups and colours for series (or for groups, of a single series), and lines."""
    series = block["series"]
    x_name, y_name = block.get("x_label") or "x", block.get("y_label") or "y"
    groups = list(dict.fromkeys(p["group"] for one in series for p in one["points"] if p.get("group") is not None))
    coloured = len(series) == 1 and 1 < len(groups) <= _NUM_COLOURS
    grouped = coloured or 1 < len(groups) <= len(_SHAPES)
    place = {group: i for i, group in enumerate(groups)} if grouped else {}
    points = [
        {
            "x": point["x"], "y": point["y"], "id": point.get("id"), "of": one["name"],
            "colour": _colour(place.get(point.get("group"), 0) if coloured else order),
            "shape": _SHAPES[place.get(point.get("group"), 0) % len(_SHAPES)],
            "tip": "\n".join(filter(None, (
                _named(one, " · ".join(str(point[key]) for key in ("group", "id") if point.get(key) is not None)),
                f"{x_name} {_whole(point['x'])} · {y_name} {format_number(point['y'])}",
                _excerpt(str(point.get("text") or ""), 360),
            ))),
        }
        for order, one in enumerate(series)
        for point in one["points"]
        if is_number(point["x"]) and is_number(point["y"])
    ]  # fmt: skip
    x = alt.X("x:Q", title=block.get("x_label"), axis=_axis(None), scale=alt.Scale(zero=False, nice=False, padding=12))
    y = alt.Y("y:Q", title=None, axis=_axis(None), scale=alt.Scale(zero=False, nice=False, padding=12))
    faint = 0.4 if len(points) > 1500 else 0.55 if len(points) > 300 else 0.75
    dots = _layer(points).mark_point(filled=True, opacity=faint, size=18 if len(points) > 300 else 32)
    layers = [
        dots.encode(
            x=x, y=y, color=alt.Color("colour:N", scale=None), shape=alt.Shape("shape:N", scale=None), tooltip="tip:N"
        )
    ]
    for order, one in enumerate(series):
        if line := one.get("line"):
            fit = _layer({"x": a, "y": b} for a, b in zip(line["x"], line["y"], strict=True)).encode(x=x, y=y)
            colour = "var(--ink)" if coloured else _colour(order)
            layers.append(fit.mark_line(color="var(--paper)", strokeWidth=5.5))
            layers.append(_line(fit, colour, order))
    summaries = [_summary(one) for one in series]
    said = [
        _named({"name": one["series"]}, f"{one['count']} points, mean {x_name} {format_number(one['x'])}, "
               f"mean {y_name} {format_number(one['y'])}, correlation {format_number(one['correlation'])}")
        for one in summaries
    ]  # fmt: skip
    shapes = [
        (_colour(i) if coloured else "var(--soft)", _SIGNS[_SHAPES[i % len(_SHAPES)]], str(group))
        for group, i in place.items()
    ]
    return Figure(
        _finish(layers, block.get("y_label"), height=420),
        [*([] if coloured else _legend(series, filled=True)), *shapes],
        f"Scatter plot, {block['title']}. {'. '.join(said)}.",
        _columns(
            ("series", "Series", "text"), ("count", "Points", "integer"), ("x", f"Mean {x_name}", "number"),
            ("y", f"Mean {y_name}", "number"), ("correlation", "Pearson's correlation", "signed"),
            ("slope", "Slope of the line", "signed"),
        ),
        summaries,
    )  # fmt: skip


def _whole(value: float) -> str:
    return format_number(value, "integer" if value == round(value) else "number")


def _excerpt(text: str, length: int) -> str:
    line = " ".join(text[: 4 * length].split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


def _summary(series: Block) -> dict[str, Any]:
    points = [(p["x"], p["y"]) for p in series["points"] if is_number(p["x"]) and is_number(p["y"])]
    x, y = np.array(points, dtype=np.float64).reshape(-1, 2).T
    varies = len(points) > 1 and bool(np.ptp(x) > 0 and np.ptp(y) > 0)
    line = series.get("line") or {"x": [], "y": []}
    rises = len(line["x"]) > 1 and line["x"][-1] != line["x"][0]
    return {
        "series": series["name"],
        "count": len(points),
        "x": float(x.mean()) if points else None,
        "y": float(y.mean()) if points else None,
        "correlation": float(np.corrcoef(x, y)[0, 1]) if varies else None,
        "slope": (line["y"][-1] - line["y"][0]) / (line["x"][-1] - line["x"][0]) if rises else None,
    }


def _curves(block: Block) -> Figure:
    """Lines with bands, named places on the x axis, and marked places."""
    series, form = block["series"], block.get("format") or "number"
    x_name, y_name = block.get("x_label") or "x", block.get("y_label") or "y"
    known = [value for one in series for value in one["x"] if is_number(value)]
    logarithmic = block.get("x_scale") == "log" and min(known, default=1.0) > 0
    scale = alt.Scale(type="log", base=2, nice=False) if logarithmic else alt.Scale(zero=False, nice=False)
    x = alt.X("x:Q", title=block.get("x_label"), axis=_x_axis(block.get("x_ticks"), logarithmic), scale=scale)
    y = alt.Y("y:Q", title=None, axis=_axis(form), scale=alt.Scale(zero=False))
    layers, said = [], []
    for at, one in enumerate(series):
        rows = _points(one, form, x_name)
        colour = _colour(one.get("colour", at))
        banded = [row for row in rows if is_number(row["low"]) and is_number(row["high"])]
        if len(banded) > 1:
            band = _layer(banded).mark_area(color=colour, opacity=0.16)
            layers.append(band.encode(x=x, y=alt.Y("low:Q"), y2="high:Q"))
        base = _layer(rows).encode(x=x, y=y)
        layers.append(_line(base, colour, one.get("dash", at)).encode(order="x:Q"))
        if one.get("dots", len(rows) <= 40):
            layers.append(base.mark_circle(color=colour, opacity=1, size=36, stroke="var(--paper)", strokeWidth=1.2))
        layers.append(base.mark_circle(opacity=0, size=160).encode(tooltip="tip:N"))  # room for the pointer
        said.append(_named(one, "; ".join(row["tip"].split("\n", 1)[-1].replace("\n", " ") for row in rows)))
    for row, line in enumerate(block.get("lines") or ()):
        colour = _colour(line["colour"]) if is_number(line.get("colour")) else "var(--ink)"
        layers += _rule(line["x"], line["label"], colour, row)
    labelled = any(one.get("labels") for one in series)
    return Figure(
        _finish(layers, block.get("y_label")),
        _legend(series, filled=False),
        f"Curves, {block['title']}, {y_name} against {x_name}. {(block.get('spoken') or '. '.join(said)).rstrip('.')}.",
        _columns(
            ("series", "Series", "text"), *([("label", "Point", "text")] if labelled else []),
            ("x", "x" if labelled else x_name, "number"), ("y", y_name, form), ("low", "Low", form),
            ("high", "High", form),
        ),
        [row | {"series": one["name"]} for one in series for row in _points(one, form, x_name)],
    )  # fmt: skip


def _points(series: Block, form: str, x_name: str) -> list[dict[str, Any]]:
    """The known points of a curve."""
    num = len(series["y"])
    labels, lows, highs = (series.get(name) or [None] * num for name in ("labels", "low", "high"))
    rows = []
    for x, y, label, low, high in zip(series["x"], series["y"], labels, lows, highs, strict=True):
        if is_number(x) and is_number(y):
            said = _in_words({"value": y, "low": low, "high": high}, form)
            tip = _named(series, f"{label or f'{x_name} {format_number(x)}'}\n{said}")
            rows.append({"x": x, "y": y, "low": low, "high": high, "label": label or "", "tip": tip})
    return rows


def _x_axis(ticks: Sequence[Block] | None, logarithmic: bool) -> alt.Axis:
    if not ticks:
        return _axis(None, values=[2**n for n in range(21)]) if logarithmic else _axis(None)
    places = [tick["x"] for tick in ticks]
    names = "[" + ", ".join(f"'{tick['label']}'" for tick in ticks) + "]"
    return alt.Axis(values=places, labelExpr=f"{names}[round(datum.index * {max(1, len(ticks) - 1)})]")


_DRAW: Mapping[str, Callable[[Block], Figure]] = {
    "bars": _bars,
    "histogram": _histogram,
    "reliability": _reliability,
    "scatter": _scatter,
    "curves": _curves,
}
