"""`find_drift`: what changed from one checkpoint of a run to the next, in every suite that they were evaluated on.

    drift = find_drift(summaries)          # of step_100, step_200, ..., final, as `run_evaluation` gives them
    drift[0].steps[0].drift.shift          # Metric: by how much the scores moved from the first to the second

An accuracy that stands still may hide scores that move or spread: a policy that is trained against one checkpoint and
then against the next sees other rewards for the same completions. Each checkpoint is compared with the next on the same
completions (`compare_checkpoints`). `final` is one of the checkpoints, exported: it is compared with the one that has
the same scores (`SuiteDrift.final_is`).
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import rankdata

from treeward.errors import DataError
from treeward.evaluation.diagnostics.completions import (
    Floats,
    correlation_metric,
    divided,
    moments_metric,
)
from treeward.evaluation.diagnostics.scores import standard_deviation
from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.findings import percent
from treeward.evaluation.report.blocks import bar_item, format_number, table_block
from treeward.evaluation.results import Block, Diagnostic, Metric
from treeward.evaluation.statistics import accuracy_metric
from treeward.evaluation.summary import Summary

__all__ = ["Step", "SuiteDrift", "compare_checkpoints", "find_drift"]

logger = logging.getLogger(__name__)

_FINAL = "final"
_STEP = re.compile(r"step_(\d+)")

_OF_CHECKPOINT = {
    "accuracy": ("Accuracy", "percent"),
    "length_controlled_accuracy": ("Length-controlled accuracy", "percent"),
    "score_mean": ("Mean score", "number"),
    "score_std": ("Standard deviation", "number"),
    "saturated": ("Saturated pairs", "percent"),
    "ece": ("Calibration error", "percent"),
}
_OF_STEP = {
    "order_agreement": ("Pairs ordered alike", "percent"),
    "scale_ratio": ("Spread, as a multiple", "number"),
    "shift": ("Scores moved by", "signed"),
    "relative_shift": ("in standard deviations", "signed"),
    "rank_correlation": ("Rank correlation", "number"),
}


@dataclass(frozen=True, slots=True)
class Step:
    """From checkpoint `before` to checkpoint `after`. `drift`: None where `problem` says why there is none."""

    before: str
    after: str
    drift: Diagnostic | None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class SuiteDrift:
    """The checkpoints of a run in one suite, in order, and the steps between them.

    `checkpoints`: the numbers of each by name, those of `_OF_CHECKPOINT`. `final_is`: the checkpoint whose scores the
    exported `final` has in every suite; None where there is no `final`, or no checkpoint has its scores.
    """

    suite: str
    title: str
    checkpoints: Mapping[str, Mapping[str, Metric]]
    steps: tuple[Step, ...]
    final_is: str | None = None

    def plain(self) -> dict[str, Any]:
        """As results.json holds it."""

        def listed(metrics: Mapping[str, Metric]) -> list[dict[str, Any]]:
            return [dataclasses.asdict(metric) for metric in metrics.values()]

        steps = [
            {"before": one.before, "after": one.after, "problem": one.problem}
            | {"metrics": [] if one.drift is None else listed(one.drift.numbers)}
            for one in self.steps
        ]
        checkpoints = [{"model": name, "metrics": listed(metrics)} for name, metrics in self.checkpoints.items()]
        return {"suite": self.suite, "final_is": self.final_is, "checkpoints": checkpoints, "steps": steps}

    def blocks(self) -> list[Block]:
        """The blocks of a report: a chapter with the accuracies by step, and both tables."""
        of_checkpoints = [
            _cells(metrics, "accuracy", "length_controlled_accuracy")
            | {"name": f"{name} (is {self.final_is})" if name == _FINAL and self.final_is else name}
            for name, metrics in self.checkpoints.items()
        ]
        of_steps = [
            _cells({} if step.drift is None else step.drift.numbers, "order_agreement")
            | {"name": f"{step.before} to {step.after}", "problem": step.problem or ""}
            for step in self.steps
        ]
        return [
            {"kind": "text", "title": f"Drift between checkpoints: {self.title}", "markdown": self._words()},
            *self._curves(),
            table_block(
                f"{self.title}: the checkpoints",
                {"name": ("checkpoint", "text")} | _OF_CHECKPOINT,
                of_checkpoints,
                "Saturated: the margin is above 5 temperatures, as sure as 99.3 % or more.",
            ),
            table_block(
                f"{self.title}: from one checkpoint to the next",
                {"name": ("checkpoints", "text")} | _OF_STEP | {"problem": ("", "text")},
                of_steps,
                "Each checkpoint against the next, on the same completions. Ordered alike: of pairs of completions of "
                "one prompt, which is all that a reward is used for.",
            ),
        ]

    def export(self) -> str | None:
        """Which checkpoint `final` is, in words."""
        return None if self.final_is is None else f"**{_FINAL} is {self.final_is}**: all their scores are equal."

    def _words(self) -> str:
        """The largest change of the order, the largest shift, and which checkpoint `final` is."""
        parts = [f"The checkpoints of one run on {self.title}, each against the next."]
        trained = [step for step in self.steps if step.after != _FINAL or self.final_is is None]
        known = [(step, step.drift) for step in trained if step.drift is not None]
        if known:
            # An unknown agreement (no pairs) is no change.
            step, drift = min(known, key=lambda one: 1.0 if (same := one[1].order_agreement.value) is None else same)
            parts.append(
                f"The order changed most from **{step.before}** to **{step.after}**: {percent(drift.order_agreement)} "
                f"of the pairs are ordered alike, and the spread of the scores is "
                f"{format_number(drift.scale_ratio.value)} times what it was."
            )
            moved, most = max(known, key=lambda one: abs(one[1].relative_shift.value or 0.0))
            parts.append(
                "A common shift of all scores changes nothing, as only differences between completions of one prompt "
                f"count; the most they moved is {format_number(most.relative_shift.value, 'signed')} standard "
                f"deviations, from {moved.before} to {moved.after}."
            )
        if self.final_is is None and _FINAL in self.checkpoints:
            parts.append(f"`{_FINAL}` was exported; none of these checkpoints has its scores.")
        return " ".join([*parts, *filter(None, [self.export()])])

    def _curves(self) -> list[Block]:
        """The accuracies by step, or by place in order where the names have no step; `final` is left out."""
        drawn = {name: metrics for name, metrics in self.checkpoints.items() if name != _FINAL}
        if len(drawn) < 2:
            return []
        numbers = [int(match[1]) for match in map(_STEP.fullmatch, drawn) if match]
        known = len(numbers) == len(drawn)
        x = numbers if known else list(range(1, 1 + len(drawn)))
        series = []
        for key in ("accuracy", "length_controlled_accuracy"):
            own = [metrics[key] for metrics in drawn.values()]
            ends = {"y": [m.value for m in own], "low": [m.low for m in own], "high": [m.high for m in own]}
            series.append({"name": _OF_CHECKPOINT[key][0], "x": x} | ends)
        block: Block = {
            "kind": "curves",
            "title": f"{self.title}: accuracy by checkpoint",
            "x_label": "step" if known else "checkpoint",
            "y_label": "accuracy",
            "format": "percent",
            "series": series,
        }
        return [block]


def find_drift(summaries: Sequence[Summary]) -> list[SuiteDrift]:
    """The drift in each suite between checkpoints, which are the models in the order of their summaries.

    A last one called `final` is compared with the checkpoint that it is, and the log says which.
    """
    found, final_is = [], _final_is(summaries)
    if final_is is not None:
        logger.info("%s is %s: all their scores are equal.", _FINAL, final_is)
    for suite in dict.fromkeys(summary.suite for summary in summaries):
        own = [summary for summary in summaries if summary.suite == suite]
        compared = list(zip(own, own[1:], strict=False))
        if final_is is not None and own[-1].model == _FINAL:
            compared[-1] = (next(one for one in own if one.model == final_is), own[-1])
        checkpoints = {one.model: _numbers(one) for one in own}
        found.append(SuiteDrift(suite, own[0].title, checkpoints, tuple(_step(*pair) for pair in compared), final_is))
    return found


def compare_checkpoints(first: Sequence[ScoredExample], second: Sequence[ScoredExample]) -> Diagnostic:
    """The drift from `first` to `second`, matched by the examples' ids; examples of only one of them are left out.

    `shift`: mean of second less first; `relative_shift`: in standard deviations of the first. `scale_ratio`: standard
    deviation of the second by that of the first. `rank_correlation`: Spearman's, over all completions.
    `order_agreement`: pairs with different ranks that both order alike. `num_left_out`: completions with a score of
    only one of the two.

    Raises `DataError` where fewer than two completions have both scores.
    """
    others = {one.example.id: one for one in second}
    matched = [(one, others[one.example.id]) for one in first if one.example.id in others]
    rows: list[tuple[float, float]] = []
    owners: list[str] = []
    agreements: list[tuple[float, str]] = []
    for a, b in matched:
        prompt = a.example.prompt_key
        scores = [np.array(one.scores, dtype=np.float64) for one in (a, b)]  # None becomes NaN
        rows += zip(*(one.tolist() for one in scores), strict=True)
        owners += [prompt] * len(scores[0])
        margins = [[own[i] - own[j] for i, j in a.pairs()] for own in scores]
        agreements += [(float(np.sign(x) == np.sign(y)), prompt) for x, y in zip(*margins, strict=True)
                       if np.isfinite(x) and np.isfinite(y)]  # fmt: skip
    table, prompts = np.asarray(rows, dtype=np.float64).reshape(-1, 2), np.unique(owners, return_inverse=True)[1]
    missing = np.isnan(table)
    there = ~missing.any(axis=1)
    table, prompts = table[there], prompts[there]
    if len(table) < 2:
        raise DataError(
            "there are no scores to compare", got=f"{len(table)} completions with a score of both", need="two at least"
        )
    x, y = table.T
    centred = [x - x.mean(), y - y.mean()]
    squares = [column**2 for column in centred]
    shift = moments_metric("shift", (y - x)[:, None], prompts, lambda means: means[:, 0])
    numbers = (
        shift,
        divided(shift, float(x.std()), "relative_shift"),
        moments_metric(
            "scale_ratio", np.column_stack([centred[0], squares[0], centred[1], squares[1]]), prompts, _ratio
        ),
        correlation_metric(rankdata(x), rankdata(y), prompts, "rank_correlation"),
        accuracy_metric([agrees for agrees, _ in agreements], "order_agreement", [prompt for _, prompt in agreements]),
    )
    num_unmatched = int((missing.sum(axis=1) == 1).sum())
    return Diagnostic({metric.name: metric for metric in numbers}, num_left_out=num_unmatched)


def _ratio(means_R4: Floats) -> Floats:
    return standard_deviation(means_R4[:, 2:]) / standard_deviation(means_R4[:, :2])


def _final_is(summaries: Sequence[Summary]) -> str | None:
    """The first checkpoint whose scores are those of `final` in every suite; some of them must have a score."""
    of_models: dict[str, list[tuple[str, str, tuple[float | None, ...]]]] = {}
    for one in summaries:
        own = of_models.setdefault(one.model, [])
        own += [(one.suite, example.example.id, example.scores) for example in one.examples]
    final = of_models.pop(_FINAL, [])
    if all(score is None for _, _, scores in final for score in scores):
        return None
    return next((name for name, own in of_models.items() if own == final), None)


def _numbers(summary: Summary) -> dict[str, Metric]:
    accuracy = dataclasses.replace(summary.result.headline, name="accuracy")
    every = {"accuracy": accuracy, **summary.length.numbers, **summary.scores.numbers, "ece": summary.statistics.ece}
    return {name: every[name] for name in _OF_CHECKPOINT}


def _step(before: Summary, after: Summary) -> Step:
    try:
        drift = compare_checkpoints(before.examples, after.examples)
    except DataError as error:  # nothing has a score of both: the rest of the report stands
        return Step(before.model, after.model, None, f"{error.summary}: {error.got}")
    left_out = f"{drift.num_left_out} completions have a score of only one of them" if drift.num_left_out else None
    return Step(before.model, after.model, drift, left_out)


def _cells(metrics: Mapping[str, Metric], *with_interval: str) -> dict[str, Any]:
    """Values by name; the table would be too wide to read with all the intervals, which results.json has."""
    return {
        name: bar_item("", metric) | {"count": None} if name in with_interval else metric.value
        for name, metric in metrics.items()
    }
