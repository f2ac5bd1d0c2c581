"""`find_drift`: what changed from one checkpoint of a run to the next, in every suite that they were evaluated on.

    drift = find_drift(summaries)          # of step_100, step_200, ..., final, as `run_evaluation` gives them
    drift[0].checkpoints[1].numbers["order_agreement"]   # Metric: pairs that the second orders as the first does

An accuracy that stands still may hide scores that move or spread: a policy that is trained against one checkpoint and
then against the next sees other rewards for the same completions. `final` is one of the checkpoints, exported: it is
compared with the one that has the same scores (`SuiteDrift.final_is`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from treeward.evaluation.diagnostics.labels import LABELS
from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.findings import percent
from treeward.evaluation.report.blocks import bar_item, table_block
from treeward.evaluation.results import Block, Metric
from treeward.evaluation.statistics import accuracy_metric
from treeward.evaluation.summary import Summary

logger = logging.getLogger(__name__)

_FINAL = "final"
_OWN = ("length_controlled_accuracy", "ece", "score_mean", "score_std")
_COLUMNS = {
    "name": ("Checkpoint", "text"),
    "accuracy": ("Accuracy", "percent"),
    **{name: LABELS[name][:2] for name in _OWN},
    "before": ("Against", "text"),
    "order_agreement": ("Pairs ordered alike", "percent"),
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint: its own numbers, and its `order_agreement` with another one, `before` (None: there is none)."""

    model: str
    before: str | None
    numbers: Mapping[str, Metric]


@dataclass(frozen=True, slots=True)
class SuiteDrift:
    """The checkpoints of a run in one suite, in order.

    `final_is`: the checkpoint whose scores the exported `final` has in every suite; None where there is no `final`, or
    no checkpoint has its scores.
    """

    suite: str
    title: str
    checkpoints: tuple[Checkpoint, ...]
    final_is: str | None = None

    def blocks(self) -> list[Block]:
        """The blocks of a report: a chapter with a row for each checkpoint."""
        rows: list[Block] = []
        for one in self.checkpoints:
            cells = {key: bar_item("", one.numbers[key]) | {"count": None} for key in _COLUMNS if key in one.numbers}
            name = f"{_FINAL} (is {self.final_is})" if one.model == _FINAL and self.final_is else one.model
            rows.append(cells | {"name": name, "before": one.before})
        note = (
            "The last columns compare each checkpoint with another one, on the same completions. Ordered alike: of "
            "pairs of completions of one prompt, which is all that a reward is used for."
        )
        return [
            {"kind": "text", "title": f"Drift between checkpoints: {self.title}", "markdown": self._words()},
            table_block(f"{self.title}: the checkpoints", _COLUMNS, rows, note),
        ]

    def export(self) -> str | None:
        """Which checkpoint `final` is, in words."""
        return None if self.final_is is None else f"**{_FINAL} is {self.final_is}**: all their scores are equal."

    def _words(self) -> str:
        """The largest change of the order, and which checkpoint `final` is."""
        parts = [f"The checkpoints of one run on {self.title}, each against the next."]
        trained = [one for one in self.checkpoints if one.before and (one.model != _FINAL or self.final_is is None)]
        if trained:
            # An unknown agreement (no pairs) is no change.
            turned = min(trained, key=lambda one: (value := one.numbers["order_agreement"].value) is None or value)
            parts.append(
                f"The order changed most from **{turned.before}** to **{turned.model}**: "
                f"{percent(turned.numbers['order_agreement'])} of the pairs are ordered alike."
            )
        if self.final_is is None and any(one.model == _FINAL for one in self.checkpoints):
            parts.append(f"`{_FINAL}` was exported; none of these checkpoints has its scores.")
        return " ".join([*parts, *filter(None, [self.export()])])


def find_drift(summaries: Sequence[Summary]) -> list[SuiteDrift]:
    """The drift in each suite between checkpoints, which are the models in the order of their summaries.

    A last one called `final` is compared with the checkpoint that it is, and the log says which.
    """
    found, final_is = [], _final_is(summaries)
    if final_is is not None:
        logger.info("%s is %s: all their scores are equal.", _FINAL, final_is)
    for suite in dict.fromkeys(summary.suite for summary in summaries):
        models = [summary for summary in summaries if summary.suite == suite]
        checkpoints = []
        for before, one in zip([None, *models], models, strict=False):
            if final_is is not None and one.model == _FINAL:
                before = next(other for other in models if other.model == final_is)
            every = {**one.length.numbers, **one.statistics.numbers}
            numbers = {"accuracy": replace(one.result.headline, name="accuracy")} | {key: every[key] for key in _OWN}
            if before is not None:
                numbers["order_agreement"] = order_agreement(before.examples, one.examples)
            checkpoints.append(Checkpoint(one.model, None if before is None else before.model, numbers))
        found.append(SuiteDrift(suite, models[0].title, tuple(checkpoints), final_is))
    return found


def order_agreement(first: Sequence[ScoredExample], second: Sequence[ScoredExample]) -> Metric:
    """The share of pairs with different ranks that both order alike, of examples with the same id."""
    others, agreements, prompts = {one.example.id: one for one in second}, [], []
    for one in first:
        other = others.get(one.example.id)
        scores = np.array([one.scores, (other or one).scores], dtype=np.float64)  # None becomes NaN
        for i, j in one.pairs() if other else ():
            x, y = np.sign(scores[:, i] - scores[:, j])
            if np.isfinite([x, y]).all():
                agreements.append(float(x == y))
                prompts.append(one.example.prompt_key)
    return accuracy_metric(agreements, "order_agreement", prompts, of="pairs")


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
