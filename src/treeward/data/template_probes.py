"""What a chat template reads, which only rendering shows: a short conversation with a mark in the
place in question.

    probe_content(apply, "the tokenizer's chat template")
    # (True, False): it reads text, and no list of parts

`apply` renders messages with the template, and passes on its errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jinja2

from treeward.data.chat_template import SETTING
from treeward.data.conversation import Message
from treeward.data.reasoning import REASONING_END, REASONING_START
from treeward.errors import ConfigError, DataError

Apply = Callable[[list[Message]], str]

PROBE_MESSAGES: list[Message] = [
    {"role": "user", "content": "Quo vadis?"},
    {"role": "assistant", "content": "Romam."},
]
PROBE_SYSTEM: Message = {"role": "system", "content": "Loquere."}
_PROBE_CALL = {"name": "itinera", "arguments": {"urbs": "Roma"}}
_AS_PYTHON = "{'urbs': 'Roma'}"
_REASONING = "Ratio."
_TEXT_TYPES = ("text", "input_text", "output_text")
"""The last two are those of OpenAI's Responses API."""


def probe_content(apply: Apply, name: str) -> tuple[bool, bool]:
    """Whether the template reads content that is text, and content that is a list of parts.
    Templates of vision models may skip a text silently, and templates for text write a list as
    Python would."""
    # A text that no template writes by itself, so that finding it says that content was read.
    contents = [message["content"] for message in PROBE_MESSAGES]
    part_messages = []
    for message in PROBE_MESSAGES:
        part_messages.append(message | {"content": as_parts(message["content"])})
    text = try_probe(apply, PROBE_MESSAGES, name)
    parts = try_probe(apply, part_messages, name)
    if all(content in text for content in contents):
        return True, parts == text
    # A template for text writes the list as Python would, with its keys.
    reads_parts = "'type'" not in parts and all(content in parts for content in contents)
    return not reads_parts, reads_parts


def reads_arguments_as_text(apply: Apply) -> bool:
    """Whether the template wants the arguments of tool calls as JSON text, as DeepSeek-V3's: it
    fails for an object, or writes it as Python would. Others write JSON themselves, and would quote
    a text again."""
    # A mark within the arguments: a template that fails, or drops the call, writes none.
    as_object = _try_call(apply, _PROBE_CALL)
    as_text = _try_call(apply, with_text_arguments(_PROBE_CALL))
    return "Roma" in as_text and ("Roma" not in as_object or _AS_PYTHON in as_object)


def reads_reasoning_apart(apply: Apply) -> bool:
    """Whether the template takes reasoning as `reasoning_content` alone, as Qwen3.8's: it writes a
    second block before content that has one."""
    question, answer = PROBE_MESSAGES
    block = f"{REASONING_START}\n{_REASONING}\n{REASONING_END}"
    whole = answer | {"content": f"{block}\n\n{answer['content']}"}
    apart = answer | {"reasoning_content": _REASONING}
    text_of_whole = try_probe(apply, [question, whole], SETTING)
    text_of_apart = try_probe(apply, [question, apart], SETTING)
    is_doubled = text_of_whole.count(REASONING_START) > 1
    is_once = text_of_apart.count(REASONING_START) == 1
    return is_doubled and is_once and _REASONING in text_of_apart


def try_probe(apply: Apply, messages: list[Message], name: str) -> str:
    """The text of the messages; empty where the template refuses them. Raises `ConfigError` for one
    that cannot be parsed, or always fails."""
    try:
        return apply(messages)
    except (jinja2.TemplateSyntaxError, jinja2.TemplateRuntimeError, ArithmeticError) as error:
        if isinstance(error, jinja2.UndefinedError):
            return ""
        what = f"fails: {type(error).__name__}: {error}"
        got = None
        if isinstance(error, jinja2.TemplateSyntaxError):
            what = f"cannot be parsed: {error.message}"
            if error.source:
                got = error.source.splitlines()[error.lineno - 1].strip()
        fix = f"fix the template, or set {SETTING} to another"
        raise ConfigError(f"the chat template {what}", where=name, got=got, fix=fix) from error
    except Exception:
        # It may still accept the data's roles; the error of a row has the template's reason.
        return ""


def _try_call(apply: Apply, function: Mapping[str, Any]) -> str:
    # Mistral's templates refuse ids that have not nine characters.
    call = {"id": "abcdefghi", "type": "function", "function": function}
    calling: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    result: Message = {
        "role": "tool",
        "tool_call_id": "abcdefghi",
        "name": "itinera",
        "content": "Via.",
    }
    question = PROBE_MESSAGES[0]
    # Some templates refuse a call that nothing answers.
    for messages in ([question, calling], [question, calling, result]):
        try:
            return apply(messages)
        except Exception:  # a template is a program: it can raise anything
            continue
    return ""


def with_text_arguments(call: Any) -> Any:
    """A tool call, or its function, with its arguments as JSON text."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": with_text_arguments(call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, Mapping):
        return call
    return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}


def as_parts(text: str) -> list[dict[str, str]]:
    """A text as the content of a message in parts."""
    return [{"type": "text", "text": text}]


def in_one_form(content: Iterable[Any]) -> list[Any]:
    """The parts of a message with each text as `as_parts` writes it: templates read no text of a
    part that is a string, or of another type. Other parts stay."""
    parts = []
    for part in content:
        if isinstance(part, str):
            parts += as_parts(part)
        elif isinstance(part, Mapping) and part.get("type", "text") in _TEXT_TYPES:
            parts.append({**part, "type": "text"})
        else:
            parts.append(part)
    return parts


def as_text(content: Iterable[Any], where: str | None) -> str:
    """The content of a message in parts as one text, for a template that reads text only. Raises
    `DataError` for a part that is none."""
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise DataError(
                "the chat template reads text only",
                where=where,
                got=f"a content part {part!r}",
                need='text, or parts of the form {"type": "text", "text": "..."}',
                fix=f"remove the row, or use a model or {SETTING} that reads such parts",
            )
        texts.append(text)
    return "".join(texts)
