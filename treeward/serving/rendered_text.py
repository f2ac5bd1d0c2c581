"""`RenderedText`: a conversation that a client has rendered, or tokenized, itself; and how a model's text ends.

    ending = model.ending
    ending.completed("...4.<|im_end|>")          # with the white space that the chat template writes after it
    ending.warning([text, another])              # what is odd about their ends, or None

A text that ends otherwise than the model's conversations is scored all the same, for the text is the client's, but the
score is read at another token than in training: the response says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treeward.data.preference import Message
from treeward.data.rendering import Renderer
from treeward.errors import DataError

__all__ = ["Ending", "RenderedText"]

_COMPLETIONS = "Romam.", "Quo vadis"
_PROMPTS: tuple[list[Message], ...] = (
    [{"role": "user", "content": "Quo vadis?"}],
    [{"role": "system", "content": "Loquere."}, {"role": "user", "content": "Quo vadis?"}],
)


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A whole conversation as text or token ids. `completion`: the text of its last message, if it is known.

    `prompt_length`: how many of the token ids other texts may begin with too, if it is known.
    """

    text: str | Sequence[int]
    completion: str | None = None
    prompt_length: int | None = None

    @property
    def messages(self) -> list[Message] | None:
        """What is known of it as messages: the completion, for shaping by length; None where it is not known."""
        return None if self.completion is None else [{"role": "assistant", "content": self.completion}]


@dataclass(frozen=True, slots=True)
class Ending:
    """What every conversation of a model ends and begins with, as its template and tokenizer write it.

    `text` and `ids`: the end of turn, without the SEP that the tokenizer of an encoder adds itself. `first_id`: the BOS
    or CLS, and `first` its text; None where there is none. `sep`: an encoder's. `padding`: the text of the pad token
    where it can be stripped.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    first_id: int | None = None
    first: str = ""
    sep: str = ""
    padding: str | None = None

    @classmethod
    def of(cls, renderer: Renderer | None) -> Ending:
        """Of a renderer; empty for None and for a template that refuses a plain conversation."""
        for prompt in _PROMPTS if renderer is not None else ():
            assert renderer is not None
            tokenizer = renderer.tokenizer
            chats = [[*prompt, {"role": "assistant", "content": completion}] for completion in _COMPLETIONS]
            sep = tokenizer.sep_token if renderer.kind == "encoder" else None
            try:
                texts = [renderer.render(chat).removesuffix(sep or "") for chat in chats]
                rows = renderer.encode_many(chats)
            except DataError:
                continue
            text, ids = _common_end(*texts), tuple(_common_end(*rows))
            first = {tokenizer.bos_token_id: tokenizer.bos_token, tokenizer.cls_token_id: tokenizer.cls_token}
            written = first.get(rows[0][0])
            padding = tokenizer.pad_token
            if not padding or padding in text or padding == tokenizer.eos_token:
                padding = None
            return cls(text, ids, rows[0][0] if written else None, written or "", sep or "", padding)
        return cls()

    def warning(self, texts: Sequence[str | Sequence[int]]) -> str | None:
        """How many texts, or token ids, do not end or begin as the model's conversations do; None for none."""
        cut = sum(map(self._is_cut, texts))
        begun = sum(map(self._begins_otherwise, texts))
        end = ascii(self.text) if self.text else f"the tokens {list(self.ids)}"
        said = [f"{cut} of {len(texts)} texts do not end with {end}, as this model's conversations do"] if cut else []
        if begun:
            said.append(f"{begun} of {len(texts)} texts do not begin with exactly one token {self.first_id}")
        return "; ".join(said) or None

    def completed(self, generated: str) -> str:
        """A generated text without padding, and with the white space that the template writes after the end of turn.

        A policy stops at its end of turn, so it never writes what follows: where only white space is missing, it is
        added. A text that was cut before its end of turn stays as it is.
        """
        if self.padding is not None:
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
        """What follows the prompt in a text, without the end of turn; None where the text does not begin with it."""
        for begin in (prompt, prompt.removeprefix(self.first)):
            for whole in (text, text.removeprefix(self.first)):
                if whole.startswith(begin):
                    return self.without(whole.removeprefix(begin))
        return None

    def without(self, completion: str) -> str:
        """A completion without the end of turn."""
        mark = self.text.strip()
        return completion.rstrip().removesuffix(mark) if mark and completion.rstrip().endswith(mark) else completion

    def _is_cut(self, text: str | Sequence[int]) -> bool:
        if isinstance(text, str):
            return not text.removesuffix(self.sep).endswith(self.text)
        return bool(self.ids) and tuple(text[-len(self.ids) :]) != self.ids

    def _begins_otherwise(self, text: str | Sequence[int]) -> bool:
        """Whether token ids have no BOS (or CLS), or two; a text is given exactly one."""
        if isinstance(text, str) or self.first_id is None:
            return False
        return text[0] != self.first_id or list(text[1:2]) == [self.first_id]


def _common_end(a: Sequence[Any], b: Sequence[Any]) -> Any:
    length = 0
    while length < min(len(a), len(b)) and a[-1 - length] == b[-1 - length]:
        length += 1
    return a[len(a) - length :]
