"""`Prompts`: the texts that a config adds to every conversation of a dataset.

    Prompts.load("think.txt", None).apply(preference, "train.jsonl:1")
    Prompts.load("think.txt", None).complete(messages, "train.jsonl:1")

`prompt_file` is a template with one `{}`, in which the last user message of the context is put; `{{` and `}}` stand for
braces. `system_prompt_file` is a system message for contexts that have none.
"""

from __future__ import annotations

import logging
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treeward.data.preference import Message, Preference
from treeward.errors import ConfigError, DataError

__all__ = ["Prompts", "completed"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompts:
    """The texts of `prompt_file` and `system_prompt_file`; None where there is no such file."""

    template: str | None = None
    template_file: str | None = None
    system: str | None = None

    @classmethod
    def load(cls, prompt_file: str | None, system_prompt_file: str | None) -> Prompts:
        """Read the files; raises `ConfigError` for one that cannot be read and for a template without its one `{}`."""
        template = None if prompt_file is None else _read_text(prompt_file, "prompt_file")
        system = None if system_prompt_file is None else _read_text(system_prompt_file, "system_prompt_file")
        if template is not None:
            _check_template(template, str(prompt_file))
        return cls(template, prompt_file, system)

    def apply(self, preference: Preference, where: str) -> Preference:
        """The preference with its context completed, as `complete` does."""
        context = self.complete(preference.context, where)
        return preference if context is preference.context else replace(preference, context=context)

    def complete(self, messages: tuple[Message, ...], where: str) -> tuple[Message, ...]:
        """The messages of a prompt, completed; raises `DataError` if there is no user message for a template."""
        if self.template is not None:
            messages = self._fill_last_user_message(messages, self.template, where)
        if self.system is not None and not any(message["role"] == "system" for message in messages):
            messages = ({"role": "system", "content": self.system}, *messages)
        return messages

    def _fill_last_user_message(self, context: Sequence[Message], template: str, where: str) -> tuple[Message, ...]:
        index = next((i for i in reversed(range(len(context))) if context[i]["role"] == "user"), None)
        if index is None:
            raise DataError(
                "the context has no user message to put in the prompt",
                where=where,
                field="context",
                got=f"roles {[message['role'] for message in context]}",
                need="a user message",
                fix=f"mend the row, or remove prompt_file ({self.template_file})",
            )
        message = context[index]
        content: Any = message["content"]
        if isinstance(content, str):
            content = template.format(content)
        else:
            content = [
                {**part, "text": template.format(part["text"])} if part.get("type") == "text" else part
                for part in content
            ]
        return (*context[:index], {**message, "content": content}, *context[index + 1 :])


def completed(
    preferences: Iterable[tuple[Preference, str]], prompts: Prompts, name: str
) -> Iterator[tuple[Preference, str]]:
    """Apply the prompts, and say at the end how many completions do not end with the assistant's words."""
    total, others, first = 0, 0, ""
    for preference, where in preferences:
        total += 1
        if any(completion.messages[-1]["role"] != "assistant" for completion in preference.completions):
            others, first = others + 1, first or where
        yield prompts.apply(preference, where), where
    if others:
        _logger.warning(
            "%s: in %d of %d comparisons a completion does not end with an assistant message (the first is %s); "
            "its score is read after that other message",
            name,
            others,
            total,
            first,
        )


def _read_text(path: str, field: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{field} cannot be read", field=field, got=f"{path}: {error}", need="a text file in UTF-8"
        ) from error


def _check_template(template: str, path: str) -> None:
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        fields, problem = [], str(error)
    else:
        problem = f"{len(fields)} places: {fields}"
    if fields not in ([""], ["0"]):
        raise ConfigError(
            "prompt_file is not a template with one {}",
            where=path,
            field="prompt_file",
            got=problem,
            need="exactly one {}, where the last user message goes",
            fix="write {{ and }} for braces that are part of the text",
        )
