"""`Renderer`: messages to token ids, for every part of treeward.

    tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
    renderer = Renderer(tokenizer, max_length=2048, truncation="drop")
    renderer.encode([{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}])

The whole conversation is rendered once with the model's own chat template, without a generation
prompt, and tokenized as one text. A `Conversation` brings its own variables to the template, its
tools among them. The ids begin with `num_bos` BOS, exactly one where the tokenizer adds one by
default; an encoder's have exactly one CLS and one SEP around them. A template that writes today's
date writes `FIXED_DATE`. `Renderer.chat_template` includes both changes, so saved with a model it
renders the same text everywhere.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jinja2

from treeward.config.scoring import Truncation
from treeward.data.chat_template import (
    NUM_BOS,
    SETTING,
    find_template,
    names_variable,
    without_clock,
)
from treeward.data.conversation import (
    SYSTEM_ROLES,
    AnyConversation,
    Message,
    canonical_message,
    check_unicode,
    is_list,
    last_text,
    template_kwargs_of,
    with_messages,
)
from treeward.data.reasoning import REASONING_START, split_reasoning
from treeward.data.template_bounds import bounded
from treeward.data.template_probes import (
    PROBE_MESSAGES,
    PROBE_SYSTEM,
    as_parts,
    as_text,
    in_one_form,
    probe_content,
    reads_arguments_as_text,
    reads_reasoning_apart,
    try_probe,
    with_text_arguments,
)
from treeward.data.unread_parts import UnreadParts
from treeward.errors import ConfigError, DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMAT_VERSION = 11
"""Raise it when the same messages would give other ids: token caches are keyed by it."""
_MIN_CHARACTERS_PER_TOKEN = 128
_NO_VARIABLE = "an argument of transformers is no variable of the template"
_SENTINEL = "\ue000"  # of Unicode's private use: no template writes it


@dataclass(frozen=True, slots=True)
class Fitted:
    """The token ids of a conversation, at most `max_length`; `truncated`: context was cut."""

    token_ids: list[int]
    truncated: bool


class Renderer:
    """Renders and tokenizes conversations for one tokenizer and one chat template.

    `chat_template`: see `find_template`. `chat_template_kwargs`: variables of the template
    (`enable_thinking`, `tools`, ...). `num_bos`: how many BOS a conversation begins with, whatever
    the template writes; None: as `set_template` has noted in the tokenizer, otherwise one where it
    adds one to any text. `max_length`: tokens, None for no limit. `truncation`: what `fit` does
    with longer conversations. Raises `ConfigError` for a template that cannot be found or parsed or
    that always fails, for variables that are arguments of `apply_chat_template`, and for a
    `num_bos` where there is no BOS.
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
        self._openings: dict[str, str] = {}  # by generation prompt
        # transformers would take such a variable as its own argument, as `tokenize`.
        arguments = inspect.signature(tokenizer.apply_chat_template).parameters.keys()
        self._not_variables = arguments - {"tools", "documents"}  # it passes these two on
        wrong = sorted(self._not_variables & self.chat_template_kwargs.keys())
        if wrong:
            field = f"{SETTING}_kwargs"
            need = "variables of the template"
            raise ConfigError(_NO_VARIABLE, field=field, got=", ".join(wrong), need=need)
        source, name = find_template(tokenizer, chat_template)
        # Today's date would give other scores tomorrow.
        self.chat_template = without_clock(source, self.chat_template_kwargs)
        # A message's content is text, or a list of parts.
        self.reads_text, self._reads_parts = probe_content(self._apply, name)
        probe: list[int] = tokenizer("a probe", add_special_tokens=True)["input_ids"]
        # The tokens that it adds show its kind: its class and its settings do not tell reliably.
        cls = tokenizer.cls_token_id
        sep = tokenizer.sep_token_id
        bos = tokenizer.bos_token_id
        framed = cls is not None and sep is not None and probe[:1] == [cls] and probe[-1:] == [sep]
        self.kind: Literal["decoder", "encoder"] = "encoder" if framed else "decoder"
        self.adds_bos = framed or (bos is not None and probe[:1] == [bos])
        # The token that every row begins with.
        self._first_id: int | None = cls if framed else bos
        if num_bos is not None and (framed or bos is None):
            field = "policy.tokenizer.num_bos"
            need = "null: an encoder has its own frame, or the tokenizer no BOS"
            raise ConfigError("there is no BOS", field=field, got=f"{num_bos}", need=need)
        if num_bos is None:
            num_bos = tokenizer.init_kwargs.get(NUM_BOS)
        if num_bos is None and self.kind == "decoder" and self.adds_bos:
            num_bos = 1
        self.num_bos: int | None = num_bos
        if self.adds_bos or self.num_bos is not None:
            self.chat_template = self._with_frame(source)
        self._reads_reasoning_apart = reads_reasoning_apart(self._apply)
        self._unread = UnreadParts(self.chat_template)

    def render(
        self,
        messages: AnyConversation,
        *,
        where: str | None = None,
        generation_prompt: bool = False,
    ) -> str:
        """The text of a whole conversation; with `generation_prompt`, up to where the assistant
        continues. Raises `DataError` if the template refuses it, fails, or writes nothing, for an
        argument of transformers among the conversation's variables, and for invalid Unicode;
        `ModelError` for an encoder with `generation_prompt`."""
        if generation_prompt and self.kind == "encoder":
            got = type(self.tokenizer).__name__
            raise ModelError("an encoder cannot complete a prompt", got=got, need="a decoder")
        variables = template_kwargs_of(messages)
        self._check_variables(variables, where)
        canonical = [canonical_message(message) for message in messages]
        self._unread.name_keys(canonical, where)
        contents = [self._written(message, where) for message in canonical]
        try:
            text = self._apply(contents, generation_prompt, variables)
        except Exception as error:  # a template is a program: it can raise anything
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, jinja2.TemplateError):
                reason = str(error) or type(error).__name__  # the words of the template's author
            roles = " > ".join(str(message.get("role")) for message in messages)
            raise DataError(
                f"the chat template refused the conversation: {reason}",
                where=where,
                got=f"roles {roles or '(no messages)'}",
                need="messages in the order and form that the model's chat template accepts",
                fix=f"change or remove the row, or set {SETTING} to a template that accepts it",
            ) from error
        check_unicode(text, where)
        if not text.strip():
            summary = "the chat template rendered nothing"
            need = f"text to tokenize; see {SETTING}"
            raise DataError(summary, where=where, got=list(messages), need=need)
        self._unread.name_roles(canonical, text, where)
        return text

    def encode(self, messages: AnyConversation, *, where: str | None = None) -> list[int]:
        """The token ids of a whole conversation, with its BOS (or CLS and SEP), without a
        generation prompt, uncut."""
        return self.encode_many([messages], where=[where])[0]

    def encode_many(
        self,
        conversations: Sequence[AnyConversation],
        *,
        where: Sequence[str | None] | None = None,
    ) -> list[list[int]]:
        """`encode` for many conversations with one call of the tokenizer; `where` names each for
        errors."""
        places = where if where is not None else [None] * len(conversations)
        return self.encode_texts(self._render_many(conversations, places), where=places)

    def _render_many(
        self,
        conversations: Sequence[AnyConversation],
        places: Sequence[str | None],
    ) -> list[str]:
        texts = []
        for messages, place in zip(conversations, places, strict=True):
            texts.append(self.render(messages, where=place))
        return texts

    def encode_prompt(self, messages: AnyConversation, *, where: str | None = None) -> list[int]:
        """The token ids of a policy's prompt: the conversation with the template's generation
        prompt, as one text. Raises `ModelError` for an encoder."""
        text = self.render(messages, where=where, generation_prompt=True)
        return self.encode_texts([text], where=[where])[0]

    def opening(self, messages: AnyConversation, *, where: str | None = None) -> str:
        """What the generation prompt writes of the completion itself, as `<think>\\n` for many
        reasoning models.

        The text of an assistant's turn is this and what is sampled after it. Empty where the
        generation prompt is the header of a turn and no more. Raises `DataError` as `render` does.
        """
        # What the generation prompt adds to the conversation as it stands.
        prompt = self.render(messages, where=where, generation_prompt=True)
        plain = self.render(messages, where=where)
        begin = len(os.path.commonprefix([plain, prompt]))
        generation_prompt = prompt[begin:]
        # It is the same for almost all prompts of a run.
        if generation_prompt not in self._openings:
            self._openings[generation_prompt] = self._opening(messages, prompt, begin, where)
        return self._openings[generation_prompt]

    def encode_texts(
        self,
        texts: Sequence[str],
        *,
        where: Sequence[str | None] | None = None,
    ) -> list[list[int]]:
        """The token ids of rendered texts, each with its BOS (or CLS and SEP), however many the
        text has. Raises `DataError` for a text without a token."""
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
                summary = "the tokenizer has no token for any of the text"
                raise DataError(summary, where=place, got=text)
        return [self._frame(row) for row in rows]

    def fit(self, conversation: AnyConversation, *, where: str | None = None) -> Fitted | None:
        """Encode a conversation within `max_length`.

        If it is too long, "error" raises `DataError` and "drop" returns None. "truncate_left"
        removes the oldest messages, keeping a leading system or developer message, the last
        question, and after it calls of tools and their results; if that does not suffice, it cuts
        tokens after BOS up to the end of the question, in steps of an eighth of `max_length`, so
        that completions of similar length share their context; None if that is too short. The cut
        depends on the conversation alone.
        """
        return self.fit_many([conversation], where=[where])[0][0]

    def fit_many(
        self,
        conversations: Sequence[AnyConversation],
        *,
        where: Sequence[str | None] | None = None,
    ) -> list[tuple[Fitted | None, int]]:
        """`fit` for many conversations with one call of the tokenizer; with each, its number of
        tokens when uncut, as `encode_short` counts them."""
        places = where if where is not None else [None] * len(conversations)
        # One call for all: a fast tokenizer works on several texts at once.
        texts = self._render_many(conversations, places)
        encoded = self.encode_short(texts, self.max_length, where=places)
        fitted = []
        for i, (ids, num_tokens) in enumerate(encoded):
            sequence = self._fitted(conversations[i], ids, num_tokens, places[i])
            fitted.append((sequence, num_tokens))
        return fitted

    def encode_short(
        self,
        texts: Sequence[str],
        max_length: int | None,
        *,
        where: Sequence[str | None],
    ) -> list[tuple[list[int] | None, int]]:
        """The ids and the number of tokens of each text. To bound memory, a text of more characters
        than `max_length` tokens can have is not tokenized: its ids are None, and its number is a
        lower bound."""
        most_characters = math.inf
        if max_length is not None:
            most_characters = max_length * self._characters_per_token
        is_short = [len(text) <= most_characters for text in texts]
        short_texts = list(itertools.compress(texts, is_short))
        short_places = list(itertools.compress(where, is_short))
        short_ids = iter(self.encode_texts(short_texts, where=short_places))
        encoded: list[tuple[list[int] | None, int]] = []
        for text, is_tokenized in zip(texts, is_short, strict=True):
            if is_tokenized:
                ids = next(short_ids)
                encoded.append((ids, len(ids)))
            else:
                encoded.append((None, math.ceil(len(text) / self._characters_per_token)))
        return encoded

    @functools.cached_property
    def read_token(self) -> Literal["eos", "newline", "other"] | None:
        """The kind of the last token of a conversation, where its score is read; None if the
        template refuses it."""
        try:
            last = self.encode(PROBE_MESSAGES)[-1]
        except DataError:
            return None
        if last == self.tokenizer.eos_token_id:
            return "eos"
        text = str(self.tokenizer.decode([last]))
        is_newline = "\n" in text and not text.strip()
        return "newline" if is_newline else "other"

    @functools.cached_property
    def developer_role(self) -> str:
        """The template's role for developer messages: most templates know `system`, and some drop
        unknown roles."""
        if "developer" in self.chat_template:
            # Cohere's has the word in its preamble, and drops the role.
            instruction = PROBE_SYSTEM | {"role": "developer"}
            text = try_probe(self._apply, [instruction, *PROBE_MESSAGES], SETTING)
            if PROBE_SYSTEM["content"] in text:
                return "developer"
        return "system"

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of everything that the ids depend on: template, variables, tokenizer,
        `max_length`, `truncation`."""
        tokenizer: Any = self.tokenizer
        contents: Any = [type(tokenizer).__name__, tokenizer.get_vocab(), tokenizer.init_kwargs]
        if tokenizer.is_fast:
            contents = json.loads(tokenizer.backend_tokenizer.to_str())
            # Leftovers of the last call with padding or truncation, which change from call to call.
            contents |= {"padding": None, "truncation": None}
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
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    @functools.cached_property
    def _characters_per_token(self) -> int:
        """The characters of the longest token, or a minimum: tokenizers may drop white space or
        have one token for unknown words, and then a long text counts as too long despite few
        tokens."""
        return max(_MIN_CHARACTERS_PER_TOKEN, *map(len, self.tokenizer.get_vocab()))

    def _opening(
        self,
        messages: AnyConversation,
        prompt: str,
        begin: int,
        where: str | None,
    ) -> str:
        """`opening` for the text of a prompt whose generation prompt begins at the character
        `begin`."""
        answered = with_messages(messages, [*messages, {"role": "assistant", "content": _SENTINEL}])
        turn = self.render(answered, where=where)
        # The header of a turn is what the template writes before any content too.
        header = os.path.commonprefix([turn.partition(_SENTINEL)[0], prompt])
        start = max(begin, len(header))
        # Templates that write an empty block of reasoning into every turn have it before the
        # content: it is no header.
        reasoning = prompt.find(REASONING_START, begin)
        if reasoning >= 0:
            start = min(start, reasoning)
        opening = prompt[start:]
        for token in self.tokenizer.all_special_tokens:
            # sampled tokens are decoded without special ones too
            opening = opening.replace(token, "")
        return opening if opening.strip() else ""

    def _with_frame(self, source: str) -> str:
        """The template with the BOS (or CLS and SEP) that it does not write itself. `_frame` adds
        them in any case; this makes plain transformers add them with the saved template."""
        text = try_probe(self._apply, PROBE_MESSAGES, SETTING)
        if not text:  # some templates want a system message
            text = try_probe(self._apply, [PROBE_SYSTEM, *PROBE_MESSAGES], SETTING)
        if not text:
            return self.chat_template  # it refuses the probe, which would show what it writes
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        num_wanted = 1 if self.num_bos is None else self.num_bos
        num_written = len(ids) - len(self._without_first(ids))
        first = "{{ cls_token }}" if self.kind == "encoder" else "{{ bos_token }}"
        before = first * max(0, num_wanted - num_written)
        after = ""
        if self.kind == "encoder" and ids[-1:] != [self.tokenizer.sep_token_id]:
            after = "{{ sep_token }}"
        if not before and not after:
            return self.chat_template
        # Of the source once more: the macro of a clock comes before all else, and `without_clock`
        # knows a template that has it by its beginning.
        return without_clock(f"{before}{source}{after}", self.chat_template_kwargs)

    def reads(self, variable: str) -> bool:
        """Whether the chat template names a variable."""
        return names_variable(self.chat_template, variable)

    def _check_variables(self, variables: Mapping[str, Any], where: str | None) -> None:
        """Raise `DataError` for a name that is no variable; say once of each variable that the
        template ignores it."""
        wrong = sorted(self._not_variables & variables.keys())
        if wrong:
            field = "chat_template_kwargs"
            need = "variables of the template"
            raise DataError(_NO_VARIABLE, where=where, field=field, got=", ".join(wrong), need=need)
        templates = self.tokenizer.chat_template
        others = templates if isinstance(templates, dict) else {}
        self._unread.name_variables(variables, others, where)

    def _written(self, message: Message, where: str | None) -> Message:
        """The message as the template reads it: content as text or parts, arguments of calls as
        objects or text."""
        if message.get("role") == "developer":
            message = message | {"role": self.developer_role}
        message = self._content(self._with_reasoning_apart(message), where)
        calls = message.get("tool_calls")
        if isinstance(calls, list) and self._reads_arguments_as_text:
            return message | {"tool_calls": [with_text_arguments(call) for call in calls]}
        return message

    # Not tried before the first call of a tool: most data has none, and it takes up to four
    # renderings.
    @functools.cached_property
    def _reads_arguments_as_text(self) -> bool:
        return reads_arguments_as_text(self._apply)

    def _with_reasoning_apart(self, message: Message) -> Message:
        """The message with its reasoning as `reasoning_content`, for a template that reads it there
        alone."""
        if message.get("role") != "assistant" or message.get("reasoning_content") is not None:
            return message
        if not self._reads_reasoning_apart:
            return message
        content = message.get("content") or ""
        parts = [] if isinstance(content, str) else content
        if not all(isinstance(part, str) or "text" in part for part in parts):
            return message  # parts that are no text have a place among the others
        reasoning_and_answer = split_reasoning(last_text([message]))
        if reasoning_and_answer is None:
            return message
        reasoning, answer = reasoning_and_answer
        return message | {"reasoning_content": reasoning, "content": answer}

    def _content(self, message: Message, where: str | None) -> Message:
        """The message with its content as text or as parts, whichever the template reads."""
        content = message.get("content")
        if content is None:
            return message
        if isinstance(content, str):
            return message if self.reads_text else message | {"content": as_parts(content)}
        if self._reads_parts:
            # Anything else is refused by the template, with its words.
            return message | {"content": in_one_form(content)} if is_list(content) else message
        return message | {"content": as_text(content, where)}

    def _frame(self, ids: list[int]) -> list[int]:
        """The ids with `num_bos` BOS (or one CLS and SEP); None: with one, if the tokenizer or the
        text has one."""
        first = self._first_id
        number = self.num_bos
        if number is None:
            number = int(self.adds_bos or ids[:1] == [first])
        if first is not None:
            ids = [first] * number + self._without_first(ids)
        if self.kind == "encoder":
            sep = self.tokenizer.sep_token_id
            while len(ids) > 1 and ids[-1] == sep:
                ids = ids[:-1]
            ids = [*ids, sep]
        return ids

    def _without_first(self, ids: list[int]) -> list[int]:
        """The ids after the BOS (or CLS), of which a template may write none, one or several."""
        return list(itertools.dropwhile(lambda token: token == self._first_id, ids))

    def _fitted(
        self,
        conversation: AnyConversation,
        ids: list[int] | None,
        num_tokens: int,
        where: str | None,
    ) -> Fitted | None:
        """`fit` for a conversation that `encode_short` has encoded."""
        if self.max_length is None or num_tokens <= self.max_length:
            assert ids is not None
            return Fitted(ids, truncated=False)
        if self.truncation == "drop":
            return None
        if self.truncation == "error":
            at_least = "more than " if ids is None else ""
            raise DataError(
                "a conversation is too long",
                where=where,
                got=f"{at_least}{num_tokens} tokens",
                need=f"at most {self.max_length} (data.max_input_seq_length)",
                fix="raise the limit, or set data.truncation to drop or truncate_left",
            )
        shortened = self._shortened(conversation, ids)
        return None if shortened is None else Fitted(shortened, truncated=True)

    def _shortened(self, conversation: AnyConversation, ids: list[int] | None) -> list[int] | None:
        """The ids of a conversation that is too long, with less context; None where not enough can
        go. `ids`: those of the whole, if they are known."""
        assert self.max_length is not None
        context = conversation[:-1]
        system: list[Message] = []
        if context and context[0].get("role") in SYSTEM_ROLES:
            system = [context[0]]
        # The last message of the context stays: without it there is no question.
        question = _place_of_question(context)
        for start in range(len(system) + 1, question + 1):
            messages = with_messages(conversation, [*system, *conversation[start:]])
            shorter = self._encode_if_short(messages)
            if shorter is not None and len(shorter) <= self.max_length:
                return shorter
        if ids is None:
            return None
        alone = self._encode_if_short(with_messages(conversation, conversation[: question + 1]))
        if alone is None:
            return None  # the end of the context is unknown
        # The BOS stay, and the last token of the context: without any there is no question.
        num_first = len(ids) - len(self._without_first(ids))
        num_context = len(os.path.commonprefix([alone, ids])) - num_first
        most = num_context - 1
        excess = len(ids) - self.max_length
        # In steps, so that completions of similar length have the same context.
        step = max(1, self.max_length // 8)
        cut = min(math.ceil(excess / step) * step, most)
        if cut < excess:
            return None
        return ids[:num_first] + ids[num_first + cut :]

    def _encode_if_short(self, messages: AnyConversation) -> list[int] | None:
        """The ids; None if the template refuses the messages, or the text has too many
        characters."""
        try:
            text = self.render(messages)
            ((ids, _),) = self.encode_short([text], self.max_length, where=[None])
        except DataError:
            return None
        return ids

    def _apply(
        self,
        messages: Sequence[Message],
        generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that transformers renders, within the bounds of `template_bounds`. `variables`
        win over those of the renderer. Passes on the template's errors."""
        all_variables = {**self.chat_template_kwargs, **(variables or {})}
        with bounded():
            text = self.tokenizer.apply_chat_template(
                list(messages),
                chat_template=self.chat_template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **all_variables,
            )
        assert isinstance(text, str)
        return text


def _place_of_question(context: Sequence[Message]) -> int:
    """The index of the message that the completion answers: the last, or before results of tools
    the last of the user, as the calls are of the completion."""
    last = len(context) - 1
    roles = [canonical_message(message).get("role") for message in context]
    if "user" not in roles or roles[-1] != "tool":
        return last
    return last - roles[::-1].index("user")
