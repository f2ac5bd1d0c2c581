"""`completion_prefixes`: the conversations that end after each token of a completion, to show how its score develops.

    prefixes = completion_prefixes(renderer, conversation)
    prefixes.pieces[2].text                 # the text of the third token of the completion
    prefixes.until(3)                       # token ids: the context, three pieces, the end of turn

Each one is the conversation as if the completion had stopped there: the tokens of the whole conversation up to that
place, then the tokens that the chat template writes after a completion, where a reward model reads the score. The last
one is the whole conversation. They are branches of one tree: scored together, the completion is computed once.
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

__all__ = ["CompletionPrefixes", "Piece", "completion_prefixes"]

_PROBES = range(0xE000, 0xF900)
"""Private characters, which no template writes: one that the conversation lacks marks the place of the completion."""
_MOST_TOKENS_OF_A_CHARACTER = 32
"""More than any tokenizer needs for one character; beyond it the tokens do not decode to the text."""
_MARK = "\ufffd"  # the decoder's mark for an incomplete character


@dataclass(frozen=True, slots=True)
class Piece:
    """A token of a completion, or several that form one character: `CompletionPrefixes.text[start:end]`, in characters.

    `num_tokens`: tokens of the completion up to here, including this piece.
    """

    text: str
    start: int
    end: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CompletionPrefixes:
    """The completion as the template writes it (`text`), in pieces, and the text that the template adds (`end`).

    `prompt_ids`, `completion_ids` and `end_ids` are the tokens of the conversation, `num_tokens` after truncation. A
    token that the completion and the end of turn share belongs to the completion.
    """

    text: str
    end: str
    pieces: tuple[Piece, ...]
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    truncated: bool = False
    prompt: str | None = None
    """The text before the completion, where the completion's last token is part of the end of turn."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole conversation."""
        return len(self.prompt_ids) + len(self.completion_ids) + len(self.end_ids)

    def until(self, num_pieces: int) -> str | list[int]:
        """The conversation whose completion ends after so many pieces, from 1 to all: its tokens, for
        `Scorer.prepare_texts`, or its text, where the end has tokens of its own.
        """
        piece = self.pieces[num_pieces - 1]
        if self.prompt is not None and num_pieces < len(self.pieces):
            return self.prompt + self.text[: piece.end] + self.end
        return [*self.prompt_ids, *self.completion_ids[: piece.num_tokens], *self.end_ids]


def completion_prefixes(renderer: Renderer, conversation: Conversation) -> CompletionPrefixes:
    """The prefixes of the last message of a conversation, which is the assistant's.

    Raises `DataError` for a conversation that cannot be scored, a completion without text, and a tokenizer that neither
    has offsets nor decodes its tokens to the original text.
    """
    *context, last = check_conversation(conversation, "the conversation")
    text = renderer.render(conversation)
    start, end = _place_of_completion(renderer, context, last, text)
    whole = renderer.encode_texts([text])[0]
    fitted = renderer.fit(conversation, encoded=whole)
    if fitted is None:
        raise DataError(f"too long to score: {len(whole)} tokens, at most {renderer.max_length}")
    raw, spans = _tokens(renderer, text)
    first = next((i for i, (_, stop) in enumerate(spans) if stop > start), len(spans))
    after = next((i for i in range(first, len(spans)) if spans[i][0] >= end), len(spans))
    if start >= end or first >= after:
        raise DataError("the completion has no text", got=last.get("content"))
    begin = first + _added_in_front(renderer, raw, whole)
    rest = whole[begin:]
    assert rest[: after - first] == raw[first:after], "the tokens with offsets are the scored ones"
    if fitted.token_ids[-len(rest) :] != rest:
        raise DataError("the completion has other tokens once the context is cut", need="a shorter context")
    is_joined = spans[after - 1][1] > end
    if is_joined and fitted.truncated:
        raise DataError(
            "the completion ends within a token of the end of turn, and the context is cut", need="a shorter context"
        )
    return CompletionPrefixes(
        text=text[start:end],
        end=text[end:],
        pieces=_pieces(text[start:end], [(a - start, b - start) for a, b in spans[first:after]]),
        prompt_ids=tuple(fitted.token_ids[: -len(rest)]),
        completion_ids=tuple(rest[: after - first]),
        end_ids=tuple(rest[after - first :]),
        truncated=fitted.truncated,
        prompt=text[:start] if is_joined else None,
    )


def _place_of_completion(renderer: Renderer, context: Sequence[Message], last: Message, text: str) -> tuple[int, int]:
    """The characters that change with the completion: templates strip completions, and write around them."""
    probe = next((chr(code) for code in _PROBES if chr(code) not in text), None)
    assert probe is not None, "a conversation with every private character"
    other = renderer.render([*context, {**last, "content": probe}])
    start = _common(text, other)
    return start, len(text) - _common(text[start:][::-1], other[start:][::-1])


def _tokens(renderer: Renderer, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """The tokens of a text without the renderer's special ones, and the characters of each."""
    tokenizer = renderer.tokenizer
    options = {"add_special_tokens": False, "padding": False, "truncation": False, "verbose": False}
    if not tokenizer.is_fast:
        ids = list(tokenizer(text, **options)["input_ids"])
        return ids, _places(tokenizer, text, ids)
    encoded = tokenizer(text, return_offsets_mapping=True, **options)
    return list(encoded["input_ids"]), [(int(a), int(b)) for a, b in encoded["offset_mapping"]]


def _places(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> list[tuple[int, int]]:
    """The characters of each token: the text that it adds when the tokens are decoded one by one.

    Tokens that form a character together have the same place. Raises `DataError` where the decoded tokens differ from
    the text, as with a token for unknown words.
    """
    places: list[tuple[int, int]] = []
    # A decoder may treat the first token differently, so the last known one goes before the new ones.
    before, at = 0, 0
    for n in range(1, len(ids) + 1):
        read = len(places)
        known = _decode(tokenizer, ids[before:read])
        added = _decode(tokenizer, ids[before:n]).removeprefix(known)
        # A part of a character is decoded to nothing, or to a mark that the next token replaces.
        end = _end_of(text, at, added) if added else None
        if end is not None:
            places.extend([(at, end)] * (n - read))
            before, at = read, end
        elif not added and text[:at].endswith(_MARK) and _decode(tokenizer, ids[read:n]):
            places.extend([places[-1]] * (n - read))  # the text itself has the mark
        elif n - read >= _MOST_TOKENS_OF_A_CHARACTER:
            break
    if len(places) < len(ids):
        raise DataError(
            "the tokens of the model's tokenizer do not decode to the text",
            got=f"{_decode(tokenizer, ids[len(places) : len(places) + 4])!r} where the text is {text[at : at + 20]!r}",
            need="a tokenizer with offsets (tokenizer.json), or one that decodes its tokens to the text",
        )
    return places


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _end_of(text: str, at: int, added: str) -> int | None:
    """The end of `added` in the text from `at`, or None; the decoder may change spaces, case and accents."""
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
    """The number of tokens that the renderer adds in front; it writes one BOS, whatever the text has."""
    tokenizer = renderer.tokenizer
    first = tokenizer.cls_token_id if renderer.kind == "encoder" else tokenizer.bos_token_id
    own = next((i for i, token in enumerate(raw) if token != first), len(raw))
    return int(framed[0] == first) - own


def _pieces(text: str, spans: Sequence[tuple[int, int]]) -> tuple[Piece, ...]:
    """The text, cut at the ends of its tokens. Tokens of one character are one piece, which ends with the last one."""
    ends = [min(this[1], following[0]) for this, following in pairwise(spans)] + [len(text)]
    pieces: list[Piece] = []
    start = 0
    for num_tokens, end in enumerate(ends, start=1):
        if end > start:
            pieces.append(Piece(text[start:end], start, end, num_tokens))
            start = end
    last = pieces[-1]  # a token without characters belongs to the last piece
    pieces[-1] = Piece(last.text, last.start, last.end, len(spans))
    return tuple(pieces)


def _common(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
