"""Where the prompt of a row is: before its completions, inside each of them, or nowhere.

before(context, {"chosen": side, "rejected": other}, "train.jsonl:1")      # (), if both sides hold the context
split_common_prefix([conversation, other])      # what both share, and the rest of each
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from treeward.data.columns import EVERY_CONVERSATION, shown_keys, unread_columns
from treeward.data.conversation import Message, Messages, is_list, last_text
from treeward.errors import DataError

_NEED_PROMPT = (
    "a prompt, under context, prompt, instruction, question, query or messages, or in another "
    "column that prompt_key names; or whole conversations"
)
_NEED_ALIKE = "completions alone, or whole conversations with the prompt in each"


def check_prompted(messages: Iterable[Message], first: bool | None, where: str | None) -> bool:
    """Whether a conversation has anything beside instructions and completions. Raises `DataError` if it differs from
    the data's `first` row; None for that row itself."""
    contents = []
    for message in messages:
        if message["role"] not in ("assistant", "system", "developer"):
            contents.append(message.get("content"))
    is_prompted = any(_says_something(content) for content in contents)
    if first is None or is_prompted == first:
        return is_prompted
    if first:
        summary = "the row has no prompt, and the first row has one"
        fix = "mend or remove the row"
    else:
        summary = "only later rows have a prompt"
        fix = "mend the first row"
    need = "a prompt in every row, or in none"
    raise DataError(
        summary,
        where=where,
        field="prompt",
        got=contents or "none",
        need=need,
        fix=fix,
    )


def _says_something(content: Any) -> bool:
    if isinstance(content, str):
        return bool(content.strip())
    return bool(content)


def check_promptless(values: Mapping[str, Any], read: Sequence[str], where: str | None) -> None:
    """Raise `DataError` for a row whose prompt may be in a column that is not in `read`: its completions would be
    learnt and scored without it."""
    columns = unread_columns(values, {*read, *EVERY_CONVERSATION})
    others = [column for column in columns if not _are_numbers(values[column])]
    if not others:
        return
    fix_with_prompt = f"name the prompt's column, as prompt_key={others[0]}"
    raise DataError(
        "the row has no prompt",
        where=where,
        field="prompt",
        got=shown_keys(values),
        need=_NEED_PROMPT,
        fix=f"{fix_with_prompt}; or, without a prompt, remove {', '.join(others)}",
    )


def _are_numbers(value: Any) -> bool:
    return is_list(value) and all(isinstance(item, int | float | None) for item in value)


def before(context: Messages, sides: Mapping[str, Messages], where: str | None) -> Messages:
    """The messages before the completions `sides`, by field: the context, or none if all completions hold it. Raises
    `DataError` if only some do."""
    if not context or not sides:
        return context
    if all(holds_prompt(side, context) for side in sides.values()):
        return ()
    for field, side in sides.items():
        check_continues(context, side, field, where)
    return context


def holds_prompt(side: Messages, prompt: Messages | None) -> bool:
    """Whether `side` is a whole conversation: it begins with the prompt, or has the single prompt text as a user turn.
    Without a prompt: whether it does not begin with the assistant."""
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
    """Raise `DataError` for a completion that is a whole conversation: its prompt would be lost, or be there twice."""
    role = side[0]["role"]
    last_role = prompt[-1]["role"] if prompt else None
    if holds_prompt(side, prompt):
        summary = f"{key} holds the prompt and another completion does not"
    elif role == "system" or (role == "user" and last_role != "assistant"):
        summary = f"{key} is a conversation that does not contain the prompt"
    else:
        return
    raise DataError(summary, where=where, field=f"{key}[0].role", got=role, need=_NEED_ALIKE)


def split_common_prefix(conversations: Sequence[Messages]) -> tuple[Messages, list[Messages]]:
    """The leading messages that all conversations share, and the remaining messages of each, at least one."""
    first = conversations[0]
    longest = min(len(conversation) for conversation in conversations) - 1
    shared = 0
    while shared < longest:
        if any(conversation[shared] != first[shared] for conversation in conversations):
            break
        shared += 1
    return first[:shared], [conversation[shared:] for conversation in conversations]
