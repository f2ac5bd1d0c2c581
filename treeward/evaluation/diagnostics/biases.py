"""`diagnose_length`, `diagnose_style`: how much of a score is the length or the markdown of a completion.

    length, style = diagnose_length(scored), diagnose_style(scored)
    length.slope_given_rank             # Metric: score per 100 characters, between equally good completions
    length.length_controlled_accuracy   # Metric: 0.5 for a model that always prefers the longer completion
    length.accuracy_gap                 # Metric: accuracy where the longer is right less that where the shorter is
    style.density_effect                # Metric: score per markdown mark in 100 words, at equal rank and length

Slopes are those of a regression within prompts (`diagnostics.completions`) that holds the rank fixed, as better
completions are longer in most data. That of markdown follows the style control of the Chatbot Arena (Li, Angelopoulos
and Chiang 2024, "Does style matter?"): marks inside a code block do not count.

`stratify` gives the accuracy where the better completion has more of a trait (length, markdown), where it has less, and
where both have about as much. A bias lifts the first and lowers the second. Their mean is the accuracy on data in which
the trait tells nothing, so a bias costs accuracy, which is what a gate for checkpoints must see; unlike the regression
of AlpacaEval (Dubois et al. 2024, arXiv 2404.04475) it needs no model of the effect. A pair with a missing score is
left out: the longest completions lack one, so counting them as wrong would look like a bias.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeward.data.preference import last_text
from treeward.evaluation.diagnostics.completions import (
    Floats,
    Integers,
    collect_pairs,
    prompt_numbers,
    residuals_within_prompts,
    slopes_within_prompts,
)
from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.results import Block, Diagnostic, Metric
from treeward.evaluation.statistics import accuracy_metric, cluster_bootstrap, combined

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
    """What a model may like beyond quality, by the names of its numbers.

    `slopes`: in units of the score and in standard deviations. `share`: of pairs whose better completion has more.
    `more`, `less`, `similar`: the accuracies of the strata; `gap`: `more` less `less`; `controlled`: their mean.
    """

    slopes: tuple[str, str]
    share: str
    more: str
    less: str
    similar: str
    gap: str
    controlled: str

    @property
    def accuracies(self) -> tuple[str, ...]:
        """What a figure shows."""
        return self.more, self.less, self.similar, self.controlled


LENGTH = Trait(
    slopes=("slope_given_rank", "relative_slope"),
    share="longer_is_right",
    more="accuracy_longer_right",
    less="accuracy_shorter_right",
    similar="accuracy_similar_length",
    gap="accuracy_gap",
    controlled="length_controlled_accuracy",
)
STYLE = Trait(
    slopes=("density_effect", "relative_density_effect"),
    share="more_markdown_is_right",
    more="accuracy_more_markdown_right",
    less="accuracy_less_markdown_right",
    similar="accuracy_similar_markdown",
    gap="markdown_gap",
    controlled="style_controlled_accuracy",
)


def diagnose_length(scored: Sequence[ScoredExample]) -> Diagnostic:
    """The length bias of scored examples."""
    scores, features, prompts = _regression(scored, [example.lengths for example in scored])
    lengths_and_places = features[:, [2, 1]]
    numbers = slopes_within_prompts(LENGTH.slopes, scores, lengths_and_places, prompts) | length_strata(scored)
    points = _score_against_length(scores, lengths_and_places, prompts)
    return Diagnostic(numbers, points)


def diagnose_style(scored: Sequence[ScoredExample]) -> Diagnostic:
    """The markdown bias of scored examples; lengths are held fixed too."""
    densities = [
        [markdown_density(last_text(completion.messages)) for completion in example.example.completions]
        for example in scored
    ]
    numbers = slopes_within_prompts(STYLE.slopes, *_regression(scored, densities)) | stratify(scored, densities, STYLE)
    return Diagnostic(numbers)


def length_strata(scored: Sequence[ScoredExample]) -> dict[str, Metric]:
    """The numbers of `stratify` by length alone."""
    return stratify(scored, [example.lengths for example in scored], LENGTH)


def _regression(scored: Sequence[ScoredExample], amounts: Sequence[Sequence[float]]) -> tuple[Floats, Floats, Integers]:
    """The scores (N,), the features (N, 3) and the prompts (N,) of all completions with a score.

    The features: the amount, the place among the ranks of the example (0 for the best, 1 for the worst), and the length
    in hundreds of characters.
    """
    rows = []
    for example, of_example, prompt in zip(scored, amounts, prompt_numbers(scored), strict=True):
        ranks = example.example.ranks
        distinct = sorted(set(ranks))
        for score, amount, length, rank in zip(example.scores, of_example, example.lengths, ranks, strict=True):
            place = distinct.index(rank) / (len(distinct) - 1) if len(distinct) > 1 else 0.5
            if score is not None:
                rows.append((score, amount, place, length / 100, prompt))
    table = np.array(rows, dtype=np.float64).reshape(-1, 5)
    return table[:, 0], table[:, 1:4], table[:, 4].astype(np.int64)


def _score_against_length(scores: Floats, features: Floats, prompts: Integers) -> Block | None:
    """Mean score by length between equally good completions of a prompt: the curve that `slope_given_rank` is of.

    Each point is the mean of as many completions. None where there are not enough for three points.
    """
    lengths, residuals, _, prompts = residuals_within_prompts(scores, features, prompts)
    num_points = min(_MOST_POINTS, len(lengths) // _FEWEST_FOR_A_POINT)
    if num_points < 3 or not np.ptp(lengths):
        return None
    points: Block = {"x": [], "y": [], "low": [], "high": []}
    for part in np.array_split(np.argsort(lengths, kind="stable"), num_points):
        low, high = cluster_bootstrap(residuals[part], prompts[part].tolist())
        point = {"x": float((100 * lengths)[part].mean()), "y": float(residuals[part].mean()), "low": low, "high": high}
        for name, value in point.items():
            points[name].append(value)
    return points


def markdown_density(text: str) -> float:
    """Headings, list items, bold texts, pieces of code (a block is one) and table rows per 100 words."""
    prose, num_blocks = _FENCED.subn(" ", text)
    return 100 * (num_blocks + sum(len(mark.findall(prose)) for mark in _MARKS)) / max(1, len(text.split()))


def stratify(scored: Sequence[ScoredExample], amounts: Sequence[Sequence[float]], trait: Trait) -> dict[str, Metric]:
    """Accuracies by an amount, not negative, that each completion of each example has.

    By the names of the trait: the share of pairs whose better completion has more (of the data, whatever the scores);
    the accuracy where it has clearly more, clearly less, about as much; their gap; the controlled accuracy. A tie
    counts as wrong. The intervals of gap and controlled accuracy are those of `combined`.
    """
    pairs = collect_pairs(scored)
    sides = [[amounts[i][j] for j in pair] for i, pair in zip(pairs.examples, pairs.sides, strict=True)]
    better, worse = np.array(sides, dtype=np.float64).reshape(-1, 2).T
    differ, has_scores = better != worse, ~np.isnan(pairs.margins)
    similar = np.abs(better - worse) <= _SIMILAR * np.maximum(better, worse)
    more, less = (has_scores & side & ~similar for side in (better > worse, better < worse))

    def part(name: str, mask: NDArray[np.bool_], outcomes: Floats = pairs.outcomes) -> Metric:
        return accuracy_metric(outcomes[mask].tolist(), name, pairs.prompts[mask].tolist())

    numbers = {
        trait.share: part(trait.share, differ, (better > worse).astype(np.float64)),
        trait.more: part(trait.more, more),
        trait.less: part(trait.less, less),
        trait.similar: part(trait.similar, has_scores & similar),
    }
    count, note = int(more.sum() + less.sum()), None
    if not more.any() or not less.any():
        stratum = (trait.less if more.any() else trait.more).removeprefix("accuracy_").removesuffix("_right")
        note = f'There is no scored pair whose right completion is "{stratum.replace("_", " ")}".'
        gap, controlled = (Metric(name, None, count=count) for name in (trait.gap, trait.controlled))
    else:
        # p - q is twice the mean of p and 1 - q, less 1.
        half = combined(trait.gap, [numbers[trait.more], part(trait.less, less, 1 - pairs.outcomes)])
        value, low, high = (None if end is None else 2 * end - 1 for end in (half.value, half.low, half.high))
        gap = Metric(trait.gap, value, low, high, count)
        controlled = combined(trait.controlled, [numbers[trait.more], numbers[trait.less]])
    return numbers | {metric.name: replace(metric, note=note) for metric in (gap, controlled)}
