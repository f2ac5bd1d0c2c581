"""Items of OpenAI's Responses API as chat messages.

    conversation_of({"input": "2 + 2?"}, [{"type": "message", "role": "assistant",
                                           "content": [{"type": "output_text", "text": "4"}]}])
    # [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]

A `function_call` becomes a tool call of the assistant's message before it, `reasoning` is left out,
and other kinds (images, calls of hosted tools) raise an error: the score of half a conversation
would be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treeward.data.conversation import Conversation, Message, canonical_call, literally
from treeward.errors import DataError

_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""The kinds of content parts with text, and the key of the text."""


def conversation_of(
    params: Mapping[str, Any],
    output: Sequence[Mapping[str, Any]],
    *,
    developer: str = "system",
) -> Conversation:
    """The messages of a request (`responses_create_params`) and of its `output`, with the request's
    tools. `developer`: the role for developer messages, which most chat templates do not know.
    Raises `DataError` for items that are not messages."""
    messages = messages_of_input(params, developer=developer)
    messages += _messages(output, "response.output", developer)
    return Conversation(messages, tools=tools_of(params))


def as_conversation(prompt: Any, response: Any, *, developer: str = "system") -> list[Message]:
    """The conversation of a prompt and its response, each a text, messages, or items of the
    Responses API."""
    messages: list[Message] = []
    need = "a text, messages, or items of the Responses API"
    for field, value, role in (("prompt", prompt, "user"), ("response", response, "assistant")):
        items = literally(value, role)
        messages += _messages(_checked(items, list | tuple, field, need), field, developer)
    return messages


def messages_of_input(
    params: Mapping[str, Any], *, developer: str = "system", field: str = "input"
) -> list[Message]:
    """The messages of `input`, which is a text of the user or a list of items, after the
    `instructions`. `field`: what errors call the input."""
    messages: list[Message] = []
    instructions = params.get("instructions")
    if isinstance(instructions, str) and instructions:
        messages.append({"role": "system", "content": instructions})
    items = params.get("input")
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    items = _checked(items, Sequence, field, "a text, or a list of items")
    return messages + _messages(items, field, developer)


def tools_of(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools of a request in the form that chat templates read. A function's name, description
    and parameters lie one level deeper there. Raises `DataError` for tools that are not objects."""
    tools = []
    for tool in _checked(params.get("tools") or (), Sequence, "tools", "a list of tools"):
        need = '{"type": "function", "name": ..., ...}'
        definition = dict(_checked(_plain(tool), Mapping, "tools", need))
        if definition.get("type") == "function" and "function" not in definition:
            function = {}
            for key in ("name", "description", "parameters"):
                if definition.get(key) is not None:
                    function[key] = definition[key]
            definition = {"type": "function", "function": function}
        tools.append(definition)
    return tools


def _messages(items: Sequence[Any], field: str, developer: str) -> list[Message]:
    """The messages of items. `field`: what errors call the list of them."""
    messages: list[Message] = []
    names: dict[str, str] = {}  # of the functions, by the ids of their calls
    for i, element in enumerate(items):
        where = f"{field}[{i}]"
        item = _checked(_plain(element), Mapping, where, '{"type": "message", ...}')
        # The Responses API lets messages leave out their type.
        match item.get("type") or "message":
            case "message":
                messages.append(_message(item, where, developer))
            case "function_call":
                # A call is an item of its own here, and a part of a message in a chat.
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                call = _call(item, where)
                calls = [*messages[-1].get("tool_calls", ()), call]
                messages[-1] = messages[-1] | {"tool_calls": calls}
                names[call["id"]] = call["function"]["name"]
            case "function_call_output":
                content = _text(item.get("output"), f"{where}.output")
                message = {"role": "tool", "content": content}
                call_id = item.get("call_id")
                if isinstance(call_id, str) and call_id:
                    message["tool_call_id"] = call_id
                name = names.get(str(call_id))
                if name:
                    message["name"] = name
                messages.append(message)
            case "reasoning":
                pass  # never a part of what is scored
            # Images, and calls of tools that the API runs itself.
            case other:
                summary = f"an item of the type {other!r} cannot be scored"
                need = "a message or a call of a function"
                raise DataError(summary, field=where, got=other, need=need)
    return messages


def _plain(item: Any) -> Any:
    """The item as an object of JSON: NeMo Gym and the openai client have objects of pydantic."""
    if hasattr(item, "model_dump"):
        return item.model_dump(exclude_none=True)
    return item


def _checked(value: Any, kind: Any, field: str, need: str) -> Any:
    """The value, which must be of a kind."""
    if not isinstance(value, kind) or value == "":
        raise DataError(f"{field} cannot be read", field=field, got=value, need=need)
    return value


def _message(item: Mapping[str, Any], where: str, developer: str) -> Message:
    """The message of an item of this type."""
    role = _checked(item.get("role"), str, f"{where}.role", "a name such as user")
    content = _text(item.get("content"), f"{where}.content")
    message: Message = {"role": developer if role == "developer" else role, "content": content}
    # Rows in the form of chat completions have their calls in the messages themselves.
    calls = _checked(item.get("tool_calls") or [], list | tuple, f"{where}.tool_calls", "a list")
    for i, call in enumerate(calls):
        field = f"{where}.tool_calls[{i}]"
        need = '{"id": ..., "function": {...}}'
        call = _checked(call, Mapping, field, need)
        function = _checked(call.get("function"), Mapping, field, need)
        tool_call = _call({**function, "call_id": call.get("id")}, field)
        message.setdefault("tool_calls", []).append(tool_call)
    for key in ("tool_call_id", "name"):
        if isinstance(item.get(key), str):
            message[key] = item[key]
    return message


def _text(content: Any, where: str) -> str:
    """The text of a content, which is text or a list of parts."""
    if isinstance(content, str):
        return content
    texts = []
    parts = _checked(content or (), Sequence, where, "a text, or a list of parts")
    for i, part in enumerate(parts):
        kind: Any = type(part).__name__
        text = None
        if isinstance(part, Mapping):
            kind = part.get("type")
            if isinstance(kind, str) and kind in _TEXT_PARTS:
                text = part.get(_TEXT_PARTS[kind])
        if not isinstance(text, str):
            summary = f"a content part of the type {kind!r} cannot be scored"
            need = f"text: {', '.join(_TEXT_PARTS)}"
            raise DataError(summary, field=f"{where}[{i}]", got=part, need=need)
        texts.append(text)
    return "".join(texts)


def _call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The call of an item as a chat has it."""
    name = _checked(item.get("name"), str, f"{where}.name", "the function's name")
    call_id = item.get("call_id")
    return {
        "id": call_id if isinstance(call_id, str) else where,
        "type": "function",
        "function": canonical_call({"name": name, "arguments": item.get("arguments")}),
    }
