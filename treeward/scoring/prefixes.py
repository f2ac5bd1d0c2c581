"""`answer_prefixes`: the conversations that end after each token of an answer, for a score that is seen to develop.

    prefixes = answer_prefixes(renderer, conversation)
    prefixes.pieces[2].text                 # what the third token adds to the answer
    prefixes.until(3)                       # token ids: the context, three pieces, the end of turn

Each of them is the conversation as if the answer had stopped there: the tokens of the whole conversation up to that
place, then the tokens that the chat template writes after an answer, since a reward model reads a score nowhere else.
The last is the whole conversation. They are branches of one tree: scored together, the answer is computed once.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from treeward.data.preference import Message
from treeward.data.rendering import Renderer
from treeward.errors import DataError
from treeward.scoring.score import Conversation
from treeward.scoring.scorer import check_conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["AnswerPrefixes", "Piece", "answer_prefixes"]

_PROBES = range(0xE000, 0xF900)
"""Private characters, which no template writes: one that a conversation does not have shows where its answer goes."""
_MOST_TOKENS_OF_A_CHARACTER = 32
"""More tokens than any tokenizer makes of what is one character to it; what takes more has gone astray."""
_MARK = "\ufffd"  # what stands for bytes that are no character


@dataclass(frozen=True, slots=True)
class Piece:
    """A token of an answer, or the few that make up one character: `AnswerPrefixes.text[start:end]`, in characters.

    `num_tokens`: tokens of the answer so far, this piece's included.
    """

    text: str
    start: int
    end: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class AnswerPrefixes:
    """The answer as the template writes it (`text`), in pieces, and what the template writes after it (`end`).

    `prompt_ids`, `answer_ids` and `end_ids` are the tokens of the conversation, of which `num_tokens` are left after
    truncation. A token that an answer and the end of turn share belongs to the answer.
    """

    text: str
    end: str
    pieces: tuple[Piece, ...]
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    truncated: bool = False
    prompt: str | None = None
    """The text before the answer, where the answer's last token is one with the end of turn."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole conversation."""
        return len(self.prompt_ids) + len(self.answer_ids) + len(self.end_ids)

    def until(self, num_pieces: int) -> str | list[int]:
        """The conversation whose answer ends after so many pieces, from 1 to all: its tokens, as `Scorer.prepare_texts`
        reads them, or its text, where its end has tokens of its own.
        """
        piece = self.pieces[num_pieces - 1]
        if self.prompt is not None and num_pieces < len(self.pieces):
            return self.prompt + self.text[: piece.end] + self.end
        return [*self.prompt_ids, *self.answer_ids[: piece.num_tokens], *self.end_ids]


def answer_prefixes(renderer: Renderer, conversation: Conversation) -> AnswerPrefixes:
    """The prefixes of the last message of a conversation, which is an assistant's.

    Raises `DataError` for a conversation that cannot be scored, for an answer without a text, and for a tokenizer that
    neither says where its tokens lie nor decodes them to the text that they were made of.
    """
    *context, last = check_conversation(conversation, "the conversation")
    text = renderer.render(conversation)
    start, end = _place_of_answer(renderer, context, last, text)
    whole = renderer.encode_texts([text])[0]
    fitted = renderer.fit(conversation, encoded=whole)
    if fitted is None:
        raise DataError(f"too long to score: {len(whole)} tokens, at most {renderer.max_length}")
    raw, spans = _tokens(renderer, text)
    first = next((i for i, (_, stop) in enumerate(spans) if stop > start), len(spans))
    after = next((i for i in range(first, len(spans)) if spans[i][0] >= end), len(spans))
    if start >= end or first >= after:
        raise DataError("there is no text in the answer to go through", got=last.get("content"))
    begin = first + _added_in_front(renderer, raw, whole)
    rest = whole[begin:]
    assert rest[: after - first] == raw[first:after], "the tokens with their places are those that are scored"
    if fitted.token_ids[-len(rest) :] != rest:
        raise DataError("the answer has other tokens once the context is cut", need="a shorter context")
    is_joined = spans[after - 1][1] > end
    if is_joined and fitted.truncated:
        raise DataError(
            "the answer ends within a token of the end of turn, and the context is cut", need="a shorter context"
        )
    return AnswerPrefixes(
        text=text[start:end],
        end=text[end:],
        pieces=_pieces(text[start:end], [(a - start, b - start) for a, b in spans[first:after]]),
        prompt_ids=tuple(fitted.token_ids[: -len(rest)]),
        answer_ids=tuple(rest[: after - first]),
        end_ids=tuple(rest[after - first :]),
        truncated=fitted.truncated,
        prompt=text[:start] if is_joined else None,
    )


def _place_of_answer(renderer: Renderer, context: Sequence[Message], last: Message, text: str) -> tuple[int, int]:
    """Where a text differs from that of another answer: templates strip answers, and write around them."""
    probe = next((chr(code) for code in _PROBES if chr(code) not in text), None)
    assert probe is not None, "a conversation with every private character"
    other = renderer.render([*context, {**last, "content": probe}])
    start = _common(text, other)
    return start, len(text) - _common(text[start:][::-1], other[start:][::-1])


def _tokens(renderer: Renderer, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """The tokens of a text before the renderer frames them, and the characters that each stands for."""
    tokenizer = renderer.tokenizer
    options = {"add_special_tokens": False, "padding": False, "truncation": False, "verbose": False}
    if not tokenizer.is_fast:
        ids = list(tokenizer(text, **options)["input_ids"])
        return ids, _places(tokenizer, text, ids)
    encoded = tokenizer(text, return_offsets_mapping=True, **options)
    return list(encoded["input_ids"]), [(int(a), int(b)) for a, b in encoded["offset_mapping"]]


def _places(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> list[tuple[int, int]]:
    """Of each token the characters that it stands for: what it adds to the tokens before it when they are decoded.

    Tokens that are characters only together have the same place. Raises `DataError` where the tokens do not lead back
    to the text, as with a token for all that is unknown.
    """
    places: list[tuple[int, int]] = []
    # A decoder may treat the first token in a way of its own, so the last one that was read goes before the new ones.
    before, at = 0, 0
    for n in range(1, len(ids) + 1):
        read = len(places)
        known = _decode(tokenizer, ids[before:read])
        added = _decode(tokenizer, ids[before:n]).removeprefix(known)
        # A part of a character is decoded to nothing, or to a mark in whose place the next token puts the character.
        end = _end_of(text, at, added) if added else None
        if end is not None:
            places.extend([(at, end)] * (n - read))
            before, at = read, end
        elif not added and text[:at].endswith(_MARK) and _decode(tokenizer, ids[read:n]):
            places.extend([places[-1]] * (n - read))  # the text has the mark itself, which its first byte was taken for
        elif n - read >= _MOST_TOKENS_OF_A_CHARACTER:
            break
    if len(places) < len(ids):
        raise DataError(
            "the tokens of the model's tokenizer do not lead back to the text",
            got=f"{_decode(tokenizer, ids[len(places) : len(places) + 4])!r} where the text is {text[at : at + 20]!r}",
            need="a tokenizer that says where its tokens lie (tokenizer.json), or that decodes what it has encoded",
        )
    return places


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _end_of(text: str, at: int, added: str) -> int | None:
    """Where `added` ends in the text, if it is what is there; spaces, case and accents may be the decoder's own."""
    if text.startswith(added, at):
        return at + len(added)
    wanted = _folded(added)
    while wanted and at < len(text):
        own = _folded(text[at])
        if not wanted.startswith(own):
            return None
        wanted, at = wanted[len(own) :], at + 1
    return None if wanted else at


def _folded(text: str) -> str:
    parts = unicodedata.normalize("NFKD", text).casefold()
    return "".join(part for part in parts if not part.isspace() and not unicodedata.combining(part))


def _added_in_front(renderer: Renderer, raw: Sequence[int], framed: Sequence[int]) -> int:
    """How many tokens more a framed row has at its beginning: one BOS, whether it had none, one or two."""
    tokenizer = renderer.tokenizer
    first = tokenizer.cls_token_id if renderer.kind == "encoder" else tokenizer.bos_token_id
    own = next((i for i, token in enumerate(raw) if token != first), len(raw))
    return int(framed[0] == first) - own


def _pieces(text: str, spans: Sequence[tuple[int, int]]) -> tuple[Piece, ...]:
    """The text cut where its tokens end. Tokens of one character are one piece: it is there with the last of them."""
    ends = [min(this[1], following[0]) for this, following in pairwise(spans)] + [len(text)]
    pieces: list[Piece] = []
    start = 0
    for num_tokens, end in enumerate(ends, start=1):
        if end > start:
            pieces.append(Piece(text[start:end], start, end, num_tokens))
            start = end
    last = pieces[-1]  # a token without a character of its own belongs to the last piece
    pieces[-1] = Piece(last.text, last.start, last.end, len(spans))
    return tuple(pieces)


def _common(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
