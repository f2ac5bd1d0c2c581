"""Rows of files to conversations to score, and back: what `treeward score` reads and writes.

conversations_of({"messages": [...]}, "in.jsonl:1")                            # one: gets "score"
conversations_of({"context": [...], "completions": [...]}, "in.jsonl:2")       # several: gets "scores"
conversations_of({"prompt": "...", "chosen": "...", "rejected": "..."}, ...)   # two, in that order
conversations_of({"prompt": "...", "responses": ["...", ...]}, ...)
conversations_of({"chosen": "\\n\\nHuman: ...", "rejected": "..."}, ...)       # transcripts
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from treeward.data.formats import from_binary_row, from_transcripts
from treeward.data.preference import Message, check_messages
from treeward.data.sources import Row
from treeward.errors import DataError
from treeward.scoring.scorer import Score, Scorer

__all__ = ["conversations_of", "score_rows"]

_Request = tuple[Row, list[list[Message]]]

_ROWS_AT_ONCE = 256
_SHAPES = (
    "messages; or context and completions; or prompt with chosen and rejected, or with responses; "
    "or chosen and rejected conversations"
)


def score_rows(scorer: Scorer, rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """Each row with its `score` (a row of one conversation) or `scores`, in order; memory does not grow with the rows.

    Rows are scored up to 256 at a time. A conversation too long to score has the score None and the row an `error` that
    says so. A row that is wrong raises `DataError`, after the rows before it.
    """
    remaining = iter(rows)
    while True:
        chunk: list[_Request] = []
        wrong: DataError | None = None
        try:
            chunk.extend((row, conversations_of(row.values, row.where)) for row in islice(remaining, _ROWS_AT_ONCE))
        except DataError as error:  # it keeps what came before the wrong row
            wrong = error
        yield from _score_chunk(scorer, chunk)
        if wrong is not None:
            raise wrong
        if len(chunk) < _ROWS_AT_ONCE:
            return


def _score_chunk(scorer: Scorer, chunk: Sequence[_Request]) -> Iterator[dict[str, Any]]:
    flat = [conversation for _, conversations in chunk for conversation in conversations]
    where = [row.where for row, conversations in chunk for _ in conversations]
    try:
        scores = iter(scorer.score(flat, where=where))
    except DataError:
        if len(chunk) == 1:
            raise
        for request in chunk:  # up to the row that is wrong
            yield from _score_chunk(scorer, [request])
        return
    for row, conversations in chunk:
        yield _with_scores(row.values, [next(scores) for _ in conversations])


def conversations_of(values: Mapping[str, Any], where: str) -> list[list[Message]]:
    """The conversations of one row, in the order of their scores. Raises `DataError` for a row of no known shape."""
    if "messages" in values:
        return [list(check_messages(values["messages"], "messages", where))]
    if "completions" in values:
        context = list(check_messages(values.get("context", []), "context", where, may_be_empty=True))
        ends = _list(values["completions"], "completions", where)
        return [context + _completion(end, f"completions[{i}]", where) for i, end in enumerate(ends)]
    if "responses" in values and "prompt" in values:
        prompt = values["prompt"]
        context = (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else list(check_messages(prompt, "prompt", where))
        )
        ends = _list(values["responses"], "responses", where)
        return [context + _completion(end, f"responses[{i}]", where) for i, end in enumerate(ends)]
    if "chosen" in values and "rejected" in values:
        transcripts = isinstance(values["chosen"], str) and "prompt" not in values
        preference = (from_transcripts if transcripts else from_binary_row)(values, where)
        return [[*preference.context, *completion.messages] for completion in preference.completions]
    raise DataError("the row has nothing to score", where=where, got=f"keys {sorted(map(str, values))}", need=_SHAPES)


def _with_scores(values: dict[str, Any], scores: Sequence[Score]) -> dict[str, Any]:
    numbers = [score.score for score in scores]
    result = {**values, "score": numbers[0]} if "messages" in values else {**values, "scores": numbers}
    too_long = [score.num_tokens for score in scores if score.score is None]
    if too_long:
        result["error"] = f"too long to score: {', '.join(map(str, too_long))} tokens"
    if any(score.truncated for score in scores):
        result["truncated"] = True
    return result


def _completion(item: Any, field: str, where: str) -> list[Message]:
    if isinstance(item, Mapping) and "completion" in item:
        item, field = item["completion"], f"{field}.completion"
    if isinstance(item, str):
        return [{"role": "assistant", "content": item}]
    return list(check_messages(item, field, where))


def _list(value: Any, field: str, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{field} is not a list of answers", where=where, field=field, got=value, need="one or more")
    return value
