"""`PairScores`: the JSON verdict of generative reward models about two completions.

    read_pair_scores('They differ. {"score_1": 4, "score_2": 3, "ranking": 2}')
    # PairScores(score_1=4.0, score_2=3.0, ranking=2.0)

The scores say how helpful each completion is, from 1 to 5. The ranking compares them, from 1 (the
first is far better) to 6 (the second is). NVIDIA's Nemotron GenRMs write this form, and NeMo Gym's
`genrm_compare` reads it. Gym takes a default for what is missing, and numbers beyond the scales as
they are; here neither is a verdict.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LOWEST_SCORE = 1
HIGHEST_SCORE = 5
LOWEST_RANKING = 1
HIGHEST_RANKING = 6
MIDDLE_RANKING = 3.5
"""Neither completion is better."""
MIDDLE_SCORE = 3.0

_KEYS = ("score_1", "score_2", "ranking")
_FENCED = re.compile(r"```json\s*(.*?)```", re.IGNORECASE | re.DOTALL)
_STRUCTURE = re.compile(r'[{}"]|\\.', re.DOTALL)
"""What counts where an object ends: braces, quotes, and what a backslash hides."""
_MOST_UNCLOSED = 200
"""Braces without an end after which no object is looked for: each costs a walk to the end of the
text, which a completion could make a judge repeat."""


@dataclass(frozen=True, slots=True)
class PairScores:
    """`score_1`, `score_2`: from 1 to 5. `ranking`: from 1 to 6. Expectations are fractions.

    `mean_tie_broken`: of an expectation, the mean of `tie_broken` over its verdicts; None of one
    verdict.
    """

    score_1: float
    score_2: float
    ranking: float
    mean_tie_broken: tuple[float, float] | None = None

    @classmethod
    def of_outcome(cls, value: float) -> PairScores:
        """The scores of a verdict that says only how sure it is of the first place, from 0 to 1.

        A tie (0.5) is the middle of each scale.
        """
        score_range = HIGHEST_SCORE - LOWEST_SCORE
        ranking_range = HIGHEST_RANKING - LOWEST_RANKING
        return cls(
            LOWEST_SCORE + score_range * value,
            HIGHEST_SCORE - score_range * value,
            HIGHEST_RANKING - ranking_range * value,
        )

    @classmethod
    def expected(cls, weights: Sequence[float]) -> PairScores:
        """The expectation, from the probability of each of `all_pair_scores`."""
        score_1 = 0.0
        score_2 = 0.0
        ranking = 0.0
        first = 0.0
        second = 0.0
        for weight, scores in zip(weights, all_pair_scores(), strict=True):
            score_1 += weight * scores.score_1
            score_2 += weight * scores.score_2
            ranking += weight * scores.ranking
            first += weight * scores.tie_broken[0]
            second += weight * scores.tie_broken[1]
        return cls(score_1, score_2, ranking, (first, second))

    @property
    def tie_broken(self) -> tuple[float, float]:
        """The score of each completion. Equal scores move apart by the ranking, which otherwise
        does not count (Gym's `simple_tiebreaker`)."""
        # Expected scores are hardly ever equal, though many of the verdicts behind them have ties.
        if self.mean_tie_broken is not None:
            return self.mean_tie_broken
        if self.score_1 != self.score_2:
            return self.score_1, self.score_2
        lead = MIDDLE_RANKING - self.ranking
        return self.score_1 + lead, self.score_2 - lead

    @property
    def label(self) -> str:
        """The better place: `A`, `B`, or `C` for a tie."""
        first, second = self.tie_broken
        if first == second:
            return "C"
        return "A" if first > second else "B"

    @property
    def is_on_scale(self) -> bool:
        """Whether the numbers are on their scales; NaN is not."""
        scores_fit = all(
            LOWEST_SCORE <= score <= HIGHEST_SCORE for score in (self.score_1, self.score_2)
        )
        return scores_fit and LOWEST_RANKING <= self.ranking <= HIGHEST_RANKING


def pair_scores_line(scores: PairScores) -> str:
    """Scores as the last line of a judge's message."""
    return (
        f'{{"score_1": {scores.score_1:g}, "score_2": {scores.score_2:g}, '
        f'"ranking": {scores.ranking:g}}}'
    )


def all_pair_scores() -> Iterator[PairScores]:
    """Every verdict in whole numbers."""
    for score_1 in range(LOWEST_SCORE, HIGHEST_SCORE + 1):
        for score_2 in range(LOWEST_SCORE, HIGHEST_SCORE + 1):
            for ranking in range(LOWEST_RANKING, HIGHEST_RANKING + 1):
                yield PairScores(score_1, score_2, ranking)


def read_pair_scores(
    text: str,
    *,
    default_score: float | None = None,
    default_ranking: float | None = None,
) -> PairScores | None:
    """The last verdict in a text: the last object of JSON, in a fenced block or not, that has one
    of the keys. Its object `overall` stands for the whole.

    A missing key takes the default. None without a verdict, where a key is missing that has no
    default, and for numbers beyond the scales.
    """
    verdicts: list[Mapping[str, Any]] = []
    end_of_blocks = 0
    for block in _FENCED.finditer(text):
        fenced = list(_verdicts_of(block[1]))
        if fenced:
            verdicts = fenced
            end_of_blocks = block.end()
    # After the blocks too: a block may be what a completion wrote, which the judge has quoted. The
    # blocks are looked for because braces of the prose around one would hide its verdict.
    verdicts += _verdicts_of(text[end_of_blocks:])
    if not verdicts:
        return None
    # The last one: before it the judge may have quoted what a completion wrote.
    verdict = verdicts[-1]
    score_1 = _number(verdict, "score_1", default_score)
    score_2 = _number(verdict, "score_2", default_score)
    ranking = _number(verdict, "ranking", default_ranking)
    if score_1 is None or score_2 is None or ranking is None:
        return None
    scores = PairScores(score_1, score_2, ranking)
    return scores if scores.is_on_scale else None


def _verdicts_of(text: str) -> Iterator[Mapping[str, Any]]:
    """The objects of JSON in a text that have one of the keys."""
    for span in _outer_objects(text):
        try:
            value = json.loads(span)
        # Numbers of thousands of digits are ValueErrors too, and deep nesting a RecursionError.
        except (ValueError, RecursionError):
            continue
        if isinstance(value.get("overall"), Mapping):
            value = value["overall"]
        if any(key in value for key in _KEYS):
            yield value


def _outer_objects(text: str) -> Iterator[str]:
    """The texts between braces that belong together, without those that stand in others."""
    num_unclosed = 0
    start = text.find("{")
    while start >= 0 and num_unclosed < _MOST_UNCLOSED:
        end = _end_of_object(text, start)
        if end is None:
            # A brace of the prose: the objects may begin after it.
            num_unclosed += 1
            end = start + 1
        else:
            yield text[start:end]
        start = text.find("{", end)


def _end_of_object(text: str, start: int) -> int | None:
    """Where the object ends that begins at `start`; None if it does not."""
    depth = 0
    is_in_string = False
    for match in _STRUCTURE.finditer(text, start):
        mark = match[0]
        if mark == '"':
            is_in_string = not is_in_string
        elif is_in_string:
            continue
        elif mark == "{":
            depth += 1
        elif mark == "}":
            depth -= 1
            if depth == 0:
                return match.end()
    return None


def _number(verdict: Mapping[str, Any], key: str, default: float | None) -> float | None:
    """The number under a key, or its default; None for anything else."""
    if key not in verdict:
        return default
    value = verdict[key]
    # Python takes true for 1.
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
