"""`find_drift`: what changed from one checkpoint of a run to the next, in every suite that they were evaluated on.

    drift = find_drift(summaries)          # of step_100, step_200, ..., final, as `run_evaluation` gives them
    drift[0].steps[0].drift.shift          # Metric: by how much the scores moved from the first to the second

An accuracy that stands still may hide scores that move or spread: a policy that is trained against one checkpoint and
then against the next sees other rewards for the same replies. Each checkpoint is compared with the next on the same
replies (`treeward.evaluation.diagnostics.scores.compare_checkpoints`). `final` is none in that order: it is one of
them, exported, and is compared with the one that has the same scores (`SuiteDrift.final_is`).
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treeward.errors import DataError
from treeward.evaluation.diagnostics.scores import Drift, compare_checkpoints
from treeward.evaluation.findings import percent
from treeward.evaluation.report.blocks import format_number
from treeward.evaluation.results import Metric

if TYPE_CHECKING:
    from treeward.evaluation.summary import Summary

__all__ = ["Step", "SuiteDrift", "find_drift"]

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
    "correlation": ("Correlation", "number"),
    "psi": ("Change of the distribution", "number"),
    "shape_psi": ("Change of its shape", "number"),
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
    `score_mean`, `score_std`, `saturated`, `ece`. `final_is`: the checkpoint whose scores the exported `final` has,
    every one of them, in every suite; None where there is no `final`, or none of the checkpoints has these.
    """

    suite: str
    title: str
    checkpoints: tuple[tuple[str, tuple[Metric, ...]], ...]
    steps: tuple[Step, ...]
    final_is: str | None = None

    def plain(self) -> dict[str, Any]:
        """As results.json holds it."""
        return {
            "suite": self.suite,
            "final_is": self.final_is,
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
            "Each checkpoint against the next, on the same replies. Ordered alike: of pairs of replies to one prompt, "
            "which is all that a reward is used for. A change of the distribution (how differently the scores are "
            "spread over ten bins, the population stability index) below 0.1 is small, above 0.25 large."
        )
        return [
            {"kind": "text", "title": f"Drift between checkpoints: {self.title}", "markdown": self._words()},
            *self._curves(),
            {
                "kind": "table",
                "title": f"{self.title}: the checkpoints",
                "note": "Saturated: the margin is above 5 temperatures, as sure as 99.3 % or more.",
                "columns": _columns("checkpoint", _OF_CHECKPOINT),
                "rows": [
                    {"name": self._named(name)} | _cells(metrics, ("accuracy", "length_controlled_accuracy"))
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
                    | _cells(() if step.drift is None else step.drift.metrics(), ("order_agreement",))
                    for step in self.steps
                ],
            },
        ]

    def export(self) -> str:
        """Which checkpoint `final` is, in words."""
        return f"**{_FINAL} is {self.final_is}**: all their scores are equal."

    def _words(self) -> str:
        """What a reader should know first."""
        parts = [f"The checkpoints of one run on {self.title}, each against the next."]
        known = [(one, one.drift) for one in self.steps if one.drift is not None and not self._is_export(one)]
        if known:
            # An agreement that is not known (no pairs) is no change that was seen.
            step, drift = min(known, key=lambda one: 1.0 if (same := one[1].order_agreement.value) is None else same)
            parts.append(
                f"The order changed most from **{step.before}** to **{step.after}**: {percent(drift.order_agreement)} "
                f"of the pairs are ordered alike, and the spread of the scores is {_times(drift.scale_ratio.value)}."
            )
            moved, most = max(known, key=lambda one: abs(one[1].relative_shift.value or 0.0))
            parts.append(
                "That all scores move together changes nothing, as only differences between replies to one prompt "
                f"count; the most they moved is {format_number(most.relative_shift.value, 'signed')} standard "
                f"deviations, from {moved.before} to {moved.after}."
            )
        if self.final_is is not None:
            parts.append(self.export())
        elif self.checkpoints[-1][0] == _FINAL:
            parts.append(f"`{_FINAL}` is the one that was exported; none of these has its scores.")
        return " ".join(parts)

    def _named(self, checkpoint: str) -> str:
        return f"{_FINAL} (is {self.final_is})" if checkpoint == _FINAL and self.final_is is not None else checkpoint

    def _is_export(self, step: Step) -> bool:
        """Whether it is no step of the training, but a checkpoint and the same as `final`."""
        return step.after == _FINAL and self.final_is is not None

    def _curves(self) -> list[dict[str, Any]]:
        """The accuracies by step; of checkpoints without a number by their place in order, `final` being none."""
        drawn = [(name, {m.name: m for m in metrics}) for name, metrics in self.checkpoints if name != _FINAL]
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
    """The drift in each suite between checkpoints, which are the models in the order of their summaries.

    A last one called `final` is compared with the checkpoint that it is, not with the one before it; which one that is
    goes to the log too.
    """
    found, final_is = [], _final_is(summaries)
    if final_is is not None:
        logger.info("%s is %s: all their scores are equal.", _FINAL, final_is)
    for suite in dict.fromkeys(summary.suite for summary in summaries):
        own = [summary for summary in summaries if summary.suite == suite]
        found.append(
            SuiteDrift(
                suite,
                own[0].title,
                tuple((one.model, _numbers(one)) for one in own),
                tuple(_step(*pair) for pair in _compared(own, final_is)),
                final_is,
            )
        )
    return found


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


def _compared(own: Sequence[Summary], final_is: str | None) -> list[tuple[Summary, Summary]]:
    pairs = list(zip(own, own[1:], strict=False))
    if final_is is None or own[-1].model != _FINAL:
        return pairs
    return [*pairs[:-1], (next(one for one in own if one.model == final_is), own[-1])]


def _times(ratio: float | None) -> str:
    return "not known" if ratio is None else f"{format_number(ratio)} times what it was"


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
