"""`TreeBatch`: comparison groups packed into one row of tokens, and the plan of which groups go together.

    batch = TreeBatch.from_groups([chosen_and_rejected_ids, eight_completions_ids])
    scores_S = model(batch)              # one score per sequence, in the order given

Every group becomes a `TokenTree`; groups that begin alike share one. `RowBatch` holds the same groups as padded rows. A
group that does not fit a budget of tokens goes in parts (`plan_parts`, `backward_in_parts`).

Shapes: G groups, S sequences, T tokens of the row, L tokens of the longest sequence.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from treeward.tree.movable import Movable
from treeward.tree.prefix import Exchange, Kept, Prefix
from treeward.tree.reads import Reads
from treeward.tree.token_tree import Segment, TokenIds, TokenTree, common_prefix_length, sort_key

MIN_SHARED_BETWEEN_GROUPS = 32
"""Groups share a tree if they have at least this many leading tokens in common. Fewer (a BOS token, a role header)
would save nothing and turn many small trees, which attention handles cheaply, into one large tree."""

MIN_SHARED_BETWEEN_SEQUENCES = 8
"""The same for single sequences to score: a short question already pays."""


@dataclass(frozen=True, slots=True)
class TreeSpan:
    """One tree's place in the row, its longest conversation `depth`, its segments. `num_prefix_tokens`: tokens before
    its root that are not in the row; `depth` and segments count them."""

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

    def path_to(self, read: int) -> list[Segment]:
        """The segments of the sequence that ends at `read`, as a segment does."""
        return self.path(next(segment for segment in self.segments if segment.end == read + 1))


@dataclass(frozen=True, slots=True)
class TreeLayout(Movable):
    """The trees of a row of T tokens, for attention.

    `positions_T`: of each token in its conversation, int64. `subtree_end_T`: int64: token q sees token k if `k <= q <
    subtree_end_T[k]`. `exchange`: the prefixes to read and to keep in one forward pass; None without either. Padding
    after the last tree sees only itself.
    """

    trees: tuple[TreeSpan, ...]
    positions_T: Tensor
    subtree_end_T: Tensor
    exchange: Exchange | None = None

    @property
    def num_tokens(self) -> int:
        return self.trees[-1].end

    def places(self, reads: Sequence[int]) -> list[np.ndarray]:
        """The places in the row of the tokens of each sequence, by where it ends."""
        paths = [next(tree for tree in self.trees if tree.start <= read < tree.end).path_to(read) for read in reads]
        return [np.concatenate([np.arange(segment.start, segment.end) for segment in path]) for path in paths]


@dataclass(frozen=True, slots=True)
class TreeBatch(Movable):
    """A packed forest of G groups with S sequences in T tokens.

    `tokens_T`: int64. `ends_S`: int64, the place in the row of each sequence's last token. `reads`: the places in the
    row at which each sequence is read. `num_row_tokens`: tokens of the same sequences as rows.
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
        """Pack groups of non-empty token sequences. `min_shared`: tokens that groups must share to share a tree.

        `read_at`: the positions at which each sequence is read, in the order of the groups; None: at its last token.
        `prefixes`: for each group the prefix that its sequences continue, and do not contain. `keep`: prefixes to keep,
        as (group, sequence in the group, tokens of it). Raises `ValueError` for an empty group, sequence or batch.
        """
        if not groups or any(len(group) == 0 for group in groups):
            raise ValueError("a TreeBatch needs at least one group, and every group at least one sequence")
        sequences = [np.asarray(sequence, dtype=np.int64) for group in groups for sequence in group]
        tokens: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        spans: list[TreeSpan] = []
        ends = np.empty(len(sequences), dtype=np.int64)
        offset = 0
        # With prefixes to read or keep, every group is its own tree, so that trees have the groups' indices.
        separate = prefixes is not None or bool(keep)
        group_prefixes = [None] * len(groups) if prefixes is None else list(prefixes)
        starts = np.cumsum([0, *map(len, groups)]).tolist()
        ranges = [list(range(start, end)) for start, end in itertools.pairwise(starts)]
        for members in ranges if separate else _clusters(sequences, ranges, min_shared):
            prefix = group_prefixes[len(spans)]  # None where groups share trees
            before = 0 if prefix is None else len(prefix)
            tree = TokenTree.from_sequences([sequences[i] for i in members])
            tokens.append(tree.tokens_N)
            positions.append(tree.positions_N + before)
            segments = tuple(segment.shifted(offset, before) for segment in tree.segments)
            spans.append(TreeSpan(offset, offset + tree.num_tokens, tree.depth + before, segments, before))
            ends[members] = tree.ends_S + offset
            offset += tree.num_tokens
        kept = [Kept(g, _first_of_path(spans[g], int(ends[starts[g] + k]), length)) for g, k, length in keep]
        exchange = Exchange(group_prefixes, kept) if separate else None
        all_segments = [segment for span in spans for segment in span.segments]
        subtree_ends = np.repeat(
            np.array([segment.subtree_end for segment in all_segments], dtype=np.int64),
            [len(segment) for segment in all_segments],
        )
        layout = TreeLayout(
            tuple(spans), torch.from_numpy(np.concatenate(positions)), torch.from_numpy(subtree_ends), exchange
        )
        if read_at is None:
            read_at = [(len(sequence) - 1,) for sequence in sequences]
        read_places = []
        for sequence, end, read_positions in zip(sequences, ends.tolist(), read_at, strict=True):
            if list(read_positions) == [len(sequence) - 1]:
                read_places.append([end])  # as nearly always, and without a search for the path
                continue
            [path] = layout.places([end])
            read_places.append(path[list(read_positions)].tolist())
        return cls(
            tokens_T=torch.from_numpy(np.concatenate(tokens)),
            layout=layout,
            ends_S=torch.from_numpy(ends),
            reads=Reads.of(read_places),
            num_row_tokens=sum(len(sequence) for sequence in sequences),
        )

    def padded(self) -> TreeBatch:
        """The same forest in a row of one of few lengths, so that compiled code is reused: multiples of 128, at most
        eight from n to 2n tokens. The added tokens belong to no sequence."""
        length, layout = len(self.tokens_T), self.layout
        step = max(128, 2 ** (length.bit_length() - 4))
        ends = torch.arange(1, -(-length // step) * step + 1, device=self.tokens_T.device)
        padding = len(ends) - length
        layout = replace(
            layout,
            positions_T=F.pad(layout.positions_T, (0, padding)),
            subtree_end_T=torch.cat([layout.subtree_end_T, ends[length:]]),
        )
        return replace(self, tokens_T=F.pad(self.tokens_T, (0, padding)), layout=layout)


@dataclass(frozen=True, slots=True)
class RowBatch(Movable):
    """The same groups as S right-padded rows of L tokens: `tokens_SL`, int64; `lengths_S`, int64, the real tokens of
    each row. `reads`: the places at which each row is read, in the rows one after another."""

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
        """Pad groups of non-empty token sequences. `read_at`: see `TreeBatch.from_groups`. Raises `ValueError` for an
        empty group, sequence or batch."""
        if not groups or any(len(group) == 0 or any(len(sequence) == 0 for sequence in group) for group in groups):
            raise ValueError("a RowBatch needs at least one group, and no group or sequence may be empty")
        sequences = [torch.as_tensor(np.asarray(sequence, dtype=np.int64)) for group in groups for sequence in group]
        lengths = [len(sequence) for sequence in sequences]
        padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=pad_token_id)
        if read_at is None:
            read_at = [[length - 1] for length in lengths]
        width = padded.shape[1]
        read_places = [[row * width + position for position in at] for row, at in enumerate(read_at)]
        return cls(padded, torch.tensor(lengths), Reads.of(read_places), sum(lengths))


Batch = TreeBatch | RowBatch


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor of the same values, copied while the host goes on."""
    tensor = torch.from_numpy(array)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def plan_micro_batches(
    sizes: Sequence[int], *, max_tokens: int | None = None, max_groups: int | None = None, num_ranks: int = 1
) -> list[list[int]]:
    """Put groups together so that no micro-batch exceeds a budget; return the indices of each. Largest first, each into
    the emptiest of as few micro-batches as hold all.

    `sizes`: the tokens of each group. `max_tokens`: of a micro-batch; a larger group has its own. `max_groups`: of a
    micro-batch. `num_ranks`: processes that share the plan: rank r computes `plan[r::num_ranks]`, as many micro-batches
    as the others, of like size at the same time, some perhaps empty.
    """
    most_tokens, most_groups = max_tokens or sys.maxsize, max_groups or sys.maxsize
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    fewest = min(max(-(-sum(sizes) // most_tokens), -(-len(sizes) // most_groups)), len(sizes))
    for count in itertools.count(-(-max(fewest, num_ranks > 1) // num_ranks) * num_ranks, num_ranks):
        plan: list[list[int]] = [[] for _ in range(count)]
        emptiest = [(0, b) for b in range(count)]  # a heap
        for i in order:
            if not emptiest or (emptiest[0][0] and emptiest[0][0] + sizes[i] > most_tokens):
                break
            used, b = heapq.heappop(emptiest)
            plan[b].append(i)
            if len(plan[b]) < most_groups:
                heapq.heappush(emptiest, (used + sizes[i], b))
        else:
            return [sorted(members) for members in sorted(plan, key=lambda members: -sum(sizes[i] for i in members))]
    raise AssertionError("as many micro-batches as groups hold all")


def plan_padded(
    shapes: Sequence[tuple[int, int]],
    *,
    max_tokens: int | None = None,
    max_groups: int | None = None,
    num_ranks: int = 1,
) -> list[list[int]]:
    """`plan_micro_batches` for padded rows, where one long row lengthens all others. `shapes`: (rows, longest row) of
    each group. Groups of similar length go together, longest first."""
    if num_ranks > 1:
        return _plan_padded_shares(shapes, max_tokens, max_groups, num_ranks)
    plan: list[list[int]] = []
    rows = length = 0
    for i in sorted(range(len(shapes)), key=lambda i: (-shapes[i][1], i)):
        group_rows, longest = shapes[i]
        fits = bool(plan) and (max_tokens is None or (rows + group_rows) * length <= max_tokens)
        if not fits or (max_groups is not None and len(plan[-1]) == max_groups):
            plan.append([])
            rows, length = 0, longest
        plan[-1].append(i)
        rows += group_rows
    return [sorted(members) for members in plan]


def _plan_padded_shares(
    shapes: Sequence[tuple[int, int]], max_tokens: int | None, max_groups: int | None, num_ranks: int
) -> list[list[int]]:
    """The plan for the smallest budget of tokens that needs no more micro-batches than `max_tokens` does."""

    def cost(members: Sequence[int]) -> int:
        return sum(shapes[i][0] for i in members) * max((shapes[i][1] for i in members), default=0)

    best = plan_padded(shapes, max_tokens=max_tokens, max_groups=max_groups)
    count = -(-max(len(best), 1) // num_ranks) * num_ranks
    low, high = 0, max(map(cost, best), default=0)
    while high - low > 1:
        middle = (low + high) // 2
        plan = plan_padded(shapes, max_tokens=middle, max_groups=max_groups)
        if len(plan) <= count:
            best, high = plan, middle
        else:
            low = middle
    return sorted(best, key=cost, reverse=True) + [[] for _ in range(count - len(best))]


def plan_sequences(
    sequences: Sequence[TokenIds],
    *,
    max_tokens: int | None = None,
    max_sequences: int | None = None,
    share: bool = True,
    num_cached: Sequence[int] | None = None,
) -> list[list[list[int]]]:
    """Plan the scoring of ungrouped sequences: micro-batches of groups of indices.

    In lexicographic order sequences that begin alike are neighbours and share a group; with `share=False` (padded rows)
    those of similar length are neighbours. `max_tokens`: computed tokens of a micro-batch; a longer sequence has its
    own. `max_sequences`: of a micro-batch. `num_cached`: each sequence's first tokens that need not be computed.
    """
    max_tokens, max_sequences = max_tokens or sys.maxsize, max_sequences or sys.maxsize
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    if not share:
        shapes = [(1, len(array)) for array in arrays]
        padded_plan = plan_padded(shapes, max_tokens=max_tokens, max_groups=max_sequences)
        return [[[i] for i in members] for members in padded_plan]
    plan: list[list[list[int]]] = []
    used, count, previous = 0, 0, None
    for i in sorted(range(len(arrays)), key=lambda i: sort_key(arrays[i])):
        shared = 0 if previous is None else common_prefix_length(arrays[previous], arrays[i])
        if shared < min(MIN_SHARED_BETWEEN_SEQUENCES, len(arrays[i])):  # an equal is shared however short it is
            shared = 0
        cached = 0 if num_cached is None else num_cached[i]
        cost = len(arrays[i]) - max(shared, cached)
        if not plan or (cost and used + cost > max_tokens) or count == max_sequences:
            plan.append([])
            used, count, shared, cost = 0, 0, 0, len(arrays[i]) - cached
        if shared:
            plan[-1][-1].append(i)
        else:
            plan[-1].append([i])
        used += cost
        count += 1
        previous = i
    return plan


def _first_of_path(tree: TreeSpan, read: int, num_tokens: int) -> tuple[tuple[int, int], ...]:
    """The ranges in the row of the first `num_tokens` tokens of the sequence that ends at `read`."""
    depth = tree.num_prefix_tokens + num_tokens
    path = tree.path_to(read)
    return tuple((s.start, min(s.end, s.start + depth - s.depth)) for s in path if s.depth < depth)


def _clusters(sequences: Sequence[np.ndarray], groups: Sequence[Sequence[int]], min_shared: int) -> list[list[int]]:
    """The sequences of each tree: of all groups that begin with the same `min_shared` tokens."""
    heads = [sequences[group[0]] for group in groups]
    order = sorted(range(len(heads)), key=lambda g: sort_key(heads[g]))
    clusters: list[list[int]] = []
    for previous, g in zip([None, *order], order, strict=False):
        if previous is None or common_prefix_length(heads[previous], heads[g]) < min_shared:
            clusters.append([])
        clusters[-1].append(g)
    clusters.sort(key=min)
    return [[i for g in sorted(cluster) for i in groups[g]] for cluster in clusters]


class GroupPart(NamedTuple):
    """Sequences `members` of the group number `group`. `num_tokens`: tokens to compute: of their tree, or padded."""

    group: int
    members: tuple[int, ...]
    num_tokens: int


def split_group(
    sequences: Sequence[TokenIds], *, max_tokens: int, share: bool = True, group: int = 0
) -> list[GroupPart]:
    """Cut one group into parts of at most `max_tokens`, as few as its order allows. `share`: parts are trees, of
    sequences that begin alike; otherwise padded rows, of sequences of like length. A longer sequence is its own part.
    """
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    order = sorted(range(len(arrays)), key=lambda i: sort_key(arrays[i]) if share else -len(arrays[i]))
    parts: list[GroupPart] = []
    members: list[int] = []
    used = 0
    for i in order:
        if not members:
            needed = len(arrays[i])
        elif share:  # neighbours in lexicographic order share the longest prefix
            needed = used + len(arrays[i]) - common_prefix_length(arrays[members[-1]], arrays[i])
        else:
            needed = (len(members) + 1) * len(arrays[members[0]])
        if members and needed > max_tokens:
            parts.append(GroupPart(group, tuple(members), used))
            members, needed = [], len(arrays[i])
        members.append(i)
        used = needed
    return [*parts, GroupPart(group, tuple(members), used)] if members else parts


def plan_parts(
    groups: Sequence[Sequence[TokenIds]], *, max_tokens: int, share: bool = True, num_ranks: int = 1
) -> list[list[GroupPart]]:
    """The micro-batches of groups: each has at most `max_tokens`, unless a single sequence is larger. A group that fits
    stays whole; empty groups are in no micro-batch. `num_ranks`: see `plan_micro_batches`."""
    parts = [
        part
        for g, sequences in enumerate(groups)
        for part in split_group(sequences, max_tokens=max_tokens, share=share, group=g)
    ]
    if share:
        plan = plan_micro_batches([part.num_tokens for part in parts], max_tokens=max_tokens, num_ranks=num_ranks)
    else:
        shapes = [(len(part.members), part.num_tokens // len(part.members)) for part in parts]
        plan = plan_padded(shapes, max_tokens=max_tokens, num_ranks=num_ranks)
    return [[parts[i] for i in members] for members in plan]


def order_of_parts(parts: Sequence[Sequence[int]]) -> Tensor | None:
    """The index of each sequence's score in the concatenated scores of `parts` (their sequences): int64 (S,) on the
    CPU, or None if they are in order."""
    members = [i for part in parts for i in part]
    return None if members == sorted(members) else torch.from_numpy(np.argsort(members))


def backward_in_parts(
    parts: Sequence[Callable[[], Tensor]],
    loss_of: Callable[[Tensor], Tensor],
    *,
    order_S: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Add the gradient of `scale * loss_of(scores_S)` to the parameters behind the scores.

    `parts`: for each part a deterministic function that computes its scores. `order_S`: of `order_of_parts`, on the
    device of the scores. Returns the scores (S,), in the order of the sequences, and the loss without `scale`, both
    detached. Several parts are scored without a graph first, for the gradient of the loss by the scores, and then
    forward again and backward one by one (Gao et al. 2021, arXiv 2101.06983). The host never waits for a GPU here.
    """
    if len(parts) == 1:
        scores_S = parts[0]()
    else:
        with torch.no_grad():
            part_scores = [score() for score in parts]
        scores_S = joined_S = torch.cat(part_scores).requires_grad_(True)
    if order_S is not None:
        scores_S = scores_S[order_S]
    loss = loss_of(scores_S)
    (scale * loss).backward()
    if len(parts) > 1:
        assert joined_S.grad is not None
        for score, grad in zip(parts, joined_S.grad.split([len(scores) for scores in part_scores]), strict=True):
            score().backward(grad)
    return scores_S.detach(), loss.detach()
