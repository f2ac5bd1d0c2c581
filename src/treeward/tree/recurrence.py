"""`Recurrence`: where each token's state comes from, in a row of trees.

    plan = Recurrence.of(layout)
    plan.window(kernel)         # causal convolutions: a longer row, each segment behind its path
    plan.rounds(multiple)       # kernels that start from a state and end with one
    plan.chunks(size)           # chunks that start from their parent chunk's state
    plan.steps                  # recurrences that go token by token

A recurrent layer carries a state from token to token. In a tree the first token of a segment goes
on from the last token of the segment above it, so a state is computed once and inherited by every
child; gradients of the children add up by themselves:

    row      | p p p p p p | a a a | b b b b b |        a prompt, and two completions
    states     0 -------> s ---> .                      a starts from s,
                          s ----------> .               and so does b

A tree with a prefix that is not in the row starts from the state that was kept at the prefix's end.

Shapes: T tokens of the row, E tokens of the longer row, K taps of a convolution, N slots of tokens
(with padding), D any.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treeward.tree.batch import TreeLayout


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, end) of the row. They go on from the end of piece `parent`, or from the prefix
    of tree `prefix_of`, or begin a conversation.
    """

    start: int
    end: int
    parent: int | None
    prefix_of: int | None = None

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Slots:
    """Tokens of the row in another order, with padding between them.

    `token_N`: of each slot, int64; a padding slot has any token. `is_token_N`: whether it is one,
    bool. `slot_T`: of each token, int64.
    """

    token_N: Tensor
    is_token_N: Tensor
    slot_T: Tensor

    @classmethod
    def of(cls, token_N: np.ndarray, is_token_N: np.ndarray, device: torch.device) -> Slots:
        # The inverse: each token of the row has exactly one slot.
        slot_T = np.empty(int(is_token_N.sum()), dtype=np.int64)
        slot_T[token_N[is_token_N]] = np.flatnonzero(is_token_N)
        return cls(
            token_N=torch.from_numpy(token_N).to(device),
            is_token_N=torch.from_numpy(is_token_N).to(device),
            slot_T=torch.from_numpy(slot_T).to(device),
        )

    def take(self, values_TD: Tensor) -> Tensor:
        """(T, D) in the order of the slots, (N, D). Padding has some token's values."""
        apply: Any = _Reordered.apply  # which torch has no types for
        taken: Tensor = apply(values_TD, self.token_N, self.slot_T, None)
        return taken

    def put(self, values_ND: Tensor) -> Tensor:
        """(N, D) in the order of the row, (T, D)."""
        apply: Any = _Reordered.apply
        put: Tensor = apply(values_ND, self.slot_T, self.token_N, self.is_token_N)
        return put


class _Reordered(torch.autograd.Function):
    """`values.index_select(0, index)` where each token has one slot, so that the gradient is
    another selection. That of `index_select` adds up one row after the other.
    """

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, index: Tensor, inverse: Tensor, is_token: Tensor | None
    ) -> Tensor:
        ctx.inverse = inverse
        ctx.is_token = is_token
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].index_select(0, ctx.inverse)
        if ctx.is_token is not None:
            # The gradient of padding, which the forward pass has not read.
            ones = [1] * (grad.dim() - 1)
            grad = grad * ctx.is_token.view(-1, *ones)
        return grad, None, None, None


@dataclass(frozen=True, slots=True)
class Window:
    """A row in which each piece follows the last K - 1 tokens of its path.

    `source_E`: of each of its tokens, int64: a token of the row, or behind them T + p (K - 1) + k,
    the k-th of the kept inputs of the p-th tree that has a prefix. `before`: the places that are
    before the beginning of a conversation, int64 (any number); they hold zeros. `place_T`: of
    each token of the row, less K - 1, int64. `kept`: for each prefix to keep, the K - 1 sources
    that end it, and how many of them are before the beginning.
    """

    source_E: Tensor
    before: Tensor
    place_T: Tensor
    kept: tuple[tuple[Tensor, int], ...]


@dataclass(frozen=True, slots=True)
class Round:
    """Pieces, or parts of them, that are computed together.

    `lengths`: the slots of each. `bounds`, in rounds of whole pieces: the first slot of each,
    counted in this round, and the end of the last, int64; `bounds_cpu` is the same on the CPU.
    `source`: for each piece, the one of the round before whose state it starts from; None in the
    first round. `is_wanted`: whether any state at the end of this round is read.
    """

    lengths: tuple[int, ...]
    bounds: Tensor | None
    bounds_cpu: Tensor | None
    source: Tensor | None
    is_wanted: bool

    @property
    def num_slots(self) -> int:
        """Of all pieces."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Rounds:
    """All rounds of a row.

    `starts`: for each row of the first round, the tree whose prefix it starts from, or None.
    `kept`: the round and the row at whose end each kept prefix ends.
    """

    slots: Slots
    rounds: tuple[Round, ...]
    starts: tuple[int | None, ...]
    kept: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Level:
    """Chunks of one depth. `parents`: for each of them, the place of its parent among those of the
    level above that have children. `with_children`: the places of those that have some.
    """

    parents: Tensor
    with_children: Tensor


@dataclass(frozen=True, slots=True)
class Chunks:
    """The row in chunks of `size` slots, level by level; `sizes`: the chunks of each level."""

    slots: Slots
    size: int
    sizes: tuple[int, ...]
    levels: tuple[Level, ...]


@dataclass(frozen=True, slots=True)
class Steps:
    """The tokens by their position after the roots, all of one position together.

    `sizes`: the tokens of each position. `parents`: of each position but the first, for each token
    the place of its parent in the position before. `starts`: for each token of the first position,
    the tree whose prefix it starts from, or None. `kept`: the slot at which each kept prefix ends.
    """

    slots: Slots
    sizes: tuple[int, ...]
    parents: tuple[Tensor, ...]
    starts: tuple[int | None, ...]
    kept: tuple[int, ...]


class Recurrence:
    """The plans of one row, for layers on `device`. Each is made when it is first needed.

    `pieces`: segments, in the order of the row; a segment is cut where a kept prefix ends in it,
    and padding of the row is one more. `kept`: the piece that ends each kept prefix.
    """

    def __init__(
        self, pieces: Sequence[Piece], kept: Sequence[int], *, device: torch.device
    ) -> None:
        self.pieces = tuple(pieces)
        self.kept = tuple(kept)
        # With padding, which `TreeLayout.num_tokens` leaves out: layers get the row as it is padded.
        self.num_tokens = self.pieces[-1].end
        self.device = device
        self._windows: dict[int, Window] = {}
        self._rounds: dict[int | None, Rounds] = {}
        self._chunks: dict[int, Chunks] = {}

    @classmethod
    def of(cls, layout: TreeLayout) -> Recurrence:
        """The plans of a row."""
        ends_of_kept: list[int] = []
        if layout.exchange is not None:
            ends_of_kept = [kept.ranges[-1][1] for kept in layout.exchange.keep]
        pieces: list[Piece] = []
        for number, tree in enumerate(layout.trees):
            prefix_of_roots = None
            if tree.num_prefix_tokens:
                prefix_of_roots = number
            last_pieces: list[int] = []
            for segment in tree.segments:
                parent = None
                if segment.parent is not None:
                    parent = last_pieces[segment.parent]
                # A state exists at the end of a piece alone, so a kept prefix needs an end there.
                cuts = {end for end in ends_of_kept if segment.start < end < segment.end}
                start = segment.start
                for end in [*sorted(cuts), segment.end]:
                    prefix_of = None
                    if parent is None:
                        prefix_of = prefix_of_roots
                    pieces.append(Piece(start, end, parent, prefix_of))
                    parent = len(pieces) - 1
                    start = end
                last_pieces.append(len(pieces) - 1)
        length = len(layout.positions_T)
        if length > layout.num_tokens:
            pieces.append(Piece(layout.num_tokens, length, None))
        piece_of_end = {piece.end: number for number, piece in enumerate(pieces)}
        kept = [piece_of_end[end] for end in ends_of_kept]
        return cls(pieces, kept, device=layout.positions_T.device)

    @cached_property
    def trees_with_prefix(self) -> list[int]:
        """The trees that start from kept states, in the order of the row."""
        # Completions that part at their first token are several roots below one prefix.
        trees = {piece.prefix_of for piece in self.pieces if piece.prefix_of is not None}
        return sorted(trees)

    def window(self, taps: int) -> Window:
        """The plan of a causal convolution with so many taps."""
        if taps not in self._windows:
            self._windows[taps] = self._make_window(taps)
        return self._windows[taps]

    def _make_window(self, taps: int) -> Window:
        before = taps - 1
        first_of_tree = {}
        for number, tree in enumerate(self.trees_with_prefix):
            first_of_tree[tree] = self.num_tokens + number * before
        # The last K - 1 sources of each piece's path; -1 is before the beginning.
        tails: list[np.ndarray] = []
        parts: list[np.ndarray] = []
        place_T = np.empty(self.num_tokens, dtype=np.int64)
        offset = 0
        for piece in self.pieces:
            if piece.parent is not None:
                above = tails[piece.parent]
            elif piece.prefix_of is not None:
                first = first_of_tree[piece.prefix_of]
                above = np.arange(first, first + before)
            else:
                above = np.full(before, -1)
            part = np.concatenate([above, np.arange(piece.start, piece.end)])
            # Not `[-before:]`: with one tap that is the whole part, and not nothing.
            tails.append(part[len(part) - before :])
            parts.append(part)
            # A token's output stands K - 1 places before it, where its first tap lies.
            place_T[piece.start : piece.end] = offset + np.arange(len(piece))
            offset += len(part)
        source_E = np.concatenate(parts)
        kept = []
        for number in self.kept:
            tail = tails[number]
            num_before = int((tail < 0).sum())
            kept.append((self._tensor(tail[num_before:]), num_before))
        return Window(
            source_E=self._tensor(source_E.clip(0)),
            before=self._tensor(np.flatnonzero(source_E < 0)),
            place_T=self._tensor(place_T),
            kept=tuple(kept),
        )

    def rounds(self, multiple: int | None) -> Rounds:
        """The plan of a kernel that takes a state for each sequence, and gives one.

        `multiple`: for a kernel over a batch of rows. In each round the pieces that can go on do so
        together, up to the end of the shortest, so that there are fewer than `multiple` slots of
        padding for each of them. None: for a kernel over sequences of different lengths. A round
        has all pieces of one depth, and nothing is padded.
        """
        if multiple not in self._rounds:
            self._rounds[multiple] = self._make_rounds(multiple)
        return self._rounds[multiple]

    def _make_rounds(self, multiple: int | None) -> Rounds:
        children: list[list[int]] = [[] for _ in self.pieces]
        roots = []
        for number, piece in enumerate(self.pieces):
            if piece.parent is None:
                roots.append(number)
            else:
                children[piece.parent].append(number)
        tokens: list[np.ndarray] = []
        is_token: list[np.ndarray] = []
        plan: list[tuple[list[int], list[int]]] = []
        end_of_piece: dict[int, tuple[int, int]] = {}
        # Pieces with how many of their tokens are computed, and the row of the round before.
        going = [(number, 0, 0) for number in roots]
        while going:
            lengths = [len(self.pieces[number]) - done for number, done, _ in going]
            if multiple is not None:
                # Up to the end of the shortest, at a multiple: there a kernel pads anyway.
                shortest = math.ceil(min(lengths) / multiple) * multiple
                lengths = [min(max(lengths), shortest)] * len(lengths)
            following = []
            for row, (number, done, _) in enumerate(going):
                piece = self.pieces[number]
                places = piece.start + done + np.arange(lengths[row])
                is_token.append(places < piece.end)
                # A slot of padding repeats the last token: any values will do, if they exist.
                tokens.append(places.clip(max=piece.end - 1))
                done += lengths[row]
                if done < len(piece):
                    following.append((number, done, row))
                    continue
                end_of_piece[number] = (len(plan), row)
                following += [(child, 0, row) for child in children[number]]
            plan.append((lengths, [row for *_, row in going]))
            going = following
        kept = tuple(end_of_piece[number] for number in self.kept)
        rounds = []
        for number, (lengths, sources) in enumerate(plan):
            bounds = bounds_cpu = None
            if multiple is None:
                bounds_cpu = torch.tensor([0, *itertools.accumulate(lengths)])
                bounds = bounds_cpu.to(self.device)
            source = None
            if number > 0:
                source = self._tensor(np.array(sources))
            # Every later round starts from the states of the one before it.
            is_wanted = number + 1 < len(plan) or any(at == number for at, _ in kept)
            rounds.append(Round(tuple(lengths), bounds, bounds_cpu, source, is_wanted))
        slots = Slots.of(np.concatenate(tokens), np.concatenate(is_token), self.device)
        starts = tuple(self.pieces[number].prefix_of for number in roots)
        return Rounds(slots, tuple(rounds), starts, kept)

    def chunks(self, size: int) -> Chunks:
        """The plan of arithmetic in chunks; not for trees that start from a prefix."""
        if size not in self._chunks:
            self._chunks[size] = self._make_chunks(size)
        return self._chunks[size]

    def _make_chunks(self, size: int) -> Chunks:
        spans: list[tuple[int, int]] = []
        parents: list[int | None] = []
        levels: list[list[int]] = []
        depths: list[int] = []
        last_chunks: list[int] = []
        for piece in self.pieces:
            parent = None
            if piece.parent is not None:
                parent = last_chunks[piece.parent]
            for start in range(piece.start, piece.end, size):
                depth = 0
                if parent is not None:
                    depth = depths[parent] + 1
                if depth == len(levels):
                    levels.append([])
                levels[depth].append(len(spans))
                spans.append((start, min(start + size, piece.end)))
                parents.append(parent)
                depths.append(depth)
                parent = len(spans) - 1
            last_chunks.append(len(spans) - 1)
        tokens = []
        is_token = []
        made = []
        having = {parent for parent in parents if parent is not None}
        # The places of the chunks above, among those that have children. Chunks of the first level
        # have none above, and `gated_delta_rule` starts them from zeros without looking.
        places_above: dict[int | None, int] = {None: 0}
        for chunks in levels:
            for chunk in chunks:
                start, end = spans[chunk]
                places = start + np.arange(size)
                is_token.append(places < end)
                tokens.append(places.clip(max=end - 1))
            with_children = [place for place, chunk in enumerate(chunks) if chunk in having]
            made.append(
                Level(
                    parents=self._tensor(np.array([places_above[parents[c]] for c in chunks])),
                    with_children=self._tensor(np.array(with_children, dtype=np.int64)),
                )
            )
            places_above = {chunks[place]: n for n, place in enumerate(with_children)}
        slots = Slots.of(np.concatenate(tokens), np.concatenate(is_token), self.device)
        return Chunks(slots, size, tuple(len(chunks) for chunks in levels), tuple(made))

    @cached_property
    def steps(self) -> Steps:
        """The plan of a recurrence that goes token by token, for all trees at once."""
        parent_T = np.empty(self.num_tokens, dtype=np.int64)
        step_T = np.empty(self.num_tokens, dtype=np.int64)
        starts: list[int | None] = []
        for piece in self.pieces:
            own = np.arange(piece.start, piece.end)
            parent_T[own] = own - 1  # the first token of a root has none: it is never looked up
            first_step = 0
            if piece.parent is None:
                starts.append(piece.prefix_of)
            else:
                last = self.pieces[piece.parent].end - 1
                parent_T[piece.start] = last
                first_step = step_T[last] + 1
            step_T[own] = first_step + np.arange(len(own))
        # Stable: the first tokens of the roots stay in the order of `starts`.
        order_N = np.argsort(step_T, kind="stable")
        slot_T = np.empty_like(order_N)
        slot_T[order_N] = np.arange(self.num_tokens)
        # Where each position begins in this order, and after them where the last one ends.
        bounds = np.searchsorted(step_T[order_N], np.arange(step_T.max() + 2))
        parents = []
        for step in range(1, len(bounds) - 1):
            tokens = order_N[bounds[step] : bounds[step + 1]]
            parents.append(self._tensor(slot_T[parent_T[tokens]] - bounds[step - 1]))
        return Steps(
            Slots.of(order_N, np.ones(self.num_tokens, dtype=bool), self.device),
            sizes=tuple(np.diff(bounds).tolist()),
            parents=tuple(parents),
            starts=tuple(starts),
            kept=tuple(int(slot_T[self.pieces[number].end - 1]) for number in self.kept),
        )

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)
