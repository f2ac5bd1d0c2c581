"""From rows of files to their scores, as `treeward score` reads and writes them.

for row in score_rows(scorer, read_rows("in.jsonl")):
    row.values["scores"]        # or "score", of a row of one conversation

`treeward.data.formats` says which rows can be read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from treeward.data.formats import conversations_of, is_single
from treeward.data.preference import Message
from treeward.data.sources import Row
from treeward.errors import DataError
from treeward.scoring.rewarding import Rewarder
from treeward.scoring.score import ConversationScorer, Reward
from treeward.scoring.shaping import Shaper

logger = logging.getLogger(__name__)

_Request = tuple[Row, list[list[Message]]]

_ROWS_AT_ONCE = 256
_OURS = ("score", "scores", "error", "truncated")


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A row with its scores. `num_failed`: how many of its conversations have no score, or no reward."""

    values: dict[str, Any]
    num_failed: int


def score_rows(scorer: ConversationScorer, rows: Iterable[Row], *, shaper: Shaper | None = None) -> Iterator[ScoredRow]:
    """Each row with its `score` (a row of one conversation) or `scores`, in order; memory does not grow with the rows.

    With a `shaper` there is a `reward`, or there are `rewards`, too; reference completions are read from the rows. Up
    to 256 rows are scored at a time. A conversation too long to score has the score None, and its row an `error`. A
    wrong row raises `DataError`, after the rows before it.
    """
    rewarder = Rewarder(lambda conversations, names: scorer.score(conversations, where=names), shaper)
    ours = _OURS if shaper is None else (*_OURS, "reward", "rewards")
    remaining = iter(rows)
    warned = False
    while True:
        chunk: list[_Request] = []
        wrong: DataError | None = None
        try:
            chunk.extend((row, conversations_of(row.values, row.where)) for row in islice(remaining, _ROWS_AT_ONCE))
        except DataError as error:  # it keeps what came before the wrong row
            wrong = error
        taken = sorted({key for row, _ in chunk for key in ours if key in row.values})
        if taken and not warned:
            logger.warning("The rows already have %s, which this scoring replaces.", ", ".join(taken))
            warned = True
        yield from _score_chunk(rewarder, chunk, ours)
        if wrong is not None:
            raise wrong
        if len(chunk) < _ROWS_AT_ONCE:
            return


def _score_chunk(rewarder: Rewarder, chunk: Sequence[_Request], ours: Sequence[str]) -> Iterator[ScoredRow]:
    flat = [conversation for _, conversations in chunk for conversation in conversations]
    where = [row.where for row, conversations in chunk for _ in conversations]
    key = rewarder.reference_key
    references = None if key is None else [row.values.get(key) for row, conversations in chunk for _ in conversations]
    try:
        rewarded = iter(rewarder.rewards(flat, references, where=where))
    except DataError:
        if len(chunk) == 1:
            raise
        for request in chunk:  # up to the row that is wrong
            yield from _score_chunk(rewarder, [request], ours)
        return
    for row, conversations in chunk:
        yield _with_scores(row, [next(rewarded) for _ in conversations], ours)


def _with_scores(row: Row, rewarded: Sequence[Reward], ours: Sequence[str]) -> ScoredRow:
    # Values of an earlier scoring would be taken for this one's.
    result = {key: value for key, value in row.values.items() if key not in ours}
    single = is_single(row.values, row.where)
    for key, numbers in (("score", [one.raw for one in rewarded]), ("reward", [one.value for one in rewarded])):
        if key in ours:
            result |= {key: numbers[0]} if single else {f"{key}s": numbers}
    errors = {i: one.error for i, one in enumerate(rewarded) if one.error is not None}
    if errors:
        alone = len(rewarded) == 1
        result["error"] = errors[0] if alone else "; ".join(f"[{i}] {error}" for i, error in errors.items())
    if any(one.score.truncated for one in rewarded):
        result["truncated"] = True
    return ScoredRow(result, len(errors))
