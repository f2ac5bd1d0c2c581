"""`describe_scores`: how scores are distributed, and where they say nothing.

    scores = describe_scores(scored, temperature=1.3)
    scores.saturated                # Metric: pairs with a margin of more than 5 temperatures
    scores.ties                     # Metric: pairs of different completions with one score

Bradley and Terry's model reads a margin m as the probability sigma(m / T). Beyond 5 T that is above 0.993: a pair
teaches next to nothing any more, and a policy that is optimised against the scores is driven by their size alone.
Equal scores of different completions are what a coarse number format or a collapsed head leaves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from treeward.evaluation.diagnostics.completions import (
    Floats,
    Integers,
    collect_completions,
    collect_pairs,
    prompt_numbers,
)
from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.results import Block, Diagnostic, Metric
from treeward.evaluation.statistics import accuracy_metric, cluster_bootstrap

__all__ = ["SATURATED", "bootstrapped_metric", "describe_scores"]

SATURATED = 5.0
"""Margins beyond this many temperatures are saturated."""

_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_BINS = 40
_MOST_SERIES = 8


def describe_scores(
    scored: Sequence[ScoredExample], model: str = "model", *, temperature: float | None = None
) -> Diagnostic:
    """Distributions by subset. `temperature`: of the model's calibration; None is taken as 1, and the notes say so.

    `saturated_wrong`: the saturated share of the pairs in the wrong order. `ties`: of pairs with different texts.
    `repeated_scores`: completions whose exact score another text has too.
    """
    completions, pairs = collect_completions(scored), collect_pairs(scored)
    scores, prompts = completions.scores, completions.prompts
    texts = _text_numbers(scored)
    owners = zip(completions.examples.tolist(), completions.completions.tolist(), strict=True)
    own_texts = np.array([texts[key] for key in owners], np.int64)
    there = np.isfinite(pairs.margins)
    margins, of_prompts = pairs.margins[there], pairs.prompts[there]
    differ = np.array(
        [texts[i, a] != texts[i, b] for i, (a, b) in zip(pairs.examples.tolist(), pairs.sides.tolist(), strict=True)],
        dtype=bool,
    )[there]
    saturated, wrong = np.abs(margins) > SATURATED * (temperature or 1.0), margins < 0
    assumed = "no temperature is fitted, so it is taken as 1" if temperature is None else None
    numbers = (
        bootstrapped_metric("score_mean", scores, prompts, lambda values: float(values.mean())),
        bootstrapped_metric("score_std", scores, prompts, lambda values: float(values.std())),
        _noted(_share("saturated", saturated, of_prompts), assumed),
        _noted(_share("saturated_wrong", saturated[wrong], of_prompts[wrong]), assumed),
        _share("ties", (margins == 0)[differ], of_prompts[differ]),
        _share("repeated_scores", _repeated(scores, own_texts), prompts),
    )
    subsets = np.array([one.example.subset for one in scored], dtype=object)[completions.examples]
    by_subset = {name: scores[subsets == name] for name in dict.fromkeys(one.example.subset for one in scored)}
    return Diagnostic({metric.name: metric for metric in numbers}, tuple(_figures(scores, by_subset, model)))


def bootstrapped_metric(
    name: str, values: Floats, prompts: Integers, statistic: Callable[[Floats], float | None]
) -> Metric:
    """A statistic of values (N,) or (N, k) with the interval of a bootstrap over prompts (N,)."""
    if len(values) == 0:
        return Metric(name, None, count=0)
    low, high = cluster_bootstrap(values, prompts.tolist(), statistic=statistic)
    return Metric(name, statistic(values), low, high, len(values))


def _figures(scores: Floats, by_subset: dict[str, Floats], model: str) -> list[Block]:
    """A histogram of the largest subsets and a table of all of them."""
    several = by_subset if len(by_subset) > 1 else {}
    drawn = dict(sorted(several.items(), key=lambda item: -len(item[1]))[:_MOST_SERIES]) or {model: scores}
    edges = np.histogram_bin_edges(scores if len(scores) else [0.0, 1.0], _BINS)
    quantiles = {f"q{round(100 * q)}": f"{round(100 * q)} %" for q in _QUANTILES}
    columns = {"name": "Subset", "count": "Completions", "mean": "Mean", "std": "Std. dev.", **quantiles}
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
        {
            "kind": "table",
            "title": "Distribution of scores",
            "columns": [
                {"key": key, "label": label, "format": {"name": "text", "count": "integer"}.get(key, "number")}
                for key, label in columns.items()
            ],
            "rows": [_distribution(name, own, list(quantiles)) for name, own in ({"all": scores} | several).items()],
        },
    ]


def _distribution(name: str, scores: Floats, quantiles: Sequence[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "count": len(scores), "mean": None, "std": None} | dict.fromkeys(quantiles)
    if len(scores) == 0:
        return row
    values = np.quantile(scores, _QUANTILES).tolist()
    return row | {"mean": float(scores.mean()), "std": float(scores.std())} | dict(zip(quantiles, values, strict=True))


def _share(name: str, flags: Any, prompts: Integers) -> Metric:
    return accuracy_metric(flags.astype(float).tolist(), name, prompts.tolist())


def _noted(metric: Metric, note: str | None) -> Metric:
    return metric if note is None else replace(metric, note=note)


def _text_numbers(scored: Sequence[ScoredExample]) -> dict[tuple[int, int], int]:
    """A number for each different conversation, by example and completion."""
    prompts, seen = prompt_numbers([one.example for one in scored]).tolist(), dict[tuple[int, str], int]()
    return {
        (i, j): seen.setdefault((prompts[i], json.dumps(list(text), sort_keys=True, default=str)), len(seen))
        for i, one in enumerate(scored)
        for j, text in enumerate(one.example.completions)
    }


def _repeated(scores: Floats, texts: Integers) -> Any:
    """Which completions have a score that a different conversation has too. (N,) booleans"""
    different = np.unique(np.column_stack([scores, texts.astype(np.float64)]), axis=0)
    values, counts = np.unique(different[:, 0], return_counts=True)
    return np.isin(scores, values[counts > 1])
