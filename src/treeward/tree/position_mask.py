"""`PositionMask`: which tokens of a row of trees see each other in one type of layer, as parts that
a CPU computes.

    mask = PositionMask(mask_function, layout)          # of transformers, and of one row
    mask.parts                          # slices of queries against slices of keys
    mask.tree_mask(tree, device)        # the same of one tree, written out

For windows and chunks queries are cut into blocks, so that cost and memory follow the window.

Shapes: N tokens of a tree, P of its prefix, Q queries, K keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from treeward.errors import ModelError
from treeward.tree.batch import TreeLayout, TreeSpan
from treeward.tree.flex import MaskFunction

CALL_COST = 4000
"""The cost of one more flash call, in mask elements per head: measured on 2 CPU cores (forward and
backward, 4 heads of 64), where a call takes about 0.15 ms and a masked element about 34 ns. It
decides between slices and a small mask."""

BLOCK = 256
"""Queries of one part in a layer with a window: the mask covers at most so many keys too many.
Without this cut a layer of Gemma 3 took 1.3 to 1.4 of the time at 2,100 to 3,000 tokens, and 0.94
at 450."""


@dataclass(frozen=True, slots=True)
class Part:
    """Queries [q_start, q_end) against keys [k_start, k_end) of the row, or of the prefix of tree
    `prefix_of`.

    `causal`: query i sees keys up to i. `mask_QK`: the visible keys, or None for all. `first`: no
    earlier part wrote these queries.
    """

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    causal: bool
    mask_QK: Tensor | None
    first: bool
    prefix_of: int | None = None

    @property
    def area(self) -> int:
        """The number of query-key products."""
        area = (self.q_end - self.q_start) * (self.k_end - self.k_start)
        if self.causal:
            return area // 2
        return area


class KeyRun(NamedTuple):
    """Keys [start, end) of the row, or of the tree's prefix; `position`: of the first, in the
    conversation."""

    start: int
    end: int
    position: int
    in_prefix: bool

    @property
    def stop(self) -> int:
        """The position after the last key."""
        return self.position + self.end - self.start

    def clipped(self, low: int, stop: int) -> KeyRun:
        """The keys at the positions [low, stop); empty if `start` is not below `end`."""
        first = max(low, self.position)
        last = min(stop, self.stop)
        offset = self.start - self.position
        return KeyRun(first + offset, last + offset, first, self.in_prefix)


@dataclass(frozen=True, slots=True)
class Window:
    """Queries [q_start, q_end) of one segment, and the runs of keys of their path from the first
    visible one, root first.

    `start`: the position of the first query. `low`, `high`: the first position that the first, the
    last query sees.
    """

    q_start: int
    q_end: int
    start: int
    low: int
    high: int
    keys: tuple[KeyRun, ...]


class PositionMask:
    """One layer type's mask over one row, for one forward pass and its backward.

    transformers passes it to attention layers in place of a tensor; its parts serve all layers of
    the type.
    """

    def __init__(self, mask_function: MaskFunction, layout: TreeLayout) -> None:
        self.mask_function = mask_function
        self.layout = layout
        self._windows: dict[int, list[Window] | None] = {}
        self._masks: dict[tuple[int, torch.device], Tensor] = {}
        self._first_seen: dict[int, int] = {}

    def allowed(self, queries_Q: Tensor, keys_K: Tensor) -> Tensor:
        """The key positions that each query position sees, bool (Q, K)."""
        zero = torch.zeros((), dtype=torch.long)
        # Not every function has the shape of the pairs: one that is not causal looks at the query
        # alone, (Q, 1).
        allowed = self.mask_function(zero, zero, queries_Q[:, None], keys_K[None, :])
        return torch.as_tensor(allowed).expand(len(queries_Q), len(keys_K))

    @cached_property
    def parts(self) -> list[Part]:
        """The parts, which cover exactly the visible keys of all tokens; small trees become one
        masked part.

        Raises `ModelError` for a mask that is not causal, or that has holes.
        """
        parts: list[Part] = []
        for number, tree in enumerate(self.layout.trees):
            tree_parts = list(self._tree_parts(tree))
            # Many short segments are many calls: then one masked call over the whole square, with
            # pairs that do not see each other, costs less.
            cost = sum(part.area for part in tree_parts) + CALL_COST * (len(tree_parts) - 1)
            if len(tree_parts) > 1 and len(tree) ** 2 <= cost:
                mask = self._visible(tree)[:, tree.num_prefix_tokens :]
                whole = Part(tree.start, tree.end, tree.start, tree.end, False, mask, first=True)
                tree_parts = [whole]
            parts += tree_parts
            parts += self._prefix_parts(number, tree)
        return parts

    def tree_mask(self, tree: TreeSpan, device: torch.device) -> Tensor:
        """The mask of one tree's tokens over its prefix and themselves, bool (N, P + N)."""
        key = (tree.start, device)
        if key not in self._masks:
            self._masks[key] = self._visible(tree).to(device)
        return self._masks[key]

    def windows(self, tree: TreeSpan) -> list[Window] | None:
        """A tree's queries in blocks, each with its keys; None if the last token sees
        everything."""
        if tree.start not in self._windows:
            last = torch.tensor([tree.depth - 1])
            # Asked of the first query and the last key, the pair that is farthest from causal.
            if tree.depth > 1 and bool(self.allowed(torch.tensor([0]), last).any()):
                raise ModelError(
                    "this model's attention sees later tokens, so its conversations cannot share "
                    "a prefix",
                    where="policy.attention",
                    fix="policy.attention=rows",
                )
            # What the last query of the longest path sees, all queries see of their own paths.
            sees_all = bool(self.allowed(last, torch.arange(tree.depth)).all())
            windows = None
            if not sees_all:
                windows = list(self._cut(tree))
            self._windows[tree.start] = windows
        return self._windows[tree.start]

    def first_seen(self, query: int) -> int:
        """The first position that a query sees. Raises `ModelError` unless it sees all from there
        to itself."""
        if query not in self._first_seen:
            seen = self.allowed(torch.tensor([query]), torch.arange(query + 1))[0]
            first = int(seen.int().argmax())
            if not bool(seen[first:].all()):
                raise ModelError(
                    "this model's attention pattern has holes that tree attention cannot follow",
                    where="policy.attention",
                    fix="policy.attention=rows",
                )
            self._first_seen[query] = first
        return self._first_seen[query]

    def _visible(self, tree: TreeSpan) -> Tensor:
        """The rule `k <= q < subtree_end[k]` and the mask function, written out: bool (N, P +
        N)."""
        # A prefix hangs above the root: its positions are the first ones, and all tokens see it.
        prefix = torch.arange(tree.num_prefix_tokens)
        tokens = torch.arange(tree.start, tree.end)
        lengths = torch.tensor([len(segment) for segment in tree.segments])
        ends = torch.tensor([segment.subtree_end for segment in tree.segments])
        ends = ends.repeat_interleave(lengths)
        depths = [
            torch.arange(segment.depth, segment.depth + len(segment)) for segment in tree.segments
        ]
        positions = torch.cat(depths)
        seen = (tokens[None, :] <= tokens[:, None]) & (tokens[:, None] < ends[None, :])
        prefix_seen = torch.ones(len(tokens), len(prefix), dtype=torch.bool)
        seen = torch.cat([prefix_seen, seen], dim=1)
        return seen & self.allowed(positions, torch.cat([prefix, positions]))

    def _tree_parts(self, tree: TreeSpan) -> Iterator[Part]:
        """The parts of a tree's tokens among themselves."""
        windows = self.windows(tree)
        if windows is None:
            for segment in tree.segments:
                span = (segment.start, segment.end)
                yield Part(*span, *span, True, None, first=True)
            # A segment is seen whole by the segments below it, which lie behind it.
            for segment in tree.segments:
                if segment.subtree_end > segment.end:
                    below = (segment.end, segment.subtree_end)
                    yield Part(*below, segment.start, segment.end, False, None, first=False)
            return
        for window in windows:
            # A window's queries among themselves: causal, unless the last one no longer sees the
            # first.
            queries = (window.q_start, window.q_end)
            if window.high <= window.start:
                yield Part(*queries, *queries, True, None, first=True)
            else:
                num_queries = window.q_end - window.q_start
                positions = torch.arange(window.start, window.start + num_queries)
                mask = self.allowed(positions, positions)
                yield Part(*queries, *queries, False, mask, first=True)
            yield from self._before(window, in_prefix=False)

    def _prefix_parts(self, number: int, tree: TreeSpan) -> Iterator[Part]:
        """The parts of a tree's tokens against its prefix; each comes after the tokens' first
        part."""
        windows = self.windows(tree)
        if windows is None:
            if tree.num_prefix_tokens:
                keys = (0, tree.num_prefix_tokens)
                yield Part(tree.start, tree.end, *keys, False, None, first=False, prefix_of=number)
            return
        for window in windows:
            for part in self._before(window, in_prefix=True):
                yield replace(part, prefix_of=number)

    def _cut(self, tree: TreeSpan) -> Iterator[Window]:
        for segment in tree.segments:
            path = []
            if tree.num_prefix_tokens:
                path.append(KeyRun(0, tree.num_prefix_tokens, 0, True))
            for above in tree.path(segment):
                path.append(KeyRun(above.start, above.end, above.depth, False))
            segment_stop = segment.depth + len(segment)
            for start in range(segment.depth, segment_stop, BLOCK):
                stop = min(start + BLOCK, segment_stop)
                # The first key that a query sees never decreases along a path, so that the first
                # query and the last bound all between them.
                low = self.first_seen(start)
                high = self.first_seen(stop - 1)
                clipped = [run.clipped(low, stop) for run in path]
                keys = tuple(run for run in clipped if run.start < run.end)
                q_start = segment.start + start - segment.depth
                yield Window(q_start, q_start + stop - start, start, low, high, keys)

    def _before(self, window: Window, *, in_prefix: bool) -> Iterator[Part]:
        """The parts of a window's queries against earlier keys: keys that all of them see, and keys
        that some see."""
        num_queries = window.q_end - window.q_start
        queries = torch.arange(window.start, window.start + num_queries)
        # From here on, up to the queries themselves, every query sees every key.
        seen_by_all = max(window.low, min(window.high, window.start))
        for run in window.keys:
            if run.in_prefix != in_prefix:
                continue
            keys = run.clipped(window.low, seen_by_all)
            if keys.start < keys.end:
                mask = self.allowed(queries, torch.arange(keys.position, keys.stop))
                # Flash attention has no value for a query that sees no key: later ones see less.
                num_seeing = int(mask.any(dim=1).sum())
                if num_seeing:
                    q_end = window.q_start + num_seeing
                    mask = mask[:num_seeing]
                    yield Part(
                        window.q_start, q_end, keys.start, keys.end, False, mask, first=False
                    )
            keys = run.clipped(seen_by_all, window.start)
            if keys.start < keys.end:
                yield Part(
                    window.q_start, window.q_end, keys.start, keys.end, False, None, first=False
                )
