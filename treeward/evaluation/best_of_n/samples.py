"""The samples of a file, and what raters say of them: a proxy or gold gives every sample a number, or a reason.

    gold = Rater("judge", lambda stack: (by_field("judge"), {"field": "judge"}))
    scores = rate("samples.jsonl", gold, folder, num_rows, on_progress)        # a list of `Score`s for each row

A rater is a model, a field of the rows, an environment, or the bundled world's gold quality. Its scores are kept as
they come, in a file of its own: an interrupted run goes on. What has no number is counted and never becomes one.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from treeward.data.formats import conversations_of, is_single
from treeward.data.preference import Completion, Message, Preference, parse_json_list, split_common_prefix
from treeward.data.sources import Row, fingerprint, read_rows
from treeward.data.synthetic.gold import gold_quality
from treeward.errors import DataError
from treeward.resumable import resumable_rows
from treeward.scoring.score import ConversationScorer, Score, score_groups

_COMPLETIONS = ("responses", "completions")
_PROMPTS = ("context", "prompt", "instruction")
_CONVERSATION = (*_COMPLETIONS, *_PROMPTS, "messages", "chosen", "rejected")
_ROWS_AT_ONCE = 64

SampledRow = tuple[Preference, Mapping[str, Any]]
"""A row of the file: its samples, whose `grades` are the fields with a number for each (NaN for null); and the columns
that are no part of a conversation, as `ground_truth`."""

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
        keys = {key: value for key, value in row.values.items() if value is not None}
        if "messages" in keys and keys.keys() & _COMPLETIONS and not keys.keys() & _PROMPTS:
            keys["context"] = keys.pop("messages")
        if is_single(keys, row.where):
            need = "a prompt with completions or responses, or chosen and rejected; docs/data.md has the keys"
            raise DataError("the row has one completion, and no list", where=row.where, got=sorted(keys), need=need)
        context, ends = split_common_prefix([tuple(chat) for chat in conversations_of(keys, row.where)])
        columns = {key: value for key, value in row.values.items() if key not in _CONVERSATION}
        fields = _fields(row, columns, len(ends))
        completions = [
            Completion(0, end, grades={name: values[i] for name, values in fields.items()})
            for i, end in enumerate(ends)
        ]
        yield Preference(context, tuple(completions), where=row.where), columns


def _fields(row: Row, columns: Mapping[str, Any], count: int) -> dict[str, list[float]]:
    """The numbers of each sample by field: a column with a list of them, or a key of each completion.

    `rank`, where lower is better, counts with the other sign; chosen and rejected completions have the ranks 0 and 1.
    """
    raw = next((row.values[key] for key in _COMPLETIONS if row.values.get(key) is not None), None)
    items = [item if isinstance(item, Mapping) else {} for item in parse_json_list(raw, "completions", row.where) or ()]
    nested = {key for item in items for key in item} - {"completion", "role", "content"}
    fields: dict[str, list[Any]] = {name: [item.get(name) for item in items] for name in sorted(nested)}
    if raw is None:
        fields["rank"] = [0, 1]
    for name, value in columns.items():
        try:
            fields[name] = parse_json_list(value, name, row.where)
        except DataError:  # text that begins with a bracket
            continue
    return {
        name: [math.nan if value is None else (-1.0 if name == "rank" else 1.0) * value for value in values]
        for name, values in fields.items()
        if isinstance(values, list)
        and len(values) == count
        and all(value is None or isinstance(value, int | float) for value in values)
    }


def by_scorer(scorer: ConversationScorer) -> Grader:
    """Scores of a reward model."""
    return lambda rows: score_groups(scorer, [samples.conversations for samples, _ in rows], on_error="mask")


def by_gold_quality(rows: Sequence[SampledRow]) -> list[list[Score]]:
    """`gold_quality` of the bundled data's world; a prompt of another world raises `DataError`."""
    return [[_quality(chat, samples.where) for chat in samples.conversations] for samples, _ in rows]


def _quality(conversation: Sequence[Message], where: str | None) -> Score:
    content = conversation[-1].get("content")
    if not isinstance(content, str):
        return Score(None, error="the completion is not text")
    try:
        return Score(gold_quality(conversation[:-1], content))
    except DataError as error:
        raise DataError(error.summary, where=where, field="prompt", got=error.got, fix=error.fix) from error


def by_field(name: str) -> Grader:
    """Numbers that the rows hold. Raises `DataError` for a row without one for each of its samples."""

    def grade(samples: Preference, columns: Mapping[str, Any]) -> list[Score]:
        grades = [completion.grades for completion in samples.completions]
        if name not in grades[0]:
            raise DataError(
                f"the row has no {name} with a number for each completion",
                where=samples.where,
                field=name,
                got=columns.get(name, f"keys {sorted(map(str, columns))}"),
                need=f"a list of {len(grades)} numbers",
            )
        scores = []
        for of_completion in grades:
            value = of_completion[name]
            error = None if math.isfinite(value) else f"{name} is {'null' if math.isnan(value) else value}"
            scores.append(Score(value if error is None else None, error=error))
        return scores

    return lambda rows: [grade(samples, columns) for samples, columns in rows]


def fields_of(row: SampledRow) -> list[str]:
    """The fields of a row that hold a number for each of its samples."""
    return list(row[0].completions[0].grades)


def rate(
    data: str, rater: Rater, folder: Path | None, num_rows: int, on_progress: Callable[[str, int, int], None]
) -> list[list[Score]]:
    """The scores of every sample of a file, a list for each row; those that `folder` keeps are not asked for again.

    `num_rows`: how many there are, for `on_progress`. Raises as `resumable_rows`.
    """
    # A name that is no good one for a file has a digest in it, so that no two share one.
    file_name = re.sub(r"[^A-Za-z0-9_-]+", "-", rater.name).strip("-")[:60]
    if file_name != rater.name:
        file_name = f"{file_name}-{hashlib.sha256(rater.name.encode()).hexdigest()[:8]}".strip("-")
    path = None if folder is None else folder / f"{file_name}.jsonl"

    def kept_scores(row: Any, where: str) -> list[Score]:
        return [Score(score, error=error) for score, error in zip(row["scores"], row["errors"], strict=True)]

    with ExitStack() as stack:
        grader, identity = rater.load(stack)
        full_identity = {"data": fingerprint(data), "rater": rater.name, **identity} if path else {}
        file = stack.enter_context(resumable_rows(path, full_identity, kept_scores))
        rated = file.kept
        on_progress(rater.name, len(rated), num_rows)
        remaining = islice(sampled_rows(read_rows(data)), len(rated), None)
        while chunk := list(islice(remaining, _ROWS_AT_ONCE)):
            for (samples, _), scores in zip(chunk, grader(chunk), strict=True):
                errors = [score.error for score in scores]
                file.add({"where": samples.where, "scores": [score.score for score in scores], "errors": errors})
                rated.append(scores)
            on_progress(rater.name, len(rated), num_rows)
    return rated
