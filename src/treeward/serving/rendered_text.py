"""`RenderedText`: a conversation rendered or tokenized by the client. `Ending`: how a model's text
ends.

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

_BEGINNING_CHARACTERS = 256
_BEGINNING_TOKENS = 64
"""The beginning of a text in which the end of the prompt cannot be seen."""


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A whole conversation as text or token ids. `completion`: the text of its last message, if
    known.
    """

    text: str | Sequence[int]
    completion: str | None = None

    @property
    def messages(self) -> list[Message] | None:
        """The completion as messages, for shaping by length; None if unknown."""
        if self.completion is None:
            return None
        return [{"role": "assistant", "content": self.completion}]


@dataclass(frozen=True, slots=True)
class Ending:
    """The end and beginning of every conversation of a model, by its template and tokenizer.

    `text`: the end of turn, without an encoder's SEP (`sep`). `first`: the BOS or CLS. `padding`:
    the text of the pad token, if it can be stripped. `turn` and `turn_ids`: between the user's
    message and a completion.
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
        # What all four texts share is the template's: the questions begin and end with different
        # characters, and so do the completions.
        chats = []
        for question in ("Quo vadis?", "Ubi es!"):
            for completion in ("Romam.", "Quo vadis"):
                prompt = {"role": "user", "content": question}
                chats.append([prompt, {"role": "assistant", "content": completion}])
        # An encoder's tokenizer adds the SEP after a text, so a text is compared without it.
        sep = ""
        if renderer.kind == "encoder":
            sep = tokenizer.sep_token or ""
        try:
            texts = [renderer.render(chat).removesuffix(sep) for chat in chats]
            rows = renderer.encode_many(chats)
        except DataError:
            return cls()
        text = _common_end(texts[0], texts[1])
        # Texts of one question agree up to the completion. What comes before the completion ends
        # alike for both questions: that is what stands between question and completion.
        turn = _common_end(_common_start(texts[0], texts[1]), _common_start(texts[2], texts[3]))
        turn_ids = _common_end(_common_start(rows[0], rows[1]), _common_start(rows[2], rows[3]))
        firsts = {
            tokenizer.bos_token_id: tokenizer.bos_token,
            tokenizer.cls_token_id: tokenizer.cls_token,
        }
        first = firsts.get(rows[0][0]) or ""
        padding = tokenizer.pad_token or ""
        # Where padding may be an end of turn, stripping it would cut conversations.
        if padding in text or padding == tokenizer.eos_token:
            padding = ""
        return cls(text, first, sep, padding, turn, tuple(turn_ids))

    def is_in(self, text: str | Sequence[int]) -> bool:
        """Whether the text has the end of turn; token ids are not checked."""
        return not isinstance(text, str) or text.removesuffix(self.sep).endswith(self.text)

    def begun(self, text: str) -> str:
        """A whole conversation with the BOS that all of the model's begin with.

        verl removes it, because most tokenizers add it again. SmolLM2's does not: its template
        writes it.
        """
        if not self.first or not self.text or text.startswith(self.first) or not self.is_in(text):
            return text
        return self.first + text

    def completed(self, generated: str) -> str:
        """A generated text without padding, and with the template's white space after the end of
        turn, before which a policy stops. A text that was cut before its end of turn stays
        unchanged.
        """
        if self.padding:
            start = 0
            end = len(generated)
            step = len(self.padding)
            # By positions: cutting off one padding at a time would copy a long text each time.
            while generated.startswith(self.padding, start):
                start += step
            while end - step >= start and generated.endswith(self.padding, start, end):
                end -= step
            generated = generated[start:end]
        mark = self.text.rstrip()
        is_complete = generated.endswith(self.text)
        if mark and not is_complete and generated.rstrip().endswith(mark):
            return generated.rstrip().removesuffix(mark) + self.text
        return generated

    def completion(self, text: str, prompt: str) -> str | None:
        """The text after the prompt, without the end of turn; None if the text does not begin with
        the prompt.
        """
        # Either may have been decoded with the BOS and the other without it.
        for begin in (prompt, prompt.removeprefix(self.first)):
            for whole in (text, text.removeprefix(self.first)):
                if whole.startswith(begin):
                    return self.without(whole.removeprefix(begin))
        return None

    def without(self, completion: str) -> str:
        """A completion without the end of turn."""
        mark = self.text.strip()
        stripped = completion.rstrip()
        if mark and stripped.endswith(mark):
            return stripped.removesuffix(mark)
        return completion


def beginning_of(conversation: AnyConversation | RenderedText, ending: Ending) -> str:
    """The common beginning of a prompt's completions: up to the first completion, or the first
    characters or tokens of a text in which that is unknown.
    """
    if not isinstance(conversation, RenderedText):
        # A message without a role is an error of its conversation, which the replica reports.
        roles = [message.get("role") for message in conversation]
        # Later turns are of one conversation alone.
        first_user = roles.index("user") if "user" in roles else 0
        return repr(conversation[: first_user + 1])
    # Up to the completion, so that all completions of a prompt begin alike.
    if isinstance(conversation.text, str):
        text = conversation.text
        start = text.find(ending.turn) if ending.turn else -1
        return text[: start if start >= 0 else _BEGINNING_CHARACTERS]
    ids = tuple(conversation.text)
    length = len(ending.turn_ids)
    if length > 0:
        for i in range(len(ids) - length + 1):
            if ids[i : i + length] == ending.turn_ids:
                return repr(ids[:i])
    return repr(ids[:_BEGINNING_TOKENS])


def _common_start(a: Sequence[Any], b: Sequence[Any]) -> Any:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return a[:length]


def _common_end(a: Sequence[Any], b: Sequence[Any]) -> Any:
    return _common_start(a[::-1], b[::-1])[::-1]
