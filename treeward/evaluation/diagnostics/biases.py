"""`diagnose_length`, `diagnose_style`: how much of a score is the length or the markdown of a completion.

    length, style = diagnose_length(scored), diagnose_style(scored)
    length.slope_given_rank             # Metric: score per 100 characters, between equally good completions
    length.length_controlled_accuracy   # Metric: 0.5 for a model that always prefers the longer completion
    length.accuracy_gap                 # Metric: accuracy where the longer is right less that where the shorter is
    style.density_effect                # Metric: score per markdown mark in 100 words, at equal rank and length

Effects are those of a regression within prompts (`diagnostics.completions`). `slope` is positive for a perfect model
too where better completions are longer; `slope_given_rank` holds the rank fixed, and is the bias itself as far as ranks
tell quality. The effects of markdown are after the style control of the Chatbot Arena (Li, Angelopoulos and Chiang
2024, "Does style matter?"): marks inside a code block do not count.

`stratify` gives the accuracy where the better completion has more of a trait (length, markdown), where it has less, and
where both have about as much. A bias lifts the first and lowers the second. Their mean is the accuracy on data in which
the trait tells nothing, so a bias costs accuracy, which is what a gate for checkpoints must see; unlike the regression
of AlpacaEval (Dubois et al. 2024, arXiv 2404.04475) it needs no model of the effect. A pair with a missing score is
left out and counted: the longest completions are those that lack one, so counting them as wrong would look like a bias.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from treeward.evaluation.diagnostics.completions import (
    Completions,
    Floats,
    Pairs,
    collect_completions,
    collect_pairs,
    completion_text,
    correlation_metric,
    in_standard_deviations,
    regress_within_prompts,
    shortened,
)
from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.parts import Part, combined
from treeward.evaluation.report.blocks import bar_item, bars_block
from treeward.evaluation.results import Block, Diagnostic, Metric
from treeward.evaluation.statistics import accuracy_metric
from treeward.scoring.calibration import fit_length_curve

__all__ = ["LENGTH_STRATA", "count_markdown", "diagnose_length", "diagnose_style", "left_out_note", "strata_of"]
__all__ += ["stratify"]

Mask = NDArray[np.bool_]

LENGTH_STRATA = {
    "longer_is_right": "",
    "accuracy_longer_right": "The longer completion is right",
    "accuracy_shorter_right": "The shorter completion is right",
    "accuracy_similar_length": "Lengths within 10 %",
    "accuracy_gap": "",
    "length_controlled_accuracy": "Length-controlled",
}
"""The numbers of `stratify` by length, and the labels of the bars that show them."""

_STYLE_STRATA = {
    "more_markdown_is_right": "",
    "accuracy_more_markdown_right": "More markdown is right",
    "accuracy_less_markdown_right": "Less markdown is right",
    "accuracy_similar_markdown": "About as much",
    "markdown_gap": "",
    "style_controlled_accuracy": "Style-controlled",
}
_SIMILAR = 0.1  # of the larger amount
_MOST_POINTS = 2000
_FEWEST_FOR_A_CURVE = 10

_FENCED = re.compile(r"^[ \t]*(```|~~~).*?(?:^[ \t]*\1[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_MARKS = {
    "headings": re.compile(r"^ {0,3}#{1,6}[ \t]+\S", re.MULTILINE),
    "list_items": re.compile(r"^[ \t]*(?:[-*+]|\d{1,3}[.)])[ \t]+\S", re.MULTILINE),
    "bold": re.compile(r"\*\*(?=\S)[^\n]+?(?<=\S)\*\*|(?<!\w)__(?=\S)[^\n]+?(?<=\S)__(?!\w)"),
    "code": re.compile(r"`[^`\n]+`"),
    "table_rows": re.compile(r"^[ \t]*\|.+\|[ \t]*$", re.MULTILINE),
}


def diagnose_length(scored: Sequence[ScoredExample], model: str = "model") -> Diagnostic:
    """The length diagnostics of scored examples."""
    completions, pairs = collect_completions(scored), collect_pairs(scored)
    scores, lengths, prompts = completions.scores, completions.lengths, completions.prompts
    (slope,) = regress_within_prompts(scores, lengths[:, None] / 100, prompts, ["slope"])
    features = np.column_stack([lengths / 100, completions.places])
    given_rank, _ = regress_within_prompts(scores, features, prompts, ["slope_given_rank", "place"])
    slopes = (
        correlation_metric(lengths, scores, prompts, "pearson"),
        correlation_metric(rankdata(lengths), rankdata(scores), prompts, "spearman"),
        slope,
        given_rank,
        in_standard_deviations(given_rank, completions, "relative_slope"),
    )
    strata = stratify(pairs, pairs.better, pairs.worse, list(LENGTH_STRATA))
    note = (
        "Without a bias the first two are alike; a model that only likes length has 100 %, 0 % and 50 %. "
        "Length-controlled is their mean. Each n counts pairs of completions that both have a score; similar lengths "
        "are within 10 % of the longer."
    )
    bars = _strata_bars("Accuracy by which completion is longer", model, LENGTH_STRATA, strata, pairs, note)
    figures = (bars, _scatter(scored, completions, model))
    return Diagnostic({metric.name: metric for metric in slopes} | strata, figures, pairs.num_failed)


def diagnose_style(scored: Sequence[ScoredExample], model: str = "model") -> Diagnostic:
    """The style diagnostics of scored examples; `effect_of_...` are score per mark, all kinds fitted together."""
    counts = [[count_markdown(completion_text(one)) for one in row.example.completions] for row in scored]
    completions, pairs = collect_completions(scored), collect_pairs(scored)
    own = [counts[i][j] for i, j in zip(completions.examples, completions.completions, strict=True)]
    fixed = np.column_stack([completions.places, completions.lengths / 100])
    densities = np.array([one["density"] for one in own])
    marks = np.array([[one[kind] for kind in _MARKS] for one in own]).reshape(-1, len(_MARKS))
    names = ["density_effect", "place", "length"]
    density, *_ = regress_within_prompts(
        completions.scores, np.column_stack([densities, fixed]), completions.prompts, names
    )
    names = ["place", "effect_of_100_characters", *(f"effect_of_{kind}" for kind in _MARKS)]
    _, *effects = regress_within_prompts(
        completions.scores, np.column_stack([fixed, marks]), completions.prompts, names
    )
    better, worse = (
        np.array([counts[i][j]["density"] for i, j in zip(pairs.examples, side, strict=True)]) for side in pairs.sides.T
    )
    strata = stratify(pairs, better, worse, list(_STYLE_STRATA))
    relative = in_standard_deviations(density, completions, "relative_density_effect")
    note = (
        "Without a bias the first two are alike; a model that only likes markdown has 100 %, 0 % and 50 %. "
        "Style-controlled is their mean. Each n counts pairs of completions that both have a score."
    )
    bars = _strata_bars("Accuracy by which completion has more markdown", model, _STYLE_STRATA, strata, pairs, note)
    numbers = {metric.name: metric for metric in (density, relative, *effects)} | strata
    return Diagnostic(numbers, (bars,), pairs.num_failed)


def count_markdown(text: str) -> dict[str, float]:
    """The marks of a text by kind; `code`: code blocks and inline code; `density`: all marks per 100 words."""
    prose, num_blocks = _FENCED.subn(" ", text)
    counts: dict[str, float] = {kind: len(pattern.findall(prose)) for kind, pattern in _MARKS.items()}
    counts["code"] += num_blocks
    return counts | {"density": 100 * sum(counts.values()) / max(1, len(text.split()))}


def strata_of(better: Floats, worse: Floats) -> tuple[Mask, Mask, Mask]:
    """Disjoint masks (P,) of the pairs whose better completion has clearly more, clearly less, or about as much."""
    differences = better - worse
    similar = np.abs(differences) <= _SIMILAR * np.maximum(better, worse)
    return (differences > 0) & ~similar, (differences < 0) & ~similar, similar


def stratify(pairs: Pairs, better: Floats, worse: Floats, names: Sequence[str]) -> dict[str, Metric]:
    """Accuracies by an amount, not negative, that the better (P,) and the worse (P,) completion of each pair have.

    `names` of the results, in this order: the share of pairs whose better completion has more (of the data, whatever
    the scores); the accuracy where it has clearly more, clearly less, about as much; the first accuracy less the
    second (the gap); the mean of the two (the controlled accuracy). A tie counts as wrong.

    The intervals of gap and controlled accuracy are those of `combined`, the method of variance estimates recovery, and
    a bootstrap over prompts where the two strata share prompts. Where both strata have as many pairs, the controlled
    accuracy is the accuracy of all these pairs, with its interval.
    """
    of_share, of_more, of_less, of_similar, of_gap, of_mean = names
    differ = better != worse
    shares = (better > worse)[differ].astype(np.float64).tolist()
    there, left_out = ~np.isnan(pairs.margins), left_out_note(pairs.num_failed)
    found = {of_share: accuracy_metric(shares, of_share, pairs.prompts[differ].tolist(), of="pairs")}
    pairs, better, worse = pairs.with_scores, better[there], worse[there]
    more, less, similar = strata_of(better, worse)
    named = {of_more: more, of_less: less, of_similar: similar}
    parts = {name: _part(pairs, inside, name) for name, inside in named.items()}
    found |= {name: part.metric for name, part in parts.items()}
    count = int(more.sum() + less.sum())
    if not more.any() or not less.any():
        which = "less" if more.any() else "more"
        note = f"There is no scored pair whose better completion clearly has {which}."
        gap, mean = (Metric(name, None, count=count, note=note) for name in (of_gap, of_mean))
    else:
        note = f"{more.sum()} pairs whose better completion has more, {less.sum()} whose better completion has less."
        # p - q is twice the mean of p and 1 - q, less 1.
        half = combined(of_gap, [parts[of_more], _part(pairs, less, of_less, flipped=True)])
        value, low, high = (None if end is None else 2 * end - 1 for end in (half.value, half.low, half.high))
        gap = Metric(of_gap, value, low, high, count, note)
        both = combined(of_mean, [parts[of_more], parts[of_less]])
        both = _part(pairs, more | less, of_mean).metric if more.sum() == less.sum() else both
        mean = replace(both, note=note)
    for metric in (gap, mean):
        found[metric.name] = replace(metric, note=" ".join(filter(None, (metric.note, left_out))))
    return found


def left_out_note(num_pairs: int) -> str | None:
    """The sentence that says how many pairs without a score are left out; None where none is."""
    if not num_pairs:
        return None
    return f"{num_pairs:,} pair{' has no score and is' if num_pairs == 1 else 's have no score and are'} left out."


def _part(pairs: Pairs, inside: Mask, name: str, *, flipped: bool = False) -> Part:
    outcomes = 1 - pairs.outcomes if flipped else pairs.outcomes
    return Part.of(name, outcomes[inside].tolist(), pairs.prompts[inside].tolist(), "pairs")


def _strata_bars(
    title: str, model: str, labels: Mapping[str, str], strata: Mapping[str, Metric], pairs: Pairs, note: str
) -> Block:
    left_out = left_out_note(pairs.num_failed)
    items = [bar_item(label, strata[name], left_out) for name, label in labels.items() if label]
    return bars_block(title, model, items, note)


def _scatter(scored: Sequence[ScoredExample], completions: Completions, model: str) -> Block:
    """Score against length, of a sample of completions, with the score that length alone predicts."""
    chosen = range(len(completions.scores))
    kept = sorted(random.Random(0).sample(chosen, _MOST_POINTS)) if len(chosen) > _MOST_POINTS else chosen
    points = []
    for i in kept:
        example = scored[completions.examples[i]].example
        text = shortened(completion_text(example.completions[completions.completions[i]]))
        place = {"x": float(completions.lengths[i]), "y": float(completions.scores[i])}
        points.append(place | {"text": text, "id": example.id, "group": example.subset})
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
