"""`Preference`: one prompt and several ranked completions; and the rows of prompts and completions
that become one.

    preference_from_dict({
        "context": [{"role": "user", "content": "What's the capital of France?"}],
        "completions": [
            {"rank": 0, "completion": [{"role": "assistant", "content": "Paris."}]},
            {"rank": 1, "completion": [{"role": "assistant", "content": "France is in Europe."}]},
        ],
    }, where="train.jsonl:1")

A lower rank is better and equal ranks are a tie. Messages stay raw: only the model that reads them
renders them. Each function is pure, and raises `DataError` naming the place, the row's key, its
value and the fix.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treeward.data.columns import (
    check_promptless,
    context_of,
    shown_keys,
    with_system,
)
from treeward.data.conversation import (
    SYSTEM_ROLES,
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

DATASET_NAME_FIX = "data.dataset_name=auto tells the format by a row's keys: see docs/data.md"
"""The fix of a row that is not of the format of its set."""

_COMPLETION_FORMAT = '{"rank": 0, "completion": [messages]}'
_RANK_FORMAT = f'{{"context": [messages], "completions": [{_COMPLETION_FORMAT}, ...]}}'
_NEED_RANK = "0, 1, ..., lower is better; or a score for each, or a list scores, and no ranks"
_NEED_ALIKE = "completions alone, or whole conversations with the prompt in each"
_SURE = 1e-7  # a judge's 0 and 1 count as this and its complement, whose log-odds are finite
# Of each of these the first that an object has counts.
_TEXT_KEYS = ("completion", "response", "answer")
_SCORE_KEYS = ("score", "overall_score", "probability")
_STRENGTH_KEYS = ("strength", "margin", "probability")
_HIGHEST_RANK = 2**31  # longer than any list, and an int64 of the token file holds it


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion of a prompt. `rank`: lower is better. `messages`: at least one. `score`: the
    data's grade, if any. `grades`: the requested attributes that the data has."""

    rank: int
    messages: Messages
    score: float | None = None
    grades: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def all_grades(self) -> dict[str, float]:
        """The grades by name, `score` among them."""
        grades = dict(self.grades)
        if self.score is not None:
            grades["score"] = self.score
        return grades


@dataclass(frozen=True, slots=True)
class Preference:
    """A comparison group: the `context` (messages, may be empty) and its `completions`, at least
    two; with grades one is enough.

    `strength`: by how much a better completion is better; see `rm.loss.strength`.
    `template_kwargs`: the row's tools and further variables of the chat template. `id`: the name in
    an evaluation. `info`: further columns of the row, which rules and judges read. `where`: file
    and row.
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
    def prompt_key(self) -> str:
        """The same for preferences that statistics treat as dependent: those of one context. One
        without a context is a prompt of its own, whatever the order of its completions."""
        if self.context:
            return self.context_key
        texts = []
        for completion in self.completions:
            texts.append(json.dumps(list(completion.messages), sort_keys=True, default=str))
        return f"without a context: {sorted(texts)}"

    @property
    def context_key(self) -> str:
        """The context as text."""
        parts: list[Any] = list(self.context)
        if self.template_kwargs:
            parts = [parts, dict(self.template_kwargs)]
        return json.dumps(parts, sort_keys=True, default=str)


def pair_ids(preference: Preference, completions: Sequence[Completion]) -> list[int]:
    """The id of each ordered pair of completions of this context, in the order of
    `losses.ranked_pairs`.

    A digest of the texts, the better completion first: it does not depend on the place of the row,
    nor on a tokenizer, and a pair that is labelled the other way round has another id.
    """
    context = digest_of(preference.context_key)
    digests = []
    for completion in completions:
        messages = json.dumps(list(completion.messages), sort_keys=True, default=str)
        digests.append(digest_of(messages))
    ids = []
    for better, better_digest in zip(completions, digests, strict=True):
        for worse, worse_digest in zip(completions, digests, strict=True):
            if better.rank < worse.rank:
                ids.append(digest_of(f"{context} {better_digest} {worse_digest}"))
    return ids


def contradicts_scores(completions: Sequence[Completion]) -> bool:
    """Whether a completion outranks one that has a higher score."""
    for better, worse in itertools.permutations(completions, 2):
        if better.score is None or worse.score is None:
            continue
        if better.rank < worse.rank and better.score < worse.score:
            return True
    return False


def num_unanswered(completions: Sequence[Completion]) -> int:
    """How many of the completions do not end with a message of the assistant."""
    return sum(completion.messages[-1]["role"] != "assistant" for completion in completions)


def differs_in_prompt(completions: Sequence[Completion]) -> bool:
    """Whether a completion begins with a question or an instruction: its side was a conversation
    whose prompt another side does not have."""
    asking = (*SYSTEM_ROLES, "user")
    return any(completion.messages[0]["role"] in asking for completion in completions)


def digest_of(text: str) -> int:
    """A hash of 64 bits, the same in every process."""
    # JSON can hold lone surrogates, at which UTF-8 would fail.
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8)
    # Signed, as the int64 of the token file.
    return int.from_bytes(digest.digest(), "little", signed=True)


def completions_of(
    values: Mapping[str, Any],
    where: str | None,
) -> tuple[Messages, list[tuple[Messages, Mapping[str, Any]]]]:
    """The context of the row, and the messages and other attributes of each of its `completions` or
    `responses`.

    One of them is text, messages, or an object with either as its `completion`, `response` or
    `answer`. The context is empty if the row has no prompt, or if all completions are whole
    conversations.
    """
    key = completions_column(values) or "completions"
    items = parse_json_list(values.get(key), key, where)
    if not is_list(items):
        summary = f"{key} is not a list of completions"
        need = '["...", ...], or as in the rank format'
        raise DataError(summary, where=where, field=key, got=items, need=need)
    context = context_of(values, where)
    sides: dict[str, Messages] = {}
    attributes: list[Mapping[str, Any]] = []
    for i, item in enumerate(items):
        item_attributes: Mapping[str, Any] = item if isinstance(item, Mapping) else {}
        value = item
        field = f"{key}[{i}]"
        # An object without such a key is a message, or refused as none.
        text_key = first_with_value(item_attributes, _TEXT_KEYS)
        if text_key is not None:
            value = item_attributes[text_key]
            field = f"{key}[{i}].{text_key}"
        sides[field] = as_messages(value, field, "assistant", where)
        attributes.append(item_attributes)
    if context is None and any(side[0]["role"] == "assistant" for side in sides.values()):
        check_promptless(values, (key, "scores"), where)
    context = before(context or (), sides, where)
    return context, list(zip(sides.values(), attributes, strict=True))


def completions_column(values: Mapping[str, Any]) -> str | None:
    """The column with the row's list of completions."""
    return first_with_value(values, ("completions", "responses"))


def first_with_value(values: Mapping[str, Any], keys: Iterable[str]) -> str | None:
    """The first of the keys that has a value."""
    for key in keys:
        if values.get(key) is not None:
            return key
    return None


def preference_from_dict(
    row: Mapping[str, Any],
    *,
    where: str | None = None,
    task_name: str = "preference",
    attributes: Sequence[str] = (),
    rating_key: str | None = None,
) -> Preference:
    """Check one row of a prompt and its completions, with ranks or scores, and return it as a
    `Preference`.

    Without a `rank` the scores rank completions, highest first and equal ones as ties: `score` (or
    `overall_score`) of each, or the row's list `scores`. Without a prompt the completions are whole
    conversations. Lists may be JSON text, as in CSV cells. `rating_key`: the key of a completion's
    score, or of the row's list of them, under another name. `attributes`: keys of a completion that
    are its grades; null and NaN mean none. With them one completion is enough, and the first
    attribute ranks completions without ranks and scores.
    """
    if not isinstance(row, Mapping):
        raise DataError("a row is not an object", where=where, got=row, need=_RANK_FORMAT)
    key = completions_column(row)
    if key is None:
        raise _missing("completions", row, where)
    context, completions = completions_of(row, where)
    ends = [messages for messages, _ in completions]
    are_conversations = all(messages[0]["role"] != "assistant" for messages in ends)
    if not context and ends and are_conversations:
        # The prompt is what the conversations begin with in common.
        context, ends = split_common_prefix(ends)
    elif context_of(row, where) is None:
        # A row may say that its prompt is empty, by an empty list. This one says nothing.
        raise _missing("context", row, where)

    fewest = 1 if attributes else 2
    if len(completions) < fewest:
        number = "one" if attributes else "two"
        summary = f"a comparison needs a list of {number} or more completions"
        raise DataError(summary, where=where, field=key, got=row[key], need=_RANK_FORMAT)
    items = [item for _, item in completions]
    if attributes:
        items = [without_nan(item) for item in items]
    fields = [f"{key}[{i}]" for i in range(len(items))]

    scores = _scores(row, items, fields, rating_key, where)
    grades = []
    for item, field in zip(items, fields, strict=True):
        grades.append(grades_of(item, attributes, where, f"{field}."))
    ranks = _ranks(items, scores, grades, attributes)
    ranked = []
    for i, messages in enumerate(ends):
        rank = _checked_rank(ranks[i], f"{fields[i]}.rank", where)
        ranked.append(Completion(rank, messages, scores[i], grades[i]))
    return preference_of(row, where, context, ranked, task_name)


def _missing(name: str, row: Mapping[str, Any], where: str | None) -> DataError:
    return DataError(
        f"the row has no {name}",
        where=where,
        field=name,
        got=shown_keys(row),
        need=_RANK_FORMAT,
        fix=DATASET_NAME_FIX,
    )


def _scores(
    row: Mapping[str, Any],
    items: Sequence[Mapping[str, Any]],
    fields: Sequence[str],
    rating_key: str | None,
    where: str | None,
) -> list[float | None]:
    """The score of each completion: its own, or of the row's list where no completion has a score
    or a rank."""
    keys = _SCORE_KEYS if rating_key is None else (rating_key,)
    # A rating is learnt as it is, and so is one that is called `probability`.
    read = score_of if rating_key is None else number_of
    scores: list[float | None] = []
    for item, field in zip(items, fields, strict=True):
        key = first_with_value(item, keys)
        score = None
        if key is not None:
            score = read(item[key], f"{field}.{key}", where)
        scores.append(score)
    # A rank says more than a score, so the row's list is not looked at beside ranks.
    if _has_ranks(items):
        return scores
    name = rating_key or "scores"
    listed = parse_json_list(row.get(name), name, where)
    if not is_list(listed) or len(listed) != len(items) or _has_any(scores):
        return scores
    return [number_of(score, f"{name}[{i}]", where) for i, score in enumerate(listed)]


def _ranks(
    items: Sequence[Mapping[str, Any]],
    scores: Sequence[float | None],
    grades: Sequence[Mapping[str, float]],
    attributes: Sequence[str],
) -> list[Any]:
    """The rank of each completion, unchecked: its own; else by the scores; else by the first of the
    attributes.

    None for a completion without any, which is an error where ranks are learnt. Where grades are
    learnt, such a completion has its grades all the same, and all completions are tied.
    """
    if _has_ranks(items):
        return [item.get("rank") for item in items]
    values = list(scores)
    if attributes and not _has_any(scores):
        values = [graded.get(attributes[0]) for graded in grades]
    # 0 for the highest value; equal ones are a tie, and a completion without one has no rank.
    best_first = sorted({value for value in values if value is not None}, reverse=True)
    ranks: list[int | None] = []
    for value in values:
        ranks.append(None if value is None else best_first.index(value))
    # One gap leaves no order: where grades are learnt, the ranks are only for reports.
    if attributes and None in ranks:
        return [0] * len(items)
    return ranks


def _has_ranks(items: Sequence[Mapping[str, Any]]) -> bool:
    return any(item.get("rank") is not None for item in items)


def _has_any(values: Sequence[float | None]) -> bool:
    return any(value is not None for value in values)


def preference_to_dict(preference: Preference) -> dict[str, Any]:
    """The rank-format row of a `Preference`; `preference_from_dict` gives it back."""
    completions = []
    for completion in preference.completions:
        item = {
            **completion.grades,
            "rank": completion.rank,
            "completion": list(completion.messages),
        }
        if completion.score is not None:
            item["score"] = completion.score
        completions.append(item)
    row: dict[str, Any] = {
        "context": list(preference.context),
        "completions": completions,
        "task_name": preference.task_name,
        **template_columns(preference.template_kwargs),
    }
    if preference.strength is not None:
        row["strength"] = preference.strength
    return row


def _checked_rank(rank: Any, field: str, where: str | None) -> int:
    # A column of numbers with a gap holds 1 as 1.0.
    is_number = isinstance(rank, int | float) and not isinstance(rank, bool)
    if is_number and 0 <= rank <= _HIGHEST_RANK and rank == int(rank):
        return int(rank)
    summary = "a rank is not a whole number from 0"
    if rank is None:
        summary = "a completion has no rank and no score"
    raise DataError(summary, where=where, field=field, got=rank, need=_NEED_RANK)


def preference_of(
    values: Mapping[str, Any],
    where: str | None,
    context: Messages,
    completions: Iterable[Completion],
    task_name: str,
) -> Preference:
    """The preference, with the row's system message, template variables, strength and task name, if
    any."""
    completions = tuple(completions)
    ends = [completion.messages for completion in completions]
    context = with_system(context, ends, values, where)
    name = values.get("task_name")
    if isinstance(name, str) and name:
        task_name = name  # the row's own wins over the set's
    strength = None
    strength_key = first_with_value(values, _STRENGTH_KEYS)
    if strength_key is not None:
        strength = score_of(values[strength_key], strength_key, where)
    return Preference(
        context=context,
        completions=completions,
        task_name=task_name,
        strength=strength,
        template_kwargs=read_template_kwargs(values, where),
    )


def required(values: Mapping[str, Any], key: str, where: str, need: str) -> Any:
    """The row's value for the key. Raises `DataError` with the nearest key if there is none."""
    value = values.get(key)
    if value is not None:
        return value
    near = nearest_name(key, [str(name) for name in values if name != key])
    got = "null" if key in values else shown_keys(values)
    fix = f"is it {near}?" if near else None
    raise DataError(f"the row has no {key}", where=where, field=key, got=got, need=need, fix=fix)


def check_prompted(messages: Iterable[Message], first: bool | None, where: str | None) -> bool:
    """Whether a conversation has anything beside instructions and completions. Raises `DataError`
    if it differs from the data's `first` row; None for that row itself."""
    contents = []
    is_prompted = False
    for message in messages:
        if message["role"] not in ("assistant", *SYSTEM_ROLES):
            content = message.get("content")
            contents.append(content)
            # Blank text asks nothing; a list of parts may be an image alone.
            if content and not (isinstance(content, str) and content.isspace()):
                is_prompted = True
    if first is None or is_prompted == first:
        return is_prompted
    if first:
        summary = "the row has no prompt, and the first row has one"
        fix = "fix or remove the row"
    else:
        summary = "only later rows have a prompt"
        fix = "fix the first row"
    need = "a prompt in every row, or in none"
    raise DataError(
        summary,
        where=where,
        field="prompt",
        got=contents or "none",
        need=need,
        fix=fix,
    )


def before(context: Messages, sides: Mapping[str, Messages], where: str | None) -> Messages:
    """The messages before the completions `sides`, by field: the context, or none if all
    completions hold it. Raises `DataError` if only some do."""
    if not context or not sides:
        return context
    if all(holds_prompt(side, context) for side in sides.values()):
        return ()
    for field, side in sides.items():
        check_continues(context, side, field, where)
    return context


def holds_prompt(side: Messages, prompt: Messages | None) -> bool:
    """Whether `side` is a whole conversation: it begins with the prompt, or has the single prompt
    text as a user turn. Without a prompt: whether it does not begin with the assistant."""
    if prompt is None:
        return bool(side[0]["role"] != "assistant")
    beginning = [(message["role"], message.get("content")) for message in side[: len(prompt)]]
    prompt_turns = [(message["role"], message.get("content")) for message in prompt]
    if len(side) > len(prompt) and beginning == prompt_turns:
        return True
    # A prompt that is only the last question, beside conversations that have the earlier turns too.
    if len(prompt) != 1 or prompt[0]["role"] != "user" or side[0]["role"] == "assistant":
        return False
    text = last_text(prompt).strip()
    questions = [message for message in side[:-1] if message["role"] == "user"]
    return any(last_text([question]).strip() == text for question in questions)


def check_continues(prompt: Messages, side: Messages, key: str, where: str | None) -> None:
    """Raise `DataError` for a completion that is a whole conversation: its prompt would be lost, or
    be there twice."""
    role = side[0]["role"]
    last_role = prompt[-1]["role"] if prompt else None
    if holds_prompt(side, prompt):
        summary = f"{key} holds the prompt and another completion does not"
    # After a prompt that ends with the assistant a side may go on with the user's next turn.
    elif role in SYSTEM_ROLES or (role == "user" and last_role != "assistant"):
        summary = f"{key} is a conversation that does not contain the prompt"
    else:
        return
    raise DataError(summary, where=where, field=f"{key}[0].role", got=role, need=_NEED_ALIKE)


def split_common_prefix(conversations: Sequence[Messages]) -> tuple[Messages, list[Messages]]:
    """The leading messages that all conversations share, and the remaining messages of each, at
    least one."""
    first = conversations[0]
    # One message of each must be left: a conversation may be the beginning of another.
    longest = min(len(conversation) for conversation in conversations) - 1
    shared = 0
    while shared < longest:
        # Compared as whole messages: tool calls and names are of the prompt too.
        if any(conversation[shared] != first[shared] for conversation in conversations):
            break
        shared += 1
    return first[:shared], [conversation[shared:] for conversation in conversations]


def number_of(value: Any, field: str, where: str | None) -> float | None:
    """The number, which may be text; None for null and for empty text, as an empty cell is.

    Raises `DataError` for any other value, and for one that is not finite.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    number = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):  # an integer of a thousand digits overflows
            number = math.nan
    if not math.isfinite(number):
        name = field.rsplit(".", 1)[-1]
        summary = f"{name} is not a finite number"
        need = "a finite number, or no such key"
        raise DataError(summary, where=where, field=field, got=value, need=need)
    return number


def score_of(value: Any, field: str, where: str | None) -> float | None:
    """A score or a strength; of the field `probability` its log-odds, which is the difference of
    two scores."""
    number = number_of(value, field, where)
    if number is None or field.rpartition(".")[2] != "probability":
        return number
    if not 0 <= number <= 1:
        need = "a number from 0 to 1"
        raise DataError(
            "the value is not a probability", where=where, field=field, got=value, need=need
        )
    # Certainty would have infinite log-odds.
    probability = min(max(number, _SURE), 1 - _SURE)
    return math.log(probability / (1 - probability))


def grades_of(
    values: Mapping[str, Any],
    attributes: Sequence[str],
    where: str | None,
    prefix: str = "",
) -> dict[str, float]:
    """The grades of a completion, without its score; null and NaN mean none. Raises `DataError` for
    values that are not numbers, with `prefix` before the key."""
    known_values = without_nan(values)
    grades: dict[str, float] = {}
    for name in attributes:
        # `Completion` has its score apart, and `all_grades` puts it among them again.
        if name == "score":
            continue
        grade = number_of(known_values.get(name), f"{prefix}{name}", where)
        if grade is not None:
            grades[name] = grade
    return grades


def without_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without NaN, as which a table of pandas writes a gap in a column of numbers."""
    kept = {}
    for key, value in values.items():
        is_nan = isinstance(value, float) and math.isnan(value)
        if not is_nan:
            kept[key] = value
    return kept
