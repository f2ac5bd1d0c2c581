"""`Conversation`: the messages that a model reads, and what else its chat template reads.

    messages = [{"role": "user", "content": "Rain in Rome?"}, ...]
    Conversation(messages, tools=[{"type": "function", ...}])
    check_messages(messages, "messages", "train.jsonl:1")  # checked, each message in one form

A conversation without tools and without template variables may as well be a plain list of messages.
Messages stay raw: only the model that reads them renders them. Messages that say the same have one
form, however they were written: ShareGPT's `from` and `value` become `role` and `content`, and the
arguments of a tool call are an object, also where they came as its JSON text. Errors are
`DataError`s that name the place, the key, its value and the fix.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from treeward.data.turns import turns_of_prompt
from treeward.errors import DataError

Message = dict[str, Any]
"""A chat message: `role`, `content`, and other keys that a chat template reads (`tool_calls`,
`name`, ...)."""

Messages = tuple[Message, ...]

SYSTEM_ROLES = ("system", "developer")
"""The roles of instructions to the model. `developer` is OpenAI's newer name of `system`."""

TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
"""The columns of a row that its conversations' template reads."""

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "observation": "tool",
    "function": "tool",
}
"""ShareGPT's roles, and OpenAI's older name of a tool. `function_call` is one of ShareGPT's too:
its value is a tool call of the assistant."""

_MESSAGE_KEYS = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})
"""The keys by which an object is told to be a message; the last are ShareGPT's."""

_TEXT_OF_MESSAGE = ("role", "content", "from", "value")
"""Keys of a message that may be empty: to say nothing is an answer too."""

# A CSV file that was written with str(messages) instead of JSON.
_PYTHON_MESSAGES = re.compile(r"\s*\[\s*\{\s*'(role|content|from|value)'\s*:")
_NEED_MESSAGE = '{"role": "user", "content": "..."}'
_NEED_MESSAGES = f"[{_NEED_MESSAGE}, ...]"
_NEED_TOOLS = 'a list as [{"type": "function", "function": {"name": ...}}], or its JSON text'


class Conversation(list[Message]):
    """Messages with the variables of their chat template.

    `tools`: what the assistant may call, as a list of JSON schemas. `chat_template_kwargs`: further
    variables, as `enable_thinking`; they win over the `chat_template_kwargs` of the model.
    `template_kwargs` holds both.
    """

    def __init__(
        self,
        messages: Iterable[Message] = (),
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(messages)
        self.template_kwargs: dict[str, Any] = {}
        if tools:
            self.template_kwargs["tools"] = list(tools)
        self.template_kwargs.update(chat_template_kwargs or {})


AnyConversation = Sequence[Message]
"""A `Conversation`, or a plain list of messages."""


def template_kwargs_of(conversation: AnyConversation) -> Mapping[str, Any]:
    """The template variables of a conversation; none for a plain list of messages."""
    if isinstance(conversation, Conversation):
        return conversation.template_kwargs
    return {}


def with_messages(conversation: AnyConversation, messages: Iterable[Message]) -> Conversation:
    """Other messages with the template variables of a conversation."""
    # The tools too, which are one of the variables.
    return Conversation(messages, chat_template_kwargs=template_kwargs_of(conversation))


def to_json(conversation: AnyConversation) -> Any:
    """The conversation for a request: its messages, in an object beside the template variables if
    it has any."""
    variables = template_kwargs_of(conversation)
    if not variables:
        return list(conversation)
    return {"messages": list(conversation), **template_columns(variables)}


def read_template_kwargs(values: Mapping[str, Any], where: str | None) -> dict[str, Any]:
    """The template variables in a row's columns `tools` and `chat_template_kwargs`, either of which
    may be JSON text.

    An empty list of tools is none. Raises `DataError`.
    """
    variables: dict[str, Any] = {}
    listed = _parsed_json(values.get("tools"))
    if listed is None:
        listed = []
    if not is_list(listed):
        raise DataError(
            "tools is not a list",
            where=where,
            field="tools",
            got=listed,
            need=_NEED_TOOLS,
        )
    tools = []
    for i, item in enumerate(listed):
        tool = _parsed_json(item)  # some files have a list of texts
        if not isinstance(tool, Mapping):
            field = f"tools[{i}]"
            raise DataError(
                "a tool is not an object",
                where=where,
                field=field,
                got=tool,
                need=_NEED_TOOLS,
            )
        tools.append(dict(tool))
    if tools:
        variables["tools"] = tools
    others = _parsed_json(values.get("chat_template_kwargs"))
    if others is not None and not isinstance(others, Mapping):
        need = 'an object of variables, as {"enable_thinking": false}, or its JSON text'
        raise DataError(
            "chat_template_kwargs is not an object",
            where=where,
            field="chat_template_kwargs",
            got=others,
            need=need,
        )
    variables.update(others or {})
    return variables


def template_columns(template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row from which `read_template_kwargs` gives these variables."""
    others = dict(template_kwargs)
    tools = others.pop("tools", None)
    columns: dict[str, Any] = {}
    if tools:
        columns["tools"] = tools
    if others:
        columns["chat_template_kwargs"] = others
    return columns


def _parsed_json(value: Any) -> Any:
    """The value of JSON text; None for an empty one; any other value, and text that is no JSON,
    unchanged."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # brackets may be nested too deep
        return value


def check_messages(
    value: Any,
    field: str,
    where: str | None,
    *,
    may_be_empty: bool = False,
) -> Messages:
    """Check a list of chat messages, and write each in one form; `field` names the list in the
    error. Content may be text or a list of parts."""
    if not is_list(value):
        summary = f"{field} is not a list of messages"
        raise DataError(summary, where=where, field=field, got=value, need=_NEED_MESSAGES)
    if not value and not may_be_empty:
        need = "at least one message"
        raise DataError(f"{field} is empty", where=where, field=field, got="[]", need=need)
    messages = []
    for i, message in enumerate(value):
        messages.append(_checked_message(message, f"{field}[{i}]", where))
    return tuple(messages)


def _checked_message(value: Any, field: str, where: str | None) -> Message:
    """The message in one form. Raises `DataError` for one without a role, or with neither text nor
    calls of tools."""
    need = _NEED_MESSAGE
    if not isinstance(value, Mapping):
        summary = "a message is not an object"
        raise DataError(summary, where=where, field=field, got=value, need=need)
    message = canonical_message(value)
    role = message.get("role")
    content = message.get("content")
    if not isinstance(role, str) or not role:
        summary = "a message has no role"
        raise DataError(summary, where=where, field=f"{field}.role", got=value, need=need)
    has_content = isinstance(content, str) or is_list(content)
    if content is not None and is_list(content):
        for i, part in enumerate(content):
            # What follows reads the text of every part.
            if not isinstance(part, str | Mapping):
                raise DataError(
                    "a part of a message is neither text nor an object",
                    where=where,
                    field=f"{field}.content[{i}]",
                    got=part,
                    need='"..." or {"type": "text", "text": "..."}',
                )
    only_calls = content is None and message.get("tool_calls")
    if not has_content and not only_calls:
        summary = "a message has no text"
        raise DataError(summary, where=where, field=f"{field}.content", got=value, need=need)
    return message


def canonical_message(message: Mapping[str, Any]) -> Message:
    """A message without keys that say nothing, its content's parts included, with one name for each
    role, and with tool calls whose arguments are objects."""
    canonical = {}
    for key, item in message.items():
        # Templates ask whether there is a key `tool_calls`: of an empty list DeepSeek-V3's leaves
        # out the message's text, and Llama 3.1's refuses it.
        is_empty = isinstance(item, str | Mapping | list | tuple) and not item
        if item is not None and (key in _TEXT_OF_MESSAGE or not is_empty):
            canonical[key] = item
    if is_list(canonical.get("content")):
        # Qwen's templates take a part with a key `image` for an image, whatever its type and text.
        canonical["content"] = [without_nulls(part) for part in canonical["content"]]
    if "role" not in canonical and "from" in canonical and "value" in canonical:
        role = canonical.pop("from")
        content = canonical.pop("value")
        canonical = {"role": role, "content": content} | canonical
    role = canonical.get("role")
    # A message of ShareGPT whose whole text is the call.
    if role == "function_call" and "tool_calls" not in canonical:
        call = _parsed_json(canonical.get("content"))
        if isinstance(call, Mapping) and "name" in call:
            tool_call = {"type": "function", "function": dict(call)}
            canonical = {"role": "assistant", "tool_calls": [tool_call]}
    elif isinstance(role, str) and role in _ROLES:
        canonical["role"] = _ROLES[role]
    # OpenAI's older form of a single call.
    call = canonical.get("function_call")
    if "tool_calls" not in canonical and isinstance(call, Mapping) and "name" in call:
        del canonical["function_call"]
        canonical["tool_calls"] = [{"type": "function", "function": dict(call)}]
    # OpenAI's API has the arguments as JSON text, which a template would quote once more.
    calls = canonical.get("tool_calls")
    if is_list(calls):
        canonical["tool_calls"] = [canonical_call(call) for call in calls or ()]
    return canonical


def canonical_call(call: Any) -> Any:
    """A tool call whose arguments are an object: OpenAI's API has its JSON text, which templates
    would quote again.

    Text that is no JSON object stays: a policy may have written it.
    """
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": canonical_call(call["function"])}
    if "arguments" not in call:
        return dict(call)
    arguments = _parsed_json(call["arguments"])
    if arguments is None:  # null, the text of null, and empty text: a call without arguments
        arguments = {}
    if not isinstance(arguments, Mapping):
        arguments = call["arguments"]
    return {**call, "arguments": arguments}


def as_messages(value: Any, key: str, role: str, where: str | None) -> Messages:
    """Text as one message of `role`, else a checked message or list of them, which may be JSON
    text, as in a CSV cell. A text of the user may mark its turns (`turns.py`).

    Raises `DataError` for the text of Python's messages, which would be read as the literal text of
    one message.
    """
    if isinstance(value, str):
        if _PYTHON_MESSAGES.match(value):
            summary = f"{key} is Python's text of messages"
            need = f"JSON: {_NEED_MESSAGES}"
            fix = "write the cell with json.dumps(messages)"
            raise DataError(summary, where=where, field=key, got=value, need=need, fix=fix)
        parsed = value
        if value.lstrip().startswith(("[", "{")):
            parsed = _parsed_json(value)
        # JSON that is no messages is a text that a person wrote.
        if not _looks_like_messages(_listed(parsed)):
            turns = turns_of_prompt(value) if role == "user" else None
            return tuple(turns or [{"role": role, "content": value}])  # also "[1, 2]"
        value = parsed
    value = _listed(value)
    if is_list(value):
        return check_messages(value, key, where)
    summary = f"{key} is neither text nor a list of messages"
    need = '"..." or [{"role": ..., "content": ...}, ...]'
    raise DataError(summary, where=where, field=key, got=value, need=need)


def _listed(value: Any) -> Any:
    """A single message as a list, as which ShareGPT's preference data have a completion; other
    values as they are."""
    return [value] if _looks_like_messages([value]) else value


def _looks_like_messages(value: Any) -> bool:
    """Whether every item has the keys of a message; what they hold is checked later."""
    if not isinstance(value, list) or not value:
        return False
    for item in value:
        if not isinstance(item, dict):
            return False
        if not any(form <= item.keys() for form in _MESSAGE_KEYS):
            return False
    return True


def without_nulls(value: Any) -> Any:
    """The value without the keys that are null, at every depth. A table of Arrow gives each object
    the keys of all rows, null where a row has none: a tool call would have arguments that nobody
    wrote."""
    if hasattr(value, "tolist"):
        value = value.tolist()  # lists from parquet may be arrays
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value


def literally(value: Any, role: str) -> Any:
    """Text as one message of the role, never parsed: a policy may have written it."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return value


def as_conversations(context: Any, completions: Any) -> list[Conversation]:
    """The conversation of each completion of a context; both are messages or literal text. The
    template variables are those of the context."""
    if isinstance(completions, str) or not completions:
        need = 'a list, as ["one", "another"]'
        raise DataError("completions is not a list of completions", got=completions, need=need)
    prompt = literally(context, "user")
    conversations = []
    for completion in completions:
        messages = [*prompt, *literally(completion, "assistant")]
        conversations.append(with_messages(prompt, messages))
    return conversations


def last_text(messages: Sequence[Message]) -> str:
    """The text of the last message, whose characters are the length of a completion. For content in
    parts, the text parts; empty for a message without content, and without messages."""
    if not messages:
        return ""
    content: Any = messages[-1].get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text")
        if isinstance(text, str):
            texts.append(text)
    return "".join(texts)


def check_unicode(text: str, where: str | None) -> None:
    """Raise `DataError` for a lone surrogate, which JSON can hold: tokenizers fail at it, each in
    its own way."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            "the conversation has text that is not valid Unicode",
            where=where,
            got=ascii(text[error.start]),
            need="text without lone surrogates",
            fix='remove the row, or mend its text: text.encode("utf-8", "replace").decode()',
        ) from error


def parse_json_list(value: Any, field: str, where: str | None) -> Any:
    """The list, if the value is text that begins like one in JSON; any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        summary = f"{field} is not valid JSON: {error}"
        fix = "write the cell with json.dumps(value)"
        raise DataError(
            summary,
            where=where,
            field=field,
            got=value,
            need="the JSON of a list",
            fix=fix,
        ) from error


def is_list(value: Any) -> bool:
    """Whether it is a sequence, and not text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
