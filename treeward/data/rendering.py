"""`Renderer`: messages to token ids, the one way that every part of treeward reads a conversation.

    renderer = Renderer(AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B"), max_length=2048, truncation="drop")
    renderer.encode([{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}])

The whole conversation is rendered once with the model's own chat template and tokenized as one text, without a
generation prompt. Rendering turn by turn and joining would differ for templates that drop earlier thoughts and for
SentencePiece, which adds a space at every beginning. Whatever the template writes, the ids begin with exactly one BOS
where the tokenizer has one and adds it by default, and an encoder's ids are framed by exactly one CLS and one SEP.

Nothing in a score depends on the day: a template that writes today's date (Llama 3.2, gpt-oss) is given `FIXED_DATE`.
`Renderer.chat_template` is the template as it is used, so saved with a model it renders the same text everywhere.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jinja2

from treeward.data.preference import Message
from treeward.errors import ConfigError, DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DEFAULT_CHAT_TEMPLATE", "FIXED_DATE", "Fitted", "Renderer", "Truncation"]

logger = logging.getLogger(__name__)

Truncation = Literal["drop", "truncate_left", "error"]

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

_FORMAT_VERSION = 2  # raise it when the same messages would give other ids: token caches are keyed by it
_SETTING = "policy.tokenizer.chat_template"
_DATE_VARIABLES = ("date_string", "current_date")
_STRFTIME = {
    "%Y": "2024", "%y": "24", "%m": "07", "%-m": "7", "%B": "July", "%b": "Jul", "%d": "26", "%-d": "26", "%e": "26",
    "%A": "Friday", "%a": "Fri", "%j": "208", "%H": "00", "%I": "12", "%p": "AM", "%M": "00", "%S": "00",
    "%D": "07/26/24", "%F": "2024-07-26", "%T": "00:00:00", "%x": "07/26/24", "%X": "00:00:00", "%Z": "", "%z": "",
}  # fmt: skip
_OWN_ARGUMENTS = frozenset(
    {
        *("conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "sanitize_control_tokens"),
    }
)
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_MOST_UNKNOWN_ROLES, _LONGEST_ROLE = 32, 60  # what a server is sent must fill neither memory nor log
_CLOCK = "{% macro strftime_now(format) %}"
_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, RecursionError)  # the last: values nested too deep
_PROBE_QUESTION, _PROBE_ANSWER = "Quo vadis?", "Romam."
_PROBE_MESSAGES: list[Message] = [
    {"role": "user", "content": _PROBE_QUESTION},
    {"role": "assistant", "content": _PROBE_ANSWER},
]
_PROBE_SYSTEM: Message = {"role": "system", "content": "Loquere."}


@dataclass(frozen=True, slots=True)
class Fitted:
    """The token ids of a conversation, within `max_length`; `truncated`: context was cut."""

    token_ids: list[int]
    truncated: bool


class Renderer:
    """Renders and tokenizes conversations for one tokenizer and one chat template.

    `chat_template`: None or "default" is the tokenizer's own (`DEFAULT_CHAT_TEMPLATE` where it has none); otherwise the
    name of one of the tokenizer's templates, a file, or the template's text. `chat_template_kwargs` reach the template
    (`enable_thinking`, `date_string`, `tools`, ...). `max_length` is in tokens, None for no limit, and `truncation` is
    what `fit` does about longer conversations. Raises `ConfigError` for a template that cannot be found or parsed.

    A Renderer can be pickled, and says what it decided (default template, fixed date) once, when it is made.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_length: int | None = None,
        truncation: Truncation = "drop",
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template_kwargs: dict[str, Any] = dict(chat_template_kwargs or {})
        self.max_length = max_length
        self.truncation: Truncation = truncation
        self._unknown_roles: set[str] = set()
        if taken := sorted(_OWN_ARGUMENTS & self.chat_template_kwargs.keys()):
            raise ConfigError(
                "chat_template_kwargs sets what the renderer decides itself",
                field=f"chat_template_kwargs.{taken[0]}",
                got=self.chat_template_kwargs[taken[0]],
                fix="remove the key; only what a policy is asked is rendered with a generation prompt",
            )
        source, name = _find_template(tokenizer, chat_template)
        self.chat_template = self._without_clock(source)
        self._reads_text, self._reads_parts = self._probe_content(name)
        probe: list[int] = tokenizer("a probe", add_special_tokens=True)["input_ids"]
        cls, sep, bos = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.bos_token_id
        framed = cls is not None and sep is not None and probe[:1] == [cls] and probe[-1:] == [sep]
        self.kind: Literal["decoder", "encoder"] = "encoder" if framed else "decoder"
        self.adds_bos = framed or (bos is not None and probe[:1] == [bos])
        self._first_id: int | None = cls if framed else bos
        if self.adds_bos:
            self.chat_template = self._with_frame(source)

    def render(self, messages: Sequence[Message], *, where: str | None = None, generation_prompt: bool = False) -> str:
        """The text of a whole conversation; with `generation_prompt`, of one that the assistant is to continue.

        Raises `DataError` where the template refuses it or writes nothing, and for text that is not valid Unicode.
        """
        self._notice_roles(messages, where)
        contents = [self._content(message, where) for message in messages]
        try:
            text = self._apply(contents, generation_prompt=generation_prompt)
        except _TEMPLATE_ERRORS as error:
            raise DataError(
                f"the chat template refused the conversation: {error or type(error).__name__}",
                where=where,
                got="roles " + (" > ".join(str(message.get("role")) for message in messages) or "(no messages)"),
                need="messages in the order and form that the model's chat template accepts",
                fix=f"change or remove the row, or set {_SETTING} to a template that accepts it",
            ) from error
        if not _is_unicode(text):
            raise DataError(
                "the conversation has text that is not valid Unicode",
                where=where,
                got=ascii(next(character for character in text if not _is_unicode(character))),
                need="text without lone surrogates, which tokenizers do not read",
                fix='remove the row, or mend its text: text.encode("utf-8", "replace").decode()',
            )
        if not text.strip():
            raise DataError(
                "the chat template rendered nothing",
                where=where,
                got=list(messages),
                need="text to tokenize",
                fix=f"remove the row, or check the template ({_SETTING})",
            )
        return text

    def encode(self, messages: Sequence[Message], *, where: str | None = None) -> list[int]:
        """The token ids of a whole conversation: exactly one BOS (or CLS and SEP), no generation prompt, uncut."""
        return self.encode_many([messages], where=[where])[0]

    def encode_many(
        self, conversations: Sequence[Sequence[Message]], *, where: Sequence[str | None] | None = None
    ) -> list[list[int]]:
        """`encode` for many conversations with one call of the tokenizer; `where` names each for errors."""
        places = where if where is not None else [None] * len(conversations)
        texts = [self.render(messages, where=place) for messages, place in zip(conversations, places, strict=True)]
        return self.encode_texts(texts, where=places)

    def encode_prompt(self, messages: Sequence[Message], *, where: str | None = None) -> list[int]:
        """The token ids of what a policy is asked: the conversation and the template's generation prompt, as one text.

        There is exactly one BOS. Raises `ModelError` for an encoder, which answers nothing.
        """
        return self.encode_prompts([messages], where=[where])[0]

    def encode_prompts(
        self, prompts: Sequence[Sequence[Message]], *, where: Sequence[str | None] | None = None
    ) -> list[list[int]]:
        """`encode_prompt` for many prompts with one call of the tokenizer; `where` names each for errors."""
        if self.kind == "encoder":
            got = type(self.tokenizer).__name__
            raise ModelError("an encoder cannot be asked for an answer", got=got, need="a decoder")
        places = where if where is not None else [None] * len(prompts)
        texts = [self.render(p, where=place, generation_prompt=True) for p, place in zip(prompts, places, strict=True)]
        return self.encode_texts(texts, where=places)

    def encode_texts(self, texts: Sequence[str], *, where: Sequence[str | None] | None = None) -> list[list[int]]:
        """The token ids of texts that are rendered already; of what `render` gives, those of `encode`.

        A BOS (or CLS and SEP) that a text has is not doubled, and one that is missing is added. Raises `DataError` for
        a text without a token.
        """
        places = where if where is not None else [None] * len(texts)
        if not texts:
            return []  # a tokenizer cannot tell an empty batch from a text
        rows: list[list[int]] = self.tokenizer(
            list(texts),
            add_special_tokens=False,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # longer than the model's limit is the truncation policy's business
        )["input_ids"]
        for row, text, place in zip(rows, texts, places, strict=True):
            if not row:
                raise DataError("the tokenizer has no token for any of the text", where=place, got=text)
        return [self._frame(row) for row in rows]

    def fit(
        self, conversation: Sequence[Message], *, encoded: list[int] | None = None, where: str | None = None
    ) -> Fitted | None:
        """Encode a conversation within `max_length`.

        Too long under "error" raises `DataError`; under "drop" gives None. "truncate_left" removes the oldest messages,
        whole, keeping a leading system message and the last two; if that does not suffice, or the template refuses
        what is left, it cuts tokens after BOS, out of what precedes the last message; None if that is too short. The
        last message and its end of turn are never touched. `encoded`: the ids of the uncut conversation, if known.

        The cut depends on the conversation alone, so that its score is the same alone and among other answers. Tokens
        are cut in steps of an eighth of `max_length`: answers of similar length keep the same context, and share it.
        """
        ids = self.encode(conversation, where=where) if encoded is None else encoded
        if self.max_length is None or len(ids) <= self.max_length:
            return Fitted(ids, truncated=False)
        if self.truncation == "drop":
            return None
        if self.truncation == "error":
            raise DataError(
                "a conversation is too long",
                where=where,
                got=f"{len(ids)} tokens",
                need=f"at most {self.max_length} (data.max_input_seq_length)",
                fix="raise the limit, or set data.truncation to drop or truncate_left",
            )
        *context, last = conversation
        shortened = self._drop_messages(context, last) or self._cut_tokens(context, ids)
        return None if shortened is None else Fitted(shortened, truncated=True)

    def end_of_turn(self, token_ids: Sequence[int]) -> Literal["eos", "newline", "other"]:
        """What the last token of a conversation is, where its score is read."""
        last = int(token_ids[-1])
        if last == self.tokenizer.eos_token_id:
            return "eos"
        text = str(self.tokenizer.decode([last]))
        return "newline" if "\n" in text and not text.strip() else "other"

    @cached_property
    def read_token(self) -> Literal["eos", "newline", "other"] | None:
        """What ends a conversation of one question and one answer; None where the template refuses such a one."""
        try:
            return self.end_of_turn(self.encode(_PROBE_MESSAGES))
        except DataError:
            return None

    @property
    def settings(self) -> dict[str, Any]:
        """What to give another `Renderer` of the same tokenizer so that it renders the same; JSON."""
        return {
            "chat_template": self.chat_template,
            "chat_template_kwargs": self.chat_template_kwargs,
            "max_length": self.max_length,
            "truncation": self.truncation,
        }

    @cached_property
    def fingerprint(self) -> str:
        """Changes when the same messages could give other ids: template, variables, tokenizer, limit or policy."""
        parts = {
            "version": _FORMAT_VERSION,
            "template": self.chat_template,
            "kwargs": self.chat_template_kwargs,
            "tokenizer": _tokenizer_contents(self.tokenizer),
            "special": self.tokenizer.special_tokens_map,
            "max_length": self.max_length,
            "truncation": self.truncation,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def _notice_roles(self, messages: Sequence[Message], where: str | None) -> None:
        for message in messages:
            role = str(message.get("role"))
            if role in _ROLES or role in self._unknown_roles or len(self._unknown_roles) >= _MOST_UNKNOWN_ROLES:
                continue
            if role not in self.chat_template:
                role = role if len(role) <= _LONGEST_ROLE else f"{role[:_LONGEST_ROLE]}..."
                self._unknown_roles.add(role)
                logger.warning(
                    "%s: a message has the role %r, which the chat template does not name; most know system, user and "
                    "assistant.",
                    where or "a conversation",
                    role,
                )

    def _apply(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        text = self.tokenizer.apply_chat_template(
            list(messages),
            chat_template=self.chat_template,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **self.chat_template_kwargs,
        )
        assert isinstance(text, str)
        return text

    def _without_clock(self, template: str) -> str:
        if "strftime_now" not in template or template.startswith(_CLOCK):
            return template
        pinned = [name for name in _DATE_VARIABLES if name in self.chat_template_kwargs and name in template]
        if not pinned:
            logger.warning(
                "the chat template writes today's date; it is rendered with %s so that scores do not depend on the day "
                "(chat_template_kwargs.date_string sets another where the template reads it)",
                FIXED_DATE,
            )
        # transformers passes only plain values to a template, so its clock is shadowed by a macro. The macro stands on
        # a line of its own: transformers trims the newline after a block, which leaves the rest as it was.
        replaced = "".join(f" | replace({code!r}, {value!r})" for code, value in _STRFTIME.items())
        return _CLOCK + "{{ format" + replaced + " }}{% endmacro %}\n" + template

    def _with_frame(self, source: str) -> str:
        """The template with the BOS (or CLS and SEP) that it does not write itself.

        `_frame` makes sure of them in any case; the template saved with a model makes plain transformers do so too.
        """
        text = self._try_probe(_PROBE_MESSAGES, _SETTING) or self._try_probe(
            [_PROBE_SYSTEM, *_PROBE_MESSAGES], _SETTING
        )
        if not text:
            return self.chat_template  # it refuses what it could be tried with: nothing shows what it writes
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        first, last = ("cls_token", "sep_token") if self.kind == "encoder" else ("bos_token", None)
        before = "" if ids[:1] == [self._first_id] else f"{{{{ {first} }}}}"
        after = "" if last is None or ids[-1:] == [self.tokenizer.sep_token_id] else f"{{{{ {last} }}}}"
        return self._without_clock(f"{before}{source}{after}") if before or after else self.chat_template

    def _probe_content(self, name: str) -> tuple[bool, bool]:
        """Whether the template reads content that is text, and content that is a list of parts.

        Templates of vision models may skip text content silently, and text templates write a list as Python would.
        """
        rendered = self._try_probe(_PROBE_MESSAGES, name)
        in_parts = [message | {"content": _as_parts(message["content"])} for message in _PROBE_MESSAGES]
        parts = self._try_probe(in_parts, name)
        if all(probe in rendered for probe in (_PROBE_QUESTION, _PROBE_ANSWER)):
            return True, parts == rendered
        reads_parts = all(probe in parts for probe in (_PROBE_QUESTION, _PROBE_ANSWER)) and "'type'" not in parts
        return not reads_parts, reads_parts

    def _try_probe(self, messages: list[Message], name: str) -> str:
        try:
            return self._apply(messages)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template cannot be parsed: {error.message}",
                where=name,
                got=(error.source or "").splitlines()[error.lineno - 1].strip() if error.source else None,
                fix=f"mend the template, or set {_SETTING} to another",
            ) from error
        except _TEMPLATE_ERRORS:
            return ""  # it may still accept the data's roles; a row that it refuses is reported with its reason

    def _content(self, message: Message, where: str | None) -> Message:
        content = message.get("content")
        if isinstance(content, str):
            return message if self._reads_text else message | {"content": _as_parts(content)}
        if content is None or self._reads_parts:
            return message
        texts = []
        for part in content:
            text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
            if not isinstance(text, str):
                raise DataError(
                    "the chat template reads text only",
                    where=where,
                    got=f"a content part {part!r}",
                    need='text, or parts of the form {"type": "text", "text": "..."}',
                    fix=f"remove the row, or use a model or {_SETTING} that reads such parts",
                )
            texts.append(text)
        return message | {"content": "".join(texts)}

    def _frame(self, ids: list[int]) -> list[int]:
        first = self._first_id
        start = 0
        while first is not None and start < len(ids) and ids[start] == first:
            start += 1
        if first is not None and (start or self.adds_bos):
            ids = [first, *ids[start:]]
        if self.kind == "encoder":
            sep = self.tokenizer.sep_token_id
            end = len(ids)
            while end > 1 and ids[end - 1] == sep:
                end -= 1
            ids = [*ids[:end], sep]
        return ids

    def _drop_messages(self, context: Sequence[Message], last: Message) -> list[int] | None:
        assert self.max_length is not None
        kept = 1 if context and context[0].get("role") == "system" else 0
        for start in range(kept + 1, len(context)):  # the last of them stays: without it there is no question
            try:
                ids = self.encode([*context[:kept], *context[start:], last])
            except DataError:
                continue  # the template refuses to begin there; an allowed beginning may follow
            if len(ids) <= self.max_length:
                return ids
        return None

    def _cut_tokens(self, context: Sequence[Message], ids: list[int]) -> list[int] | None:
        assert self.max_length is not None
        try:
            alone = self.encode(context)
        except DataError:
            return None  # nowhere to see the end of the context
        head = 1 if ids[0] == self._first_id else 0
        excess = len(ids) - self.max_length
        most = _common_prefix(alone, ids) - head - 1
        step = max(1, self.max_length // 8)
        cut = min(-(-excess // step) * step, most)
        return ids[:head] + ids[head + cut :] if cut >= excess else None


def _find_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> tuple[str, str]:
    """The template's text and a name for messages."""
    own = tokenizer.chat_template
    if chat_template is None or chat_template == "default":
        if not own:
            logger.warning("the tokenizer has no chat template: using treeward's default, <|role|> headers and EOS")
            return DEFAULT_CHAT_TEMPLATE, "the default chat template"
        if isinstance(own, dict) and "default" not in own:
            raise ConfigError(
                "the tokenizer has several chat templates and no default", field=_SETTING, need=f"one of {sorted(own)}"
            )
        return tokenizer.get_chat_template(), "the tokenizer's chat template"
    if isinstance(own, dict) and chat_template in own:
        return own[chat_template], f"the tokenizer's chat template {chat_template!r}"
    if any(mark in chat_template for mark in ("{{", "{%", "\n")):
        return chat_template, _SETTING
    path = Path(chat_template).expanduser()
    if not path.is_file():
        raise ConfigError(
            "the chat template is neither a file nor a template",
            field=_SETTING,
            got=chat_template,
            need="a file that exists, a Jinja template, or null for the tokenizer's own",
        )
    return path.read_text(encoding="utf-8"), str(path)


def _tokenizer_contents(tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.is_fast:
        return json.dumps([type(tokenizer).__name__, tokenizer.get_vocab(), tokenizer.init_kwargs], default=str)
    contents = json.loads(tokenizer.backend_tokenizer.to_str())
    # Leftovers of the last call with padding or truncation: they change from call to call, our ids do not.
    return json.dumps(contents | {"padding": None, "truncation": None})


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
