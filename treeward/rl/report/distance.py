"""`distance_blocks`: proxy and gold over the distance that the policy has moved, d = sqrt(KL).

Where there are points enough and a validation at the start, the law of RL is fitted to gold,
gold(d) - gold(0) = d (alpha - beta ln d): Gao, Schulman, Hilton 2022, arXiv 2210.10760, section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from treeward.evaluation.best_of_n.laws import GaoLaw, fit_gao
from treeward.evaluation.report.blocks import format_number
from treeward.evaluation.results import Block
from treeward.rl.report.findings import RunSummary
from treeward.rl.report.reading import Curve

__all__ = ["DASHED", "DOTTED", "SOLID", "distance_blocks"]

# The dashes of charts that tell the curves of one run apart.
SOLID, DASHED, DOTTED = 0, 1, 2

_FEWEST_FOR_A_LAW = 5
_LEAST_R_SQUARED = 0.8
_NEAR_THE_START = 0.1
_SIMILAR_SCALES = 5.0
_LAW_POINTS = 60
_FAR_APART = 4.0
_LEAST_SHARE = 0.05


def distance_blocks(summaries: Sequence[RunSummary]) -> list[Block]:
    """Proxy and gold over sqrt(KL): in one figure where their scales allow it, else one each."""
    paths = [_distances(one) for one in summaries]
    reached = [max(path.values()) for path in paths if path]
    if not reached:
        return []
    # Where one run went so much further than another the axis is logarithmic, from a share of the shortest way on.
    least = _LEAST_SHARE * min(reached) if max(reached) > _FAR_APART * min(reached) > 0.0 else 0.0
    curves: dict[str, list[Block]] = {"gold": [], "proxy": [], "law": []}
    laws, lines = [], []
    for colour, (one, path) in enumerate(zip(summaries, paths, strict=True)):
        prefix = f"{one.run.name}: " if len(summaries) > 1 else ""
        gold = _gains(one.run.curve("validation/gold_reward"))
        for what, gains, dash in (("gold", gold, SOLID), ("proxy", _gains(one.run.proxy("validation")), DASHED)):
            if shown := [step for step, d in path.items() if step in gains and d >= least]:
                x = [path[step] for step in shown]
                labels = [f"step {step:,}, distance {format_number(path[step])}" for step in shown]
                look = {"name": f"{prefix}{what}", "colour": colour, "dash": dash, "dots": dash == SOLID}
                curves[what].append(look | {"x": x, "y": [gains[step] for step in shown], "labels": labels})
        if fitted := _law(path, gold):
            law, words = fitted
            points = (np.geomspace if least else np.linspace)(least, max(path.values()), _LAW_POINTS)
            look = {"name": f"{prefix}gold, fitted law", "colour": colour, "dash": DOTTED, "dots": False}
            curves["law"].append(look | {"x": points.tolist(), "y": law.gain(points).tolist()})
            laws.append(f"{prefix}{words}")
        if one.run.alarm_step in path and path[one.run.alarm_step] >= least:
            lines.append({"x": path[one.run.alarm_step], "label": f"{prefix}alarm", "colour": colour})
    note = "How much was gained for the distance that the policy has moved."
    note += " One run went much further, so the axis is logarithmic, without the start, 0." if least else ""
    if laws:
        note += f" Dotted: d (alpha - beta ln d) fitted to gold, with d the distance. {'; '.join(laws)}."
    if not curves["gold"]:
        note += " There are no values of gold: what the proxy's rise is worth cannot be seen here."
    figure: Block = {
        "kind": "curves",
        "x_label": f"square root of KL to the reference, KL in nats{', logarithmic' if least else ''}",
        "x_scale": "log" if least else "linear",
        "y_label": "gain over the first validation",
        "lines": lines,
    }
    title, of_gold = "{} over the distance moved", [*curves["gold"], *curves["law"]]
    spans = [max((abs(y) for one in curves[what] for y in one["y"]), default=0.0) for what in ("gold", "proxy")]
    if not of_gold or max(spans) <= _SIMILAR_SCALES * min(spans):
        title = title.format("Proxy and gold" if of_gold else "Proxy")
        return [figure | {"title": title, "note": note, "series": [*curves["gold"], *curves["proxy"], *curves["law"]]}]
    own = "In units of its own: its scale is another than that of gold."
    return [
        figure | {"title": title.format("Gold"), "note": note, "series": of_gold},
        figure | {"title": title.format("Proxy"), "note": own, "series": curves["proxy"]},
    ]


def _distances(summary: RunSummary) -> dict[int, float]:
    """sqrt(KL) by validation; empty for a run without two of them."""
    run = summary.run
    measured, kl = (
        run.proxy("validation").keys() | run.curve("validation/gold_reward").keys(),
        run.curve("validation/kl"),
    )
    found = {step: math.sqrt(max(value, 0.0)) for step, value in kl.items() if step in measured}
    return found if summary.source == "validation" and len(found) > 1 else {}


def _gains(curve: Curve) -> Curve:
    """A curve less its first value."""
    return {step: value - next(iter(curve.values())) for step, value in curve.items()}


def _law(distances: Mapping[int, float], gains: Curve) -> tuple[GaoLaw, str] | None:
    """Gao's law of RL, and its numbers in words; None for too few points, or where it does not describe them.

    It goes through 0 at d = 0, so the first validation must be near the start.
    """
    points = {d: gains[step] for step, d in distances.items() if step in gains and d > 0.0}
    if len(points) < _FEWEST_FOR_A_LAW or next(iter(distances.values())) > _NEAR_THE_START * max(points):
        return None
    d, y = np.array(sorted(points.items())).T
    law = fit_gao(d, y, "rl")
    spread = float(np.sum((y - y.mean()) ** 2))
    r_squared = 1.0 - float(np.sum((y - law.gain(d)) ** 2)) / spread if spread > 0.0 else 0.0
    peak = law.peak_distance
    top = "still rising at the end" if peak is None or peak > d[-1] else f"highest at {format_number(peak)}"
    words = f"alpha = {format_number(law.alpha)}, beta = {format_number(law.beta)} (R squared {r_squared:.2f}), {top}"
    return (law, words) if r_squared >= _LEAST_R_SQUARED else None
