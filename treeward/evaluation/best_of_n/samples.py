"""The samples of a file: rows with several responses to one prompt, their proxy and gold scores, kept as they come.

    rows = sampled_rows(read_rows("samples.jsonl"))        # {"prompt": "2 + 2?", "responses": ["4", "5", ...]}
    for scored in score_samples(rows, by_scorer(scorer), by_field("gold_scores")):
        scored.prompt                                      # a SampledPrompt, for `analyse`

A grader gives every sample of some rows a number, or None and the reason: a model, a field of the rows, the bundled
world's gold quality, or any function. What has no number is counted and never becomes one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from treeward.data.preference import Message, parse_json_list
from treeward.data.sources import Row
from treeward.data.synthetic.gold import gold_quality
from treeward.errors import DataError
from treeward.evaluation.best_of_n.analysis import SampledPrompt
from treeward.resumable import ResumableRows, resumable_rows
from treeward.scoring.rows import conversations_of
from treeward.scoring.score import ConversationScorer, Score

__all__ = ["Grade", "Grader", "SampledRow", "ScoredRow", "by_field", "by_gold_quality", "by_known"]
__all__ += ["by_scorer", "fields_of", "sample_file", "sampled_rows", "score_samples"]

_ANSWERS = ("responses", "completions")
_PROMPTS = ("context", "prompt", "messages")
_CONVERSATION = (*_ANSWERS, *_PROMPTS, "chosen", "rejected")
_SAMPLES_AT_ONCE = 1024


class Grade(NamedTuple):
    """A finite number, or None and why there is none."""

    value: float | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SampledRow:
    """A row of the file: the `context` of its N `conversations`, and its other columns as `info`."""

    number: int
    where: str
    context: list[Message]
    conversations: list[list[Message]]
    values: Mapping[str, Any]

    @property
    def info(self) -> dict[str, Any]:
        """What the row says of the prompt, as `ground_truth`: the columns that are no part of a conversation."""
        return {key: value for key, value in self.values.items() if key not in _CONVERSATION}


Grader = Callable[[Sequence[SampledRow]], list[list[Grade]]]
"""Gives a list of N grades for each of some rows, in order."""


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A row of `samples.jsonl`: the scores of the samples, and the two samples that matter most.

    `best` and `chosen`: indices of the first sample with the highest gold and with the highest proxy, among those with
    both; `completions`: the messages of these two, in that order. `errors`: how often each reason left a sample out.
    """

    row: int
    where: str
    cluster: str
    proxy: list[float | None]
    gold: list[float | None]
    errors: dict[str, int]
    best: int | None
    chosen: int | None
    context: list[Message]
    completions: list[list[Message]]

    @property
    def prompt(self) -> SampledPrompt:
        return SampledPrompt(self.proxy, self.gold, self.cluster, self.where)


# --- reading ---------------------------------------------------------------------------------------------------------


def sampled_rows(rows: Iterable[Row]) -> Iterator[SampledRow]:
    """Rows of `prompt` (text), `context` or `messages` with `responses` or `completions` (texts, messages, or those of
    a preference file), and rows of chosen and rejected answers. Raises `DataError` for any other row."""
    for number, row in enumerate(rows):
        conversations = _conversations(row.values, row.where)
        yield SampledRow(number, row.where, _shared(conversations), conversations, row.values)


def _conversations(values: Mapping[str, Any], where: str) -> list[list[Message]]:
    given = {key: value for key, value in values.items() if value is not None}
    answers = [key for key in _ANSWERS if key in given]
    if not answers:
        if "messages" in given:
            need = "responses or completions beside the messages"
            raise DataError("the row has one conversation and no samples", where=where, field="messages", need=need)
        return conversations_of(values, where)
    prompts = [key for key in _PROMPTS if key in given]
    if len(answers) + len(prompts) != 2:
        raise DataError(
            "the row does not have one prompt and one list of responses",
            where=where,
            got=" and ".join((*prompts, *answers)),
            need=f"one of {', '.join(_PROMPTS)}, and one of {' and '.join(_ANSWERS)}",
        )
    return conversations_of({"context": given[prompts[0]], "completions": given[answers[0]]}, where)


def _shared(conversations: Sequence[Sequence[Message]]) -> list[Message]:
    """The messages that all of them begin with; each has at least one more."""
    first, longest = conversations[0], min(map(len, conversations)) - 1
    same = (all(one[i] == first[i] for one in conversations) for i in range(longest))
    num = next((i for i, equal in enumerate(same) if not equal), longest)
    return list(first[:num])


# --- grading ---------------------------------------------------------------------------------------------------------


def by_scorer(scorer: ConversationScorer) -> Grader:
    """Scores of a reward model."""

    def grade(rows: Sequence[SampledRow]) -> list[list[Grade]]:
        flat = [conversation for row in rows for conversation in row.conversations]
        scores = iter(scorer.score(flat, on_error="mask"))
        return [[_grade(next(scores)) for _ in row.conversations] for row in rows]

    return grade


def by_gold_quality() -> Grader:
    """`gold_quality` of the bundled data's world; a prompt of another world raises `DataError`."""

    def grade(rows: Sequence[SampledRow]) -> list[list[Grade]]:
        return [[_quality(conversation, row.where) for conversation in row.conversations] for row in rows]

    return grade


def by_field(name: str) -> Grader:
    """Numbers that the rows hold: a list as long as the responses, or a key of each completion.

    `rank`, where lower is better, counts with the other sign; chosen and rejected answers have the ranks 0 and 1.
    Raises `DataError` for a row without the field, or with another number of them.
    """

    def grade(rows: Sequence[SampledRow]) -> list[list[Grade]]:
        return [_field_grades(row, name) for row in rows]

    return grade


def by_known(scored: Iterable[ScoredRow], otherwise: Callable[[], Grader]) -> Grader:
    """The gold of rows that are scored already, with another proxy; that of all others is what `otherwise` gives.

    `otherwise` is called at the first row that is not known, so that a model is loaded only if it is needed.
    """
    known = {one.row: one for one in scored}
    graders: list[Grader] = []

    def grade(rows: Sequence[SampledRow]) -> list[list[Grade]]:
        unknown = [row for row in rows if row.number not in known]
        if unknown and not graders:
            graders.append(otherwise())
        fresh = iter(graders[0](unknown) if unknown else ())
        return [_gold_grades(known[row.number]) if row.number in known else next(fresh) for row in rows]

    return grade


def _gold_grades(scored: ScoredRow) -> list[Grade]:
    """The grades that a row was made of. Which sample had which reason is not kept, only how often each came."""
    reasons = iter(
        reason.removeprefix("gold: ")
        for reason, count in scored.errors.items()
        if reason.startswith("gold: ")
        for _ in range(count)
    )
    return [Grade(value) if value is not None else Grade(None, next(reasons, "no score")) for value in scored.gold]


def fields_of(row: SampledRow) -> list[str]:
    """The fields of a row that hold a number for each of its samples."""
    own = [key for key in row.values if key not in _CONVERSATION and _numbers_of(row, key) is not None]
    completions = _completions(row)
    nested = {key for item in completions if isinstance(item, Mapping) for key in item}
    nested |= {"rank"} if _is_pair(row) else set()
    return own + sorted(key for key in nested - {"completion", "role", "content"} if _numbers_of(row, key) is not None)


def _field_grades(row: SampledRow, name: str) -> list[Grade]:
    values = _numbers_of(row, name)
    if values is None:
        raise DataError(
            f"the row has no {name} with a number for each response",
            where=row.where,
            field=name,
            got=row.values.get(name, f"keys {sorted(map(str, row.values))}"),
            need=f"a list of {len(row.conversations)} numbers",
        )
    return [_finite(value, f"{name} is null") for value in values]


def _numbers_of(row: SampledRow, name: str) -> list[float | None] | None:
    """A number, or None, for each sample; None where the row has no such field."""
    values = row.values.get(name)
    if values is not None:
        try:
            values = parse_json_list(values, name, row.where)
        except DataError:  # text that begins with a bracket
            return None
    elif name == "rank" and _is_pair(row):
        values = [0, 1]
    else:
        values = [item.get(name) if isinstance(item, Mapping) else None for item in _completions(row)]
        if all(value is None for value in values):
            return None
    if not isinstance(values, list) or len(values) != len(row.conversations):
        return None
    if not all(value is None or isinstance(value, int | float) for value in values):
        return None
    sign = -1.0 if name == "rank" else 1.0
    return [None if value is None else sign * value for value in values]


def _completions(row: SampledRow) -> list[Any]:
    given: Any = next((row.values[key] for key in _ANSWERS if row.values.get(key) is not None), [])
    items = parse_json_list(given, "completions", row.where)
    return items if isinstance(items, list) else []


def _is_pair(row: SampledRow) -> bool:
    return all(row.values.get(key) is None for key in _ANSWERS)


def _grade(score: Score) -> Grade:
    return _finite(score.score, score.error)


def _finite(value: float | None, error: str | None) -> Grade:
    if value is None:
        return Grade(None, error or "no score")
    return Grade(float(value)) if math.isfinite(value) else Grade(None, f"the number is {value}")


def _quality(conversation: Sequence[Message], where: str) -> Grade:
    content = conversation[-1].get("content")
    if not isinstance(content, str):
        return Grade(None, "the response is not text")
    try:
        return Grade(gold_quality(conversation[:-1], content))
    except DataError as error:
        raise DataError(error.summary, where=where, field="prompt", got=error.got, fix=error.fix) from error


# --- scoring and keeping ---------------------------------------------------------------------------------------------


def score_samples(rows: Iterable[SampledRow], proxy: Grader, gold: Grader) -> Iterator[ScoredRow]:
    """Each row with its scores, in order; memory does not grow with the rows."""
    chunk: list[SampledRow] = []
    for row in rows:
        if chunk and sum(len(one.conversations) for one in (*chunk, row)) > _SAMPLES_AT_ONCE:
            yield from _score_chunk(chunk, proxy, gold)
            chunk = []
        chunk.append(row)
    if chunk:
        yield from _score_chunk(chunk, proxy, gold)


def _score_chunk(rows: Sequence[SampledRow], proxy: Grader, gold: Grader) -> Iterator[ScoredRow]:
    for row, proxies, golds in zip(rows, proxy(rows), gold(rows), strict=True):
        assert len(proxies) == len(golds) == len(row.conversations)
        pairs = list(zip(proxies, golds, strict=True))
        both = [i for i, (p, g) in enumerate(pairs) if p.value is not None and g.value is not None]
        best = max(both, key=lambda i: pairs[i][1].value or 0.0, default=None)
        chosen = max(both, key=lambda i: pairs[i][0].value or 0.0, default=None)
        of_proxy = Counter(f"proxy: {grade.error}" for grade in proxies if grade.value is None)
        of_gold = Counter(f"gold: {grade.error}" for grade in golds if grade.value is None)
        shared = len(row.context)
        yield ScoredRow(
            row=row.number,
            where=row.where,
            cluster=hashlib.sha256(json.dumps(row.context, sort_keys=True, default=str).encode()).hexdigest()[:16],
            proxy=[grade.value for grade in proxies],
            gold=[grade.value for grade in golds],
            errors=dict(of_proxy + of_gold),
            best=best,
            chosen=chosen,
            context=row.context,
            completions=[row.conversations[i][shared:] for i in (best, chosen) if i is not None],
        )


def sample_file(folder: Path, identity: Mapping[str, str]) -> AbstractContextManager[ResumableRows[ScoredRow]]:
    """`samples.jsonl` in a folder, as `resumable_rows`: `kept` rows of an earlier run, and `add` for each new one.

    `identity`: what that run must have in common with this one; anything else raises `CheckpointError`.
    """
    return resumable_rows(folder / "samples.jsonl", identity, _scored_row)


def _scored_row(row: Any, where: str) -> ScoredRow:
    try:
        return ScoredRow(**row)
    except TypeError as error:
        raise DataError("this is no row of scored samples", where=where, got=str(error)) from error
