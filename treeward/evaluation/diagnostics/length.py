"""`diagnose_length`: how much of a reward model's score is the length of the completion.

    length = diagnose_length(scored)
    length.slope_given_rank             # Metric: score per 100 characters, between equally good completions
    length.length_controlled_accuracy   # Metric: 0.5 for a model that always prefers the longer completion
    length.accuracy_gap                 # Metric: accuracy where the longer is right less that where the shorter is

Which number to read:

- `slope` answers "what do 100 characters more come with, within a prompt?". If the better completions of the data are
  the longer ones, it is positive for a perfect model too. `slope_given_rank` holds the rank fixed, and is the length
  bias itself as far as ranks tell quality; `relative_slope` is the same in standard deviations of the scores within a
  prompt, so that models of different scales can be compared.
- Pairs fall into three strata: the better completion is longer, shorter, or within 10 % of the other.
  `length_controlled_accuracy` is the mean of the accuracies of the first two, whatever their sizes. Pairs without a
  score are left out: see `treeward.evaluation.diagnostics.strata`.

Why that, and not the regression of AlpacaEval (Dubois et al. 2024, arXiv 2404.04475), which predicts the outcome at
equal lengths? The mean of the strata is the accuracy on data in which length tells nothing, so a bias costs accuracy,
which is what a gate for checkpoints must see; it needs no model of the effect, and has a value where every pair is
right. What a model does at equal lengths is `accuracy_similar_length`, on the pairs where it can be seen.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from scipy.stats import rankdata

from treeward.evaluation.diagnostics.blocks import bar_item, bars_block
from treeward.evaluation.diagnostics.completions import (
    Completions,
    collect_completions,
    collect_pairs,
    completion_text,
    correlation_metric,
    in_standard_deviations,
    regress_within_prompts,
    shortened,
)
from treeward.evaluation.diagnostics.strata import left_out_note, stratify
from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.results import Block, Diagnostic
from treeward.scoring.calibration import fit_length_curve

__all__ = ["STRATA_NAMES", "diagnose_length"]

STRATA_NAMES = (
    "longer_is_right",
    "accuracy_longer_right",
    "accuracy_shorter_right",
    "accuracy_similar_length",
    "accuracy_gap",
    "length_controlled_accuracy",
)
"""The names of `stratify` by length. `longer_is_right` is of the data, not of the model."""

_PER_CHARACTERS = 100
_MOST_POINTS = 2000
_FEWEST_FOR_A_CURVE = 10


def diagnose_length(scored: Sequence[ScoredExample], model: str = "model", *, seed: int = 0) -> Diagnostic:
    """The length diagnostics of scored examples; `seed` chooses the points of the scatter."""
    completions, pairs = collect_completions(scored), collect_pairs(scored)
    scores, lengths, prompts = completions.scores, completions.lengths, completions.prompts
    per_100 = lengths / _PER_CHARACTERS
    (slope,) = regress_within_prompts(scores, per_100[:, None], prompts, ["slope"])
    given_rank, _ = regress_within_prompts(
        scores, np.column_stack([per_100, completions.places]), prompts, ["slope_given_rank", "place"]
    )
    slopes = (
        correlation_metric(lengths, scores, prompts, "pearson"),
        correlation_metric(rankdata(lengths), rankdata(scores), prompts, "spearman"),
        slope,
        given_rank,
        in_standard_deviations(given_rank, completions, "relative_slope"),
    )
    numbers = {metric.name: metric for metric in slopes} | stratify(pairs, pairs.better, pairs.worse, STRATA_NAMES)
    shown = {
        "The longer completion is right": numbers["accuracy_longer_right"],
        "The shorter completion is right": numbers["accuracy_shorter_right"],
        "Lengths within 10 %": numbers["accuracy_similar_length"],
        "Length-controlled": numbers["length_controlled_accuracy"],
    }
    left_out = left_out_note(pairs.num_failed)
    bars = bars_block(
        "Accuracy by which completion is longer",
        model,
        [bar_item(label, metric, left_out) for label, metric in shown.items()],
        "Without a bias the first two are alike; a model that only likes length has 100 %, 0 % and 50 %. "
        "Length-controlled is their mean. Each n counts pairs of completions that both have a score; similar lengths "
        "are within 10 % of the longer.",
    )
    return Diagnostic(numbers, (bars, _scatter(scored, completions, model, seed)), pairs.num_failed)


def _scatter(scored: Sequence[ScoredExample], completions: Completions, model: str, seed: int) -> Block:
    """Score against length, of a sample of completions, with the score that length alone predicts."""
    chosen = range(len(completions.scores))
    kept = sorted(random.Random(seed).sample(chosen, _MOST_POINTS)) if len(chosen) > _MOST_POINTS else chosen
    points = []
    for i in kept:
        example = scored[completions.examples[i]].example
        points.append(
            {
                "x": float(completions.lengths[i]),
                "y": float(completions.scores[i]),
                "text": shortened(completion_text(example.completions[completions.completions[i]])),
                "id": example.id,
                "group": example.subset,
            }
        )
    series: Block = {"name": model, "points": points}
    if len(np.unique(completions.lengths)) >= _FEWEST_FOR_A_CURVE and np.ptp(completions.scores) > 0:
        curve = fit_length_curve(completions.scores, completions.lengths, unit="characters")
        if curve is not None:
            series["line"] = {"x": list(curve.lengths), "y": list(curve.values)}
    return {
        "kind": "scatter",
        "title": "Score against length",
        "note": "A point is a completion. The line is the score that length alone predicts: flat without a bias.",
        "x_label": "characters of the completion",
        "y_label": "score",
        "series": [series],
    }
