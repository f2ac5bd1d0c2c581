"""The samples of a file, and what raters say of them: a proxy or gold gives every sample a number, or a reason.

    proxy = Rater("length", lambda stack: (by_scorer(scorer), scorer_identity(scorer, "length")))
    gold = Rater("judge", lambda stack: (by_field("judge"), {"field": "judge"}))
    scores = rate("samples.jsonl", proxy, folder, num_rows)        # a list of `Score`s for each row

A rater is a model, a field of the rows, an environment, or the bundled world's gold quality. It reads the file once,
and its scores are kept as they come, in a file of its own: an interrupted run goes on, and a further proxy does not ask
the others again. What has no number is counted and never becomes one.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from treeward.data.formats import conversations_of, is_single
from treeward.data.preference import Message, parse_json_list, split_common_prefix
from treeward.data.sources import Row, fingerprint, read_rows
from treeward.data.synthetic.gold import gold_quality
from treeward.errors import DataError
from treeward.resumable import resumable_rows
from treeward.scoring.score import ConversationScorer, Score, score_groups

_COMPLETIONS = ("responses", "completions")
_PROMPTS = ("context", "prompt", "instruction")
_CONVERSATION = (*_COMPLETIONS, *_PROMPTS, "messages", "chosen", "rejected")
_ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class SampledRow:
    """A row of the file: the `context` of its N `conversations`, and all its columns as `values`."""

    where: str
    context: list[Message]
    conversations: list[list[Message]]
    values: Mapping[str, Any]

    @property
    def info(self) -> dict[str, Any]:
        """What the row says of the prompt, as `ground_truth`: the columns that are no part of a conversation."""
        return {key: value for key, value in self.values.items() if key not in _CONVERSATION}

    @property
    def cluster(self) -> str:
        """The same for rows of one prompt."""
        return hashlib.sha256(json.dumps(self.context, sort_keys=True, default=str).encode()).hexdigest()[:16]


Grader = Callable[[Sequence[SampledRow]], list[list[Score]]]
"""Gives a list of N scores for each of some rows, in order."""


@dataclass(frozen=True, slots=True)
class Rater:
    """A proxy or a gold. `load`: its grader, and what its scores depend on besides the samples, as JSON by name; called
    when its turn comes, with a stack for what must be shut down."""

    name: str
    load: Callable[[ExitStack], tuple[Grader, Mapping[str, Any]]]


def sampled_rows(rows: Iterable[Row]) -> Iterator[SampledRow]:
    """Rows of several completions, as `conversations_of` reads them; with `responses` or `completions` a row may have
    its prompt as `messages`. Raises `DataError` for any other row."""
    for row in rows:
        conversations = _conversations(row.values, row.where)
        context, _ = split_common_prefix([tuple(one) for one in conversations])
        yield SampledRow(row.where, list(context), conversations, row.values)


def _conversations(values: Mapping[str, Any], where: str) -> list[list[Message]]:
    given = {key: value for key, value in values.items() if value is not None}
    if "messages" in given and given.keys() & _COMPLETIONS and not given.keys() & _PROMPTS:
        given["context"] = given.pop("messages")
    if is_single(given, where):
        need = "a prompt with completions or responses, or chosen and rejected; docs/data.md has the keys"
        raise DataError("the row has one completion, and no list", where=where, got=sorted(given), need=need)
    return conversations_of(given, where)


# --- graders ---------------------------------------------------------------------------------------------------------


def by_scorer(scorer: ConversationScorer) -> Grader:
    """Scores of a reward model."""
    return lambda rows: score_groups(scorer, [row.conversations for row in rows], on_error="mask")


def by_gold_quality(rows: Sequence[SampledRow]) -> list[list[Score]]:
    """`gold_quality` of the bundled data's world; a prompt of another world raises `DataError`."""
    return [[_quality(conversation, row.where) for conversation in row.conversations] for row in rows]


def _quality(conversation: Sequence[Message], where: str) -> Score:
    content = conversation[-1].get("content")
    if not isinstance(content, str):
        return Score(None, error="the completion is not text")
    try:
        return Score(gold_quality(conversation[:-1], content))
    except DataError as error:
        raise DataError(error.summary, where=where, field="prompt", got=error.got, fix=error.fix) from error


def by_field(name: str) -> Grader:
    """Numbers that the rows hold: a list as long as the completions, or a key of each completion.

    `rank`, where lower is better, counts with the other sign; chosen and rejected completions have the ranks 0 and 1.
    Raises `DataError` for a row without the field, or with another number of them.
    """

    def grade(rows: Sequence[SampledRow]) -> list[list[Score]]:
        return [[_as_score(value, name) for value in _required(row, name)] for row in rows]

    return grade


def fields_of(row: SampledRow) -> list[str]:
    """The fields of a row that hold a number for each of its samples."""
    nested = {key for item in _completions(row) if isinstance(item, Mapping) for key in item} | {"rank"}
    names = [key for key in row.values if key not in _CONVERSATION]
    names += sorted(nested - {"completion", "role", "content", *names})
    return [name for name in names if _numbers(row, name) is not None]


def _required(row: SampledRow, name: str) -> list[float | None]:
    values = _numbers(row, name)
    if values is None:
        raise DataError(
            f"the row has no {name} with a number for each completion",
            where=row.where,
            field=name,
            got=row.values.get(name, f"keys {sorted(map(str, row.values))}"),
            need=f"a list of {len(row.conversations)} numbers",
        )
    return values


def _numbers(row: SampledRow, name: str) -> list[float | None] | None:
    """A number, or None, for each sample; None where the row has no such field."""
    values = row.values.get(name)
    if values is not None:
        try:
            values = parse_json_list(values, name, row.where)
        except DataError:  # text that begins with a bracket
            return None
    elif completions := _completions(row):
        values = [item.get(name) if isinstance(item, Mapping) else None for item in completions]
        values = None if all(value is None for value in values) else values
    elif name == "rank":  # of chosen and rejected
        values = [0, 1]
    if not isinstance(values, list) or len(values) != len(row.conversations):
        return None
    if not all(value is None or isinstance(value, int | float) for value in values):
        return None
    return [None if value is None else (-1.0 if name == "rank" else 1.0) * value for value in values]


def _completions(row: SampledRow) -> list[Any]:
    given: Any = next((row.values[key] for key in _COMPLETIONS if row.values.get(key) is not None), [])
    items = parse_json_list(given, "completions", row.where)
    return items if isinstance(items, list) else []


def _as_score(value: float | None, name: str) -> Score:
    if value is None:
        return Score(None, error=f"{name} is null")
    return Score(value) if math.isfinite(value) else Score(None, error=f"{name} is {value}")


# --- rating a file ---------------------------------------------------------------------------------------------------


def rate(
    data: str, rater: Rater, folder: Path | None, num_rows: int, on_progress: Callable[[str, int, int], None]
) -> list[list[Score]]:
    """The scores of every sample of a file, a list for each row; those that `folder` keeps are not asked for again.

    `num_rows`: how many there are, for `on_progress`. Raises as `resumable_rows`.
    """
    path = None if folder is None else folder / f"{_file_name(rater.name)}.jsonl"
    with ExitStack() as stack:
        grader, identity = rater.load(stack)
        own = {"data": fingerprint(data), "rater": rater.name, **identity} if path else {}
        file = stack.enter_context(resumable_rows(path, own, _kept_scores))
        found = file.kept
        on_progress(rater.name, len(found), num_rows)
        left = islice(sampled_rows(read_rows(data)), len(found), None)
        while chunk := list(islice(left, _ROWS_AT_ONCE)):
            for row, scores in zip(chunk, grader(chunk), strict=True):
                errors = [score.error for score in scores]
                file.add({"where": row.where, "scores": [score.score for score in scores], "errors": errors})
                found.append(scores)
            on_progress(rater.name, len(found), num_rows)
    return found


def _kept_scores(row: Any, where: str) -> list[Score]:
    return [Score(score, error=error) for score, error in zip(row["scores"], row["errors"], strict=True)]


def _file_name(name: str) -> str:
    """A name that is no good one for a file has a digest in it, so that no two share one."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:60]
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}".strip("-")
