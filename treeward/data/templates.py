"""Chat templates: where a renderer's template comes from, the date it writes, and how long it may run.

A template that writes today's date (Llama 3.2, gpt-oss) is given `FIXED_DATE`, so that a score does not depend on the
day. A template whose loops run on without end is stopped after `MAX_SECONDS` of processor time.
"""

from __future__ import annotations

import contextvars
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from treeward.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DEFAULT_CHAT_TEMPLATE", "FIXED_DATE", "SETTING", "apply_template", "find_template", "without_clock"]

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
"""What `strftime_now` gives: the date that Llama 3's templates fall back to (a Friday)."""

MAX_SECONDS = 10.0
"""Processor time that one rendering may take; real templates need milliseconds."""

SETTING = "policy.tokenizer.chat_template"
_DATE_VARIABLES = ("date_string", "current_date")
_STRFTIME = {
    "%Y": "2024", "%y": "24", "%m": "07", "%-m": "7", "%B": "July", "%b": "Jul", "%d": "26", "%-d": "26", "%e": "26",
    "%A": "Friday", "%a": "Fri", "%j": "208", "%H": "00", "%I": "12", "%p": "AM", "%M": "00", "%S": "00",
    "%D": "07/26/24", "%F": "2024-07-26", "%T": "00:00:00", "%x": "07/26/24", "%X": "00:00:00", "%Z": "", "%z": "",
}  # fmt: skip
_CLOCK = "{% macro strftime_now(format) %}"
_TIMED = "treeward_timed"
_deadline: contextvars.ContextVar[float] = contextvars.ContextVar("deadline", default=float("inf"))


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
        if isinstance(own, dict) and "default" not in own:
            summary = "the tokenizer has several chat templates and no default"
            raise ConfigError(summary, field=SETTING, need=f"one of {sorted(own)}")
        return tokenizer.get_chat_template(), "the tokenizer's chat template"
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
    if not any(name in variables and name in template for name in _DATE_VARIABLES):
        logger.warning(
            "the chat template writes today's date; it is rendered with %s so that scores do not depend on the day "
            "(chat_template_kwargs.date_string sets another where the template reads it)",
            FIXED_DATE,
        )
    # transformers passes only plain values to a template, so a macro shadows its clock. The macro stands on a line of
    # its own: transformers trims the newline after a block, which leaves the rest as it was.
    replaced = "".join(f" | replace({code!r}, {value!r})" for code, value in _STRFTIME.items())
    return _CLOCK + "{{ format" + replaced + " }}{% endmacro %}\n" + template


def apply_template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], template: str, **variables: Any
) -> str:
    """What transformers renders, within `MAX_SECONDS`. Raises whatever the template raises."""
    _limit_time(template)
    token = _deadline.set(time.thread_time() + MAX_SECONDS)
    try:
        text = tokenizer.apply_chat_template(list(messages), chat_template=template, tokenize=False, **variables)
    finally:
        _deadline.reset(token)
    assert isinstance(text, str)
    return text


def _limit_time(template: str) -> None:
    """Make each turn of a loop and each call in the template look at the clock.

    transformers compiles a text once and renders with that object; it offers no way to pass an environment.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    compiled = _compile_jinja_template(template)
    environment = compiled.environment
    if _TIMED in environment.filters:
        return
    environment.filters[_TIMED] = _timed
    call = environment.call

    def timed_call(context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        _check_time()
        return call(context, function, *args, **kwargs)

    environment.call = timed_call
    tree = environment.parse(template)
    for loop in tree.find_all(jinja2.nodes.For):
        loop.iter = jinja2.nodes.Filter(loop.iter, _TIMED, [], [], None, None, lineno=loop.lineno)
    timed = environment.from_string(tree)
    compiled.root_render_func, compiled.blocks = timed.root_render_func, timed.blocks


@jinja2.pass_context  # or Jinja would evaluate the filter when it compiles
def _timed(_: Any, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _check_time()
        yield item


def _check_time() -> None:
    if time.thread_time() > _deadline.get():
        raise jinja2.TemplateRuntimeError(f"it runs for more than {MAX_SECONDS:g} seconds")
