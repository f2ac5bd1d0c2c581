"""`distance_blocks`: proxy and gold over the distance that the policy has moved, d = sqrt(KL).

Where there are points enough and a validation at the start, the law of RL is fitted to gold,
gold(d) - gold(0) = d (alpha - beta ln d): Gao, Schulman, Hilton 2022, arXiv 2210.10760, section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from treeward.evaluation.best_of_n.laws import GaoLaw, fit_gao
from treeward.evaluation.report.blocks import format_number
from treeward.rl.report.findings import RunSummary, scales_remark
from treeward.rl.report.reading import Curve

__all__ = ["DASHED", "DOTTED", "SOLID", "distance_blocks", "spoken"]

# The dashes of figures.js that tell the curves of one run apart.
SOLID, DASHED, DOTTED = 0, 1, 2

_FEWEST_FOR_A_LAW = 5
_LEAST_R_SQUARED = 0.8
_NEAR_THE_START = 0.1
_SIMILAR_SCALES = 5.0
_LAW_POINTS = 60
_FAR_APART = 4.0
_LEAST_SHARE = 0.05
_NO_GOLD = "There are no values of gold: what the proxy's rise is worth cannot be seen here."


class _Path(NamedTuple):
    """A run's way: at each validation the step, d = sqrt(KL), and the gains of proxy and gold over the first."""

    summary: RunSummary
    steps: tuple[int, ...]
    distances: tuple[float, ...]
    proxy: tuple[float | None, ...]
    gold: tuple[float | None, ...]


def distance_blocks(summaries: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """Proxy and gold over sqrt(KL): in one figure where their scales allow it, else one each."""
    paths = [path for path in map(_path, summaries) if path is not None]
    if not paths:
        return []
    x_label, y_label = "square root of KL to the reference, KL in nats", "gain over the first validation"
    note = "How much was gained for the distance that the policy has moved."
    least = _least_on_a_logarithmic_axis(paths)
    scale = {"x_scale": "log" if least else "linear"}
    if least:
        x_label += ", logarithmic"
        note = (
            "Gain for the distance moved; one run went much further, so the axis is logarithmic, without the start, 0."
        )
    several = len(summaries) > 1
    colours = {one.run.name: index for index, one in enumerate(summaries)}
    laws = [(path, law) for path in paths if (law := _law(path)) is not None]
    gold = [_series(path, path.gold, "gold", SOLID, colours, several, least) for path in paths if _any(path.gold)]
    proxy = [_series(path, path.proxy, "proxy", DASHED, colours, several, least) for path in paths if _any(path.proxy)]
    fitted = [_law_series(path, law, colours, several, least) for path, law in laws]
    about = _law_words(laws, several) if gold else [_NO_GOLD]
    base = {"kind": "curves", "x_label": x_label, "y_label": y_label, "lines": _marks(paths, colours, least), **scale}
    shown = "Proxy and gold" if gold else "Proxy"
    remark = scales_remark([one.run for one in summaries])
    if not gold or _ratio(gold, proxy) <= _SIMILAR_SCALES:
        note = " ".join(filter(None, (note, *about, remark)))
        series = [*gold, *proxy, *fitted]
        return [{**base, "title": f"{shown} over the distance moved", "note": note, "spoken": spoken(gold + proxy),
                 "series": series}]  # fmt: skip
    return [
        {**base, "title": "Gold over the distance moved", "note": " ".join((note, *about)), "spoken": spoken(gold),
         "series": [*gold, *fitted]},
        {**base, "title": "Proxy over the distance moved", "spoken": spoken(proxy), "series": proxy,
         "note": f"In units of its own: its scale is another than that of gold. {remark}".strip()},
    ]  # fmt: skip


def _least_on_a_logarithmic_axis(paths: Sequence[_Path]) -> float:
    """The least distance that is drawn where one run went so much further than another that the axis is logarithmic;
    0 where it is linear."""
    reached = [max(path.distances) for path in paths]
    far_apart = max(reached) > _FAR_APART * min(reached) > 0.0
    return _LEAST_SHARE * min(reached) if far_apart else 0.0


def _path(summary: RunSummary) -> _Path | None:
    run = summary.run
    if summary.source != "validation":
        return None
    proxy, gold = run.proxy("validation"), run.curve("validation/gold_reward")
    kl = run.curve("validation/kl", "train/kl")
    found = [(step, kl.at(step)) for step in sorted({*proxy.steps, *gold.steps})]
    known = [(step, value) for step, value in found if value is not None]
    if len(known) < 2:
        return None
    steps = tuple(step for step, _ in known)
    gains = [tuple(_gain(curve, step) for step in steps) for curve in (proxy, gold)]
    return _Path(summary, steps, tuple(math.sqrt(max(value, 0.0)) for _, value in known), *gains)


def _gain(curve: Curve, step: int) -> float | None:
    value = curve.at(step)
    return None if value is None else value - curve.values[0]


def _any(values: Sequence[float | None]) -> bool:
    return any(value is not None for value in values)


def _ratio(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> float:
    """How many times as much the larger changes as the smaller."""
    spans = [
        max((abs(value) for one in series for value in one["y"] if value is not None), default=0.0)
        for series in (first, second)
    ]
    return math.inf if min(spans) == 0.0 else max(spans) / min(spans)


def _series(
    path: _Path,
    values: Sequence[float | None],
    what: str,
    dash: int,
    colours: Mapping[str, int],
    several: bool,
    least: float,
) -> dict[str, Any]:
    points = zip(path.steps, path.distances, values, strict=True)
    shown = [(step, d, value) for step, d, value in points if d >= least]
    return {
        "name": f"{path.summary.run.name}: {what}" if several else what,
        "x": [d for _, d, _ in shown],
        "y": [value for *_, value in shown],
        "labels": [f"step {step:,}, distance {format_number(d)}" for step, d, _ in shown],
        "colour": colours[path.summary.run.name],
        "dash": dash,
        "dots": dash == SOLID,
    }  # fmt: skip


def _law(path: _Path) -> tuple[GaoLaw, float] | None:
    """Gao's law of RL and its R squared; None for too few points, or where it does not describe them.

    It goes through 0 at d = 0, so the first validation must be near the start.
    """
    if path.distances[0] > _NEAR_THE_START * max(path.distances):
        return None
    points = sorted(
        (d, gain) for d, gain in zip(path.distances, path.gold, strict=True) if gain is not None and d > 0.0
    )
    distinct = [point for before, point in pairwise([(0.0, 0.0), *points]) if point[0] > before[0]]
    if len(distinct) < _FEWEST_FOR_A_LAW:
        return None
    d, gains = np.array(distinct).T
    law = fit_gao(d, gains, "rl")
    spread = float(np.sum((gains - gains.mean()) ** 2))
    r_squared = 1.0 - float(np.sum((gains - law.gain(d)) ** 2)) / spread if spread > 0.0 else 0.0
    return (law, r_squared) if r_squared >= _LEAST_R_SQUARED else None


def _law_series(
    path: _Path, law: tuple[GaoLaw, float], colours: Mapping[str, int], several: bool, least: float
) -> dict[str, Any]:
    space = np.geomspace if least else np.linspace
    x = space(least, max(path.distances), _LAW_POINTS)
    name = "gold, fitted law"
    return {
        "name": f"{path.summary.run.name}: {name}" if several else name,
        "x": x.tolist(),
        "y": law[0].gain(x).tolist(),
        "colour": colours[path.summary.run.name],
        "dash": DOTTED,
        "dots": False,
    }


def _law_words(laws: Sequence[tuple[_Path, tuple[GaoLaw, float]]], several: bool) -> list[str]:
    if not laws:
        return []
    found = []
    for path, (law, r_squared) in laws:
        peak, reached = law.peak_distance, max(path.distances)
        top = "still rising at the end" if peak is None or peak > reached else f"highest at {format_number(peak)}"
        numbers = f"alpha = {format_number(law.alpha)}, beta = {format_number(law.beta)} (R squared {r_squared:.2f})"
        found.append(f"{f'{path.summary.run.name}: ' if several else ''}{numbers}, {top}")
    return [f"Dotted: d (alpha - beta ln d) fitted to gold, with d the distance. {'; '.join(found)}."]


def _marks(paths: Sequence[_Path], colours: Mapping[str, int], least: float) -> list[dict[str, Any]]:
    """Where the alarms came, on the axis of distances."""
    found = []
    for path in paths:
        run = path.summary.run
        place = dict(zip(path.steps, path.distances, strict=True)).get(-1 if run.alarm_step is None else run.alarm_step)
        if place is not None and place >= least:
            label = "alarm" if len(colours) == 1 else f"{run.name}: alarm"
            found.append({"x": place, "label": label, "colour": colours[run.name]})
    return found


def spoken(series: Sequence[Mapping[str, Any]], form: str = "number") -> str:
    """What the curves do, for who does not see them."""
    parts = []
    for one in series:
        known = [(x, y) for x, y in zip(one["x"], one["y"], strict=True) if y is not None]
        if not known:
            continue
        (x0, y0), (x1, y1), (top_x, top), (_, low) = known[0], known[-1], max(known, key=_y), min(known, key=_y)
        first, last, highest, lowest = (format_number(value, form) for value in (y0, y1, top, low))
        at0, at1, at_top = (format_number(value).rstrip("0").rstrip(".") or "0" for value in (x0, x1, top_x))
        name = one["name"]
        parts.append(f"{name}: {first} at {at0}, {last} at {at1}; highest {highest} at {at_top}, lowest {lowest}")
    return ". ".join(parts)


def _y(point: tuple[float, float]) -> float:
    return point[1]
