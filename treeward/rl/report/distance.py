"""`distance_blocks`: proxy and gold over the distance that the policy has moved, d = sqrt(KL).

Where there are points enough and a validation at the start, the law of RL is fitted to gold,
gold(d) - gold(0) = d (alpha - beta ln d): Gao, Schulman, Hilton 2022, arXiv 2210.10760, section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from treeward.evaluation.best_of_n.laws import GaoLaw, fit_gao
from treeward.evaluation.report.blocks import format_number
from treeward.evaluation.results import Block
from treeward.rl.report.findings import RunSummary
from treeward.rl.report.reading import RLRun

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


@dataclass(frozen=True, slots=True)
class _Path:
    """A run's way: d = sqrt(KL) by validation, and the gains of proxy and gold over the first."""

    run: RLRun
    colour: int
    label: Callable[[str], str]
    distances: dict[int, float]
    gains: dict[str, dict[int, float]]
    law: tuple[GaoLaw, float] | None

    def series(self, what: str, dash: int, least: float) -> list[Block]:
        """The curve of "gold" or "proxy" from the distance `least` on."""
        gains = self.gains[what]
        shown = [step for step, d in self.distances.items() if step in gains and d >= least]
        look = {"name": self.label(what), "colour": self.colour, "dash": dash, "dots": dash == SOLID}
        x = [self.distances[step] for step in shown]
        labels = [f"step {step:,}, distance {format_number(d)}" for step, d in zip(shown, x, strict=True)]
        return [look | {"x": x, "y": [gains[step] for step in shown], "labels": labels}] if shown else []

    def law_series(self, least: float) -> list[Block]:
        if self.law is None:
            return []
        x = (np.geomspace if least else np.linspace)(least, max(self.distances.values()), _LAW_POINTS)
        look = {"name": self.label("gold, fitted law"), "colour": self.colour, "dash": DOTTED, "dots": False}
        return [look | {"x": x.tolist(), "y": self.law[0].gain(x).tolist()}]

    def law_words(self) -> str:
        """The fitted law and its peak; nothing where there is none."""
        if self.law is None:
            return ""
        law, r_squared = self.law
        peak, reached = law.peak_distance, max(self.distances.values())
        top = "still rising at the end" if peak is None or peak > reached else f"highest at {format_number(peak)}"
        numbers = f"alpha = {format_number(law.alpha)}, beta = {format_number(law.beta)} (R squared {r_squared:.2f})"
        return self.label(f"{numbers}, {top}")


def distance_blocks(summaries: Sequence[RunSummary]) -> list[Block]:
    """Proxy and gold over sqrt(KL): in one figure where their scales allow it, else one each."""
    several = len(summaries) > 1
    paths = [path for colour, one in enumerate(summaries) if (path := _path(one, colour, several)) is not None]
    if not paths:
        return []
    reached = [max(path.distances.values()) for path in paths]
    # Where one run went so much further than another the axis is logarithmic, from a share of the shortest way on.
    least = _LEAST_SHARE * min(reached) if max(reached) > _FAR_APART * min(reached) > 0.0 else 0.0
    note = "How much was gained for the distance that the policy has moved."
    if least:
        note += " One run went much further, so the axis is logarithmic, without the start, 0."
    gold = [one for path in paths for one in path.series("gold", SOLID, least)]
    proxy = [one for path in paths for one in path.series("proxy", DASHED, least)]
    fitted = [one for path in paths for one in path.law_series(least)]
    words = "; ".join(filter(None, (path.law_words() for path in paths)))
    laws = f" Dotted: d (alpha - beta ln d) fitted to gold, with d the distance. {words}." if words else ""
    if not gold:
        laws = " There are no values of gold: what the proxy's rise is worth cannot be seen here."
    lines = [
        {"x": path.distances[step], "label": path.label("alarm"), "colour": path.colour}
        for path in paths
        if (step := path.run.alarm_step) in path.distances and path.distances[step] >= least
    ]

    def block(title: str, note: str, series: Sequence[Block]) -> Block:
        return {
            "kind": "curves",
            "title": f"{title} over the distance moved",
            "note": note,
            "x_label": f"square root of KL to the reference, KL in nats{', logarithmic' if least else ''}",
            "x_scale": "log" if least else "linear",
            "y_label": "gain over the first validation",
            "lines": lines,
            "series": list(series),
        }

    spans = [max((abs(y) for one in series for y in one["y"]), default=0.0) for series in (gold, proxy)]
    if not gold or max(spans) <= _SIMILAR_SCALES * min(spans):
        return [block("Proxy and gold" if gold else "Proxy", note + laws, [*gold, *proxy, *fitted])]
    return [
        block("Gold", note + laws, [*gold, *fitted]),
        block("Proxy", "In units of its own: its scale is another than that of gold.", proxy),
    ]


def _path(summary: RunSummary, colour: int, several: bool) -> _Path | None:
    run = summary.run
    curves = {"proxy": run.proxy("validation"), "gold": run.curve("validation/gold_reward")}
    kl = run.curve("validation/kl")
    steps = sorted((curves["proxy"].keys() | curves["gold"].keys()) & kl.keys())
    if summary.source != "validation" or len(steps) < 2:
        return None
    distances = {step: math.sqrt(max(kl[step], 0.0)) for step in steps}
    gains = {name: {step: value - next(iter(curve.values())) for step, value in curve.items()}
             for name, curve in curves.items()}  # fmt: skip
    law = _law(distances, gains["gold"])
    return _Path(run, colour, lambda what: f"{run.name}: {what}" if several else what, distances, gains, law)


def _law(distances: dict[int, float], gains: dict[int, float]) -> tuple[GaoLaw, float] | None:
    """Gao's law of RL and its R squared; None for too few points, or where it does not describe them.

    It goes through 0 at d = 0, so the first validation must be near the start.
    """
    points = {d: gains[step] for step, d in distances.items() if step in gains and d > 0.0}
    first = next(iter(distances.values()))
    if len(points) < _FEWEST_FOR_A_LAW or first > _NEAR_THE_START * max(points):
        return None
    d, y = np.array(sorted(points.items())).T
    law = fit_gao(d, y, "rl")
    spread = float(np.sum((y - y.mean()) ** 2))
    r_squared = 1.0 - float(np.sum((y - law.gain(d)) ** 2)) / spread if spread > 0.0 else 0.0
    return (law, r_squared) if r_squared >= _LEAST_R_SQUARED else None
