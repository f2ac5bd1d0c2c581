"""`diagnose_length`: how much of a reward model's score is the length of the reply.

    length = diagnose_length(scored)
    length.slope_given_rank             # Metric: score per 100 characters, between equally good replies to a prompt
    length.length_controlled_accuracy   # Metric: 0.5 for a model that always prefers the longer reply
    length.metrics(), length.blocks("my-model")

Which number to read:

- `slope` answers "what do 100 characters more come with, within a prompt?". If the better replies of the data are
  the longer ones, it is positive for a perfect model too. `slope_given_rank` holds the rank of the reply fixed, and
  is the length bias itself as far as ranks tell quality; `relative_slope` is the same in standard deviations of the
  scores within a prompt, so that models of different scales can be compared.
- Pairs fall into three strata: the better reply is longer, shorter, or within 10 % of the other (of the longer one's
  characters). `length_controlled_accuracy` is the mean of the accuracies of the first two, whatever their sizes. All
  of them are of pairs whose replies both have a score: see `treeward.evaluation.diagnostics.strata`.

Why that, and not the regression of AlpacaEval (Dubois et al. 2024, arXiv 2404.04475), which predicts the outcome at
equal lengths? The mean of the strata is the accuracy on data in which length tells nothing, so a bias costs accuracy,
which is what a gate for checkpoints must see; it needs no model of the effect, and has a value where every pair is
right. What a model does at equal lengths is `accuracy_similar_length`, on the pairs where it can be seen.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from treeward.evaluation.diagnostics.blocks import accuracy_bars, metrics_table
from treeward.evaluation.diagnostics.replies import (
    Replies,
    collect_pairs,
    collect_replies,
    correlation_metric,
    in_standard_deviations,
    mid_ranks,
    regress_within_prompts,
    reply_text,
    shortened,
)
from treeward.evaluation.diagnostics.strata import left_out_note, stratify
from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.results import Metric
from treeward.scoring.calibration import fit_length_curve

__all__ = ["LengthDiagnostics", "LengthPoint", "diagnose_length", "length_controlled_accuracy"]

_PER_CHARACTERS = 100
_MOST_POINTS = 2000
_FEWEST_FOR_A_CURVE = 10


@dataclass(frozen=True, slots=True)
class LengthPoint:
    """A reply in the scatter: `length` in characters, the `text` shortened; `id` and `group` of its example."""

    length: float
    score: float
    text: str
    id: str
    group: str


@dataclass(frozen=True, slots=True)
class LengthDiagnostics:
    """Length and score; the module says how to read them.

    Slopes are per 100 characters. `longer_is_right`: of the data, not of the model: in how many pairs of different
    length the better reply is the longer. `accuracy_gap`: accuracy where the longer is right less that where the
    shorter is. `points`: a sample of replies; `curve`: (lengths, scores) of the score that length alone predicts,
    smoothed, None where there is too little. A reply without a score is in no slope, and its pairs are in no accuracy:
    `num_failed` such replies, `num_left_out` such pairs.
    """

    pearson: Metric
    spearman: Metric
    slope: Metric
    slope_given_rank: Metric
    relative_slope: Metric
    longer_is_right: Metric
    accuracy_longer_right: Metric
    accuracy_shorter_right: Metric
    accuracy_similar_length: Metric
    accuracy_gap: Metric
    length_controlled_accuracy: Metric
    num_failed: int
    num_left_out: int
    points: tuple[LengthPoint, ...] = ()
    curve: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    def metrics(self) -> tuple[Metric, ...]:
        """All numbers, in the order of the fields."""
        values = (getattr(self, name) for name in self.__slots__)
        return tuple(value for value in values if isinstance(value, Metric))

    def blocks(self, model: str = "model") -> list[dict[str, Any]]:
        """The blocks of a report: strata, scatter, table."""
        strata = {
            "The longer reply is right": self.accuracy_longer_right,
            "The shorter reply is right": self.accuracy_shorter_right,
            "Lengths within 10 %": self.accuracy_similar_length,
            "Length-controlled": self.length_controlled_accuracy,
        }
        points = [
            {"x": point.length, "y": point.score, "text": point.text, "id": point.id, "group": point.group}
            for point in self.points
        ]
        series: dict[str, Any] = {"name": model, "points": points}
        if self.curve is not None:
            series["line"] = {"x": list(self.curve[0]), "y": list(self.curve[1])}
        return [
            accuracy_bars(
                "Accuracy by which reply is longer",
                model,
                strata,
                "Without a bias the first two are alike; a model that only likes length has 100 %, 0 % and 50 %. "
                "Length-controlled is their mean. Each n counts pairs of replies that both have a score; similar "
                "lengths are within 10 % of the longer.",
                item_note=left_out_note(self.num_left_out),
            ),
            {
                "kind": "scatter",
                "title": "Score against length",
                "note": "A point is a reply. The line is the score that length alone predicts: flat without a bias.",
                "x_label": "characters of the reply",
                "y_label": "score",
                "series": [series],
            },
            metrics_table("Length in numbers", model, self.metrics()),
        ]


def diagnose_length(scored: Sequence[ScoredExample], *, seed: int = 0) -> LengthDiagnostics:
    """The length diagnostics of scored examples; `seed` chooses the points of the scatter."""
    replies, pairs = collect_replies(scored), collect_pairs(scored)
    per_100 = replies.lengths / _PER_CHARACTERS
    (slope,) = regress_within_prompts(replies.scores, per_100[:, None], replies.prompts, ["slope"])
    given_rank, _ = regress_within_prompts(
        replies.scores, np.column_stack([per_100, replies.places]), replies.prompts, ["slope_given_rank", "place"]
    )
    strata = stratify(pairs, pairs.better, pairs.worse)
    return LengthDiagnostics(
        pearson=correlation_metric(replies.lengths, replies.scores, replies.prompts, "pearson"),
        spearman=correlation_metric(mid_ranks(replies.lengths), mid_ranks(replies.scores), replies.prompts, "spearman"),
        slope=slope,
        slope_given_rank=given_rank,
        relative_slope=in_standard_deviations(given_rank, replies, "relative_slope"),
        longer_is_right=replace(strata.share_more, name="longer_is_right"),
        accuracy_longer_right=replace(strata.better_has_more, name="accuracy_longer_right"),
        accuracy_shorter_right=replace(strata.better_has_less, name="accuracy_shorter_right"),
        accuracy_similar_length=replace(strata.similar, name="accuracy_similar_length"),
        accuracy_gap=replace(strata.gap, name="accuracy_gap"),
        length_controlled_accuracy=replace(strata.controlled, name="length_controlled_accuracy"),
        num_failed=replies.num_failed,
        num_left_out=strata.num_left_out,
        points=_points(scored, replies, seed),
        curve=_curve(replies),
    )


def length_controlled_accuracy(scored: Sequence[ScoredExample]) -> Metric:
    """(accuracy where the better reply is longer + accuracy where it is shorter) / 2, of scored pairs.

    Similar lengths are left out. No value where one of the two has no pair. Intervals:
    `treeward.evaluation.diagnostics.strata`.
    """
    pairs = collect_pairs(scored)
    return replace(stratify(pairs, pairs.better, pairs.worse).controlled, name="length_controlled_accuracy")


def _points(scored: Sequence[ScoredExample], replies: Replies, seed: int) -> tuple[LengthPoint, ...]:
    chosen = range(len(replies.scores))
    kept = sorted(random.Random(seed).sample(chosen, _MOST_POINTS)) if len(chosen) > _MOST_POINTS else chosen
    points = []
    for i in kept:
        example = scored[replies.examples[i]].example
        text = shortened(reply_text(example.completions[replies.completions[i]]))
        points.append(
            LengthPoint(float(replies.lengths[i]), float(replies.scores[i]), text, example.id, example.subset)
        )
    return tuple(points)


def _curve(replies: Replies) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    if len(np.unique(replies.lengths)) < _FEWEST_FOR_A_CURVE or np.ptp(replies.scores) == 0:
        return None
    fitted = fit_length_curve(replies.scores, replies.lengths, unit="characters")
    return None if fitted is None else (tuple(fitted.lengths), tuple(fitted.values))
