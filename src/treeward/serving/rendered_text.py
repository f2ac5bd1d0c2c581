"""`RenderedText`: a conversation rendered or tokenized by the client. `Ending`: how a model's text ends.

    ending.completed("...4.<|im_end|>")          # with the chat template's white space after it
    beginning_of(conversation, ending)           # the same for all completions of a prompt

A text with another end than the model's conversations is scored at another token than in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treeward.data.conversation import AnyConversation, Message
from treeward.data.rendering import Renderer
from treeward.errors import DataError


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A whole conversation as text or token ids. `completion`: the text of its last message, if known."""

    text: str | Sequence[int]
    completion: str | None = None

    @property
    def messages(self) -> list[Message] | None:
        """The completion as messages, for shaping by length; None if unknown."""
        return None if self.completion is None else [{"role": "assistant", "content": self.completion}]


@dataclass(frozen=True, slots=True)
class Ending:
    """The end and beginning of every conversation of a model, by its template and tokenizer.

    `text`: the end of turn, without an encoder's SEP (`sep`). `first`: the BOS or CLS. `padding`: the text of the pad
    token, if it can be stripped. `turn` and `turn_ids`: between the user's message and a completion.
    """

    text: str = ""
    first: str = ""
    sep: str = ""
    padding: str = ""
    turn: str = ""
    turn_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, renderer: Renderer) -> Ending:
        """The ending of a renderer; empty for a template that refuses a plain conversation."""
        tokenizer = renderer.tokenizer
        chats = [
            [{"role": "user", "content": question}, {"role": "assistant", "content": completion}]
            for question in ("Quo vadis?", "Ubi es!")
            for completion in ("Romam.", "Quo vadis")
        ]
        sep = tokenizer.sep_token or "" if renderer.kind == "encoder" else ""
        try:
            texts = [renderer.render(chat).removesuffix(sep) for chat in chats]
            rows = renderer.encode_many(chats)
        except DataError:
            return cls()
        text = _common_end(*texts[:2])
        turn, turn_ids = (_common_end(_common_start(*items[:2]), _common_start(*items[2:])) for items in (texts, rows))
        firsts = {tokenizer.bos_token_id: tokenizer.bos_token, tokenizer.cls_token_id: tokenizer.cls_token}
        first = firsts.get(rows[0][0]) or ""
        padding = tokenizer.pad_token or ""
        can_strip = padding not in text and padding != tokenizer.eos_token
        return cls(text, first, sep, padding if can_strip else "", turn, tuple(turn_ids))

    def is_in(self, text: str | Sequence[int]) -> bool:
        """Whether the text has the end of turn; token ids are not checked."""
        return not isinstance(text, str) or text.removesuffix(self.sep).endswith(self.text)

    def begun(self, text: str) -> str:
        """A whole conversation with the BOS that all of the model's begin with.

        verl removes it, because most tokenizers add it again. SmolLM2's does not: its template writes it.
        """
        if not self.first or not self.text or text.startswith(self.first) or not self.is_in(text):
            return text
        return self.first + text

    def completed(self, generated: str) -> str:
        """A generated text without padding, and with the template's white space after the end of turn, before which a
        policy stops. A text that was cut before its end of turn stays unchanged.
        """
        if self.padding:
            start, end, step = 0, len(generated), len(self.padding)
            while generated.startswith(self.padding, start):
                start += step
            while end - step >= start and generated.endswith(self.padding, start, end):
                end -= step
            generated = generated[start:end]
        mark = self.text.rstrip()
        if mark and not generated.endswith(self.text) and generated.rstrip().endswith(mark):
            return generated.rstrip().removesuffix(mark) + self.text
        return generated

    def completion(self, text: str, prompt: str) -> str | None:
        """The text after the prompt, without the end of turn; None if the text does not begin with the prompt."""
        for begin in (prompt, prompt.removeprefix(self.first)):
            for whole in (text, text.removeprefix(self.first)):
                if whole.startswith(begin):
                    return self.without(whole.removeprefix(begin))
        return None

    def without(self, completion: str) -> str:
        """A completion without the end of turn."""
        mark = self.text.strip()
        return completion.rstrip().removesuffix(mark) if mark and completion.rstrip().endswith(mark) else completion


def beginning_of(conversation: AnyConversation | RenderedText, ending: Ending) -> str:
    """The common beginning of a prompt's completions: up to the first completion, or the first characters or tokens of
    a text in which that is unknown.
    """
    if not isinstance(conversation, RenderedText):
        first_user = next((i for i, message in enumerate(conversation) if message["role"] == "user"), 0)
        return repr(conversation[: first_user + 1])
    if isinstance(conversation.text, str):
        start = conversation.text.find(ending.turn) if ending.turn else -1
        return conversation.text[: start if start >= 0 else 256]
    ids, length = tuple(conversation.text), len(ending.turn_ids)
    places = range(len(ids) - length + 1) if length else ()
    return repr(ids[: next((i for i in places if ids[i : i + length] == ending.turn_ids), 64)])


def _common_start(a: Sequence[Any], b: Sequence[Any]) -> Any:
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def _common_end(a: Sequence[Any], b: Sequence[Any]) -> Any:
    return _common_start(a[::-1], b[::-1])[::-1]
