"""The columns of a row: which hold its prompt, which belong to every conversation, and which are
not read.

    context_of({"system": "Be brief.", "question": "2 + 2?", "chosen": "4", ...}, "train.jsonl:1")
    # a system message and a user message

Every column of a row is read, refused, or named: `prompt_column` refuses rows whose prompt may be
in several columns, and `unread_columns` are those that a log line names when the data is opened.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from treeward.config.data import DatasetConfig
from treeward.data.conversation import (
    SYSTEM_ROLES,
    TEMPLATE_COLUMNS,
    Message,
    Messages,
    as_messages,
    is_list,
    last_text,
)
from treeward.errors import DataError

PROMPT_COLUMNS = ("context", "prompt", "instruction", "question", "query")
"""The names of a prompt: text, or messages."""

CONVERSATION_COLUMNS = ("messages", "conversation", "conversations", "input", "history")
"""Columns that are the prompt of a row without one of `PROMPT_COLUMNS`, where they hold messages;
`input` also as text."""

SYSTEM_COLUMNS = ("system", "system_prompt")
"""The names of a text that becomes the system message."""

EVERY_CONVERSATION = (*SYSTEM_COLUMNS, *TEMPLATE_COLUMNS, "task_name")
"""Columns that are read beside any prompt."""

_MORE_PROMPT = ("input", "history")
"""Beside a prompt these hold the rest of it, in some order that only the data's author knows."""

MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
"""No model here reads them: a prompt without its image would be another question."""

_NEED_PROMPT = (
    "a prompt, under context, prompt, instruction, question, query or messages, or in another "
    "column that prompt_key names; or whole conversations"
)
_NAME_IT = "name the prompt's column, as prompt_key=prompt: then only that one is read"


def prompt_column(values: Mapping[str, Any], where: str | None) -> str | None:
    """The column of the row's prompt; None for a row without a prompt.

    Raises `DataError` for a row with two prompts, or with columns beside the prompt that would be
    lost with it.
    """
    names = [name for name in PROMPT_COLUMNS if values.get(name) is not None]
    if len(names) > 1:  # an empty cell of a CSV file is no prompt
        names = [name for name in names if not _is_empty(values[name])]
    if all(values[name] == values[names[0]] for name in names):
        names = names[:1]  # some tools copy the prompt under a second name, as distilabel
    if not names:
        names = [name for name in CONVERSATION_COLUMNS if _holds_prompt(name, values.get(name))]
    if len(names) > 1:
        raise DataError(
            "the row has two prompts",
            where=where,
            got=" and ".join(names),
            need="one of them",
            fix=_NAME_IT,
        )
    name = names[0] if names else None
    lost = [*MEDIA_COLUMNS]
    if name in PROMPT_COLUMNS:
        lost += _MORE_PROMPT
    check_not_lost(values, [other for other in lost if other != name], where, fix=_NAME_IT)
    return name


def check_not_lost(
    values: Mapping[str, Any], names: Iterable[str], where: str | None, *, fix: str
) -> None:
    """Raise `DataError` for a row with a value in one of these columns: it belongs to the prompt,
    and no model would read it."""
    for name in names:
        if not _is_empty(values.get(name)):
            raise DataError(
                f"the row's {name} would be lost",
                where=where,
                field=name,
                got=values[name],
                need="the whole prompt in one column, as text or messages",
                fix=fix,
            )


def with_named_prompt(
    values: Mapping[str, Any],
    column: str | None,
    where: str,
    *,
    required: bool = True,
) -> Mapping[str, Any]:
    """The row with the prompt of a named column alone; unchanged if no column is named.

    A row without that column is an error if it has its prompt in another one, and with
    `required=False` unchanged: NeMo RL's `data.default` names a column for all sets, and some have
    it under another name.
    """
    if column is None or (not required and values.get(column) is None):
        return values
    others = {*PROMPT_COLUMNS, *CONVERSATION_COLUMNS, *MEDIA_COLUMNS} - {column}
    row = {name: value for name, value in values.items() if name not in others}
    prompt = row.pop(column, None)
    if prompt is not None:
        return row | {"prompt": as_messages(prompt, column, "user", where)}
    usual = [name for name in PROMPT_COLUMNS if name != column]
    if any(not _is_empty(values.get(name)) for name in usual):
        summary = f"the row has no {column}"
        got = shown_keys(values)
        need = "a prompt under prompt_key"
        raise DataError(summary, where=where, field=column, got=got, need=need)
    return row  # perhaps whole conversations


def with_own_prompt(
    values: Mapping[str, Any], column: str | None, where: str | None
) -> Mapping[str, Any]:
    """The row with the prompt of its format's own `column` as `prompt`, where it has none under a
    usual name.

    Raises `DataError` as `prompt_column` does.
    """
    if column is None or values.get(column) is None:
        return values
    # One that the configuration names has become `prompt` before, and goes first.
    if prompt_column(values, where) is not None:
        return values
    # Under its own name it would be a second prompt, or a part of one that nobody reads.
    others = {name: value for name, value in values.items() if name != column}
    return {**others, "prompt": values[column]}


def named_columns(values: Mapping[str, Any], config: DatasetConfig, where: str) -> dict[str, Any]:
    """The row as one of `prompt`, `chosen` and `rejected`, where the configuration names columns
    for them.

    Raises `DataError` for a row without a named column.
    """
    row = dict(with_named_prompt(values, config.prompt_key, where, required=True))
    completions = {}
    # A column under its usual name may be missing: the row can be of another format.
    for column, name in ((config.chosen_key, "chosen"), (config.rejected_key, "rejected")):
        if column == name:
            continue
        if values.get(column) is None:
            summary = f"the row has no {column}"
            got = shown_keys(values)
            raise DataError(summary, where=where, field=column, got=got, need="a completion")
        # Not into the row yet: the other completion's column may have this usual name.
        completions[name] = values[column]
        row.pop(column, None)  # it has gone already if it has a usual name of a prompt
    return row | completions


def context_of(values: Mapping[str, Any], where: str | None) -> Messages | None:
    """The messages of the row's prompt, without its system column; None for a row without a prompt.

    Raises `DataError` as `prompt_column` does.
    """
    name = prompt_column(values, where)
    if name is None:
        return None
    value = values[name]
    # A prompt that says that it is empty.
    if value in ([], (), "[]"):
        return ()
    return as_messages(value, name, "user", where)


def with_system(
    context: Messages,
    ends: Iterable[Sequence[Message]],
    values: Mapping[str, Any],
    where: str | None,
) -> Messages:
    """The context after the row's system message, if a column has one.

    `ends`: what follows the context. Raises `DataError` for a conversation that already has another
    one.
    """
    texts = {name: values[name] for name in SYSTEM_COLUMNS if not _is_empty(values.get(name))}
    if not texts:
        return context
    # A row may have the same text in both columns.
    name, text = next(iter(texts.items()))
    distinct = {str(text) for text in texts.values()}
    if not isinstance(text, str) or len(distinct) > 1:
        summary = "the system message is not one text"
        raise DataError(summary, where=where, field=name, got=texts, need="one text")
    num_conversations = 0
    own_texts = []
    for end in ends:
        messages = [*context, *end]
        if not messages:
            continue
        num_conversations += 1
        if messages[0]["role"] in SYSTEM_ROLES:
            own_texts.append(last_text(messages[:1]))
    if not own_texts:
        return ({"role": "system", "content": text}, *context)
    # Every conversation has the column's text already: it would be there twice.
    if set(own_texts) == {text} and len(own_texts) == num_conversations:
        return context
    raise DataError(
        f"{name} is another system message than that of the conversation",
        where=where,
        field=name,
        got=text,
        need="one system message",
        fix="remove one of them",
    )


def unread_columns(values: Mapping[str, Any], read: Collection[str]) -> list[str]:
    """The columns with a text, a list or an object that are not in `read`. Numbers, also as text,
    do not count."""
    unread = []
    for name, value in values.items():
        if name not in read and not _is_empty(value) and _holds_text(value):
            unread.append(str(name))
    return unread


def _holds_text(value: Any) -> bool:
    if not isinstance(value, str):
        return is_list(value) or isinstance(value, Mapping)
    # Files of text, as CSV, have numbers as text.
    try:
        float(value)
    except ValueError:
        is_flag = value.lower() in ("true", "false")
        return not is_flag
    return False


def _holds_prompt(name: str, value: Any) -> bool:
    """Whether it is a list of messages, or its JSON text, that a completion can follow; or the text
    of an input."""
    if _is_empty(value) or not (isinstance(value, str) or is_list(value)):
        return False
    try:
        messages = as_messages(value, name, "user", None)
    except DataError:
        return False
    # Plain text. `input` is LLMBar's name of a prompt; under the other names text is anything.
    if isinstance(value, str) and messages == ({"role": "user", "content": value},):
        return name == "input"
    # A conversation with its completion is what is scored, and no prompt.
    ends_with_completion = messages[-1]["role"] == "assistant"
    return not ends_with_completion


def _is_empty(value: Any) -> bool:
    """Whether it says nothing, as an empty cell or an empty list."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, Mapping | list | tuple) and not value)


def shown_keys(values: Mapping[str, Any]) -> str:
    """The keys of a row, for an error."""
    return f"keys {sorted(map(str, values))}"


def check_promptless(values: Mapping[str, Any], read: Sequence[str], where: str | None) -> None:
    """Raise `DataError` for a row whose prompt may be in a column that is not in `read`: its
    completions would be learnt and scored without it."""
    others = []
    for column in unread_columns(values, {*read, *EVERY_CONVERSATION}):
        value = values[column]
        # A list of numbers is no prompt: grades, or log-probabilities.
        if not (is_list(value) and all(isinstance(item, int | float | None) for item in value)):
            others.append(column)
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
