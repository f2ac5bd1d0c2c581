"""`diagnose_length`, `diagnose_style`: how much of a score is the length or the markdown of a
completion.

    length, style = diagnose_length(scored), diagnose_style(scored)
    length.accuracy_gap                 # how much more often it is right where the longer one is
    length.length_controlled_accuracy   # 0.5 for a model that always prefers the longer one

A bias lifts the accuracy where the better completion of a prompt has more of the trait and lowers
it where it has less (`stratify`); the mean of both is the accuracy on data in which the trait tells
nothing. A pair with a missing score is left out: it is mostly the longest completions that lack
one.
"""

from __future__ import annotations

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
        prompt = example.example.context_key
        # NaN makes the margin of a pair without a score NaN, which is above nothing.
        scores = np.array(example.scores, dtype=np.float64).tolist()
        pairs += [Pair(scores[a] - scores[b], prompt, i, a, b) for a, b in example.pairs()]
    return pairs


Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

_SIMILAR = 0.1  # of the larger amount

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

    `share`: of pairs whose better completion has more. `more`, `less`, `similar`: the accuracies of
    the strata; `gap`: `more` less `less`; `controlled`: their mean.
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
        texts = [last_text(completion.messages) for completion in example.example.completions]
        densities.append([markdown_density(text) for text in texts])
    return Diagnostic(stratify(scored, densities, STYLE))


def markdown_density(text: str) -> float:
    """Headings, list items, bold texts, pieces of code (a block is one) and table rows per 100
    words.
    """
    prose, num_marks = _FENCED.subn(" ", text)
    for mark in _MARKS:
        num_marks += len(mark.findall(prose))
    num_words = max(1, len(text.split()))
    return 100 * num_marks / num_words


def stratify(
    scored: Sequence[ScoredExample], amounts: Sequence[Sequence[float]], trait: Trait
) -> dict[str, Metric]:
    """Accuracies by an amount, not negative, that each completion of each example has, by the names
    of the trait.

    A tie counts as wrong. The intervals of gap and controlled accuracy are those of `combined`.
    Marks of markdown are those of the Chatbot Arena's style control (Li, Angelopoulos and Chiang
    2024, "Does style matter?"). Unlike the regression of AlpacaEval (Dubois et al. 2024, arXiv
    2404.04475) strata need no model of the effect.
    """
    pairs = collect_pairs(scored)
    prompts = [pair.prompt for pair in pairs]
    outcomes = np.array([pair.outcome for pair in pairs], dtype=np.float64)
    margins = np.array([pair.margin for pair in pairs], dtype=np.float64)
    better = np.array([amounts[pair.example][pair.better] for pair in pairs], dtype=np.float64)
    worse = np.array([amounts[pair.example][pair.worse] for pair in pairs], dtype=np.float64)
    # It is mostly the longest completions that lack a score: counted as wrong, they would look
    # like a bias.
    has_scores = ~np.isnan(margins)
    # A few characters decide nothing: such pairs are in neither stratum.
    is_similar = np.abs(better - worse) <= _SIMILAR * np.maximum(better, worse)
    has_more = has_scores & (better > worse) & ~is_similar
    has_less = has_scores & (better < worse) & ~is_similar

    def part(name: str, mask: Mask, values: Floats = outcomes) -> Metric:
        return accuracy_metric(values[mask].tolist(), name, list(compress(prompts, mask)))

    more = part(trait.more, has_more)
    less = part(trait.less, has_less)
    numbers = [
        part(trait.share, better != worse, (better > worse).astype(np.float64)),
        more,
        less,
        part(trait.similar, has_scores & is_similar),
    ]
    # Either stratum alone says nothing of the difference.
    if more.count and less.count:
        # p - q is twice the mean of p and 1 - q, less 1.
        mistakes = part(trait.less, has_less, 1 - outcomes)
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
    numbers += [replace(metric, count=count, note=note) for metric in (gap, controlled)]
    return {metric.name: metric for metric in numbers}


def _twice_less_1(number: float | None) -> float | None:
    return None if number is None else 2 * number - 1
