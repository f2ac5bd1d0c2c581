"""`PromptFiles`: the texts that a config adds to every conversation of a dataset.

    PromptFiles.load("think.txt", None).complete(messages, "train.jsonl:1")

`prompt_file` is a template with one `{}`, in which the last user message of the context is put; `{{` and `}}` stand for
braces. `system_prompt_file` is a system message for contexts that have none.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeward.config.data import SetConfig
from treeward.data.preference import Message
from treeward.errors import ConfigError, DataError

__all__ = ["PromptFiles"]


@dataclass(frozen=True)
class PromptFiles:
    """The texts of `prompt_file` and `system_prompt_file`; None where there is no such file."""

    template: str | None = None
    system: str | None = None

    @classmethod
    def load(cls, prompt_file: str | None, system_prompt_file: str | None) -> PromptFiles:
        """Read the files; raises `ConfigError` for one that cannot be read and for a template without its one `{}`."""
        template, system = _text(prompt_file, "prompt_file"), _text(system_prompt_file, "system_prompt_file")
        try:
            places = [name for _, name, _, _ in string.Formatter().parse(template or "{}") if name is not None]
        except ValueError as error:
            places = [str(error)]
        if places not in ([""], ["0"]):
            need = "exactly one {}, where the last user message goes; {{ and }} are braces of the text"
            raise ConfigError("prompt_file is not a template", where=prompt_file, field="prompt_file", need=need)
        return cls(template, system)

    @classmethod
    def of_object(cls, dataset: Any, config: SetConfig) -> PromptFiles:
        """Those of the config, or else of the `task_spec` of an object of a class by dotted path."""
        spec = getattr(dataset, "task_spec", None)
        keys = ("prompt_file", "system_prompt_file")
        return cls.load(*(getattr(config, key) or getattr(spec, key, None) for key in keys))

    def complete(self, messages: tuple[Message, ...], where: str | None) -> tuple[Message, ...]:
        """The messages of a prompt, completed; raises `DataError` if there is no user message for a template."""
        if self.template is not None:
            last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
            if last is None:
                got = f"roles {[message['role'] for message in messages]}"
                summary, need = "the context has no user message for prompt_file", "a user message, or no prompt_file"
                raise DataError(summary, where=where, field="context", got=got, need=need)
            filled = messages[last] | {"content": _filled(messages[last]["content"], self.template)}
            messages = (*messages[:last], filled, *messages[last + 1 :])
        if self.system is not None and not any(message["role"] == "system" for message in messages):
            messages = ({"role": "system", "content": self.system}, *messages)
        return messages


def _filled(content: Any, template: str) -> Any:
    if isinstance(content, str):
        return template.format(content)
    return [{**part, "text": template.format(part["text"])} if part.get("type") == "text" else part for part in content]


def _text(path: str | None, field: str) -> str | None:
    try:
        return None if path is None else Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        got = f"{path}: {error}"
        raise ConfigError(f"{field} cannot be read", field=field, got=got, need="a text file in UTF-8") from error
