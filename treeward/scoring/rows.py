"""From rows of files to conversations, and from scores back to rows, as `treeward score` reads and writes them.

conversations_of({"messages": [...]}, "in.jsonl:1")                            # one, "score"
conversations_of({"context": [...], "completions": [...]}, "in.jsonl:2")       # several, "scores"
conversations_of({"prompt": "...", "chosen": "...", "rejected": "..."}, ...)   # two, in that order
conversations_of({"prompt": "...", "responses": ["...", ...]}, ...)            # or context and responses
conversations_of({"chosen": "\\n\\nHuman: ...", "rejected": "..."}, ...)       # transcripts
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

__all__ = ["ScoredRow", "conversations_of", "score_rows"]

logger = logging.getLogger(__name__)

_Request = tuple[Row, list[list[Message]]]

_ROWS_AT_ONCE = 256
_OURS = ("score", "scores", "error", "truncated")
_OURS_WITH_REWARDS = (*_OURS, "reward", "rewards")
_LISTS = ("messages", "completions", "responses")
_SHAPES = (
    "messages; or context with completions or responses; or prompt with chosen and rejected, or with responses; "
    "or chosen and rejected conversations"
)


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A row with its scores. `num_failed`: how many of its conversations have no score, or no reward."""

    values: dict[str, Any]
    num_failed: int


def score_rows(scorer: ConversationScorer, rows: Iterable[Row], *, shaper: Shaper | None = None) -> Iterator[ScoredRow]:
    """Each row with its `score` (a row of one conversation) or `scores`, in order; memory does not grow with the rows.

    With a `shaper` there is a `reward`, or there are `rewards`, too; reference answers are read from the rows. Up to
    256 rows are scored at a time. A conversation too long to score has the score None, and its row an `error`. A wrong
    row raises `DataError`, after the rows before it.
    """
    rewarder = Rewarder(lambda conversations, names: scorer.score(conversations, where=names), shaper)
    ours = _OURS if shaper is None else _OURS_WITH_REWARDS
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
        yield from _score_chunk(rewarder, chunk)
        if wrong is not None:
            raise wrong
        if len(chunk) < _ROWS_AT_ONCE:
            return


def _score_chunk(rewarder: Rewarder, chunk: Sequence[_Request]) -> Iterator[ScoredRow]:
    flat = [conversation for _, conversations in chunk for conversation in conversations]
    where = [row.where for row, conversations in chunk for _ in conversations]
    key = rewarder.reference_key
    answers = None if key is None else [row.values.get(key) for row, conversations in chunk for _ in conversations]
    try:
        rewarded = iter(rewarder.rewards(flat, answers, where=where))
    except DataError:
        if len(chunk) == 1:
            raise
        for request in chunk:  # up to the row that is wrong
            yield from _score_chunk(rewarder, [request])
        return
    for row, conversations in chunk:
        yield _with_scores(row.values, [next(rewarded) for _ in conversations], rewarder.shaper is not None)


def conversations_of(values: Mapping[str, Any], where: str) -> list[list[Message]]:
    """The conversations of one row, in the order of their scores.

    Lists may be given as JSON text, as in a CSV cell, and keys without a value count as absent. Raises `DataError` for
    a row of no known shape, or of two.
    """
    given = {key: value for key, value in values.items() if value is not None}
    row = {key: parse_json_list(value, key, where) if key in _LISTS else value for key, value in given.items()}
    shapes = [shape for shape in _READERS if set(shape) <= row.keys()]
    if len(shapes) > 1:
        raise DataError(
            "the row can be read in more than one way",
            where=where,
            got=" and ".join("/".join(shape) for shape in shapes),
            need="one of them",
            fix="remove the keys that are not to be scored",
        )
    wrong = [key for key in ("context", "prompt") if shapes and key in row and key not in _CONTEXT_OF[shapes[0]]]
    if wrong:
        raise DataError(
            f"the row has a {wrong[0]}, which is not read beside {'/'.join(shapes[0])}",
            where=where,
            field=wrong[0],
            got=row[wrong[0]],
            need=_SHAPES,
            fix="completions go with context, responses with context or prompt: rename one of them",
        )
    if not shapes:
        raise DataError(
            "the row has nothing to score", where=where, got=f"keys {sorted(map(str, values))}", need=_SHAPES
        )
    return _READERS[shapes[0]](row, where)


def _read_messages(row: Mapping[str, Any], where: str) -> list[list[Message]]:
    return [list(check_messages(row["messages"], "messages", where))]


def _read_completions(row: Mapping[str, Any], where: str) -> list[list[Message]]:
    context = _prompt(row.get("context", []), "context", where, may_be_empty=True)
    ends = _list(row["completions"], "completions", where)
    return [context + _completion(end, f"completions[{i}]", where) for i, end in enumerate(ends)]


def _read_responses(row: Mapping[str, Any], where: str) -> list[list[Message]]:
    key = "context" if "context" in row else "prompt"
    context = _prompt(row[key], key, where)
    ends = _list(row["responses"], "responses", where)
    return [context + _completion(end, f"responses[{i}]", where) for i, end in enumerate(ends)]


def _read_pair(row: Mapping[str, Any], where: str) -> list[list[Message]]:
    transcripts = isinstance(row["chosen"], str) and "prompt" not in row
    preference = (from_transcripts if transcripts else from_binary_row)(row, where)
    return [[*preference.context, *completion.messages] for completion in preference.completions]


_READERS: dict[tuple[str, ...], Callable[[Mapping[str, Any], str], list[list[Message]]]] = {
    ("messages",): _read_messages,
    ("completions",): _read_completions,
    ("prompt", "responses"): _read_responses,
    ("context", "responses"): _read_responses,
    ("chosen", "rejected"): _read_pair,
}
_CONTEXT_OF: dict[tuple[str, ...], tuple[str, ...]] = {
    ("messages",): ("context", "prompt"),  # the conversation is whole: they are columns like others
    ("completions",): ("context",),
    ("prompt", "responses"): ("prompt",),
    ("context", "responses"): ("context",),
    ("chosen", "rejected"): ("prompt",),
}
"""The keys that hold the context in each shape; other context keys would be ignored silently."""


def _with_scores(values: Mapping[str, Any], rewarded: Sequence[Reward], with_rewards: bool) -> ScoredRow:
    found = {"score": [one.raw for one in rewarded]}
    if with_rewards:
        found["reward"] = [one.value for one in rewarded]
    # Values of an earlier scoring would be taken for this one's.
    ours = _OURS_WITH_REWARDS if with_rewards else _OURS
    result = {key: value for key, value in values.items() if key not in ours}
    for key, numbers in found.items():
        result |= {key: numbers[0]} if values.get("messages") is not None else {f"{key}s": numbers}
    errors = [one.error for one in rewarded]
    num_failed = sum(error is not None for error in errors)
    if num_failed and len(errors) == 1:
        result["error"] = errors[0]
    elif num_failed:
        result["error"] = "; ".join(f"[{i}] {error}" for i, error in enumerate(errors) if error is not None)
    if any(one.score.truncated for one in rewarded):
        result["truncated"] = True
    return ScoredRow(result, num_failed)


def _prompt(value: Any, field: str, where: str, *, may_be_empty: bool = False) -> list[Message]:
    """Messages, as a list or as JSON, or the text of the only user message."""
    if may_be_empty and isinstance(value, list) and not value:
        return []
    return list(as_messages(value, field, "user", where))


def _completion(item: Any, field: str, where: str) -> list[Message]:
    if isinstance(item, Mapping) and "completion" in item:
        item, field = item["completion"], f"{field}.completion"
    if isinstance(item, str):
        return [{"role": "assistant", "content": item}]
    return list(check_messages(item, field, where))


def _list(value: Any, field: str, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        summary = f"{field} is not a list of completions"
        raise DataError(summary, where=where, field=field, got=value, need="one or more")
    return value
