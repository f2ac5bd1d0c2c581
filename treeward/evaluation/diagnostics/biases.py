"""`diagnose_length`, `diagnose_style`: how much of a score is the length or the markdown of a completion.

    length, style = diagnose_length(scored), diagnose_style(scored)
    length.slope_given_rank             # Metric: score per 100 characters, between equally good completions
    length.length_controlled_accuracy   # Metric: 0.5 for a model that always prefers the longer completion
    length.accuracy_gap                 # Metric: accuracy where the longer is right less that where the shorter is
    style.density_effect                # Metric: score per markdown mark in 100 words, at equal rank and length

Slopes are those of a regression within prompts (`diagnostics.completions`) that holds the rank fixed, as better
completions are longer in most data: they are the bias itself as far as ranks tell quality. That of markdown follows the
style control of the Chatbot Arena (Li, Angelopoulos and Chiang 2024, "Does style matter?"): marks inside a code block
do not count.

`stratify` gives the accuracy where the better completion has more of a trait (length, markdown), where it has less, and
where both have about as much. A bias lifts the first and lowers the second. Their mean is the accuracy on data in which
the trait tells nothing, so a bias costs accuracy, which is what a gate for checkpoints must see; unlike the regression
of AlpacaEval (Dubois et al. 2024, arXiv 2404.04475) it needs no model of the effect. A pair with a missing score is
left out and counted: the longest completions are those that lack one, so counting them as wrong would look like a bias.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeward.evaluation.diagnostics.completions import (
    Pairs,
    collect_pairs,
    completion_text,
    prompt_numbers,
    residuals_within_prompts,
    slopes_within_prompts,
)
from treeward.evaluation.diagnostics.labels import LABELS
from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.report.blocks import bar_item, bars_block
from treeward.evaluation.results import Block, Diagnostic, Metric
from treeward.evaluation.statistics import Part, accuracy_metric, cluster_bootstrap, combined

_SIMILAR = 0.1  # of the larger amount
_MOST_POINTS, _FEWEST_FOR_A_POINT = 10, 20

_FENCED = re.compile(r"^[ \t]*(```|~~~).*?(?:^[ \t]*\1[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_MARKS = (
    re.compile(r"^ {0,3}#{1,6}[ \t]+\S", re.MULTILINE),  # headings
    re.compile(r"^[ \t]*(?:[-*+]|\d{1,3}[.)])[ \t]+\S", re.MULTILINE),  # list items
    re.compile(r"\*\*(?=\S)[^\n]+?(?<=\S)\*\*|(?<!\w)__(?=\S)[^\n]+?(?<=\S)__(?!\w)"),  # bold
    re.compile(r"`[^`\n]+`"),
    re.compile(r"^[ \t]*\|.+\|[ \t]*$", re.MULTILINE),  # table rows
)


class Trait(NamedTuple):
    """What a model may like beyond quality: names of the slopes and of the strata, title and note of the figure."""

    slopes: tuple[str, str]
    strata: tuple[str, ...]
    title: str
    note: str


_FAIR = (
    "Without a bias the first two are alike; a model that only likes {} has 100 %, 0 % and 50 %. The last is their "
    "mean. Each n counts pairs of completions that both have a score."
)
LENGTH = Trait(
    ("slope_given_rank", "relative_slope"),
    ("longer_is_right", "accuracy_longer_right", "accuracy_shorter_right", "accuracy_similar_length", "accuracy_gap",
     "length_controlled_accuracy"),
    "Accuracy by which completion is longer",
    f"{_FAIR.format('length')} Similar is within 10 % of the longer.",
)  # fmt: skip
STYLE = Trait(
    ("density_effect", "relative_density_effect"),
    ("more_markdown_is_right", "accuracy_more_markdown_right", "accuracy_less_markdown_right",
     "accuracy_similar_markdown", "markdown_gap", "style_controlled_accuracy"),
    "Accuracy by which completion has more markdown",
    f"{_FAIR.format('markdown')} These are completions with the markdown that they have, often few marks. Rewrites "
    "(--perturbations) add it to completions that have none; where the two differ, a policy will meet the rewrites.",
)  # fmt: skip


def diagnose_length(scored: Sequence[ScoredExample], model: str = "model") -> Diagnostic:
    """The length bias of scored examples."""
    return _diagnose(scored, model, LENGTH, [[length / 100 for length in one.lengths] for one in scored])


def diagnose_style(scored: Sequence[ScoredExample], model: str = "model") -> Diagnostic:
    """The markdown bias of scored examples; lengths are held fixed too."""
    densities = [[markdown_density(completion_text(one)) for one in row.example.completions] for row in scored]
    return _diagnose(scored, model, STYLE, densities)


def length_strata(scored: Sequence[ScoredExample]) -> dict[str, Metric]:
    """The numbers of `stratify` by length alone."""
    return stratify(scored, [one.lengths for one in scored], LENGTH.strata)


def _diagnose(
    scored: Sequence[ScoredExample], model: str, trait: Trait, amounts: Sequence[Sequence[float]]
) -> Diagnostic:
    """`amounts`: of the trait, by example and completion."""
    rows = []
    for one, own, prompt in zip(scored, amounts, prompt_numbers(scored), strict=True):
        distinct = sorted(set(one.example.ranks))
        for score, amount, length, rank in zip(one.scores, own, one.lengths, one.example.ranks, strict=True):
            # The place among the ranks of the example: 0 for the best, 1 for the worst.
            place = distinct.index(rank) / (len(distinct) - 1) if len(distinct) > 1 else 0.5
            rows += [] if score is None else [(score, prompt, amount, place, length / 100)]
    table = np.array(rows, dtype=np.float64).reshape(-1, 5)
    features = table[:, 2:4] if trait is LENGTH else table[:, 2:]
    scores, prompts = table[:, 0], table[:, 1].astype(np.int64)
    numbers = slopes_within_prompts(trait.slopes, scores, features, prompts)
    numbers |= length_strata(scored) if trait is LENGTH else stratify(scored, amounts, trait.strata)
    _, more, less, similar, _, mean = trait.strata
    items = [bar_item(LABELS[one][0], numbers[one]) for one in (more, less, similar, mean)]
    bars = bars_block(trait.title, model, items, trait.note)
    curve = _score_against_length(scores, features, prompts, model) if trait is LENGTH else []
    return Diagnostic(numbers, (bars, *curve), int(np.isnan(collect_pairs(scored).margins).sum()))


def _score_against_length(
    scores: NDArray[np.float64], features: NDArray[np.float64], prompts: NDArray[np.int64], model: str
) -> list[Block]:
    """Mean score by length between equally good completions of a prompt: the curve that `slope_given_rank` is of.

    Nothing where there are not enough completions for three points.
    """
    lengths, rest, _, prompts = residuals_within_prompts(scores, features, prompts)
    num_points = min(_MOST_POINTS, len(lengths) // _FEWEST_FOR_A_POINT)
    if num_points < 3 or not np.ptp(lengths):
        return []
    parts = np.array_split(np.argsort(lengths, kind="stable"), num_points)
    x, y = ([float(values[part].mean()) for part in parts] for values in (100 * lengths, rest))
    low, high = zip(*(cluster_bootstrap(rest[part], prompts[part].tolist()) for part in parts), strict=True)
    block: Block = {
        "kind": "curves",
        "title": "Score against length",
        "note": "Of completions of one prompt, at equal rank: flat without a bias. Each point is the mean of as many "
        f"completions, {len(lengths):,} in all; the band is a 95 % interval.",
        "x_label": "characters above the prompt's mean",
        "y_label": "score above the prompt's mean",
        "series": [{"name": model, "x": x, "y": y, "low": list(low), "high": list(high)}],
    }
    return [block]


def markdown_density(text: str) -> float:
    """Headings, list items, bold texts, pieces of code (a block is one) and table rows per 100 words."""
    prose, num_blocks = _FENCED.subn(" ", text)
    return 100 * (num_blocks + sum(len(mark.findall(prose)) for mark in _MARKS)) / max(1, len(text.split()))


def stratify(
    scored: Sequence[ScoredExample], amounts: Sequence[Sequence[float]], names: Sequence[str]
) -> dict[str, Metric]:
    """Accuracies by an amount, not negative, that each completion of each example has.

    `names` of the results, in this order: the share of pairs whose better completion has more (of the data, whatever
    the scores); the accuracy where it has clearly more, clearly less, about as much; the first accuracy less the
    second (the gap); the mean of the two (the controlled accuracy). A tie counts as wrong.

    The intervals of gap and controlled accuracy are those of `combined`, the method of variance estimates recovery, and
    a bootstrap over prompts where the two strata share prompts. Where both strata have as many pairs, the controlled
    accuracy is the accuracy of all these pairs, with its interval.
    """
    of_share, of_more, of_less, of_similar, of_gap, of_mean = names
    pairs = collect_pairs(scored)
    found_amounts = [[amounts[i][j] for j in sides] for i, sides in zip(pairs.examples, pairs.sides, strict=True)]
    better, worse = np.array(found_amounts, dtype=np.float64).reshape(-1, 2).T
    differ, known = better != worse, ~np.isnan(pairs.margins)
    shares = (better > worse)[differ].astype(np.float64).tolist()
    found = {of_share: accuracy_metric(shares, of_share, pairs.prompts[differ].tolist(), of="pairs")}
    similar = np.abs(better - worse) <= _SIMILAR * np.maximum(better, worse)
    more, less = (known & side & ~similar for side in (better > worse, better < worse))
    masks = {of_more: more, of_less: less, of_similar: known & similar}
    parts = {name: _part(pairs, inside, name) for name, inside in masks.items()}
    found |= {name: part.metric for name, part in parts.items()}
    count, note = int(more.sum() + less.sum()), None
    if not more.any() or not less.any():
        note = f'There is no scored pair for "{LABELS[of_less if more.any() else of_more][0]}".'
        gap, mean = (Metric(name, None, count=count) for name in (of_gap, of_mean))
    else:
        # p - q is twice the mean of p and 1 - q, less 1.
        half = combined(of_gap, [parts[of_more], _part(pairs, less, of_less, flipped=True)])
        value, low, high = (None if end is None else 2 * end - 1 for end in (half.value, half.low, half.high))
        gap = Metric(of_gap, value, low, high, count)
        mean = combined(of_mean, [parts[of_more], parts[of_less]])
        mean = _part(pairs, more | less, of_mean).metric if more.sum() == less.sum() else mean
    note = " ".join(filter(None, (note, left_out_note(int((~known).sum()))))) or None
    return found | {metric.name: replace(metric, note=note) for metric in (gap, mean)}


def left_out_note(num_pairs: int) -> str | None:
    """The sentence that says how many pairs without a score are left out; None where none is."""
    if not num_pairs:
        return None
    return f"{num_pairs:,} pair{' has no score and is' if num_pairs == 1 else 's have no score and are'} left out."


def _part(pairs: Pairs, inside: NDArray[np.bool_], name: str, *, flipped: bool = False) -> Part:
    own = pairs.where(inside)
    return Part.of(name, (1 - own.outcomes if flipped else own.outcomes).tolist(), own.prompts.tolist(), "pairs")
