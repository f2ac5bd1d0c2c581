"""Charts of a report: numbers become an Altair chart, a legend and the table of the same numbers.

    accuracy = Metric("accuracy", 0.71, 0.62, 0.79, 100)
    bar_chart({"a model": {"accuracy": accuracy}}).chart["layer"]           # Vega-Lite
    curve_chart([Line("gold", x=[0, 1], y=[0.0, 0.4])], x_label="step", y_label="gold")

Colours are CSS variables of the page, so that one chart serves light, dark and print. A row of a
chart's data says how its mark looks (`colour`, `dash`) and has a text `tip`, which the page shows
under the pointer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import altair as alt

from treeward.evaluation.report.intervals import interval_text, is_number, size_of
from treeward.evaluation.report.tables import TableColumn
from treeward.evaluation.results import Metric
from treeward.formatting import format_number

_NUM_COLOURS = 6
# So that lines are told apart in print, and without seeing colours.
_DASHES: tuple[list[int], ...] = ([], [7, 4], [2, 3], [9, 3, 2, 3], [4, 2], [1, 4])
SOLID = 0
DASHED = 1
DOTTED = 2
"""Dashes of a `Line`, by number."""

# Expressions of Vega: only the browser knows how wide the page is. Bars end 205 pixels before the
# right edge, where "71.0%  (62.1% to 79.0%, n = 100)" stands, or 52 where there is "71.0%" alone.
_WIDE = "width > 480"
_ROOM_FOR_WORDS = f"width - ({_WIDE} ? 205 : 52)"
# Pixels.
_LANE_HEIGHT = 20.5
_HEIGHT = 340
_SQUARE_HEIGHT = 240
_MOST_DOTS = 40  # of a line whose points are marked
_FONT = (
    '"Inter", "Segoe UI", -apple-system, "Roboto", "Noto Sans", "Liberation Sans", Arial, '
    "sans-serif"
)
# Channels are classes here and below: for a shorthand as x="low:Q" Altair looks at every class of
# its schema, which was two thirds of the time of a chart.
_COLOUR = alt.Color("colour:N", scale=None)
_STROKE = alt.Stroke("colour:N", scale=None)
_DASH = alt.StrokeDash("dash:N", scale=None)

THEME: dict[str, Any] = {
    "background": None,
    "aria": False,  # the figure has a description of its own
    "font": _FONT,
    "view": {"stroke": None},
    "text": {"font": _FONT, "fontSize": 12.5, "color": "var(--ink)"},
    "title": {
        "font": _FONT,
        "fontSize": 12.5,
        "fontWeight": "normal",
        "color": "var(--soft)",
        "anchor": "start",
    },
    "axis": {
        "labelFontSize": 12.5,
        "titleFontSize": 12.5,
        "titleFontWeight": "normal",
        "labelColor": "var(--soft)",
        "titleColor": "var(--soft)",
        "gridColor": "var(--rule)",
        "domainColor": "var(--edge)",
        "tickColor": "var(--edge)",
        "titlePadding": 10,
        "labelOverlap": "greedy",
        "labelSeparation": 6,
    },
    "axisX": {"grid": False, "tickCount": {"expr": "ceil(width / 90)"}},
    "axisY": {"domain": False, "ticks": False, "labelPadding": 8, "tickCount": 5},
}
"""The configuration of every chart."""


@dataclass(frozen=True, slots=True)
class Line:
    """A curve: `y` over `x`, with a band from `low` to `high` if they are known.

    `labels`: of the points. `colour`: its number in the palette; `dash`: `SOLID`, `DASHED`,
    `DOTTED`. `dots`: whether points are marked; None: if there are few.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    labels: Sequence[str] | None = None
    colour: int = 0
    dash: int = SOLID
    dots: bool | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """A place on the x axis: a tick with a name, or a dashed vertical line in the colour of a
    `Line`."""

    x: float
    label: str
    colour: int = 0


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart (None where there is nothing to draw) and what stands around it.

    `legend`: a colour, a dash or None for a filled square, and a name, for each series. `axes`:
    what is against what, in words. `columns` and `rows`: its numbers, as a table.
    """

    kind: Literal["bars", "curves"]
    chart: dict[str, Any] | None
    legend: list[tuple[str, list[int] | None, str]]
    columns: list[TableColumn]
    rows: list[dict[str, Any]]
    axes: str = ""
    is_square: bool = False


def _colour(number: int) -> str:
    return f"var(--s{number % _NUM_COLOURS})"


def _layer(rows: Iterable[Mapping[str, Any]]) -> alt.Chart:
    return alt.Chart(alt.InlineData(list(rows)))


def _axis(format: str | None, **options: Any) -> alt.Axis:
    if format == "percent":
        return alt.Axis(format="~%", **options)
    return alt.Axis(**options)


def _finish(layers: Sequence[alt.Chart], title: str, height: int) -> dict[str, Any]:
    # Given here: `properties` would copy every row of every layer.
    options: dict[str, Any] = {"width": "container", "height": height}
    if title:
        options["title"] = alt.TitleParams(title, frame="bounds", offset=8)
    chart = alt.layer(*layers, **options)
    # Validation against the JSON schema would take half the time of a report.
    made: dict[str, Any] = chart.to_dict(validate=False)
    del made["$schema"]  # an address, and the page loads nothing
    made.pop("config", None)  # the page has one for all charts
    return made


def _tip(series: str, text: str) -> str:
    return f"{series}: {text}" if series else text


# --- bars -----------------------------------------------------------------------------------------


def bar_chart(
    series: Mapping[str, Mapping[str, Metric]],
    labels: Mapping[str, str] | None = None,
    *,
    format: str = "percent",
    reference: float | None = 0.5,
    x_range: tuple[float, float] = (0.0, 1.0),
) -> Figure:
    """Horizontal bars in groups of one label, with whiskers, the numbers in words, and the line of
    chance.

    `series`: metrics by name, of each model. `labels`: of the metrics that are shown, in order;
    None shows all by their names. `reference`: where the line of chance is.
    """
    bars = []
    for order, (name, metrics) in enumerate(series.items()):
        label_of_metric = labels
        if label_of_metric is None:
            label_of_metric = {metric: metric for metric in metrics}
        for metric, label in label_of_metric.items():
            bars.append(_Bar(name, order, label, metrics[metric]))
    # One size for all, so that they have one number of decimals.
    size = size_of(bar.metric for bar in bars)
    rows = [_bar_row(bar, format, x_range, size) for bar in bars]
    legend: list[tuple[str, list[int] | None, str]] = []
    if len(series) > 1:
        legend = [(_colour(number), None, name) for number, name in enumerate(series)]
    chart = None
    if any(is_number(row["value"]) for row in rows):
        chart = _bars(rows, format, x_range, reference, num_series=len(series))
    columns = [
        TableColumn("label", "Label"),
        TableColumn("series", "Series"),
        TableColumn("value", "Value", format, size=size),
        TableColumn("low", "Low", format, size=size),
        TableColumn("high", "High", format, size=size),
        TableColumn("count", "n", "integer"),
    ]
    return Figure("bars", chart, legend, columns, rows)


class _Bar(NamedTuple):
    """A metric of a series. `order`: the number of the series, which gives the colour."""

    series: str
    order: int
    label: str
    metric: Metric


def _bar_row(bar: _Bar, format: str, x_range: tuple[float, float], size: float) -> dict[str, Any]:
    """The row of a bar in the chart's data. `size`: see `interval_text`."""
    value, interval = interval_text(bar.metric, format, size=size)
    _, without_count = interval_text(bar.metric, format, with_count=False, size=size)
    return {
        "series": bar.series,
        "label": bar.label,
        "lane": f"s{bar.order}",
        "colour": _colour(bar.order),
        # A bar and its whisker end at the edges of the chart; the words have the whole numbers.
        "value": _within(bar.metric.value, x_range),
        "low": _within(bar.metric.low, x_range),
        "high": _within(bar.metric.high, x_range),
        "count": bar.metric.count,
        # Three lengths of the words, for what there is room for.
        "shown": value,
        "brief": f"{value}  {without_count}",
        "words": f"{value}  {interval}",
        "tip": f"{_tip(bar.series, bar.label)}\n{value} {interval}",
    }


def _within(number: float | None, x_range: tuple[float, float]) -> float | None:
    """The number, or the end of the range beyond which it is; None for no number."""
    if not is_number(number):
        return None
    return min(max(number, x_range[0]), x_range[1])


def _bars(
    rows: Sequence[dict[str, Any]],
    format: str,
    x_range: tuple[float, float],
    reference: float | None,
    num_series: int,
) -> dict[str, Any]:
    labels = list(dict.fromkeys(row["label"] for row in rows))
    # Each label has a lane for its own text and one for each series.
    lanes = ["head", *(f"s{number}" for number in range(num_series))]
    place: dict[str, Any] = {
        "y": alt.Y(
            "label:N",
            sort=None,
            axis=None,
            scale=alt.Scale(domain=labels, paddingInner=0.12, paddingOuter=0.04),
        ),
        "yOffset": alt.YOffset("lane:N", sort=None, scale=alt.Scale(domain=lanes)),
    }
    # Several bars of a label have their words beside them, and end before these. A single one has
    # its words above it, in the lane of the label.
    has_words_beside = num_series > 1
    scale = alt.Scale(
        domain=list(x_range),
        nice=False,
        rangeMax=alt.ExprRef(_ROOM_FOR_WORDS if has_words_beside else "width"),
    )
    x = alt.X("value:Q", title=None, axis=_axis(format, grid=True), scale=scale)
    # Bars begin at 0, or at the end of the axis that is nearest to it.
    zero = alt.X2Datum(_within(0.0, x_range))
    # A label without a value keeps its place, and its words are a dash.
    bars = _layer(row for row in rows if row["value"] is not None).encode(**place)
    # Half transparent, with an edge: a whisker in the colour of text is seen on it, in light and
    # dark.
    bars = bars.mark_bar(size=13, fillOpacity=0.4, strokeWidth=1)
    names = _layer({"label": label, "lane": "head"} for label in labels).encode(**place)
    names = names.mark_text(align="left", dy=3, fontSize=13.5, limit=alt.ExprRef("width * 0.55"))
    # Later layers are drawn over earlier ones.
    layers = [
        bars.encode(x=x, x2=zero, color=_COLOUR, stroke=_STROKE, tooltip=alt.Tooltip("tip:N")),
        *_whiskers(rows, place),
        names.encode(x=alt.value(0), text=alt.Text("label:N")),
        _bar_words(rows, place, is_beside=has_words_beside),
    ]
    if reference is not None:
        layers += _reference_line(reference, format)
    return _finish(layers, "", round(_LANE_HEIGHT * len(lanes) * len(labels)))


def _whiskers(rows: Sequence[dict[str, Any]], place: Mapping[str, Any]) -> list[alt.Chart]:
    """A line from the low to the high end of each interval, and a tick at either."""
    with_interval = [row for row in rows if row["low"] is not None and row["high"] is not None]
    ends = _layer(with_interval).encode(**place)
    tick = ends.mark_tick(color="var(--ink)", thickness=1.6, height=9)
    return [
        ends.mark_rule(color="var(--ink)", strokeWidth=1.6).encode(
            x=alt.X("low:Q"), x2=alt.X2("high:Q")
        ),
        tick.encode(x=alt.X("low:Q")),
        tick.encode(x=alt.X("high:Q")),
    ]


def _bar_words(
    rows: Sequence[dict[str, Any]], place: Mapping[str, Any], *, is_beside: bool
) -> alt.Chart:
    """The numbers of each bar at the right edge, in fewer words where the page is narrow."""
    if is_beside:
        narrow = "shown"
    else:
        narrow = "brief"
        rows = [row | {"lane": "head"} for row in rows]
    text = alt.ExprRef(f"{_WIDE} ? datum.words : datum.{narrow}")
    base = _layer(rows).encode(**place)
    words: alt.Chart = base.mark_text(align="right", text=text).encode(x=alt.value("width"))
    return words


def _reference_line(value: float, format: str) -> list[alt.Chart]:
    label = f"{value:g}"
    # A line at 0 is where a shift would be none, and no chance.
    if format == "percent" and value:
        label = f"chance {100 * value:g}%"
    line = _layer([{"value": value, "label": label}]).encode(x=alt.X("value:Q"))
    return [
        line.mark_rule(color="var(--ink)", strokeDash=[4, 4], strokeWidth=1.4),
        line.mark_text(color="var(--soft)", baseline="bottom").encode(
            y=alt.value(-4), text=alt.Text("label:N")
        ),
    ]


# --- curves ---------------------------------------------------------------------------------------


def curve_chart(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    format: str = "number",
    is_square: bool = False,
    x_ticks: Sequence[Place] = (),
    marks: Sequence[Place] = (),
) -> Figure:
    """Lines with bands.

    `is_square`: shares against shares, with the diagonal. `x_ticks`: named places on the x axis, in
    place of numbers. `marks`: places with a dashed vertical line.
    """
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines):
        rows += _points(line, number, format, x_label)
    legend: list[tuple[str, list[int] | None, str]] = []
    # A single line is named by the axis.
    if len(lines) > 1:
        for line in lines:
            legend.append((_colour(line.colour), _dash(line), line.name))
    chart = None
    if rows:
        layers = [*_curves(rows, x_label, format, is_square, x_ticks), *_marks(marks)]
        chart = _finish(layers, y_label, _SQUARE_HEIGHT if is_square else _HEIGHT)
    columns = [
        TableColumn("series", "Series"),
        TableColumn("x", x_label, "number"),
        TableColumn("value", y_label, format),
        TableColumn("low", "Low", format),
        TableColumn("high", "High", format),
    ]
    if any(line.labels for line in lines):
        columns.insert(1, TableColumn("label", "Point"))
    axes = f"{y_label} against {x_label}"
    return Figure("curves", chart, legend, columns, rows, axes, is_square)


def _dash(line: Line) -> list[int]:
    return _DASHES[line.dash % len(_DASHES)]


def _points(line: Line, order: int, format: str, x_label: str) -> list[dict[str, Any]]:
    """The known points of a curve."""
    has_dots = line.dots
    if has_dots is None:
        has_dots = len(line.y) <= _MOST_DOTS
    nothing = [None] * len(line.y)
    lows = line.low or nothing
    highs = line.high or nothing
    labels = line.labels or nothing
    rows = []
    for x, y, low, high, label in zip(line.x, line.y, lows, highs, labels, strict=True):
        # A point that is not known is left out, and its neighbours are joined.
        if not (is_number(x) and is_number(y)):
            continue
        words = " ".join(interval_text(Metric(line.name, y, low, high), format))
        # NaN is not JSON, and an unknown end has no band.
        known_low = low if is_number(low) else None
        known_high = high if is_number(high) else None
        tip = _tip(line.name, label or f"{x_label} {format_number(x)}")
        rows.append(
            {
                "series": line.name,
                "order": order,
                "colour": _colour(line.colour),
                "dash": _dash(line),
                "x": float(x),
                "value": float(y),
                "low": known_low,
                "high": known_high,
                "label": label or "",
                "tip": f"{tip}\n{words}",
                "dots": has_dots,
            }
        )
    return rows


def _curves(
    rows: Sequence[dict[str, Any]],
    x_label: str,
    format: str,
    is_square: bool,
    x_ticks: Sequence[Place],
) -> list[alt.Chart]:
    if is_square:
        x_scale = y_scale = alt.Scale(domain=[0, 1], nice=False)
    else:
        # The x axis ends where the curves end; the y axis at a round number.
        x_scale = alt.Scale(zero=False, nice=False)
        y_scale = alt.Scale(zero=False)
    if x_ticks:
        x_axis = _named_axis(x_ticks)
    else:
        x_axis = _axis(format if is_square else None)
    x = alt.X("x:Q", title=x_label, axis=x_axis, scale=x_scale)
    y = alt.Y("value:Q", title=None, axis=_axis(format), scale=y_scale)

    # Later layers are drawn over earlier ones: the diagonal, bands, lines, dots.
    layers = []
    if is_square:
        diagonal = _layer([{"x": 0, "value": 0}, {"x": 1, "value": 1}]).encode(x=x, y=y)
        layers.append(diagonal.mark_line(color="var(--edge)", strokeDash=[3, 4], strokeWidth=1.2))
    with_interval = [row for row in rows if row["low"] is not None and row["high"] is not None]
    band = _layer(with_interval).mark_area(opacity=0.16)
    # `detail`: Vega joins points of one colour, and two lines may have the same.
    layers.append(
        band.encode(
            x=x, y=alt.Y("low:Q"), y2=alt.Y2("high:Q"), color=_COLOUR, detail=alt.Detail("order:N")
        )
    )
    points = _layer(rows).encode(x=x, y=y)
    line = points.mark_line(strokeWidth=2.2)
    layers.append(
        line.encode(
            color=_COLOUR, strokeDash=_DASH, detail=alt.Detail("order:N"), order=alt.Order("x:Q")
        )
    )
    dots = _layer(row for row in rows if row["dots"])
    dots = dots.mark_circle(opacity=1, size=36, stroke="var(--paper)", strokeWidth=1.2)
    layers.append(dots.encode(x=x, y=y, color=_COLOUR))
    # Invisible and larger than a dot, so that the pointer need not hit it.
    layers.append(points.mark_circle(opacity=0, size=160).encode(tooltip=alt.Tooltip("tip:N")))
    return layers


def _named_axis(ticks: Sequence[Place]) -> alt.Axis:
    """An axis with names in place of numbers."""
    names = json.dumps([tick.label for tick in ticks])
    # Vega gives a tick's index as a share: 0 is the first, and 1 the last.
    last = max(1, len(ticks) - 1)
    expression = f"{names}[round(datum.index * {last})]"
    return alt.Axis(values=[tick.x for tick in ticks], labelExpr=expression)


def _marks(marks: Sequence[Place]) -> list[alt.Chart]:
    """Dashed vertical lines, each with its name at the top, on the side where there is room."""
    if not marks:
        return []
    rows = []
    for number, mark in enumerate(marks):
        row = {"x": mark.x, "label": mark.label, "colour": _colour(mark.colour)}
        # Each name is a line of text below the one before, so that none covers another.
        rows.append(row | {"place": 4 + 17 * number})
    base = _layer(rows).encode(x=alt.X("x:Q"))
    place = "scale('x', datum.x)"
    at_right = f"{place} > width * 0.6"
    text = base.mark_text(
        align=alt.ExprRef(f"{at_right} ? 'right' : 'left'"),
        dx=alt.ExprRef(f"{at_right} ? -6 : 6"),
        limit=alt.ExprRef(f"({at_right} ? {place} : width - {place}) - 6"),
        color="var(--soft)",
    )
    return [
        base.mark_rule(strokeDash=[4, 4], strokeWidth=1.4).encode(color=_COLOUR),
        text.encode(y=alt.Y("place:Q", scale=None, axis=None), text=alt.Text("label:N")),
    ]
