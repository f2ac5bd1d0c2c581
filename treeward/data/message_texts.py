"""Messages as texts: what a rule, a judge or a function of one's own reads.

transcript([{"role": "user", "content": "Hi"}])     # "user: Hi"
completion_text(conversation)                       # None unless it ends with a text of the assistant
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treeward.data.preference import Message

NO_COMPLETION = "the conversation does not end with a text of the assistant"


def completion_text(conversation: Sequence[Message]) -> str | None:
    """The text of the last message; None if it is not the assistant's, or not text."""
    if not conversation or conversation[-1].get("role") != "assistant":
        return None
    return message_text(conversation[-1])


def message_text(message: Mapping[str, Any]) -> str | None:
    """The content of a message: text, or the joined texts of a list of parts; None otherwise."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        return None
    parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if texts and len(texts) == len(parts) else None


def transcript(messages: Sequence[Message]) -> str:
    """`role: text` of each message, with an empty line between them."""
    return "\n\n".join(f"{message.get('role')}: {message_text(message) or ''}" for message in messages)


def prompt_text(messages: Sequence[Message]) -> str:
    """The messages before a completion as one text: the user's single message, or a transcript."""
    if len(messages) == 1 and messages[0].get("role") == "user":
        return message_text(messages[0]) or ""
    return transcript(messages)
