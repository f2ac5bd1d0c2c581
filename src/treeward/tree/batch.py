"""`TreeBatch`: comparison groups packed into one row of tokens.

    batch = TreeBatch.from_groups([chosen_and_rejected_ids, eight_completions_ids])
    scores_S = model(batch)              # one score per sequence, in the order given

Every group becomes a `TokenTree`; groups that begin alike share one. `RowBatch` holds the same
groups as padded rows. Which groups go together is planned in `plan.py`.

Shapes: G groups, S sequences, T tokens of the row, L tokens of the longest sequence, N different
places that are read, R reads of all sequences.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from treeward.tree.prefix import Exchange, Kept, Prefix
from treeward.tree.token_tree import (
    Segment,
    TokenIds,
    TokenTree,
    common_prefix_length,
    sort_key,
)

MIN_SHARED_BETWEEN_GROUPS = 32
"""Groups share a tree if they have at least this many leading tokens in common. Fewer (a BOS token,
a role header) would save nothing and turn many small trees, which attention handles cheaply, into
one large tree."""


@dataclass(frozen=True, slots=True)
class Movable:
    """A dataclass of tensors, of other `Movable`s, and of values that stay on the host."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """A copy on the device. With `non_blocking` the host does not wait for copies from
        page-locked memory."""
        moved: Self = _each(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))
        return moved

    def pin(self) -> Self:
        """A copy in page-locked memory. Needs CUDA."""
        pinned: Self = _each(self, Tensor.pin_memory)
        return pinned


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    # Values that stay on the host come back as they are: numbers, spans, and exchanges, whose
    # prefixes are on the device already.
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Movable):
        changed = {item.name: _each(getattr(value, item.name), change) for item in fields(value)}
        return replace(value, **changed)
    if isinstance(value, tuple) and value and isinstance(value[0], Movable):
        return tuple(_each(item, change) for item in value)
    return value


@dataclass(frozen=True, slots=True)
class Reads(Movable):
    """The places at which a model's head reads the sequences of a batch, one or many for each
    sequence.

        reads = Reads.of([[7], [3, 9], [9]])
        reads.places_N                          # [3, 7, 9]: each place once
        values_RH = values_NH[reads.index_R]    # for every read of every sequence, in order
        values_RH.split(reads.counts)           # by sequence: 1, 2 and 1 reads

    A reward model reads at the last token. A gate reads where the prompt ends too, and a process
    reward model after every step. Sequences of a tree may be read at the same place, whose hidden
    state is computed and multiplied once.

    `places_N`: where the hidden states lie in the batch, int64, ascending, each once. `index_R`:
    the index into them of every read, sequence after sequence, int64. `counts`: the reads of each
    sequence."""

    places_N: Tensor
    index_R: Tensor
    counts: tuple[int, ...]

    @classmethod
    def of(cls, places: Sequence[Sequence[int]]) -> Reads:
        """`places`: those of each sequence."""
        counts = tuple(len(places_of_sequence) for places_of_sequence in places)
        all_places = np.concatenate([np.asarray(row, dtype=np.int64) for row in places])
        places_N, index_R = np.unique(all_places, return_inverse=True)
        return cls(torch.from_numpy(places_N), torch.from_numpy(index_R), counts)


@dataclass(frozen=True, slots=True)
class TreeSpan:
    """One tree's place in the row, its longest conversation `depth`, its segments.

    `num_prefix_tokens`: tokens before its root that are not in the row; `depth` and segments count
    them.
    """

    start: int
    end: int
    depth: int
    segments: tuple[Segment, ...]
    num_prefix_tokens: int = 0

    def __len__(self) -> int:
        return self.end - self.start

    def path(self, segment: Segment) -> list[Segment]:
        """The segments from the root to this one."""
        path = [segment]
        while path[0].parent is not None:
            path.insert(0, self.segments[path[0].parent])
        return path

    def path_to(self, last: int) -> list[Segment]:
        """The segments of the sequence whose last token is at the place `last`, where a segment
        ends too."""
        segment = next(segment for segment in self.segments if segment.end == last + 1)
        return self.path(segment)

    def first_of_path(self, last: int, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """The first `num_tokens` tokens of the sequence that ends at the place `last`, as ranges of
        the row: tokens of other sequences may lie between its segments."""
        depth = self.num_prefix_tokens + num_tokens
        ranges = []
        for segment in self.path_to(last):
            if segment.depth < depth:
                end = min(segment.end, segment.start + depth - segment.depth)
                ranges.append((segment.start, end))
        return tuple(ranges)


@dataclass(frozen=True, slots=True)
class TreeLayout(Movable):
    """The trees of a row of T tokens, for attention.

    `positions_T`: of each token in its conversation, int64. `subtree_end_T`: int64: token q sees
    token k if `k <= q < subtree_end_T[k]`. `exchange`: the prefixes to read and to keep in one
    forward pass; None without either. Padding after the last tree sees only itself.
    """

    trees: tuple[TreeSpan, ...]
    positions_T: Tensor
    subtree_end_T: Tensor
    exchange: Exchange | None = None

    @property
    def num_tokens(self) -> int:
        return self.trees[-1].end

    def places(self, ends: Sequence[int]) -> list[np.ndarray]:
        """The places in the row of the tokens of each sequence, given the place of its last
        token."""
        places = []
        for end in ends:
            tree = next(tree for tree in self.trees if tree.start <= end < tree.end)
            ranges = [np.arange(segment.start, segment.end) for segment in tree.path_to(end)]
            places.append(np.concatenate(ranges))
        return places


@dataclass(frozen=True, slots=True)
class TreeBatch(Movable):
    """A packed forest of G groups with S sequences in T tokens.

    `tokens_T`: int64. `ends_S`: int64, the place in the row of each sequence's last token. `reads`:
    the places in the row at which each sequence is read. `num_row_tokens`: tokens of the same
    sequences as rows.
    """

    tokens_T: Tensor
    layout: TreeLayout
    ends_S: Tensor
    reads: Reads
    num_row_tokens: int

    def places(self) -> list[np.ndarray]:
        """The places in the row of the tokens of each sequence; the batch must be on the host."""
        return self.layout.places(self.ends_S.tolist())

    @property
    def num_computed_tokens(self) -> int:
        return self.layout.num_tokens

    @classmethod
    def from_groups(
        cls,
        groups: Sequence[Sequence[TokenIds]],
        *,
        min_shared: int = MIN_SHARED_BETWEEN_GROUPS,
        prefixes: Sequence[Prefix | None] | None = None,
        keep: Sequence[tuple[int, int, int]] = (),
        read_at: Sequence[Sequence[int]] | None = None,
    ) -> TreeBatch:
        """Pack groups of non-empty token sequences.

        `min_shared`: tokens that groups must share to share a tree. `prefixes`: for each group the
        prefix that its sequences continue, and do not contain. `keep`: prefixes to keep, as (group,
        sequence in the group, tokens of it). `read_at`: the positions at which each sequence is
        read, in the order of the groups; None: at its last token. Raises `ValueError` for an empty
        group, sequence or batch.
        """
        if not groups or any(len(group) == 0 for group in groups):
            raise ValueError(
                "a TreeBatch needs at least one group, and every group at least one sequence"
            )
        sequences = _arrays(groups)
        starts = np.cumsum([0, *map(len, groups)]).tolist()  # of each group among the sequences
        members_of_groups = [list(range(start, end)) for start, end in itertools.pairwise(starts)]
        # With prefixes to read or keep, every group is its own tree, so that trees have the groups'
        # indices.
        is_separate = prefixes is not None or bool(keep)
        if is_separate:
            members_of_trees = members_of_groups
        else:
            members_of_trees = _clusters(sequences, members_of_groups, min_shared)
        tree_prefixes: list[Prefix | None] = [None] * len(members_of_trees)
        if prefixes is not None:
            tree_prefixes = list(prefixes)

        tokens: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        subtree_ends: list[np.ndarray] = []
        spans: list[TreeSpan] = []
        ends = np.empty(len(sequences), dtype=np.int64)
        offset = 0
        for members, prefix in zip(members_of_trees, tree_prefixes, strict=True):
            before = 0
            if prefix is not None:
                before = len(prefix)
            tree = TokenTree.from_sequences([sequences[i] for i in members])
            # Places count within the row; positions and depths count the prefix as well.
            segments = tuple(segment.shifted(offset, before) for segment in tree.segments)
            tokens.append(tree.tokens_N)
            positions.append(tree.positions_N + before)
            # All tokens of a segment have the same tokens below them, besides its own: together
            # with `k <= q` this one number says who sees whom.
            for segment in segments:
                subtree_ends.append(np.full(len(segment), segment.subtree_end, dtype=np.int64))
            end = offset + tree.num_tokens
            spans.append(TreeSpan(offset, end, tree.depth + before, segments, before))
            ends[members] = tree.ends_S + offset
            offset = end

        exchange = None
        if is_separate:
            kept = []
            for group, sequence, length in keep:
                last = int(ends[starts[group] + sequence])
                kept.append(Kept(group, spans[group].first_of_path(last, length)))
            exchange = Exchange(tree_prefixes, kept)
        layout = TreeLayout(
            tuple(spans),
            torch.from_numpy(np.concatenate(positions)),
            torch.from_numpy(np.concatenate(subtree_ends)),
            exchange,
        )
        return cls(
            tokens_T=torch.from_numpy(np.concatenate(tokens)),
            layout=layout,
            ends_S=torch.from_numpy(ends),
            reads=_reads(layout, sequences, ends.tolist(), read_at),
            num_row_tokens=sum(map(len, sequences)),
        )

    def padded(self) -> TreeBatch:
        """The same forest in a row of one of few lengths, so that compiled code is reused.

        Lengths are multiples of 128, at most eight from n to 2n tokens. The added tokens belong to
        no sequence.
        """
        length = len(self.tokens_T)
        # A power of two between 1/16 and 1/8 of the length.
        # 128 is a block of FlexAttention (`flex.BLOCK`), which computes whole blocks anyway.
        step = max(128, 2 ** (length.bit_length() - 4))
        padded_length = math.ceil(length / step) * step
        padding = padded_length - length
        # Each added token's subtree is the token itself: a row of the mask without any key would
        # have a softmax of nothing, which is NaN.
        own_ends = torch.arange(length + 1, padded_length + 1, device=self.tokens_T.device)
        layout = replace(
            self.layout,
            positions_T=F.pad(self.layout.positions_T, (0, padding)),
            subtree_end_T=torch.cat([self.layout.subtree_end_T, own_ends]),
        )
        return replace(self, tokens_T=F.pad(self.tokens_T, (0, padding)), layout=layout)


@dataclass(frozen=True, slots=True)
class RowBatch(Movable):
    """The same groups as S right-padded rows of L tokens.

    `tokens_SL`: int64. `lengths_S`: int64, the real tokens of each row. `reads`: the places at
    which each row is read, in the rows one after another.
    """

    tokens_SL: Tensor
    lengths_S: Tensor
    reads: Reads
    num_row_tokens: int

    @property
    def num_computed_tokens(self) -> int:
        return self.tokens_SL.numel()

    @property
    def mask_SL(self) -> Tensor:
        """1 for real tokens, int64 (S, L)."""
        places_L = torch.arange(self.tokens_SL.shape[1], device=self.tokens_SL.device)
        return (places_L < self.lengths_S[:, None]).long()

    @classmethod
    def from_groups(
        cls,
        groups: Sequence[Sequence[TokenIds]],
        *,
        pad_token_id: int,
        read_at: Sequence[Sequence[int]] | None = None,
    ) -> RowBatch:
        """Pad groups of non-empty token sequences. `read_at`: see `TreeBatch.from_groups`.

        Raises `ValueError` for an empty group, sequence or batch.
        """
        arrays = _arrays(groups)
        is_empty = not groups or any(len(group) == 0 for group in groups)
        if is_empty or any(len(array) == 0 for array in arrays):
            raise ValueError(
                "a RowBatch needs at least one group, and no group or sequence may be empty"
            )
        sequences = [torch.from_numpy(array) for array in arrays]
        lengths = [len(sequence) for sequence in sequences]
        padded = torch.nn.utils.rnn.pad_sequence(
            sequences, batch_first=True, padding_value=pad_token_id
        )
        if read_at is None:
            read_at = [[length - 1] for length in lengths]
        width = padded.shape[1]
        read_places = []
        for row, positions in enumerate(read_at):
            read_places.append([row * width + position for position in positions])
        return cls(padded, torch.tensor(lengths), Reads.of(read_places), sum(lengths))


Batch = TreeBatch | RowBatch


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor of the same values, copied while the host goes on."""
    tensor = torch.from_numpy(array)
    # Only a copy from page-locked memory goes on beside the host.
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _arrays(groups: Sequence[Sequence[TokenIds]]) -> list[np.ndarray]:
    """The sequences of all groups, in order, int64."""
    sequences = itertools.chain.from_iterable(groups)
    return [np.asarray(sequence, dtype=np.int64) for sequence in sequences]


def _reads(
    layout: TreeLayout,
    sequences: Sequence[np.ndarray],
    ends: Sequence[int],
    read_at: Sequence[Sequence[int]] | None,
) -> Reads:
    if read_at is None:
        return Reads.of([[end] for end in ends])
    places = []
    for sequence, end, positions in zip(sequences, ends, read_at, strict=True):
        if list(positions) == [len(sequence) - 1]:
            places.append([end])  # as nearly always, and without a search for the path
        else:
            [path] = layout.places([end])
            places.append(path[list(positions)].tolist())
    return Reads.of(places)


def _clusters(
    sequences: Sequence[np.ndarray], groups: Sequence[Sequence[int]], min_shared: int
) -> list[list[int]]:
    """The sequences of each tree: of all groups that begin with the same `min_shared` tokens."""
    # One sequence stands for its group, because completions of a prompt begin alike. A tree can
    # hold others too.
    heads = [sequences[members[0]] for members in groups]
    order = sorted(range(len(heads)), key=lambda g: sort_key(heads[g]))
    clusters: list[list[int]] = []
    previous: np.ndarray | None = None
    for g in order:
        if previous is None or common_prefix_length(previous, heads[g]) < min_shared:
            clusters.append([])
        clusters[-1].append(g)
        previous = heads[g]
    # In the order of the groups, so that a batch without shared beginnings is packed as it is
    # given.
    clusters.sort(key=min)
    trees = []
    for cluster in clusters:
        members_of_groups = [groups[g] for g in sorted(cluster)]
        trees.append(list(itertools.chain.from_iterable(members_of_groups)))
    return trees
