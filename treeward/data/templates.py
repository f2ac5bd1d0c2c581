"""Chat templates: where they come from, and the date that they write.

A template is a program that comes with a model, and transformers runs it in a sandbox. One that writes today's date is
given `FIXED_DATE`, so that a score does not depend on the day.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from treeward.data.preference import Message
from treeward.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

DEFAULT_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' + message['content'] -}}
{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- if not loop.last -%}{{- '\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '\\n<|assistant|>\\n' -}}{%- endif -%}"""
"""For tokenizers without a template: each role as a header on its own line, then the text; the EOS token (where there
is one) after each assistant message, and nothing after the last, so that a score is read at EOS."""

FIXED_DATE = "26 Jul 2024"
"""What `strftime_now` gives, in the format that a template asks for: the date that those of Llama 3 fall back to."""

MAX_CHARACTERS = 2**28
"""The longest text that a template may write."""

SETTING = "policy.tokenizer.chat_template"
_MIDNIGHT = datetime.strptime(FIXED_DATE, "%d %b %Y")
_CLOCK = "{% macro strftime_now(format) %}"


def find_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> tuple[str, str]:
    """The template's text, and a name for it in errors.

    `chat_template`: None or "default" is the tokenizer's own, or `DEFAULT_CHAT_TEMPLATE` where it has none; else the
    name of one of the tokenizer's templates, a file, or the text of a template. Raises `ConfigError`.
    """
    own = tokenizer.chat_template
    if chat_template is None or chat_template == "default":
        if not own:
            logger.warning("the tokenizer has no chat template: using treeward's default, <|role|> headers and EOS")
            return DEFAULT_CHAT_TEMPLATE, "the default chat template"
        try:
            return tokenizer.get_chat_template(), "the tokenizer's chat template"
        except ValueError as error:  # several, and no default
            raise ConfigError(str(error), field=SETTING, need=f"one of {sorted(own)}") from error
    if isinstance(own, dict) and chat_template in own:
        return own[chat_template], f"the tokenizer's chat template {chat_template!r}"
    if any(mark in chat_template for mark in ("{{", "{%", "\n")):
        return chat_template, SETTING
    path = Path(chat_template).expanduser()
    if not path.is_file():
        summary = "the chat template is neither a file nor a template"
        need = "a file that exists, a Jinja template, or null for the tokenizer's own"
        raise ConfigError(summary, field=SETTING, got=chat_template, need=need)
    return path.read_text(encoding="utf-8"), str(path)


def without_clock(template: str, variables: Mapping[str, Any]) -> str:
    """The template with `strftime_now` fixed; `variables` are those that it is rendered with."""
    if "strftime_now" not in template or template.startswith(_CLOCK):
        return template
    if not {"date_string", "current_date"} & variables.keys():
        logger.warning(
            "the chat template writes today's date; it is rendered with %s so that scores do not depend on the day "
            "(chat_template_kwargs.date_string sets another where the template reads it)",
            FIXED_DATE,
        )
    # transformers passes only plain values to a template, so a macro shadows its clock. The macro stands on a line of
    # its own: transformers trims the newline after a block, which leaves the rest as it was.
    codes = [f"%{code}" for code in ("-d", "-m", *"aAbBcdDeFHIjmMpSTuUwWxXyYzZ")]
    replaced = "".join(f" | replace({code!r}, {_MIDNIGHT.strftime(code)!r})" for code in codes)
    return f"{_CLOCK}{{{{ format{replaced} }}}}{{% endmacro %}}\n{template}"


def apply_template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], template: str, variables: Mapping[str, Any]
) -> str:
    """What transformers renders, at most `MAX_CHARACTERS`. Raises whatever the template raises."""
    text = tokenizer.apply_chat_template(list(messages), chat_template=template, tokenize=False, **variables)
    assert isinstance(text, str)
    if len(text) > MAX_CHARACTERS:
        raise jinja2.TemplateRuntimeError(f"it writes a text of more than {MAX_CHARACTERS:,} characters")
    return text
