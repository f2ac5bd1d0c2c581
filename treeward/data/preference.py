"""`Preference`: one prompt and several ranked completions, the schema that everything in treeward speaks.

    preference_from_dict({
        "context": [{"role": "user", "content": "What's the capital of France?"}],
        "completions": [
            {"rank": 0, "completion": [{"role": "assistant", "content": "Paris."}]},
            {"rank": 1, "completion": [{"role": "assistant", "content": "France is in Europe."}]},
        ],
    }, where="train.jsonl:1")

A lower rank is better and equal ranks are a tie. There may be two completions or many, each of one message or more.
Messages stay raw: only the model that reads them renders them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treeward.errors import DataError

__all__ = [
    "Completion",
    "Message",
    "Preference",
    "check_messages",
    "last_text",
    "preference_from_dict",
    "preference_to_dict",
]

Message = dict[str, Any]
"""A chat message: `role` and `content`, and whatever else a chat template reads (`tool_calls`, `name`, ...)."""

_LARGEST_RANK = 2**31
_PREFERENCE_SHAPE = '{"context": [messages], "completions": [{"rank": 0, "completion": [messages]}, ...]}'


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer to a prompt.

    `rank`: lower is better. `messages`: at least one. `score`: a grade that the data carries, if any; it is kept for
    evaluation and is not used by the Bradley-Terry loss.
    """

    rank: int
    messages: tuple[Message, ...]
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Preference:
    """A comparison group: the `context` (messages, may be empty) and at least two `completions` of it.

    `margin` (optional, finite) is by how much a better completion's score should exceed a worse one's.
    `non_contextual`: an answer to another prompt, which is worse than all completions; see `data.non_contextual`.
    """

    context: tuple[Message, ...]
    completions: tuple[Completion, ...]
    task_name: str = "preference"
    margin: float | None = None
    non_contextual: tuple[Message, ...] | None = None

    @property
    def num_ordered_pairs(self) -> int:
        """How many pairs of completions have different ranks."""
        ranks = [completion.rank for completion in self.completions]
        return sum(a != b for i, a in enumerate(ranks) for b in ranks[i + 1 :])


def preference_from_dict(
    row: Mapping[str, Any], *, where: str | None = None, task_name: str = "preference"
) -> Preference:
    """Check one row in the rank format and return it as a `Preference`.

    Raises `DataError` naming `where` and the field for a missing key, an empty list, a wrong type, fewer than two
    completions, or a margin or score that is not finite. Keys that are not part of the schema are left unread.
    """
    if not isinstance(row, Mapping):
        raise DataError("a row is not an object", where=where, got=type(row).__name__, need=_PREFERENCE_SHAPE)
    context = check_messages(_key(row, "context", where), "context", where, may_be_empty=True)
    raw = _key(row, "completions", where)
    if not _is_list(raw):
        got = type(raw).__name__
        raise DataError("completions is not a list", where=where, field="completions", got=got, need=_PREFERENCE_SHAPE)
    if len(raw) < 2:
        raise DataError(
            "a comparison needs at least two completions",
            where=where,
            field="completions",
            got=f"{len(raw)} completion{'s' if len(raw) != 1 else ''}",
            need="two or more",
            fix="remove the row, or add the completion that it was compared with",
        )
    completions = tuple(_completion(item, f"completions[{i}]", where) for i, item in enumerate(raw))
    margin = _number(row.get("margin"), "margin", where)
    name = row.get("task_name")
    return Preference(context, completions, name if isinstance(name, str) and name else task_name, margin)


def preference_to_dict(preference: Preference) -> dict[str, Any]:
    """The rank-format row of a `Preference`; `preference_from_dict` gives it back."""
    row: dict[str, Any] = {
        "context": list(preference.context),
        "completions": [
            {"rank": c.rank, "completion": list(c.messages)} | ({} if c.score is None else {"score": c.score})
            for c in preference.completions
        ],
        "task_name": preference.task_name,
    }
    return row if preference.margin is None else row | {"margin": preference.margin}


def check_messages(value: Any, field: str, where: str | None, *, may_be_empty: bool = False) -> tuple[Message, ...]:
    """Check a list of chat messages; `field` names it in the error. Content may be text or a list of parts."""
    if not _is_list(value):
        advice = 'write [{"role": "user", "content": "..."}]'
        if field in ("context", "prompt"):
            advice = f"for a plain-text {field} use dataset_name: BinaryPreferenceDataset"
        raise DataError(
            f"{field} is not a list of messages",
            where=where,
            field=field,
            got=value,
            need='[{"role": "user", "content": "..."}, ...]',
            fix=advice if isinstance(value, str) else None,
        )
    if not value and not may_be_empty:
        raise DataError(f"{field} is empty", where=where, field=field, got="[]", need="at least one message")
    for i, message in enumerate(value):
        _check_message(message, f"{field}[{i}]", where)
    return tuple({key: item for key, item in message.items() if item is not None} for message in value)


def last_text(messages: Sequence[Message]) -> str:
    """The text of the last message, whose characters are the length of a reply.

    Of content in parts those that are text; empty for a message without content, and without messages.
    """
    content: Any = messages[-1].get("content") if messages else None
    if content is None or isinstance(content, str):
        return content or ""
    texts = (part if isinstance(part, str) else part.get("text") for part in content)
    return "".join(text for text in texts if isinstance(text, str))


def _check_message(message: Any, field: str, where: str | None) -> None:
    if not isinstance(message, Mapping):
        raise DataError(
            "a message is not an object", where=where, field=field, got=message, need='{"role": ..., "content": ...}'
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise DataError(
            "a message has no role",
            where=where,
            field=f"{field}.role",
            got=role,
            need="a name such as user, assistant or system",
        )
    content = message.get("content")
    if isinstance(content, str) or _is_list(content) or (content is None and message.get("tool_calls")):
        return
    raise DataError("a message has no text", where=where, field=f"{field}.content", got=content, need="a string")


def _completion(item: Any, field: str, where: str | None) -> Completion:
    if not isinstance(item, Mapping):
        raise DataError(
            "a completion is not an object",
            where=where,
            field=field,
            got=item,
            need='{"rank": 0, "completion": [messages]}',
        )
    rank = item.get("rank")
    if isinstance(rank, float) and rank.is_integer():
        rank = int(rank)
    if isinstance(rank, bool) or not isinstance(rank, int) or abs(rank) > _LARGEST_RANK:
        raise DataError(
            "a completion has no rank" if rank is None else "a rank is not a whole number of ordinary size",
            where=where,
            field=f"{field}.rank",
            got=rank,
            need="a whole number; lower is better, equal is a tie",
        )
    if "completion" not in item:
        raise DataError(
            "a completion has no messages",
            where=where,
            field=f"{field}.completion",
            got=f"keys {sorted(item)}",
            need='[{"role": "assistant", "content": "..."}]',
        )
    messages = check_messages(item["completion"], f"{field}.completion", where)
    return Completion(rank, messages, _number(item.get("score"), f"{field}.score", where))


def _number(value: Any, field: str, where: str | None) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(
            f"{field.rsplit('.', 1)[-1]} is not a finite number",
            where=where,
            field=field,
            got=value,
            need="a finite number, or no such key",
        )
    return float(value)


def _key(row: Mapping[str, Any], key: str, where: str | None) -> Any:
    if key not in row:
        raise DataError(
            f"the row has no {key}",
            where=where,
            field=key,
            got=f"keys {sorted(map(str, row))}",
            need=_PREFERENCE_SHAPE,
            fix="for rows of prompt, chosen and rejected use dataset_name: BinaryPreferenceDataset",
        )
    return row[key]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
