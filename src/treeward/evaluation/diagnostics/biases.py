"""`diagnose_length`, `diagnose_style`: how much of a score is the length or the markdown of a
completion.

    length, style = diagnose_length(scored), diagnose_style(scored)
    length.accuracy_gap                 # how much more often it is right where the longer one is
    length.length_controlled_accuracy   # 0.5 for a model that always prefers the longer one

A bias lifts the accuracy where the better completion of a prompt has more of the trait and lowers
it where it has less (`stratify`); the mean of both is the accuracy on data in which the trait tells
nothing. A pair with a missing score is left out: it is mostly the longest completions that lack
one.

Shapes: P pairs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeward.data.conversation import last_text
from treeward.evaluation.results import Diagnostic, Metric, ScoredExample
from treeward.evaluation.statistics import accuracy_metric, combined


class Pair(NamedTuple):
    """Two completions of different rank of one example.

    `margin`: the better one's score less the other's, NaN where one has none. `prompt`: the context
    as text. `example`: index of the example. `better`, `worse`: indices of its completions.
    """

    margin: float
    prompt: str
    example: int
    better: int
    worse: int

    @property
    def outcome(self) -> float:
        """1 where the better completion scores higher, else 0: a tie and a missing score count as
        wrong."""
        return float(self.margin > 0)  # NaN is not above 0


def collect_pairs(scored: Sequence[ScoredExample]) -> list[Pair]:
    """The ordered pairs of scored examples; those without a score are among them."""
    pairs = []
    for i, example in enumerate(scored):
        prompt = example.example.prompt_key
        # None becomes NaN, and so does the margin of a pair without a score.
        scores = np.array(example.scores, dtype=np.float64).tolist()
        for better, worse in example.pairs():
            pairs.append(Pair(scores[better] - scores[worse], prompt, i, better, worse))
    return pairs


def known_margins(pairs: Sequence[Pair]) -> list[float]:
    """The margins of the pairs that have both scores."""
    return [pair.margin for pair in pairs if not math.isnan(pair.margin)]


Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

_SIMILAR = 0.1  # of the larger amount

# A block of code from its fence to one of the same kind, or to the end of a text that was cut.
_FENCED = re.compile(r"^[ \t]*(```|~~~).*?(?:^[ \t]*\1[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_MARKS = (
    re.compile(r"^ {0,3}#{1,6}[ \t]+\S", re.MULTILINE),  # headings
    re.compile(r"^[ \t]*(?:[-*+]|\d{1,3}[.)])[ \t]+\S", re.MULTILINE),  # list items
    re.compile(r"\*\*(?=\S)[^\n]+?(?<=\S)\*\*|(?<!\w)__(?=\S)[^\n]+?(?<=\S)__(?!\w)"),  # bold
    re.compile(r"`[^`\n]+`"),  # code within a line
    re.compile(r"^[ \t]*\|.+\|[ \t]*$", re.MULTILINE),  # table rows
)


class Trait(NamedTuple):
    """What a model may like beyond quality: the names that its numbers have in `results.json`.

    `share`: the share of pairs whose better completion has more of the trait. `more`, `less`,
    `similar`: the accuracies of the strata. `gap`: the accuracy of `more` less that of `less`.
    `controlled`: the mean of these two.
    """

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
    share="longer_is_right",
    more="accuracy_longer_right",
    less="accuracy_shorter_right",
    similar="accuracy_similar_length",
    gap="accuracy_gap",
    controlled="length_controlled_accuracy",
)
STYLE = Trait(
    share="more_markdown_is_right",
    more="accuracy_more_markdown_right",
    less="accuracy_less_markdown_right",
    similar="accuracy_similar_markdown",
    gap="markdown_gap",
    controlled="style_controlled_accuracy",
)


def diagnose_length(scored: Sequence[ScoredExample]) -> Diagnostic:
    """The length bias of scored examples."""
    return Diagnostic(stratify(scored, [example.lengths for example in scored], LENGTH))


def diagnose_style(scored: Sequence[ScoredExample]) -> Diagnostic:
    """The markdown bias of scored examples."""
    densities = []
    for example in scored:
        example_densities = []
        for completion in example.example.completions:
            example_densities.append(markdown_density(last_text(completion.messages)))
        densities.append(example_densities)
    return Diagnostic(stratify(scored, densities, STYLE))


def markdown_density(text: str) -> float:
    """Headings, list items, bold texts, pieces of code (a block is one) and table rows per 100
    words.
    """
    # Marks within a block of code are code.
    prose, num_marks = _FENCED.subn(" ", text)
    for mark in _MARKS:
        num_marks += len(mark.findall(prose))
    num_words = max(1, len(text.split()))
    return 100 * num_marks / num_words


def stratify(
    scored: Sequence[ScoredExample], amounts: Sequence[Sequence[float]], trait: Trait
) -> dict[str, Metric]:
    """The numbers of a trait by their names. `amounts`: how much of the trait each completion of
    each example has, not negative.

    A tie counts as wrong. The intervals of gap and controlled accuracy are those of `combined`.
    Marks of markdown are those of the Chatbot Arena's style control (Li, Angelopoulos and Chiang
    2024, "Does style matter?"). Unlike the regression of AlpacaEval (Dubois et al. 2024, arXiv
    2404.04475) strata need no model of the effect.
    """
    prompts = []
    outcomes = []
    margins = []
    better_amounts = []
    worse_amounts = []
    for pair in collect_pairs(scored):
        prompts.append(pair.prompt)
        outcomes.append(pair.outcome)
        margins.append(pair.margin)
        better_amounts.append(amounts[pair.example][pair.better])
        worse_amounts.append(amounts[pair.example][pair.worse])
    outcomes_P = np.array(outcomes, dtype=np.float64)
    better_P = np.array(better_amounts, dtype=np.float64)
    worse_P = np.array(worse_amounts, dtype=np.float64)
    # It is mostly the longest completions that lack a score: counted as wrong, they would look
    # like a bias.
    has_scores_P = ~np.isnan(np.array(margins, dtype=np.float64))
    # A few characters decide nothing: such pairs are in neither stratum.
    is_similar_P = np.abs(better_P - worse_P) <= _SIMILAR * np.maximum(better_P, worse_P)
    has_more_P = has_scores_P & (better_P > worse_P) & ~is_similar_P
    has_less_P = has_scores_P & (better_P < worse_P) & ~is_similar_P

    def part(name: str, mask_P: Mask, values_P: Floats = outcomes_P) -> Metric:
        """The mean of the values of these pairs."""
        return accuracy_metric(values_P[mask_P].tolist(), name, list(compress(prompts, mask_P)))

    more = part(trait.more, has_more_P)
    less = part(trait.less, has_less_P)
    numbers = [
        # Of all pairs, scored or not: it is a number of the data.
        part(trait.share, better_P != worse_P, (better_P > worse_P).astype(np.float64)),
        more,
        less,
        part(trait.similar, has_scores_P & is_similar_P),
    ]
    # Either stratum alone says nothing of the difference.
    if more.count and less.count:
        # `combined` makes means and no differences: p - q is twice the mean of p and 1 - q, less 1.
        mistakes = part(trait.less, has_less_P, 1 - outcomes_P)
        half = combined(trait.gap, [more, mistakes])
        gap = Metric(
            trait.gap, _twice_less_1(half.value), _twice_less_1(half.low), _twice_less_1(half.high)
        )
        controlled = combined(trait.controlled, [more, less])
        note = None
    else:
        missing = trait.less if more.count else trait.more
        stratum = missing.removeprefix("accuracy_").removesuffix("_right").replace("_", " ")
        note = f'There is no scored pair whose better completion is "{stratum}".'
        gap = Metric(trait.gap, None)
        controlled = Metric(trait.controlled, None)
    count = (more.count or 0) + (less.count or 0)
    numbers.append(replace(gap, count=count, note=note))
    numbers.append(replace(controlled, count=count, note=note))
    return {metric.name: metric for metric in numbers}


def _twice_less_1(number: float | None) -> float | None:
    return None if number is None else 2 * number - 1
