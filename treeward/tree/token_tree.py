"""`TokenTree`: several token sequences as one trie, each shared token held once.

    tree = TokenTree.from_sequences([[1, 2, 3, 4], [1, 2, 9], [1, 2, 3]])
    tree.tokens_N    # [1, 2, 3, 4, 9]: 5 tokens for the 10 of the plain rows
    tree.reads_S     # [3, 4, 2]: the index of each sequence's last token

Sharing is discovered from the tokens. They lie in preorder, so that the tokens below a segment are one range.

Shapes: N tokens of the tree, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.integer] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens without a branch: [`start`, `end`) in the flat order, with the tokens below it up to
    `subtree_end`. `depth`: the position of its first token in the conversation. `parent`: the index of the segment
    above it."""

    start: int
    end: int
    subtree_end: int
    depth: int
    parent: int | None

    def __len__(self) -> int:
        return self.end - self.start

    def shifted(self, tokens: int, depth: int = 0) -> Segment:
        """The segment with `tokens` tokens before its tree and `depth` tokens above its root; same `parent`."""
        return Segment(
            self.start + tokens, self.end + tokens, self.subtree_end + tokens, self.depth + depth, self.parent
        )


@dataclass(frozen=True, slots=True)
class TokenTree:
    """A trie of token sequences in preorder: its tokens and their positions in their conversations, int64, its
    segments, and the flat index of each sequence's last token, in the order given."""

    tokens_N: npt.NDArray[np.int64]
    positions_N: npt.NDArray[np.int64]
    segments: tuple[Segment, ...]
    reads_S: npt.NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_N)

    @property
    def depth(self) -> int:
        """The number of tokens of the longest sequence."""
        return int(self.positions_N.max()) + 1

    @classmethod
    def from_sequences(cls, sequences: Sequence[TokenIds]) -> TokenTree:
        """Insert S non-empty sequences of non-negative token ids. Raises `ValueError` for an empty one or for none."""
        arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
        if not arrays:
            raise ValueError("a TokenTree needs at least one sequence")
        if any(len(array) == 0 for array in arrays):
            raise ValueError("a TokenTree cannot hold an empty sequence: there is no token to read a score at")
        return _Builder(arrays).build()


def common_prefix_length(a: npt.NDArray[np.integer], b: npt.NDArray[np.integer]) -> int:
    """How many leading tokens two sequences share."""
    shortest = min(len(a), len(b))
    differs = a[:shortest] != b[:shortest]
    return int(differs.argmax()) if differs.any() else shortest


class _Builder:
    """Builds the trie from the sorted sequences: in lexicographic order each adds one *piece*, its tokens after the
    prefix that it shares with the one before it. Segments end where later pieces branch off."""

    def __init__(self, arrays: list[npt.NDArray[np.int64]]) -> None:
        self.arrays = arrays
        # Big-endian bytes of non-negative integers sort as the integers do.
        keys = [array.astype(">i8").tobytes() for array in arrays]
        self.order = sorted(range(len(arrays)), key=keys.__getitem__)

    def build(self) -> TokenTree:
        starts, branches, reads = self._lay_out_pieces()
        segments = self._cut(starts, branches)
        pieces = [self.arrays[i][starts[i][0] :] for i in starts]
        positions = [np.arange(starts[i][0], len(self.arrays[i])) for i in starts]
        return TokenTree(
            np.concatenate(pieces),
            np.concatenate(positions),
            segments,
            np.array([reads[i] for i in range(len(self.arrays))], dtype=np.int64),
        )

    def _lay_out_pieces(self) -> tuple[dict[int, tuple[int, int, int | None]], dict[int, set[int]], dict[int, int]]:
        """For each sequence that adds tokens: (depth of its piece, flat start, the sequence it branches from)."""
        pieces: dict[int, tuple[int, int, int | None]] = {}
        branches: dict[int, set[int]] = {}
        reads: dict[int, int] = {}
        path: list[int] = []  # the sequences whose pieces make up the previous sequence, root first
        flat = 0
        previous: int | None = None
        for i in self.order:
            array = self.arrays[i]
            shared = 0 if previous is None else common_prefix_length(self.arrays[previous], array)
            if previous is not None and shared == len(array):  # sorts after its equal only: it ends where that one ends
                reads[i] = reads[previous]
                continue
            while path and pieces[path[-1]][0] >= shared:
                path.pop()
            owner = path[-1] if path else None
            if owner is not None:
                branches[owner].add(shared)
            pieces[i], branches[i] = (shared, flat, owner), set()
            flat += len(array) - shared
            reads[i] = flat - 1
            path.append(i)
            previous = i
        return pieces, branches, reads

    def _cut(
        self, pieces: dict[int, tuple[int, int, int | None]], branches: dict[int, set[int]]
    ) -> tuple[Segment, ...]:
        bounds: list[tuple[int, int, int, int | None]] = []  # start, end, depth, parent
        ends_at: dict[tuple[int, int], int] = {}  # (piece, depth) -> the segment that ends there
        for i, (depth, flat, owner) in pieces.items():
            parent = None if owner is None else ends_at[owner, depth]
            cuts = [depth, *sorted(branches[i] - {len(self.arrays[i])}), len(self.arrays[i])]
            for low, high in zip(cuts, cuts[1:], strict=False):
                bounds.append((flat + low - depth, flat + high - depth, low, parent))
                parent = ends_at[i, high] = len(bounds) - 1
        subtree_ends = [end for _, end, _, _ in bounds]
        for index in range(len(bounds) - 1, -1, -1):
            parent = bounds[index][3]
            if parent is not None:
                subtree_ends[parent] = max(subtree_ends[parent], subtree_ends[index])
        return tuple(
            Segment(start, end, subtree_ends[index], depth, parent)
            for index, (start, end, depth, parent) in enumerate(bounds)
        )
