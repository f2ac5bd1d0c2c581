"""`UnreadParts`: what a chat template leaves out of conversations, each kind said once in the log.

    parts = UnreadParts(renderer.chat_template)
    parts.name_keys(messages, "train.jsonl:1")
    # train.jsonl:1: the chat template ignores tool_calls of messages.

A template leaves out without a word what it does not know, and no model reads it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence

from treeward.data.chat_template import SETTING, names_variable
from treeward.data.conversation import Message, last_text
from treeward.data.reasoning import REASONING_START

logger = logging.getLogger(__name__)

_MOST_NAMED = 32  # a server's requests must fill neither memory nor log
_LONGEST_NAME = 60  # characters
_ALWAYS_READ = ("role", "content")
_LINKS = ("id", "tool_call_id")
"""Keys that only link messages to each other, as the `name` of a tool's result does."""
_WORD = re.compile("[A-Za-z0-9]+")
"""What a template writes as it is, also where it writes the text as JSON."""


class UnreadParts:
    """Looks for what one template leaves out. `where`: the place of a conversation, None if it has
    none."""

    def __init__(self, template: str) -> None:
        self._template = template
        self._seen_keys: set[str] = {*_ALWAYS_READ, *_LINKS}
        self._lost_roles: set[str] = set()
        self._ignored_variables: set[str] = set()

    def name_keys(self, messages: Iterable[Message], where: str | None) -> None:
        """Name the keys of messages with a text, a list or an object that the template does not
        name, as `reasoning_content`."""
        for message in messages:
            ignored = []
            for key, value in message.items():
                # Numbers and flags are about a message, as its weight, and no part of it.
                is_said = isinstance(value, str | Sequence | Mapping) and bool(value)
                is_link = key == "name" and message.get("role") == "tool"
                if not is_said or is_link or key in self._seen_keys:
                    continue
                if len(self._seen_keys) < _MOST_NAMED:
                    self._seen_keys.add(key)
                    if not names_variable(self._template, key):
                        ignored.append(str(key)[:_LONGEST_NAME])
            if ignored:
                keys = ", ".join(ignored)
                logger.warning("%s: the chat template ignores %s of messages.", _place(where), keys)

    def name_roles(self, messages: Iterable[Message], text: str, where: str | None) -> None:
        """Name the roles of messages that are not in the rendered `text`: those beside the user's
        and the assistant's, and the assistant's with calls of tools.

        A template may know a role and leave out a message of it all the same, as a system message
        that is not the first.
        """
        for message in messages:
            role = str(message.get("role"))[:_LONGEST_NAME]
            has_calls = bool(message.get("tool_calls"))
            if role == "user" or (role == "assistant" and not has_calls):
                continue
            if role in self._lost_roles or len(self._lost_roles) >= _MOST_NAMED:
                continue
            content = last_text([message])
            # Templates leave out the reasoning of earlier turns by design.
            if REASONING_START in content or content.strip() in text:
                continue
            # The longest word is the least likely to be in the rest of the text by chance.
            words = _WORD.findall(content)
            if words and max(words, key=len) not in text:
                self._lost_roles.add(role)
                beside = " beside its calls of tools" if has_calls else ""
                message_of = (
                    "%s: the chat template leaves out the text of a message of the role %s%s."
                )
                logger.warning(message_of, _place(where), role, beside)

    def name_variables(
        self,
        names: Iterable[str],
        others: Mapping[str, str],
        where: str | None,
    ) -> None:
        """Name the variables that the template does not name. `others`: further templates of the
        tokenizer by their names, as one for the use of tools."""
        for name in sorted(set(names) - self._ignored_variables):
            if names_variable(self._template, name) or len(self._ignored_variables) >= _MOST_NAMED:
                continue
            self._ignored_variables.add(name)
            hint = ""
            for other, template in others.items():
                if names_variable(template, name):
                    hint = " The tokenizer has a template that reads it: "
                    hint += f"{SETTING}={other}."
                    break
            logger.warning("%s: the chat template ignores %s.%s", _place(where), name, hint)


def _place(where: str | None) -> str:
    return where or "a conversation"
