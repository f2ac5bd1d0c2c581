"""`Renderer`: messages to token ids, for every part of treeward.

    renderer = Renderer(AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B"), max_length=2048, truncation="drop")
    renderer.encode([{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}])

The whole conversation is rendered once with the model's own chat template, without a generation prompt, and tokenized
as one text. A `Conversation` brings its own variables to the template, its tools among them. The ids begin with
`num_bos` BOS, exactly one where the tokenizer adds one by default; an encoder's have exactly one CLS and one SEP around
them. A template that writes today's date writes `FIXED_DATE`. `Renderer.chat_template` includes both changes, so saved
with a model it renders the same text everywhere.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jinja2

from treeward.config.scoring import Truncation
from treeward.data.conversation import (
    AnyConversation,
    Message,
    canonical_message,
    last_text,
    template_kwargs_of,
    with_messages,
)
from treeward.data.reasoning import REASONING_END, REASONING_START, split_reasoning
from treeward.data.template_bounds import bounded
from treeward.errors import ConfigError, DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_FORMAT_VERSION = 4  # raise it when the same messages would give other ids: token caches are keyed by it
_MIN_CHARACTERS_PER_TOKEN = 128
_ROLES = ("system", "developer", "user", "assistant", "tool")
_MOST_ROLES = 32  # a server's requests must fill neither memory nor log
_PROBE_MESSAGES: list[Message] = [
    {"role": "user", "content": "Quo vadis?"},
    {"role": "assistant", "content": "Romam."},
]
_PROBE_SYSTEM: Message = {"role": "system", "content": "Loquere."}
_PROBE_CALL = {"name": "itinera", "arguments": {"urbs": "Roma"}}
_AS_PYTHON = "{'urbs': 'Roma'}"
_REASONING = "Ratio."
_SENTINEL = "\ue000"  # of Unicode's private use: no template writes it


@dataclass(frozen=True, slots=True)
class Fitted:
    """The token ids of a conversation, at most `max_length`; `truncated`: context was cut."""

    token_ids: list[int]
    truncated: bool


class Renderer:
    """Renders and tokenizes conversations for one tokenizer and one chat template.

    `chat_template`: see `find_template`. `chat_template_kwargs`: variables of the template (`enable_thinking`, `tools`,
    ...). `num_bos`: how many BOS a conversation begins with, whatever the template writes; None: as `set_template` has
    noted in the tokenizer, otherwise one where it adds one to any text. `max_length`: tokens, None for no limit.
    `truncation`: what `fit` does with longer conversations. Raises `ConfigError` for a template that cannot be found or
    parsed or that always fails, for variables that are arguments of `apply_chat_template`, and for a `num_bos` where
    there is no BOS.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        num_bos: int | None = None,
        max_length: int | None = None,
        truncation: Truncation = "drop",
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template_kwargs: dict[str, Any] = dict(chat_template_kwargs or {})
        self.max_length = max_length
        self.truncation: Truncation = truncation
        self._seen_roles = set(_ROLES)
        self._ignored_variables: set[str] = set()
        self._openings: dict[str, str] = {}  # by generation prompt
        arguments = inspect.signature(tokenizer.apply_chat_template).parameters.keys()
        self._not_variables = arguments - {"tools", "documents"}
        if wrong := sorted(self._not_variables & self.chat_template_kwargs.keys()):
            raise ConfigError(
                _NO_VARIABLE, field=f"{SETTING}_kwargs", got=", ".join(wrong), need="variables of the template"
            )
        source, name = find_template(tokenizer, chat_template)
        self.chat_template = without_clock(source, self.chat_template_kwargs)
        self._reads_text, self._reads_parts = self._probe_content(name)
        probe: list[int] = tokenizer("a probe", add_special_tokens=True)["input_ids"]
        cls, sep, bos = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.bos_token_id
        framed = cls is not None and sep is not None and probe[:1] == [cls] and probe[-1:] == [sep]
        self.kind: Literal["decoder", "encoder"] = "encoder" if framed else "decoder"
        self.adds_bos = framed or (bos is not None and probe[:1] == [bos])
        self._first_id: int | None = cls if framed else bos
        if num_bos is not None and (framed or bos is None):
            got, need = f"{num_bos}", "null: an encoder has its own frame, or the tokenizer no BOS"
            raise ConfigError("there is no BOS", field="policy.tokenizer.num_bos", got=got, need=need)
        num_bos = tokenizer.init_kwargs.get(NUM_BOS) if num_bos is None else num_bos
        self.num_bos: int | None = 1 if num_bos is None and self.kind == "decoder" and self.adds_bos else num_bos
        if self.adds_bos or self.num_bos is not None:
            self.chat_template = self._with_frame(source)

    def render(self, messages: AnyConversation, *, where: str | None = None, generation_prompt: bool = False) -> str:
        """The text of a whole conversation; with `generation_prompt`, up to where the assistant continues. Raises
        `DataError` if the template refuses it, fails, or writes nothing, for an argument of transformers among the
        conversation's variables, and for invalid Unicode; `ModelError` for an encoder with `generation_prompt`."""
        if generation_prompt and self.kind == "encoder":
            got = type(self.tokenizer).__name__
            raise ModelError("an encoder cannot complete a prompt", got=got, need="a decoder")
        for role in {str(message.get("role"))[:60] for message in messages} - self._seen_roles:
            if role not in self.chat_template and len(self._seen_roles) < _MOST_ROLES:
                self._seen_roles.add(role)
                logger.warning("%s: the chat template does not name the role %r.", where or "a conversation", role)
        variables = template_kwargs_of(messages)
        self._check_variables(variables, where)
        contents = [self._written(canonical_message(message), where) for message in messages]
        try:
            text = self._apply(contents, generation_prompt, variables)
        except Exception as error:  # a template is a program: it can raise anything
            reason = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            raise DataError(
                f"the chat template refused the conversation: {reason or type(error).__name__}",
                where=where,
                got="roles " + (" > ".join(str(message.get("role")) for message in messages) or "(no messages)"),
                need="messages in the order and form that the model's chat template accepts",
                fix=f"change or remove the row, or set {SETTING} to a template that accepts it",
            ) from error
        check_unicode(text, where)
        if not text.strip():
            summary, need = "the chat template rendered nothing", f"text to tokenize; see {SETTING}"
            raise DataError(summary, where=where, got=list(messages), need=need)
        return text

    def encode(self, messages: AnyConversation, *, where: str | None = None) -> list[int]:
        """The token ids of a whole conversation, with its BOS (or CLS and SEP), without a generation prompt, uncut."""
        return self.encode_many([messages], where=[where])[0]

    def encode_many(
        self, conversations: Sequence[AnyConversation], *, where: Sequence[str | None] | None = None
    ) -> list[list[int]]:
        """`encode` for many conversations with one call of the tokenizer; `where` names each for errors."""
        places = where if where is not None else [None] * len(conversations)
        texts = [self.render(messages, where=place) for messages, place in zip(conversations, places, strict=True)]
        return self.encode_texts(texts, where=places)

    def encode_prompt(self, messages: AnyConversation, *, where: str | None = None) -> list[int]:
        """The token ids of a policy's prompt: the conversation with the template's generation prompt, as one text.
        Raises `ModelError` for an encoder."""
        return self.encode_texts([self.render(messages, where=where, generation_prompt=True)], where=[where])[0]

    def opening(self, messages: AnyConversation, *, where: str | None = None) -> str:
        """What the generation prompt writes of the completion itself, as `<think>\\n` for many reasoning models.

        The text of an assistant's turn is this and what is sampled after it. Empty where the generation prompt is the
        header of a turn and no more. Raises `DataError` as `render` does.
        """
        prompt = self.render(messages, where=where, generation_prompt=True)
        plain = self.render(messages, where=where)
        first = len(os.path.commonprefix([plain, prompt]))
        generation_prompt = prompt[first:]
        if generation_prompt not in self._openings:  # it is the same for almost all prompts of a run
            self._openings[generation_prompt] = self._opening(messages, prompt, first, where)
        return self._openings[generation_prompt]

    def encode_texts(self, texts: Sequence[str], *, where: Sequence[str | None] | None = None) -> list[list[int]]:
        """The token ids of rendered texts, each with its BOS (or CLS and SEP), however many the text has. Raises
        `DataError` for a text without a token."""
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
            verbose=False,  # `truncation` handles texts beyond the model's limit
        )["input_ids"]
        for row, text, place in zip(rows, texts, places, strict=True):
            if not row:
                raise DataError("the tokenizer has no token for any of the text", where=place, got=text)
        return [self._frame(row) for row in rows]

    def fit(self, conversation: AnyConversation, *, where: str | None = None) -> Fitted | None:
        """Encode a conversation within `max_length`.

        If it is too long, "error" raises `DataError` and "drop" returns None. "truncate_left" removes the oldest
        messages, keeping a leading system message and the last two; if that does not suffice, it cuts tokens after BOS
        from the context of the last message, in steps of an eighth of `max_length`, so that completions of similar
        length share their context; None if that is too short. The cut depends on the conversation alone.
        """
        return self.fit_many([conversation], where=[where])[0][0]

    def fit_many(
        self, conversations: Sequence[AnyConversation], *, where: Sequence[str | None] | None = None
    ) -> list[tuple[Fitted | None, int]]:
        """`fit` for many conversations with one call of the tokenizer; with each, its number of tokens when uncut, as
        `encode_short` counts them."""
        places = where if where is not None else [None] * len(conversations)
        texts = [self.render(messages, where=place) for messages, place in zip(conversations, places, strict=True)]
        encoded = self.encode_short(texts, self.max_length, where=places)
        return [
            (self._fitted(conversation, ids, num_tokens, place), num_tokens)
            for conversation, (ids, num_tokens), place in zip(conversations, encoded, places, strict=True)
        ]

    def encode_short(
        self, texts: Sequence[str], max_length: int | None, *, where: Sequence[str | None]
    ) -> list[tuple[list[int] | None, int]]:
        """The ids and the number of tokens of each text. To bound memory, a text of more characters than `max_length`
        tokens can have is not tokenized: its ids are None, and its number is a lower bound."""
        most = float("inf") if max_length is None else max_length * self._characters_per_token
        short = [i for i, text in enumerate(texts) if len(text) <= most]
        encoded = self.encode_texts([texts[i] for i in short], where=[where[i] for i in short])
        encoded_texts: list[tuple[list[int] | None, int]]
        encoded_texts = [(None, -(-len(text) // self._characters_per_token)) for text in texts]
        for i, ids in zip(short, encoded, strict=True):
            encoded_texts[i] = ids, len(ids)
        return encoded_texts

    @functools.cached_property
    def read_token(self) -> Literal["eos", "newline", "other"] | None:
        """The kind of the last token of a conversation, where its score is read; None if the template refuses it."""
        try:
            last = self.encode(_PROBE_MESSAGES)[-1]
        except DataError:
            return None
        text = str(self.tokenizer.decode([last]))
        is_newline = "\n" in text and not text.strip()
        return "eos" if last == self.tokenizer.eos_token_id else "newline" if is_newline else "other"

    @property
    def developer_role(self) -> str:
        """The template's role for developer messages: most templates know `system`, and some drop unknown roles."""
        return "developer" if "developer" in self.chat_template else "system"

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of everything that the ids depend on: template, variables, tokenizer, `max_length`, `truncation`."""
        tokenizer: Any = self.tokenizer
        contents: Any = [type(tokenizer).__name__, tokenizer.get_vocab(), tokenizer.init_kwargs]
        if tokenizer.is_fast:
            # Without leftovers of the last call with padding or truncation: they change from call to call.
            contents = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
        parts = {
            "chat_template": self.chat_template,
            "chat_template_kwargs": self.chat_template_kwargs,
            "num_bos": self.num_bos,
            "max_length": self.max_length,
            "truncation": self.truncation,
            "version": _FORMAT_VERSION,
            "tokenizer": json.dumps(contents, default=str),
            "special": tokenizer.special_tokens_map,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    @functools.cached_property
    def _characters_per_token(self) -> int:
        """The characters of the longest token, or a minimum: tokenizers may drop white space or have one token for
        unknown words, and then a long text counts as too long despite few tokens."""
        return max(_MIN_CHARACTERS_PER_TOKEN, *map(len, self.tokenizer.get_vocab()))

    def _opening(self, messages: AnyConversation, prompt: str, first: int, where: str | None) -> str:
        """`opening` for the text of a prompt whose generation prompt begins at the character `first`."""
        answered = with_messages(messages, [*messages, {"role": "assistant", "content": _SENTINEL}])
        turn = self.render(answered, where=where)
        # The header of a turn is what the template writes before any content too.
        header = os.path.commonprefix([turn.partition(_SENTINEL)[0], prompt])
        start = max(first, len(header))
        # Templates that write an empty block of reasoning into every turn have it before the content: it is no header.
        reasoning = prompt.find(REASONING_START, first)
        if reasoning >= 0:
            start = min(start, reasoning)
        opening = prompt[start:]
        for token in self.tokenizer.all_special_tokens:
            opening = opening.replace(token, "")  # sampled tokens are decoded without special ones too
        return opening if opening.strip() else ""

    def _with_frame(self, source: str) -> str:
        """The template with the BOS (or CLS and SEP) that it does not write itself. `_frame` adds them in any case;
        this makes plain transformers add them with the saved template."""
        text = self._try_probe(_PROBE_MESSAGES, SETTING) or self._try_probe([_PROBE_SYSTEM, *_PROBE_MESSAGES], SETTING)
        if not text:
            return self.chat_template  # it refuses the probe, which would show what it writes
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        first, last = ("cls_token", "sep_token") if self.kind == "encoder" else ("bos_token", None)
        written = len(ids) - len(self._without_first(ids))
        before = f"{{{{ {first} }}}}" * ((1 if self.num_bos is None else self.num_bos) - written)
        after = "" if last is None or ids[-1:] == [self.tokenizer.sep_token_id] else f"{{{{ {last} }}}}"
        if not before and not after:
            return self.chat_template
        return without_clock(f"{before}{source}{after}", self.chat_template_kwargs)

    def _probe_content(self, name: str) -> tuple[bool, bool]:
        """Whether the template reads content that is text, and content that is a list of parts. Templates of vision
        models may skip a text silently, and templates for text write a list as Python would."""
        part_messages = [message | {"content": _as_parts(message["content"])} for message in _PROBE_MESSAGES]
        text, parts = self._try_probe(_PROBE_MESSAGES, name), self._try_probe(part_messages, name)
        if all(message["content"] in text for message in _PROBE_MESSAGES):
            return True, parts == text
        reads_parts = "'type'" not in parts and all(message["content"] in parts for message in _PROBE_MESSAGES)
        return not reads_parts, reads_parts

    def _try_probe(self, messages: list[Message], name: str) -> str:
        try:
            return self._apply(messages, generation_prompt=False)
        except (jinja2.TemplateSyntaxError, jinja2.TemplateRuntimeError, ArithmeticError) as error:
            if isinstance(error, jinja2.UndefinedError):
                return ""
            what, got = f"fails: {type(error).__name__}: {error}", None
            if isinstance(error, jinja2.TemplateSyntaxError):
                what = f"cannot be parsed: {error.message}"
                got = (error.source or "\n" * error.lineno).splitlines()[error.lineno - 1].strip()
            fix = f"mend the template, or set {SETTING} to another"
            raise ConfigError(f"the chat template {what}", where=name, got=got, fix=fix) from error
        except Exception:
            return ""  # it may still accept the data's roles; the error of a row has the template's reason

    def reads(self, variable: str) -> bool:
        """Whether the chat template names a variable."""
        return _names(self.chat_template, variable)

    def _check_variables(self, variables: Mapping[str, Any], where: str | None) -> None:
        """Raise `DataError` for a name that is no variable; say once of each variable that the template ignores it."""
        if wrong := sorted(self._not_variables & variables.keys()):
            field, need = "chat_template_kwargs", "variables of the template"
            raise DataError(_NO_VARIABLE, where=where, field=field, got=", ".join(wrong), need=need)
        for name in sorted(variables.keys() - self._ignored_variables):
            if not self.reads(name) and len(self._ignored_variables) < _MOST_ROLES:
                self._ignored_variables.add(name)
                place = where or "a conversation"
                logger.warning("%s: the chat template ignores %s.%s", place, name, self._reading(name))

    def _reading(self, variable: str) -> str:
        """A sentence that names the tokenizer's own templates that read a variable; "" without any."""
        templates = self.tokenizer.chat_template
        if not isinstance(templates, dict):
            return ""
        names = [name for name, template in templates.items() if _names(template, variable)]
        return f" The tokenizer has a template that reads it: {SETTING}={names[0]}." if names else ""

    def _written(self, message: Message, where: str | None) -> Message:
        """The message as the template reads it: content as text or parts, arguments of calls as objects or text."""
        message = self._content(self._with_reasoning_apart(message), where)
        calls = message.get("tool_calls")
        if isinstance(calls, list) and self._reads_arguments_as_text:
            return message | {"tool_calls": [_with_text_arguments(call) for call in calls]}
        return message

    @functools.cached_property
    def _reads_arguments_as_text(self) -> bool:
        """Whether the template wants the arguments of tool calls as JSON text, as DeepSeek-V3's: it fails for an
        object, or writes it as Python would. Others write JSON themselves, and would quote a text again."""
        as_object, as_text = (self._try_call(call) for call in (_PROBE_CALL, _with_text_arguments(_PROBE_CALL)))
        return "Roma" in as_text and ("Roma" not in as_object or _AS_PYTHON in as_object)

    @functools.cached_property
    def _reads_reasoning_apart(self) -> bool:
        """Whether the template takes reasoning as `reasoning_content` alone, as Qwen3.8's: it writes a second block
        before content that has one."""
        question, answer = _PROBE_MESSAGES
        whole = answer | {"content": f"{REASONING_START}\n{_REASONING}\n{REASONING_END}\n\n{answer['content']}"}
        apart = answer | {"reasoning_content": _REASONING}
        text_of_whole = self._try_probe([question, whole], SETTING)
        text_of_apart = self._try_probe([question, apart], SETTING)
        is_doubled = text_of_whole.count(REASONING_START) > 1
        return is_doubled and text_of_apart.count(REASONING_START) == 1 and _REASONING in text_of_apart

    def _with_reasoning_apart(self, message: Message) -> Message:
        """The message with its reasoning as `reasoning_content`, for a template that reads it there alone."""
        if message.get("role") != "assistant" or message.get("reasoning_content") is not None:
            return message
        if not self._reads_reasoning_apart:
            return message
        content = message.get("content") or ""
        if not isinstance(content, str) and not all(isinstance(part, str) or "text" in part for part in content):
            return message  # parts that are no text have a place among the others
        parts = split_reasoning(last_text([message]))
        if parts is None:
            return message
        reasoning, answer = parts
        return message | {"reasoning_content": reasoning, "content": answer}

    def _try_call(self, function: Mapping[str, Any]) -> str:
        call = {"id": "abcdefghi", "type": "function", "function": function}
        calling: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        result: Message = {"role": "tool", "tool_call_id": "abcdefghi", "name": "itinera", "content": "Via."}
        for messages in ([_PROBE_MESSAGES[0], calling], [_PROBE_MESSAGES[0], calling, result]):
            try:
                return self._apply(messages, generation_prompt=False)
            except Exception:  # a template is a program: it can raise anything
                continue
        return ""

    def _content(self, message: Message, where: str | None) -> Message:
        content = message.get("content")
        if content is None or (self._reads_text if isinstance(content, str) else self._reads_parts):
            return message
        if isinstance(content, str):
            return message | {"content": _as_parts(content)}
        texts = []
        for part in content:
            text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
            if not isinstance(text, str):
                got, need = f"a content part {part!r}", 'text, or parts of the form {"type": "text", "text": "..."}'
                fix = f"remove the row, or use a model or {SETTING} that reads such parts"
                raise DataError("the chat template reads text only", where=where, got=got, need=need, fix=fix)
            texts.append(text)
        return message | {"content": "".join(texts)}

    def _frame(self, ids: list[int]) -> list[int]:
        """The ids with `num_bos` BOS (or one CLS and SEP); None: with one, if the tokenizer or the text has one."""
        first, sep = self._first_id, self.tokenizer.sep_token_id
        number = int(self.adds_bos or ids[:1] == [first]) if self.num_bos is None else self.num_bos
        if first is not None:
            ids = [first] * number + self._without_first(ids)
        if self.kind == "encoder":
            while len(ids) > 1 and ids[-1] == sep:
                ids = ids[:-1]
            ids = [*ids, sep]
        return ids

    def _without_first(self, ids: list[int]) -> list[int]:
        return list(itertools.dropwhile(lambda token: token == self._first_id, ids))

    def _fitted(
        self, conversation: AnyConversation, ids: list[int] | None, num_tokens: int, where: str | None
    ) -> Fitted | None:
        if self.max_length is None or num_tokens <= self.max_length:
            assert ids is not None
            return Fitted(ids, truncated=False)
        if self.truncation == "drop":
            return None
        if self.truncation == "error":
            got = f"{num_tokens} tokens" if ids is not None else f"more than {num_tokens} tokens"
            need = f"at most {self.max_length} (data.max_input_seq_length)"
            fix = "raise the limit, or set data.truncation to drop or truncate_left"
            raise DataError("a conversation is too long", where=where, got=got, need=need, fix=fix)
        shortened = self._shortened(conversation, ids)
        return None if shortened is None else Fitted(shortened, truncated=True)

    def _shortened(self, conversation: AnyConversation, ids: list[int] | None) -> list[int] | None:
        assert self.max_length is not None
        context = conversation[:-1]
        system = context[:1] if context and context[0].get("role") == "system" else []
        for start in range(len(system) + 1, len(context)):  # the last of them stays: without it there is no question
            shorter = self._encode_if_short(with_messages(conversation, [*system, *conversation[start:]]))
            if shorter is not None and len(shorter) <= self.max_length:
                return shorter
        alone = None if ids is None else self._encode_if_short(with_messages(conversation, context))
        if ids is None or alone is None:
            return None  # the end of the context is unknown
        head = len(ids) - len(self._without_first(ids))
        excess = len(ids) - self.max_length
        most = len(os.path.commonprefix([alone, ids])) - head - 1
        step = max(1, self.max_length // 8)
        cut = min(-(-excess // step) * step, most)
        return ids[:head] + ids[head + cut :] if cut >= excess else None

    def _encode_if_short(self, messages: AnyConversation) -> list[int] | None:
        """The ids; None if the template refuses the messages, or the text has too many characters."""
        try:
            return self.encode_short([self.render(messages)], self.max_length, where=[None])[0][0]
        except DataError:
            return None

    def _apply(
        self, messages: Sequence[Message], generation_prompt: bool, variables: Mapping[str, Any] | None = None
    ) -> str:
        """The text that transformers renders, within the bounds of `template_bounds`. `variables` win over those of
        the renderer. Passes on the template's errors."""
        all_variables = {**self.chat_template_kwargs, **(variables or {}), "add_generation_prompt": generation_prompt}
        with bounded():
            text = self.tokenizer.apply_chat_template(
                list(messages), chat_template=self.chat_template, tokenize=False, **all_variables
            )
        assert isinstance(text, str)
        return text


def _with_text_arguments(call: Any) -> Any:
    """A tool call, or its function, with its arguments as JSON text."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_text_arguments(call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, Mapping):
        return call
    return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


DEFAULT_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' + message['content'] -}}
{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- if not loop.last -%}{{- '\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '\\n<|assistant|>\\n' -}}{%- endif -%}"""
"""For tokenizers without a template: each role as a header on its own line, then the text; EOS (if there is one) after
each assistant message, and nothing after the last, so that a score is read at EOS."""

FIXED_DATE = "26 Jul 2024"
"""The date of `strftime_now`, in the template's format: the default date of Llama 3's templates."""

_NO_VARIABLE = "an argument of transformers is no variable of the template"

NUM_BOS = "num_bos"
"""A key of a tokenizer's `init_kwargs`, which are saved with it."""

SETTING = "policy.tokenizer.chat_template"
_MIDNIGHT = datetime.strptime(FIXED_DATE, "%d %b %Y")
_CLOCK = "{% macro strftime_now(format) %}"


def _names(template: str, variable: str) -> bool:
    """Whether a template has a variable's name."""
    return re.search(rf"\b{re.escape(variable)}\b", template) is not None


def find_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> tuple[str, str]:
    """The template's text, and its name for errors. `chat_template`: None or "default" for the tokenizer's, or
    `DEFAULT_CHAT_TEMPLATE` if it has none; else the name of one of the tokenizer's templates, a file, or a text. Raises
    `ConfigError`."""
    tokenizer_template = tokenizer.chat_template
    if chat_template is None or chat_template == "default":
        if not tokenizer_template:
            logger.warning("the tokenizer has no chat template: using treeward's default, <|role|> headers and EOS")
            return DEFAULT_CHAT_TEMPLATE, "the default chat template"
        try:
            return tokenizer.get_chat_template(), "the tokenizer's chat template"
        except ValueError as error:  # several, and no default
            raise ConfigError(str(error), field=SETTING, need=f"one of {sorted(tokenizer_template)}") from error
    if isinstance(tokenizer_template, dict) and chat_template in tokenizer_template:
        return tokenizer_template[chat_template], f"the tokenizer's chat template {chat_template!r}"
    if any(mark in chat_template for mark in ("{{", "{%", "\n")):
        return chat_template, SETTING
    path = Path(chat_template).expanduser()
    if not path.is_file():
        summary = "the chat template is neither a file nor a template"
        need = "a file that exists, a Jinja template, or null for the tokenizer's own"
        raise ConfigError(summary, field=SETTING, got=chat_template, need=need)
    return path.read_text(encoding="utf-8"), str(path)


def check_unicode(text: str, where: str | None) -> None:
    """Raise `DataError` for a lone surrogate, which JSON can hold: tokenizers fail at it, each in its own way."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        summary, need = "the conversation has text that is not valid Unicode", "text without lone surrogates"
        fix = 'remove the row, or mend its text: text.encode("utf-8", "replace").decode()'
        raise DataError(summary, where=where, got=ascii(text[error.start]), need=need, fix=fix) from error


def without_clock(template: str, variables: Mapping[str, Any]) -> str:
    """The template with `strftime_now` fixed. `variables`: of the rendering."""
    if "strftime_now" not in template or template.startswith(_CLOCK):
        return template
    if not {"date_string", "current_date"} & variables.keys():
        logger.warning(
            "the chat template writes today's date; it is rendered with %s so that scores do not depend on the day "
            "(chat_template_kwargs.date_string sets another where the template reads it)",
            FIXED_DATE,
        )
    # transformers passes only plain values to a template, so a macro shadows its clock, on a line of its own:
    # transformers trims the newline after a block.
    codes = [f"%{code}" for code in ("-d", "-m", *"aAbBcdDeFHIjmMpSTuUwWxXyYzZ")]
    replaced = "".join(f" | replace({code!r}, {_MIDNIGHT.strftime(code)!r})" for code in codes)
    return f"{_CLOCK}{{{{ format{replaced} }}}}{{% endmacro %}}\n{template}"
