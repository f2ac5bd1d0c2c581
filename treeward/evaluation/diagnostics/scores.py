"""`describe_scores`: how scores are distributed, and where they say nothing.

    scores = describe_scores(scored, temperature=1.3)
    scores.saturated                # Metric: pairs with a margin of more than 5 temperatures
    scores.saturated_wrong          # Metric: the same, of the pairs in the wrong order

Bradley and Terry's model reads a margin m as the probability sigma(m / T). Beyond 5 T that is above 0.993: a pair
teaches next to nothing any more, and a policy that is optimised against the scores is driven by their size alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from treeward.evaluation.diagnostics.completions import (
    Floats,
    Integers,
    collect_completions,
    collect_pairs,
    moments_metric,
)
from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.results import Block, Diagnostic, Metric
from treeward.evaluation.statistics import accuracy_metric

__all__ = ["SATURATED", "describe_scores", "standard_deviation"]

SATURATED = 5.0
"""Margins beyond this many temperatures are saturated."""

_BINS = 40
_MOST_SERIES = 8


def describe_scores(
    scored: Sequence[ScoredExample], model: str = "model", *, temperature: float | None = None
) -> Diagnostic:
    """Distributions by subset. `temperature`: of the model's calibration; None is taken as 1, and the notes say so.

    `saturated_wrong`: the saturated share of the pairs in the wrong order.
    """
    completions, pairs = collect_completions(scored), collect_pairs(scored)
    scores, prompts = completions.scores, completions.prompts
    centred = scores - scores.mean() if len(scores) else scores
    there = np.isfinite(pairs.margins)
    margins, of_prompts = pairs.margins[there], pairs.prompts[there]
    saturated, wrong = np.abs(margins) > SATURATED * (temperature or 1.0), margins < 0
    assumed = "no temperature is fitted, so it is taken as 1" if temperature is None else None
    numbers = (
        moments_metric("score_mean", scores[:, None], prompts, lambda means: means[:, 0]),
        moments_metric("score_std", np.column_stack([centred, centred**2]), prompts, standard_deviation),
        _noted(_share("saturated", saturated, of_prompts), assumed),
        _noted(_share("saturated_wrong", saturated[wrong], of_prompts[wrong]), assumed),
    )
    subsets = np.array([one.example.subset for one in scored], dtype=object)[completions.examples]
    by_subset = {name: scores[subsets == name] for name in dict.fromkeys(one.example.subset for one in scored)}
    return Diagnostic({metric.name: metric for metric in numbers}, tuple(_figures(scores, by_subset, model)))


def standard_deviation(means_R2: Floats) -> Floats:
    """From the means of values and of their squares (R, 2), for `moments_metric`."""
    found: Floats = np.sqrt((means_R2[:, 1] - means_R2[:, 0] ** 2).clip(0.0))
    return found


def _figures(scores: Floats, by_subset: dict[str, Floats], model: str) -> list[Block]:
    """A histogram of the largest subsets."""
    several = by_subset if len(by_subset) > 1 else {}
    drawn = dict(sorted(several.items(), key=lambda item: -len(item[1]))[:_MOST_SERIES]) or {model: scores}
    edges = np.histogram_bin_edges(scores if len(scores) else [0.0, 1.0], _BINS)
    return [
        {
            "kind": "histogram",
            "title": "Scores by subset" if several else "Scores",
            "note": "Every completion. Spikes and walls are completions that the model cannot tell apart.",
            "edges": edges.tolist(),
            "series": [{"name": name, "counts": np.histogram(own, edges)[0].tolist()} for name, own in drawn.items()],
            "x_label": "score",
            "y_label": "completions",
            "mark": None,
        },
    ]


def _share(name: str, flags: Any, prompts: Integers) -> Metric:
    return accuracy_metric(flags.astype(float).tolist(), name, prompts.tolist())


def _noted(metric: Metric, note: str | None) -> Metric:
    return metric if note is None else replace(metric, note=note)
