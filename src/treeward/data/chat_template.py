"""Chat templates: where a tokenizer's is, the one for tokenizers without any, and a clock that
stands still.

    source, name = find_template(tokenizer, None)  # the tokenizer's, or `DEFAULT_CHAT_TEMPLATE`
    without_clock(source, {})                      # `strftime_now` gives `FIXED_DATE`
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
"""For tokenizers without a template: each role as a header on its own line, then the text; EOS (if
there is one) after each assistant message, and nothing after the last, so that a score is read at
EOS."""

FIXED_DATE = "26 Jul 2024"
"""The date of `strftime_now`, in the template's format: the default date of Llama 3's templates."""

NUM_BOS = "num_bos"
"""A key of a tokenizer's `init_kwargs`, which are saved with it: how many BOS its conversations
begin with. `model/published.py` writes it, and `Renderer` reads it."""

SETTING = "policy.tokenizer.chat_template"
"""The key of a configuration that errors name."""

# A format of the template may ask for hours and minutes too.
_MIDNIGHT = datetime.strptime(FIXED_DATE, "%d %b %Y")
_CLOCK = "{% macro strftime_now(format) %}"


def find_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> tuple[str, str]:
    """The template's text, and its name for errors. `chat_template`: None or "default" for the
    tokenizer's, or `DEFAULT_CHAT_TEMPLATE` if it has none; else the name of one of the tokenizer's
    templates, a file, or a text. Raises `ConfigError`."""
    tokenizer_template = tokenizer.chat_template
    if chat_template is None or chat_template == "default":
        if not tokenizer_template:
            default = "<|role|> headers and EOS"
            logger.warning(
                "the tokenizer has no chat template: using treeward's default, %s",
                default,
            )
            return DEFAULT_CHAT_TEMPLATE, "the default chat template"
        try:
            return tokenizer.get_chat_template(), "the tokenizer's chat template"
        except ValueError as error:  # several, and no default
            need = f"one of {sorted(tokenizer_template)}"
            raise ConfigError(str(error), field=SETTING, need=need) from error
    if isinstance(tokenizer_template, dict) and chat_template in tokenizer_template:
        return tokenizer_template[chat_template], f"the tokenizer's chat template {chat_template!r}"
    # No path holds these marks.
    if any(mark in chat_template for mark in ("{{", "{%", "\n")):
        return chat_template, SETTING
    path = Path(chat_template).expanduser()
    if not path.is_file():
        summary = "the chat template is neither a file nor a template"
        need = "a file that exists, a Jinja template, or null for the tokenizer's own"
        raise ConfigError(summary, field=SETTING, got=chat_template, need=need)
    return path.read_text(encoding="utf-8"), str(path)


def without_clock(template: str, variables: Mapping[str, Any]) -> str:
    """The template with `strftime_now` fixed. `variables`: of the rendering."""
    # A template that was saved with the macro comes back with it.
    if "strftime_now" not in template or template.startswith(_CLOCK):
        return template
    if not {"date_string", "current_date"} & variables.keys():
        logger.warning(
            "the chat template writes today's date; it is rendered with %s so that scores do not "
            "depend on the day (chat_template_kwargs.date_string sets another where the template "
            "reads it)",
            FIXED_DATE,
        )
    # transformers passes only plain values to a template, so a macro shadows its clock. It is on a
    # line of its own, because transformers trims the newline after a block. Jinja cannot format a
    # date: every directive that a format may have is replaced (-d and -m have no leading zero).
    filters = ""
    for letters in ("-d", "-m", *"aAbBcdDeFHIjmMpSTuUwWxXyYzZ"):
        code = f"%{letters}"
        filters += f" | replace({code!r}, {_MIDNIGHT.strftime(code)!r})"
    return f"{_CLOCK}{{{{ format{filters} }}}}{{% endmacro %}}\n{template}"


def names_variable(template: str, variable: str) -> bool:
    """Whether a template has a variable's name."""
    return re.search(rf"\b{re.escape(variable)}\b", template) is not None
