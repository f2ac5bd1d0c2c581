"""`find_drift`: what changed from one checkpoint of a run to the next, in every suite that they were evaluated on.

    drift = find_drift(summaries)          # of step_100, step_200, ..., final, as `run_evaluation` gives them
    drift[0].steps[0].drift.shift          # Metric: by how much the scores moved from the first to the second

An accuracy that stands still may hide scores that move or spread: a policy that is trained against one checkpoint and
then against the next sees other rewards for the same replies. Each checkpoint is compared with the next on the same
replies (`treeward.evaluation.diagnostics.scores.compare_checkpoints`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treeward.errors import DataError
from treeward.evaluation.diagnostics.scores import Drift, compare_checkpoints
from treeward.evaluation.report.blocks import format_number
from treeward.evaluation.results import Metric

if TYPE_CHECKING:
    from treeward.evaluation.summary import Summary

__all__ = ["Step", "SuiteDrift", "find_drift"]

_STEP = re.compile(r"step_(\d+)")

_OF_CHECKPOINT = {
    "accuracy": ("Suite's number", "percent"),
    "length_controlled_accuracy": ("Length-controlled accuracy", "percent"),
    "score_mean": ("Mean score", "number"),
    "score_std": ("Standard deviation", "number"),
    "saturated": ("Saturated pairs", "percent"),
    "ece": ("Calibration error", "percent"),
}
_OF_STEP = {
    "shift": ("Scores moved by", "signed"),
    "relative_shift": ("in standard deviations", "signed"),
    "scale_ratio": ("Spread, as a multiple", "number"),
    "order_agreement": ("Pairs ordered alike", "percent"),
    "rank_correlation": ("Rank correlation", "number"),
    "correlation": ("Correlation", "number"),
    "psi": ("Change of the distribution", "number"),
    "shape_psi": ("of its shape", "number"),
}


@dataclass(frozen=True, slots=True)
class Step:
    """From checkpoint `before` to checkpoint `after`. `drift`: None where `problem` says why there is none."""

    before: str
    after: str
    drift: Drift | None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class SuiteDrift:
    """The checkpoints of a run in one suite, in order, and the steps between them.

    `checkpoints`: of each its name and numbers: `accuracy` (the suite's headline), `length_controlled_accuracy`,
    `score_mean`, `score_std`, `saturated`, `ece`.
    """

    suite: str
    title: str
    checkpoints: tuple[tuple[str, tuple[Metric, ...]], ...]
    steps: tuple[Step, ...]

    def plain(self) -> dict[str, Any]:
        """As results.json holds it."""
        return {
            "suite": self.suite,
            "checkpoints": [
                {"model": name, "metrics": [dataclasses.asdict(metric) for metric in metrics]}
                for name, metrics in self.checkpoints
            ],
            "steps": [
                {
                    "before": step.before,
                    "after": step.after,
                    "metrics": [] if step.drift is None else list(map(dataclasses.asdict, step.drift.metrics())),
                    "problem": step.problem,
                }
                for step in self.steps
            ],
        }

    def blocks(self) -> list[dict[str, Any]]:
        """The blocks of a report: a chapter with the accuracies by step, and both tables."""
        note = (
            "Each checkpoint against the next, on the same replies. A change of the distribution (population stability "
            "index) below 0.1 is small, above 0.25 large."
        )
        return [
            {"kind": "text", "title": f"Drift between checkpoints: {self.title}", "markdown": self._words()},
            *self._curves(),
            {
                "kind": "table",
                "title": f"{self.title}: the checkpoints",
                "columns": _columns("checkpoint", _OF_CHECKPOINT),
                "rows": [
                    {"name": name} | _cells(metrics, ("accuracy", "length_controlled_accuracy"))
                    for name, metrics in self.checkpoints
                ],
            },
            {
                "kind": "table",
                "title": f"{self.title}: from one checkpoint to the next",
                "note": note,
                "columns": [*_columns("checkpoints", _OF_STEP), {"key": "problem", "label": "", "format": "text"}],
                "rows": [
                    {"name": f"{step.before} to {step.after}", "problem": step.problem or ""}
                    | _cells(() if step.drift is None else step.drift.metrics(), ("shift",))
                    for step in self.steps
                ],
            },
        ]

    def _words(self) -> str:
        """What a reader should know first."""
        parts = [f"The checkpoints of one run on {self.title}, each against the next."]
        known = [(step, step.drift) for step in self.steps if step.drift is not None]
        if known:
            step, drift = max(known, key=lambda one: abs(one[1].shift.value or 0.0))
            parts.append(
                f"Scores moved most from **{step.before}** to **{step.after}**: by "
                f"{format_number(drift.shift.value, 'signed')} ({format_number(drift.relative_shift.value, 'signed')} "
                f"standard deviations), and {format_number(drift.order_agreement.value, 'percent')} of the pairs are "
                "ordered alike."
            )
        if self.checkpoints[-1][0] == "final":
            parts.append("`final` is the one that was exported.")
        return " ".join(parts)

    def _curves(self) -> list[dict[str, Any]]:
        """The accuracies by step; of checkpoints without a number by their place in order, `final` being none."""
        drawn = [(name, {m.name: m for m in metrics}) for name, metrics in self.checkpoints if name != "final"]
        if len(drawn) < 2:
            return []
        numbers = [match and int(match[1]) for match in (_STEP.fullmatch(name) for name, _ in drawn)]
        known = all(number is not None for number in numbers)
        x = numbers if known else list(range(1, 1 + len(drawn)))
        return [
            {
                "kind": "curves",
                "title": f"{self.title}: accuracy by checkpoint",
                "x_label": "step" if known else "checkpoint",
                "y_label": "accuracy",
                "format": "percent",
                "series": [
                    {
                        "name": label,
                        "x": x,
                        "y": [metrics[key].value for _, metrics in drawn],
                        "low": [metrics[key].low for _, metrics in drawn],
                        "high": [metrics[key].high for _, metrics in drawn],
                    }
                    for key, (label, _) in list(_OF_CHECKPOINT.items())[:2]
                ],
            }
        ]


def find_drift(summaries: Sequence[Summary]) -> list[SuiteDrift]:
    """The drift in each suite between checkpoints, which are the models in the order of their summaries."""
    found = []
    for suite in dict.fromkeys(summary.suite for summary in summaries):
        own = [summary for summary in summaries if summary.suite == suite]
        found.append(
            SuiteDrift(
                suite,
                own[0].title,
                tuple((one.model, _numbers(one)) for one in own),
                tuple(_step(*pair) for pair in zip(own, own[1:], strict=False)),
            )
        )
    return found


def _numbers(summary: Summary) -> tuple[Metric, ...]:
    accuracy = dataclasses.replace(summary.result.headline, name="accuracy")
    controlled, scores = summary.length.length_controlled_accuracy, summary.scores
    return (accuracy, controlled, scores.mean, scores.std, scores.saturated, summary.statistics.ece)


def _step(before: Summary, after: Summary) -> Step:
    try:
        drift = compare_checkpoints(before.examples, after.examples)
    except DataError as error:  # nothing has a score of both: the rest of the report stands
        return Step(before.model, after.model, None, f"{error.summary}: {error.got}")
    left_out = f"{drift.num_unmatched} replies have a score of only one of them" if drift.num_unmatched else None
    return Step(before.model, after.model, drift, left_out)


def _columns(name: str, labels: dict[str, tuple[str, str]]) -> list[dict[str, str]]:
    numbers = [{"key": key, "label": label, "format": format} for key, (label, format) in labels.items()]
    return [{"key": "name", "label": name, "format": "text"}, *numbers]


def _cells(metrics: Sequence[Metric], with_interval: Sequence[str]) -> dict[str, Any]:
    """Values by name; the table would be too wide to read with all the intervals, which results.json has."""
    return {m.name: {"value": m.value, "low": m.low, "high": m.high} if m.name in with_interval else m.value
            for m in metrics}  # fmt: skip
