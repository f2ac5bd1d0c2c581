"""`TokenTree`: several token sequences as one trie, each shared token held once.

    tree = TokenTree.from_sequences([[1, 2, 3, 4], [1, 2, 9], [1, 2, 3]])
    tree.tokens_N    # [1, 2, 3, 4, 9]: 5 tokens for the 10 of the plain rows
    tree.ends_S     # [3, 4, 2]: the index of each sequence's last token

Sharing is discovered from the tokens. They lie in preorder, so that the tokens below a segment are
one range.

Shapes: N tokens of the tree, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.integer] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens without a branch: [`start`, `end`) in the flat order.

    `subtree_end`: the end of the tokens below it. `depth`: the position of its first token in the
    conversation. `parent`: the index of the segment above it.
    """

    start: int
    end: int
    subtree_end: int
    depth: int
    parent: int | None

    def __len__(self) -> int:
        return self.end - self.start

    def shifted(self, tokens: int, depth: int = 0) -> Segment:
        """The segment with `tokens` tokens before its tree and `depth` tokens above its root; same
        `parent`."""
        return Segment(
            start=self.start + tokens,
            end=self.end + tokens,
            subtree_end=self.subtree_end + tokens,
            depth=self.depth + depth,
            parent=self.parent,
        )


@dataclass(frozen=True, slots=True)
class TokenTree:
    """A trie of token sequences in preorder.

    `tokens_N`, `positions_N`: its tokens and their positions in their conversations, int64.
    `ends_S`: the flat index of each sequence's last token, int64, in the order given.
    """

    tokens_N: npt.NDArray[np.int64]
    positions_N: npt.NDArray[np.int64]
    segments: tuple[Segment, ...]
    ends_S: npt.NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_N)

    @property
    def depth(self) -> int:
        """The number of tokens of the longest sequence."""
        return int(self.positions_N.max()) + 1

    @classmethod
    def from_sequences(cls, sequences: Sequence[TokenIds]) -> TokenTree:
        """Insert S non-empty sequences of non-negative token ids. Raises `ValueError` for an empty
        one or for none."""
        arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
        if not arrays:
            raise ValueError("a TokenTree needs at least one sequence")
        if any(len(array) == 0 for array in arrays):
            raise ValueError(
                "a TokenTree cannot hold an empty sequence: there is no token to read a score at"
            )
        keys = [sort_key(array) for array in arrays]
        # Equal sequences are one path of the tree, which several ends point to.
        distinct = dict(zip(keys, arrays, strict=True))
        sorted_keys = sorted(distinct)

        # In sorted order no earlier sequence shares more with one than the one before it. So each
        # adds to the tree the tokens after the prefix that it shares with that one, and the tokens
        # lie in preorder.
        lengths: list[int] = []
        shared: list[int] = []
        ends: list[int] = []
        tokens: list[npt.NDArray[np.int64]] = []
        positions: list[npt.NDArray[np.int64]] = []
        end = 0
        previous: npt.NDArray[np.int64] | None = None
        for key in sorted_keys:
            array = distinct[key]
            start = 0
            if previous is not None:
                start = common_prefix_length(previous, array)
            end += len(array) - start
            lengths.append(len(array))
            shared.append(start)
            ends.append(end)
            tokens.append(array[start:])
            positions.append(np.arange(start, len(array)))
            previous = array

        end_of_key = dict(zip(sorted_keys, ends, strict=True))
        return cls(
            tokens_N=np.concatenate(tokens),
            positions_N=np.concatenate(positions),
            segments=_segments(lengths, shared, ends),
            ends_S=np.array([end_of_key[key] - 1 for key in keys], dtype=np.int64),
        )


def sort_key(tokens: TokenIds) -> bytes:
    """Bytes whose order is that of the non-negative token ids: in lexicographic order neighbours
    share most."""
    # Big-endian: the highest byte of a number decides first, as it does in bytes.
    return np.asarray(tokens, dtype=np.int64).astype(">i8").tobytes()


def common_prefix_length(a: npt.NDArray[np.integer], b: npt.NDArray[np.integer]) -> int:
    """How many leading tokens two sequences share."""
    shortest = min(len(a), len(b))
    differs = a[:shortest] != b[:shortest]
    if not differs.any():
        return shortest
    return int(differs.argmax())


def _segments(
    lengths: Sequence[int], shared: Sequence[int], ends: Sequence[int]
) -> tuple[Segment, ...]:
    """The segments of a tree of sorted, different sequences, in preorder.

    For each sequence: its length, the leading tokens that it shares with the one before it, and
    where its last token ends in the flat order.
    """
    segments: list[Segment] = []
    # Sequences [first, last) that share one more segment, which begins at this depth, and its
    # parent.
    ranges: list[tuple[int, int, int, int | None]] = [(0, len(lengths), 0, None)]
    while ranges:
        first, last, depth, parent = ranges.pop()
        # What all share is the least that two neighbours share.
        bottom = min(shared[first + 1 : last], default=lengths[first])
        if bottom > depth:  # else they are several trees, without a common root
            # The first sequence of a range holds these tokens itself: it shares at most `depth`
            # with the one before it.
            start = ends[first] - lengths[first] + depth
            segments.append(Segment(start, start + bottom - depth, ends[last - 1], depth, parent))
            parent = len(segments) - 1
        # The sequences part where one shares no more than `bottom` with the one before it.
        branches = [first]
        for i in range(first + 1, last):
            if shared[i] == bottom:
                branches.append(i)
        branches.append(last)
        below = []
        for first_of_branch, end_of_branch in pairwise(branches):
            if lengths[first_of_branch] > bottom:  # else the sequence ends here
                below.append((first_of_branch, end_of_branch, bottom, parent))
        # A stack gives the last one first, and preorder is the order of the branches.
        ranges += reversed(below)
    return tuple(segments)
