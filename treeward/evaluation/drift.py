"""`find_drift`: what changed from one checkpoint of a run to the next, in every suite that they were evaluated on.

    drift = find_drift(summaries)          # of step_100, step_200, ..., final, as `run_evaluation` gives them
    drift[0].steps[0].drift.shift          # Metric: by how much the scores moved from the first to the second

An accuracy that stands still may hide scores that move or spread: a policy that is trained against one checkpoint and
then against the next sees other rewards for the same completions. `final` is one of the checkpoints, exported: it is
compared with the one that has the same scores (`SuiteDrift.final_is`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from treeward.evaluation.diagnostics.labels import LABELS
from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.findings import percent
from treeward.evaluation.report.blocks import bar_item, format_number, table_block
from treeward.evaluation.results import Block, Diagnostic, Metric
from treeward.evaluation.statistics import accuracy_metric, cluster_bootstrap
from treeward.evaluation.summary import Summary

__all__ = ["Step", "SuiteDrift", "compare_checkpoints", "find_drift"]

logger = logging.getLogger(__name__)

_FINAL = "final"
_STEP = re.compile(r"step_(\d+)")
_OF_CHECKPOINT = ("accuracy", "length_controlled_accuracy", "score_mean", "score_std", "saturated", "ece")
_COLUMNS = {
    "name": ("checkpoint", "text"),
    "accuracy": ("Accuracy", "percent"),
    **{name: LABELS[name][:2] for name in ("length_controlled_accuracy", "ece", "score_mean", "score_std")},
    "before": ("Against", "text"),
    "order_agreement": ("Pairs ordered alike", "percent"),
}


class Step(NamedTuple):
    """From checkpoint `before` to checkpoint `after`."""

    before: str
    after: str
    drift: Diagnostic


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
        checkpoints = [{"model": name, "metrics": _listed(numbers)} for name, numbers in self.checkpoints.items()]
        steps = [
            {"before": one.before, "after": one.after, "metrics": _listed(one.drift.numbers)}
            | {"num_left_out": one.drift.num_left_out}
            for one in self.steps
        ]
        return {"suite": self.suite, "final_is": self.final_is, "checkpoints": checkpoints, "steps": steps}

    def blocks(self) -> list[Block]:
        """The blocks of a report: a chapter with the accuracies by step, and a row for each checkpoint."""
        rows: list[Block] = []
        for name, numbers in self.checkpoints.items():
            step = next((one for one in self.steps if one.after == name), None)
            every = {**numbers, **(step.drift.numbers if step else {})}
            cells = {key: bar_item("", every[key]) | {"count": None} for key in _COLUMNS if key in every}
            shown = f"{_FINAL} (is {self.final_is})" if name == _FINAL and self.final_is else name
            rows.append(cells | {"name": shown, "before": step and step.before})
        note = (
            "The last columns compare each checkpoint with another one, on the same completions. Ordered alike: of "
            "pairs of completions of one prompt, which is all that a reward is used for."
        )
        return [
            {"kind": "text", "title": f"Drift between checkpoints: {self.title}", "markdown": self._words()},
            *self._curves(),
            table_block(f"{self.title}: the checkpoints", _COLUMNS, rows, note),
        ]

    def export(self) -> str | None:
        """Which checkpoint `final` is, in words."""
        return None if self.final_is is None else f"**{_FINAL} is {self.final_is}**: all their scores are equal."

    def _words(self) -> str:
        """The largest change of the order, and which checkpoint `final` is."""
        parts = [f"The checkpoints of one run on {self.title}, each against the next."]
        if trained := [step for step in self.steps if step.after != _FINAL or self.final_is is None]:
            # An unknown agreement (no pairs) is no change.
            turned = min(trained, key=lambda one: (value := one.drift.order_agreement.value) is None or value)
            parts.append(
                f"The order changed most from **{turned.before}** to **{turned.after}**: "
                f"{percent(turned.drift.order_agreement)} of the pairs are ordered alike, and the spread of the scores "
                f"is {format_number(turned.drift.scale_ratio.value)} times what it was. A common shift of all scores "
                "changes nothing, as only differences between completions of one prompt count."
            )
        if self.final_is is None and _FINAL in self.checkpoints:
            parts.append(f"`{_FINAL}` was exported; none of these checkpoints has its scores.")
        return " ".join([*parts, *filter(None, [self.export()])])

    def _curves(self) -> list[Block]:
        """The accuracies by step, or by place in order where the names have no step; `final` is left out."""
        drawn = {name: numbers for name, numbers in self.checkpoints.items() if name != _FINAL}
        if len(drawn) < 2:
            return []
        steps = [int(match[1]) for match in map(_STEP.fullmatch, drawn) if match]
        known = len(steps) == len(drawn)
        series = []
        for key in ("accuracy", "length_controlled_accuracy"):
            own = [numbers[key] for numbers in drawn.values()]
            ends = {"y": [m.value for m in own], "low": [m.low for m in own], "high": [m.high for m in own]}
            series.append({"name": _COLUMNS[key][0], "x": steps if known else list(range(1, 1 + len(drawn)))} | ends)
        title, axis = f"{self.title}: accuracy by checkpoint", "step" if known else "checkpoint"
        block: Block = {"kind": "curves", "title": title, "x_label": axis, "y_label": "accuracy", "format": "percent"}
        return [block | {"series": series}]


def find_drift(summaries: Sequence[Summary]) -> list[SuiteDrift]:
    """The drift in each suite between checkpoints, which are the models in the order of their summaries.

    A last one called `final` is compared with the checkpoint that it is, and the log says which.
    """
    found, final_is = [], _final_is(summaries)
    if final_is is not None:
        logger.info("%s is %s: all their scores are equal.", _FINAL, final_is)
    for suite in dict.fromkeys(summary.suite for summary in summaries):
        own = {summary.model: summary for summary in summaries if summary.suite == suite}
        models, checkpoints = list(own.values()), {}
        for name, one in own.items():
            accuracy = {"accuracy": replace(one.result.headline, name="accuracy")}
            every = {**one.length.numbers, **one.statistics.numbers, **accuracy}
            checkpoints[name] = {key: every[key] for key in _OF_CHECKPOINT}
        steps = []
        for before, after in zip(models, models[1:], strict=False):
            first = own[final_is] if final_is is not None and after.model == _FINAL else before
            steps.append(Step(first.model, after.model, compare_checkpoints(first.examples, after.examples)))
        found.append(SuiteDrift(suite, models[0].title, checkpoints, tuple(steps), final_is))
    return found


def compare_checkpoints(first: Sequence[ScoredExample], second: Sequence[ScoredExample]) -> Diagnostic:
    """The drift from `first` to `second`, matched by the examples' ids; examples of only one of them are left out.

    `shift`: mean of second less first. `scale_ratio`: standard deviation of the second by that of the first.
    `order_agreement`: pairs with different ranks that both order alike. `num_left_out`: completions with a score of
    only one of the two.
    """
    others = {one.example.id: one for one in second}
    rows: list[tuple[float, float]] = []
    owners: list[str] = []
    agreements: list[tuple[float, str]] = []
    for a in first:
        if (b := others.get(a.example.id)) is None:
            continue
        scores = np.array([a.scores, b.scores], dtype=np.float64)  # None becomes NaN
        rows += [(x, y) for x, y in scores.T.tolist()]
        owners += [a.example.prompt_key] * scores.shape[1]
        for i, j in a.pairs():
            x, y = scores[:, i] - scores[:, j]
            if np.isfinite(x) and np.isfinite(y):
                agreements.append((float(np.sign(x) == np.sign(y)), a.example.prompt_key))
    table = np.array(rows, dtype=np.float64).reshape(-1, 2)
    num_missing = np.isnan(table).sum(axis=1)
    (x, y), count = table[num_missing == 0].T, int((num_missing == 0).sum())
    prompts = [owner for owner, missing in zip(owners, num_missing, strict=True) if not missing]
    low, high = cluster_bootstrap(y - x, prompts) if count else (None, None)
    numbers = (
        Metric("shift", float((y - x).mean()) if count else None, low, high, count),
        Metric("scale_ratio", float(y.std() / x.std()) if count and x.std() > 0 else None, count=count),
        accuracy_metric([agrees for agrees, _ in agreements], "order_agreement", [prompt for _, prompt in agreements]),
    )
    return Diagnostic({metric.name: metric for metric in numbers}, num_left_out=int((num_missing == 1).sum()))


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


def _listed(numbers: Mapping[str, Metric]) -> list[dict[str, Any]]:
    return [asdict(metric) for metric in numbers.values()]
