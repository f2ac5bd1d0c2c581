"""Rewards of the completions of a prompt from verdicts about pairs of them, as NeMo Gym's
`genrm_compare` computes them.

    pairs = pairs_of(3, "circular")                       # [(0, 1), (1, 2), (2, 0)]
    rewards = mean_scores([PairVerdict(0, 1, 0, PairScores(4, 3, 2)), ...], 3)
    rewards = with_bonuses(rewards, completions, config)

The mean of the scores in each comparison comes first, then two bonuses for the shortest among the
best, then what a short or plain completion gains over the others of its group, which adds up to 0.
Lengths are in characters.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

from treeward.config.served_judge import ServedJudgeConfig
from treeward.scoring.pair_scores import PairScores


class GroupCompletion(NamedTuple):
    """A completion of the policy: what the user gets, and the reasoning before it."""

    answer: str
    reasoning: str = ""


class PairVerdict(NamedTuple):
    """A comparison of the completions at `first` and `second` by the judge with this number.

    `scores`: None without a verdict, of which `error` is the reason.
    """

    first: int
    second: int
    judge: int
    scores: PairScores | None
    error: str | None = None


def pairs_of(num_completions: int, strategy: str) -> list[tuple[int, int]]:
    """The pairs to compare, each with the completion that stands first."""
    if strategy == "all_pairs":
        return list(itertools.combinations(range(num_completions), 2))
    # Two completions are compared in both orders.
    return [(i, (i + 1) % num_completions) for i in range(num_completions)]


def num_pairs(num_completions: int, strategy: str) -> int:
    """The number of `pairs_of`."""
    if strategy == "all_pairs":
        return math.comb(num_completions, 2)
    return num_completions


def mean_scores(verdicts: Sequence[PairVerdict], num_completions: int) -> list[float | None]:
    """The mean score of each completion, ties broken by the ranking; None for one without a
    verdict."""
    values: list[list[float]] = [[] for _ in range(num_completions)]
    for verdict in verdicts:
        if verdict.scores is not None:
            first, second = verdict.scores.tie_broken
            values[verdict.first].append(first)
            values[verdict.second].append(second)
    means: list[float | None] = []
    for scores in values:
        means.append(fmean(scores) if scores else None)
    return means


def group_metrics(verdicts: Sequence[PairVerdict]) -> dict[str, float]:
    """Mean and standard deviation of all scores as they were given (divided by their number), and
    the share of comparisons with equal scores; where there are any, the comparisons without a
    verdict."""
    given = [verdict.scores for verdict in verdicts if verdict.scores is not None]
    metrics: dict[str, float] = {}
    if given:
        scores: list[float] = []
        num_ties = 0
        for verdict in given:
            scores += [verdict.score_1, verdict.score_2]
            num_ties += verdict.score_1 == verdict.score_2
        metrics["mean_individual_score"] = fmean(scores)
        metrics["std_individual_score"] = pstdev(scores)
        metrics["tiebreak_usage_rate"] = num_ties / len(given)
    num_missing = len(verdicts) - len(given)
    if num_missing:
        metrics["missing_comparisons"] = float(num_missing)
    return metrics


def with_bonuses(
    rewards: Sequence[float],
    completions: Sequence[GroupCompletion],
    config: ServedJudgeConfig,
) -> list[float]:
    """The rewards with the bonuses and penalties of the section."""
    shaped = list(rewards)
    if len(shaped) < 2:
        return shaped
    reasoning_lengths = [len(completion.reasoning.strip()) for completion in completions]
    answer_lengths = [len(completion.answer.strip()) for completion in completions]

    # The least reward among the best is that before any bonus.
    num_best = max(1, int(len(shaped) * config.top_percentile))
    least_best = sorted(shaped, reverse=True)[num_best - 1]
    for bonus, lengths in (
        (config.reasoning_bonus, reasoning_lengths),
        (config.answer_bonus, answer_lengths),
    ):
        present = [i for i, length in enumerate(lengths) if length > 0]
        if not present:
            continue
        shortest = min(present, key=lengths.__getitem__)  # the first of several
        # The second bonus looks at a reward that may have the first one already.
        if shaped[shortest] >= least_best:
            shaped[shortest] += bonus

    densities = [style_density(completion.answer) for completion in completions]
    for coefficient, amounts in (
        (config.group_reasoning_length_penalty_coeff, reasoning_lengths),
        (config.group_answer_length_penalty_coeff, answer_lengths),
        (config.group_style_penalty_coeff, densities),
    ):
        for i, advantage in enumerate(_advantages_of_less(amounts)):
            shaped[i] += coefficient * advantage
    return shaped


def _advantages_of_less(amounts: Sequence[float]) -> list[float]:
    """From the least (1) to the most (0), less the mean; 0 for equal ones."""
    least = min(amounts)
    span = max(amounts) - least
    if span == 0:
        return [0.0] * len(amounts)
    values = [1.0 - (amount - least) / span for amount in amounts]
    mean = fmean(values)
    return [value - mean for value in values]


_CODE_BLOCK = re.compile(r"```.*?```", re.DOTALL)
_STYLE_ELEMENTS = (
    re.compile(r"^#{1,6}\s", re.MULTILINE),  # headers
    re.compile(r"^\s*\d+\.\s", re.MULTILINE),  # items of numbered lists
    re.compile(r"^\s*[-*+]\s", re.MULTILINE),  # items of other lists
    re.compile(r"\*\*[^*\n]+\*\*"),  # bold text
    re.compile(r"__[^_\n]+__"),
    # Emoji. Gym's range from U+24C2 to U+1F251 holds every Chinese, Japanese and Korean character:
    # an answer in Chinese would be nothing but style. Here only its emoji count.
    re.compile(
        "[\U0001f600-\U0001f64f\U0001f300-\U0001f5ff\U0001f680-\U0001f6ff\U0001f1e0-\U0001f1ff"
        "\u2600-\u27bf\u24c2\u3030\u303d\u3297\u3299\u2b00-\u2bff\U0001f004\U0001f0cf"
        "\U0001f170-\U0001f251\U0001f900-\U0001f9ff\U0001fa00-\U0001faff]"
    ),
)


def style_density(text: str) -> float:
    """Headers, list items, bold texts and emoji for each character, without blocks of code; 0 for
    an empty text."""
    prose = _CODE_BLOCK.sub("", text)
    num_characters = len(prose.strip())
    if num_characters == 0:
        return 0.0
    num_elements = sum(len(element.findall(prose)) for element in _STYLE_ELEMENTS)
    return num_elements / num_characters
