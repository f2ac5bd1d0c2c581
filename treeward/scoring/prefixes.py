"""`completion_prefixes`: the conversations that end after each token of a completion, to show how its score develops.

    prefixes = completion_prefixes(renderer, conversation)
    prefixes.until(3)                       # token ids: the context, three pieces, the end of turn

Each one is the conversation as if the completion had stopped there, with the tokens that the chat template writes after
a completion, where a reward model reads the score. They are branches of one tree: the completion is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from os.path import commonprefix

from treeward.data.rendering import Renderer
from treeward.errors import DataError
from treeward.scoring.score import Conversation
from treeward.scoring.scorer import check_conversation

_PROBES = range(0xE000, 0xF900)
"""Private characters, which no template writes: one that the conversation lacks marks the place of the completion."""


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

    `prompt_ids`, `completion_ids` and `end_ids` are the tokens of the conversation after truncation.
    """

    text: str
    end: str
    pieces: tuple[Piece, ...]
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    truncated: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole conversation."""
        return len(self.prompt_ids) + len(self.completion_ids) + len(self.end_ids)

    def until(self, num_pieces: int) -> list[int]:
        """The tokens of the conversation whose completion ends after so many pieces, from 1 to all."""
        return [*self.prompt_ids, *self.completion_ids[: self.pieces[num_pieces - 1].num_tokens], *self.end_ids]


def completion_prefixes(renderer: Renderer, conversation: Conversation) -> CompletionPrefixes:
    """The prefixes of the last message of a conversation, which is the assistant's.

    Raises `DataError` for a conversation that cannot be scored, a completion without text or whose last token reaches
    into the end of turn, and a tokenizer without tokenizer.json.
    """
    *context, last = check_conversation(conversation, "the conversation")
    text = renderer.render(conversation)
    # The characters that change with the completion: templates strip completions, and write around them.
    probe = next(chr(code) for code in _PROBES if chr(code) not in text)
    other = renderer.render([*context, {**last, "content": probe}])
    start = len(commonprefix([text, other]))
    end = len(text) - len(commonprefix([text[start:][::-1], other[start:][::-1]]))
    whole = renderer.encode_texts([text])[0]
    fitted = renderer.fit(conversation, encoded=whole)
    if fitted is None:
        raise DataError(f"too long to score: {len(whole)} tokens, at most {renderer.max_length}")
    if not renderer.tokenizer.is_fast:
        raise DataError("the tokenizer does not say where in the text its tokens are", need="one with tokenizer.json")
    options = {"add_special_tokens": False, "padding": False, "truncation": False, "verbose": False}
    encoded = renderer.tokenizer(text, return_offsets_mapping=True, **options)
    raw, spans = list(encoded["input_ids"]), [(int(a), int(b)) for a, b in encoded["offset_mapping"]]
    first = next((i for i, (_, stop) in enumerate(spans) if stop > start), len(spans))
    after = next((i for i in range(first, len(spans)) if spans[i][0] >= end), len(spans))
    if start >= end or first >= after:
        raise DataError("the completion has no text", got=last.get("content"))
    # The renderer writes one BOS (or CLS) in front, whatever the text has.
    begin = renderer.tokenizer.cls_token_id if renderer.kind == "encoder" else renderer.tokenizer.bos_token_id
    num_in_text = next((i for i, token in enumerate(raw) if token != begin), len(raw))
    tail = whole[first + int(whole[0] == begin) - num_in_text :]
    assert tail[: after - first] == raw[first:after], "the tokens with offsets are the scored ones"
    if spans[after - 1][1] > end:
        raise DataError("the completion ends within a token of the end of turn", need="another last word")
    if fitted.token_ids[-len(tail) :] != tail:
        raise DataError("the completion has other tokens once the context is cut", need="a shorter context")
    return CompletionPrefixes(
        text=text[start:end],
        end=text[end:],
        pieces=_pieces(text[start:end], [(a - start, b - start) for a, b in spans[first:after]]),
        prompt_ids=tuple(fitted.token_ids[: -len(tail)]),
        completion_ids=tuple(tail[: after - first]),
        end_ids=tuple(tail[after - first :]),
        truncated=fitted.truncated,
    )


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
