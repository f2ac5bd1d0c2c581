"""`Preference`: one prompt and several ranked completions; and the formats of rows that become one.

    preference_from_dict({
        "context": [{"role": "user", "content": "What's the capital of France?"}],
        "completions": [
            {"rank": 0, "completion": [{"role": "assistant", "content": "Paris."}]},
            {"rank": 1, "completion": [{"role": "assistant", "content": "France is in Europe."}]},
        ],
    }, where="train.jsonl:1")

A lower rank is better and equal ranks are a tie. Messages stay raw: only the model that reads them renders them. Each
function is pure, and raises `DataError` naming the place, the row's key, its value and the fix.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treeward.data.columns import EVERY_CONVERSATION, context_of, unread_columns, with_system
from treeward.data.conversation import (
    Conversation,
    Message,
    Messages,
    as_messages,
    is_list,
    last_text,
    parse_json_list,
    read_template_kwargs,
    template_columns,
)
from treeward.errors import DataError, nearest_name

_RANK_FORMAT = '{"context": [messages], "completions": [{"rank": 0, "completion": [messages]}, ...]}'
_RECOGNISED = "data.dataset_name=auto tells the format by the keys of the first row; docs/data.md has the keys of each"
_TEXT_KEYS, _SCORE_KEYS = ("completion", "response", "answer"), ("score", "overall_score", "probability")
_STRENGTH_KEYS = ("strength", "margin", "probability")
_SURE = 1e-7  # a judge's 0 and 1 count as this and its complement, whose log-odds are finite
_SIDE_SCORES = ("score_{}", "{}_score", "{}_rating", "{}-rating")
_TRANSCRIPT = '"\\n\\nHuman: ...\\n\\nAssistant: ..."'
_TURN = re.compile(r"\n\n(Human|Assistant):")
_HELPSTEER3_KEYS = ("context", "response1", "response2", "overall_preference")
_HELPSTEER2_KEYS = ("prompt", "response_1", "response_2", "preference_strength")
_HELPSTEER_TURN = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")
_ROLE_OF_SPEAKER = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion of a prompt. `rank`: lower is better. `messages`: at least one. `score`: the data's grade, if any.
    `grades`: the requested attributes that the data has."""

    rank: int
    messages: Messages
    score: float | None = None
    grades: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def all_grades(self) -> dict[str, float]:
        """The grades by name, `score` among them."""
        return dict(self.grades) | ({} if self.score is None else {"score": self.score})


@dataclass(frozen=True, slots=True)
class Preference:
    """A comparison group: the `context` (messages, may be empty) and its `completions`, at least two; with grades one
    is enough.

    `strength`: by how much a better completion is better; see `rm.loss.strength`. `template_kwargs`: the row's tools
    and further variables of the chat template. `id`: the name in an evaluation. `info`: further columns of the row,
    which rules read. `where`: file and row.
    """

    context: Messages
    completions: tuple[Completion, ...]
    task_name: str = "preference"
    strength: float | None = None
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    id: str = ""
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    where: str | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each completion: lower is better, equal is a tie."""
        return tuple(completion.rank for completion in self.completions)

    @property
    def conversations(self) -> list[Conversation]:
        """The context with each completion."""
        return [self.conversation(completion) for completion in self.completions]

    def conversation(self, completion: Completion) -> Conversation:
        """The context with one completion."""
        messages = [*self.context, *completion.messages]
        return Conversation(messages, chat_template_kwargs=self.template_kwargs)

    @property
    def context_key(self) -> str:
        """The context as text. Statistics treat preferences with the same context as dependent."""
        parts = [list(self.context), dict(self.template_kwargs)] if self.template_kwargs else list(self.context)
        return json.dumps(parts, sort_keys=True, default=str)


def check_prompted(messages: Iterable[Message], first: bool | None, where: str | None) -> bool:
    """Whether a conversation has anything beside instructions and completions. Raises `DataError` if it differs from
    the data's `first` row; None for that row itself."""
    contents = [m.get("content") for m in messages if m["role"] not in ("assistant", "system", "developer")]
    is_prompted = any(content.strip() if isinstance(content, str) else content for content in contents)
    if first is None or is_prompted == first:
        return is_prompted
    summary = "the row has no prompt, and the first row has one" if first else "only later rows have a prompt"
    need, fix = "a prompt in every row, or in none", "mend or remove the row" if first else "mend the first row"
    raise DataError(summary, where=where, field="prompt", got=contents or "none", need=need, fix=fix)


def completions_of(
    values: Mapping[str, Any], where: str | None
) -> tuple[Messages, list[tuple[Messages, Mapping[str, Any]]]]:
    """The context of the row's `completions` or `responses`, and the messages and other attributes of each, which is
    text, messages, or an object with either as its `completion`, `response` or `answer`. The context is empty if the
    row has no prompt, or if all completions are whole conversations."""
    key = completions_column(values) or "completions"
    items = parse_json_list(values.get(key), key, where)
    if not is_list(items):
        need = '["...", ...], or as in the rank format'
        raise DataError(f"{key} is not a list of completions", where=where, field=key, got=items, need=need)
    context = context_of(values, where)
    sides: dict[str, Messages] = {}
    more: list[Mapping[str, Any]] = []
    for i, item in enumerate(items):
        attributes: Mapping[str, Any] = item if isinstance(item, Mapping) else {}
        text_key = next((name for name in _TEXT_KEYS if attributes.get(name) is not None), None)
        value, field = item, f"{key}[{i}]"
        if text_key is not None:
            value, field = attributes[text_key], f"{key}[{i}].{text_key}"
        sides[field] = as_messages(value, field, "assistant", where)
        more.append(attributes)
    if context is None and any(side[0]["role"] == "assistant" for side in sides.values()):
        check_promptless(values, (key, "scores"), where)
    return before(context or (), sides, where), list(zip(sides.values(), more, strict=True))


def completions_column(values: Mapping[str, Any]) -> str | None:
    """The column with the row's list of completions."""
    return next((key for key in ("completions", "responses") if values.get(key) is not None), None)


def check_promptless(values: Mapping[str, Any], read: Sequence[str], where: str | None) -> None:
    """Raise `DataError` for a row whose prompt may be in a column that is not in `read`: its completions would be
    learnt and scored without it."""
    columns = unread_columns(values, {*read, *EVERY_CONVERSATION})
    others = [column for column in columns if not _are_numbers(values[column])]
    if not others:
        return
    raise DataError(
        "the row has no prompt",
        where=where,
        field="prompt",
        got=_keys(values),
        need="a prompt (context, prompt, instruction, question or query, or messages), or whole conversations",
        fix=f"name the prompt's column, as prompt_key={others[0]}; or, without a prompt, remove {', '.join(others)}",
    )


def before(context: Messages, sides: Mapping[str, Messages], where: str | None) -> Messages:
    """The messages before the completions `sides`, by field: the context, or none if all completions hold it. Raises
    `DataError` if only some do."""
    if context and sides and all(_holds_prompt(side, context) for side in sides.values()):
        return ()
    for field, side in sides.items() if context else ():
        _check_continues(context, side, field, where)
    return context


def preference_from_dict(
    row: Mapping[str, Any],
    *,
    where: str | None = None,
    task_name: str = "preference",
    attributes: Sequence[str] = (),
    rating_key: str | None = None,
) -> Preference:
    """Check one row of a prompt and its completions, with ranks or scores, and return it as a `Preference`.

    Without a `rank` the scores rank completions, highest first and equal ones as ties: `score` (or `overall_score`) of
    each, or the row's list `scores`. Without a prompt the completions are whole conversations. Lists may be JSON text,
    as in CSV cells. `rating_key`: the key of a completion's score, or of the row's list of them, under another name.
    `attributes`: keys of a completion that are its grades; null and NaN mean none. With them one completion is enough,
    and the first attribute ranks completions without ranks and scores.
    """
    if not isinstance(row, Mapping):
        raise DataError("a row is not an object", where=where, got=row, need=_RANK_FORMAT)
    key = completions_column(row)
    context, completions = ((), []) if key is None else completions_of(row, where)
    ends = [messages for messages, _ in completions]
    if not context and ends and all(messages[0]["role"] != "assistant" for messages in ends):
        context, ends = split_common_prefix(ends)
    elif key is None or context_of(row, where) is None:
        missing = "completions" if key is None else "context"
        summary = f"the row has no {missing}"
        raise DataError(summary, where=where, field=missing, got=_keys(row), need=_RANK_FORMAT, fix=_RECOGNISED)
    if len(completions) < (1 if attributes else 2):
        summary = f"a comparison needs a list of {'one' if attributes else 'two'} or more completions"
        raise DataError(summary, where=where, field=key, got=row[key or ""], need=_RANK_FORMAT)
    if attributes:
        completions = [(messages, _without_nan(about)) for messages, about in completions]
    ranks = [about.get("rank") for _, about in completions]
    score_keys = _SCORE_KEYS if rating_key is None else (rating_key,)
    scores = [_score_of(about, score_keys, f"{key}[{i}]", where) for i, (_, about) in enumerate(completions)]
    if ranks == [None] * len(completions):
        name = rating_key or "scores"
        listed = parse_json_list(row.get(name), name, where)
        if is_list(listed) and len(listed) == len(completions) and scores == ranks:
            scores = [_number(score, f"{name}[{i}]", where) for i, score in enumerate(listed)]
    grades = [grades_of(about, attributes, where, f"{key}[{i}].") for i, (_, about) in enumerate(completions)]
    if ranks == [None] * len(completions):
        has_scores = not attributes or scores != ranks
        values = scores if has_scores else [graded.get(attributes[0]) for graded in grades]
        best_first = sorted({value for value in values if value is not None}, reverse=True)
        ranks = [None if value is None else best_first.index(value) for value in values]
        if attributes and None in ranks:
            ranks = [0] * len(completions)
    ranked = (
        Completion(_rank(rank, f"{key}[{i}].rank", where), messages, score, graded)
        for i, (rank, messages, score, graded) in enumerate(zip(ranks, ends, scores, grades, strict=True))
    )
    return preference_of(row, where, context, ranked, task_name)


def preference_to_dict(preference: Preference) -> dict[str, Any]:
    """The rank-format row of a `Preference`; `preference_from_dict` gives it back."""
    row: dict[str, Any] = {
        "context": list(preference.context),
        "completions": [
            {**c.grades, "rank": c.rank, "completion": list(c.messages)}
            | ({} if c.score is None else {"score": c.score})
            for c in preference.completions
        ],
        "task_name": preference.task_name,
        **template_columns(preference.template_kwargs),
    }
    return row if preference.strength is None else row | {"strength": preference.strength}


def _rank(rank: Any, field: str, where: str | None) -> int:
    if isinstance(rank, bool) or not isinstance(rank, int | float) or not 0 <= rank <= 2**31 or rank != int(rank):
        need = "0, 1, ..., where a lower rank is better; or a score for each completion (or a list scores) and no ranks"
        summary = "a completion has no rank and no score" if rank is None else "a rank is not a whole number from 0"
        raise DataError(summary, where=where, field=field, got=rank, need=need)
    return int(rank)


def _score_of(about: Mapping[str, Any], keys: Sequence[str], field: str, where: str | None) -> float | None:
    key = next((key for key in keys if about.get(key) is not None), None)
    return None if key is None else _graded(about[key], f"{field}.{key}", where)


def preference_of(
    values: Mapping[str, Any], where: str | None, context: Messages, completions: Iterable[Completion], task_name: str
) -> Preference:
    """The preference, with the row's system message, template variables, strength and task name, if any."""
    completions = tuple(completions)
    name = values.get("task_name")
    task_name = name if isinstance(name, str) and name else task_name
    key = next((key for key in _STRENGTH_KEYS if values.get(key) is not None), "margin")
    return Preference(
        context=with_system(context, [completion.messages for completion in completions], values, where),
        completions=completions,
        task_name=task_name,
        strength=_graded(values.get(key), key, where),
        template_kwargs=read_template_kwargs(values, where),
    )


def grades_of(
    about: Mapping[str, Any], attributes: Sequence[str], where: str | None, prefix: str = ""
) -> dict[str, float]:
    """The grades of a completion, without its score; null and NaN mean none. Raises `DataError` for values that are not
    numbers, with `prefix` before the key."""
    values = _without_nan(about)
    grades = {name: _number(values.get(name), f"{prefix}{name}", where) for name in attributes if name != "score"}
    return {name: value for name, value in grades.items() if value is not None}


def _without_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if not (isinstance(value, float) and math.isnan(value))}


def _graded(value: Any, field: str, where: str | None) -> float | None:
    """A number; for the field `probability`, its log-odds."""
    number = _number(value, field, where)
    if number is None or not field.endswith("probability"):
        return number
    if not 0 <= number <= 1:
        raise DataError("this is no probability", where=where, field=field, got=value, need="a number from 0 to 1")
    number = min(max(number, _SURE), 1 - _SURE)
    return math.log(number / (1 - number))


def _number(value: Any, field: str, where: str | None) -> float | None:
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float | str) else float(value)
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        summary = f"{field.rsplit('.', 1)[-1]} is not a finite number"
        raise DataError(summary, where=where, field=field, got=value, need="a finite number, or no such key")
    return number


def from_binary_row(
    values: Mapping[str, Any],
    where: str,
    *,
    chosen_key: str = "chosen",
    rejected_key: str = "rejected",
    task_name: str = "preference",
) -> Preference:
    """A row of a prompt, a chosen and a rejected completion; reads `margin`, `task_name`, `score_chosen` and
    `score_rejected` too.

    Each is text or messages. Rows of whole conversations need no prompt, nor do rows with no other text than these
    two. Equal scores are a tie.
    """
    need = "a completion; prompt_key, chosen_key and rejected_key of BinaryPreferenceDataset name the keys"
    keys = (chosen_key, rejected_key)
    chosen, rejected = (as_messages(required(values, key, where, need), key, "assistant", where) for key in keys)
    prompt = context_of(values, where)
    alone = [key for key, side in zip(keys, (chosen, rejected), strict=True) if not _holds_prompt(side, prompt)]
    if not alone:
        prompt, (chosen, rejected) = split_common_prefix([chosen, rejected])
    elif prompt is None:
        if any(is_transcript(values[key]) or not isinstance(values[key], str) for key in keys):
            need, fix = "a prompt, or whole conversations on both sides", "set prompt_key to the prompt's column"
            raise DataError("the row has no prompt", where=where, field="prompt", got=_keys(values), need=need, fix=fix)
        numbers = [form.format(key) for form in _SIDE_SCORES for key in keys]
        check_promptless(values, (*keys, *numbers), where)
        prompt = ()
    else:
        _check_continues(prompt, chosen, chosen_key, where)
        _check_continues(prompt, rejected, rejected_key, where)
    return _two_sides(values, where, prompt, (chosen, rejected), (chosen_key, rejected_key), task_name)


def from_helpsteer3_row(values: Mapping[str, Any], where: str, *, task_name: str = "preference") -> Preference:
    """A row of a prompt, two responses and a preference from -3 (the first is much better) to 3; 0 is a tie. The
    strength is 1, 2 or 3. The keys are those of nvidia/HelpSteer3, or of nvidia/HelpSteer2's preferences."""
    keys = _HELPSTEER2_KEYS if _HELPSTEER2_KEYS[1] in values else _HELPSTEER3_KEYS
    need = f"a row of {', '.join(keys)}; or another format, as {_RECOGNISED}"
    raw_prompt, *responses, raw = (required(values, key, where, need) for key in keys)
    context = as_messages(turns_of(raw_prompt), keys[0], "user", where)
    sides = zip(responses, keys[1:3], strict=True)
    first, second = (as_messages(side, key, "assistant", where) for side, key in sides)
    grade = _number(raw, keys[3], where)
    if grade not in range(-3, 4):
        need = f"a whole number from -3 ({keys[1]} is much better) to 3 ({keys[2]} is)"
        raise DataError("a grade is not valid", where=where, field=keys[3], got=raw, need=need)
    better, worse = (second, first) if grade in (1, 2, 3) else (first, second)
    completions = (Completion(0, better), Completion(int(grade != 0), worse))
    attributes = {name: values.get(name) for name in EVERY_CONVERSATION} | {"strength": abs(grade) if grade else None}
    return preference_of(attributes, where, context, completions, task_name)


def turns_of(prompt: Any) -> Any:
    r"""The messages of a prompt with HelpSteer2's `"\n<extra_id_1>Assistant\n"` between turns; any other unchanged."""
    if not isinstance(prompt, str) or not _HELPSTEER_TURN.search(prompt):
        return prompt
    parts = ["User", *_HELPSTEER_TURN.split(prompt)]
    return [{"role": role.lower(), "content": text} for role, text in zip(parts[::2], parts[1::2], strict=True)]


def is_transcript(value: Any) -> bool:
    """Whether it is text that begins with a turn of Human or Assistant; see `parse_transcript`."""
    return isinstance(value, str) and value.lstrip().startswith(("Human:", "Assistant:"))


def from_transcripts(values: Mapping[str, Any], where: str, *, task_name: str = "preference") -> Preference:
    """A row of two whole transcripts, as Anthropic's hh-rlhf has them; see `parse_transcript`."""
    chosen, rejected = (
        parse_transcript(required(values, key, where, f"a transcript: {_TRANSCRIPT}"), where, key)
        for key in ("chosen", "rejected")
    )
    context, (better, worse) = split_common_prefix([chosen, rejected])
    return _two_sides(values, where, context, (better, worse), ("chosen", "rejected"), task_name)


def parse_transcript(text: Any, where: str | None = None, field: str = "transcript") -> Messages:
    r"""The messages of `"\n\nHuman: ...\n\nAssistant: ..."`; roles alternate.

    The same speaker's name after a blank line belongs to the content: joining `f"\n\n{speaker}: {content}"` gives the
    transcript back. Raises `DataError` for text before the first turn.
    """
    value, text = text, text if isinstance(text, str) else ""
    if not text.startswith("\n\n") and text.lstrip().startswith(("Human:", "Assistant:")):
        text = f"\n\n{text.lstrip()}"
    head, *parts = _TURN.split(text)
    if head.strip() or not parts:
        summary = "a transcript is not text that begins with a turn"
        raise DataError(summary, where=where, field=field, got=value, need=_TRANSCRIPT, fix=_RECOGNISED)
    turns: list[tuple[str, str]] = []
    for speaker, content in zip(parts[::2], parts[1::2], strict=True):
        if turns and turns[-1][0] == speaker:
            turns[-1] = (speaker, f"{turns[-1][1]}\n\n{speaker}:{content}")
        else:
            turns.append((speaker, content.removeprefix(" ")))
    return tuple({"role": _ROLE_OF_SPEAKER[speaker], "content": content} for speaker, content in turns)


def split_common_prefix(conversations: Sequence[Messages]) -> tuple[Messages, list[Messages]]:
    """The leading messages that all conversations share, and the remaining messages of each, at least one."""
    longest, first = min(map(len, conversations)) - 1, conversations[0]
    shared = 0
    while shared < longest and all(conversation[shared] == first[shared] for conversation in conversations):
        shared += 1
    return first[:shared], [conversation[shared:] for conversation in conversations]


def required(values: Mapping[str, Any], key: str, where: str, need: str) -> Any:
    """The row's value for the key. Raises `DataError` with the nearest key if there is none."""
    value = values.get(key)
    if value is None:
        near = nearest_name(key, [str(name) for name in values if name != key])
        got, fix = "null" if key in values else _keys(values), f"is it {near}?" if near else None
        raise DataError(f"the row has no {key}", where=where, field=key, got=got, need=need, fix=fix)
    return value


def _two_sides(
    values: Mapping[str, Any],
    where: str,
    context: Messages,
    sides: tuple[Messages, Messages],
    keys: tuple[str, str],
    task_name: str,
) -> Preference:
    """A preference of two `sides`, better one first, with the row's scores of their `keys`."""
    names = [[form.format(key) for form in _SIDE_SCORES] for key in keys]
    score_keys = [next((name for name in candidates if values.get(name) is not None), "") for candidates in names]
    better, worse = (_number(values.get(name), name, where) for name in score_keys)
    tie = better is not None and better == worse
    completions = (Completion(0, sides[0], better), Completion(int(not tie), sides[1], worse))
    return preference_of(values, where, context, completions, task_name)


def _holds_prompt(side: Messages, prompt: Messages | None) -> bool:
    """Whether `side` is a whole conversation: it begins with the prompt, or has the single prompt text as a user turn.
    Without a prompt: whether it does not begin with the assistant."""
    if prompt is None:
        return bool(side[0]["role"] != "assistant")
    begins = [(a["role"], a.get("content")) for a in side[: len(prompt)]]
    if len(side) > len(prompt) and begins == [(b["role"], b.get("content")) for b in prompt]:
        return True
    if len(prompt) != 1 or prompt[0]["role"] != "user" or side[0]["role"] == "assistant":
        return False
    text = last_text(prompt).strip()
    return any(message["role"] == "user" and last_text([message]).strip() == text for message in side[:-1])


def _check_continues(prompt: Messages, side: Messages, key: str, where: str | None) -> None:
    """Raise `DataError` for a completion that is a whole conversation: its prompt would be lost, or be there twice."""
    role, last_role = side[0]["role"], prompt[-1]["role"] if prompt else None
    if _holds_prompt(side, prompt):
        summary = f"{key} holds the prompt and another completion does not"
    elif role == "system" or (role == "user" and last_role != "assistant"):
        summary = f"{key} is a conversation that does not contain the prompt"
    else:
        return
    need = "the completion alone, or the whole conversation with the prompt in it, alike for all completions"
    raise DataError(summary, where=where, field=f"{key}[0].role", got=role, need=need)


def _keys(values: Mapping[str, Any]) -> str:
    return f"keys {sorted(map(str, values))}"


def _are_numbers(value: Any) -> bool:
    return is_list(value) and all(isinstance(item, int | float | None) for item in value)
