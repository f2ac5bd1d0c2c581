"""From rows of files to conversations, and from scores back to rows, as `treeward score` reads and writes them.

conversations_of({"messages": [...]}, "in.jsonl:1")                            # one, "score"
conversations_of({"context": [...], "completions": [...]}, "in.jsonl:2")       # several, "scores"
conversations_of({"prompt": "...", "chosen": "...", "rejected": "..."}, ...)   # two, in that order
conversations_of({"prompt": "...", "responses": ["...", ...]}, ...)            # or context and responses
conversations_of({"chosen": "\\n\\nHuman: ...", "rejected": "..."}, ...)       # transcripts
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from treeward.data.preference import (
    Message,
    as_messages,
    check_messages,
    from_binary_row,
    from_transcripts,
    parse_json_list,
)
from treeward.data.sources import Row
from treeward.errors import DataError
from treeward.scoring.rewarding import Rewarder
from treeward.scoring.score import ConversationScorer, Reward
from treeward.scoring.shaping import Shaper

logger = logging.getLogger(__name__)

_Request = tuple[Row, list[list[Message]]]

_ROWS_AT_ONCE = 256
_OURS = ("score", "scores", "error", "truncated")
_LISTS = ("messages", "completions", "responses")
_SHAPES = {
    frozenset(shape.split())
    for shape in (
        *("completions", "context completions", "context responses", "prompt responses"),
        *("chosen rejected", "prompt chosen rejected"),
    )
}
"""The keys of rows of several conversations; another key of them would be ignored silently."""
_NEED = (
    "messages; or completions, alone or with context; or responses with context or prompt; or chosen and rejected, "
    "alone or with prompt"
)


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
        yield _with_scores(row.values, [next(rewarded) for _ in conversations], ours)


def conversations_of(values: Mapping[str, Any], where: str) -> list[list[Message]]:
    """The conversations of one row, in the order of their scores.

    Lists may be given as JSON text, as in a CSV cell, and keys without a value count as absent. Raises `DataError` for
    a row of no known shape, or of two.
    """
    given = {key: value for key, value in values.items() if value is not None}
    row = {key: parse_json_list(value, key, where) if key in _LISTS else value for key, value in given.items()}
    keys = row.keys() & frozenset.union(*_SHAPES)
    if "messages" in row and not keys - {"context", "prompt"}:  # which are columns like others then
        return [list(check_messages(row["messages"], "messages", where))]
    if "messages" in row or keys not in _SHAPES:
        raise DataError(
            "the row cannot be scored with these keys together" if keys else "the row has nothing to score",
            where=where,
            got=f"keys {sorted(map(str, values))}",
            need=_NEED,
        )
    if "chosen" in keys:
        transcripts = isinstance(row["chosen"], str) and "prompt" not in keys
        preference = (from_transcripts if transcripts else from_binary_row)(row, where)
        return [[*preference.context, *completion.messages] for completion in preference.completions]
    field = "completions" if "completions" in keys else "responses"
    key = "prompt" if "prompt" in keys else "context"
    alone = key == "context" and row.get(key, []) == []
    context = [] if alone else list(as_messages(row[key], key, "user", where))
    ends = row[field]
    if not isinstance(ends, list) or not ends:
        raise DataError(f"{field} is not a list of completions", where=where, field=field, got=ends, need="one or more")
    return [context + _completion(end, f"{field}[{i}]", where) for i, end in enumerate(ends)]


def _with_scores(values: Mapping[str, Any], rewarded: Sequence[Reward], ours: Sequence[str]) -> ScoredRow:
    # Values of an earlier scoring would be taken for this one's.
    result = {key: value for key, value in values.items() if key not in ours}
    for key, numbers in (("score", [one.raw for one in rewarded]), ("reward", [one.value for one in rewarded])):
        if key in ours:
            result |= {key: numbers[0]} if values.get("messages") is not None else {f"{key}s": numbers}
    errors = {i: one.error for i, one in enumerate(rewarded) if one.error is not None}
    if errors:
        alone = len(rewarded) == 1
        result["error"] = errors[0] if alone else "; ".join(f"[{i}] {error}" for i, error in errors.items())
    if any(one.score.truncated for one in rewarded):
        result["truncated"] = True
    return ScoredRow(result, len(errors))


def _completion(item: Any, field: str, where: str) -> list[Message]:
    if isinstance(item, Mapping) and "completion" in item:
        item, field = item["completion"], f"{field}.completion"
    if isinstance(item, str):
        return [{"role": "assistant", "content": item}]
    return list(check_messages(item, field, where))
