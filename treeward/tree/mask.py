"""`PositionMask`: which tokens of a `TreeBatch` see each other, as parts that attention computes one by one.

    mask = PositionMask(mask_function, layout)      # of one layer type, from transformers, and of one row
    for part in mask.parts: ...                     # queries [q_start, q_end) against keys [k_start, k_end)

For windows and chunks, queries are cut into blocks, so that cost and memory follow the window.

Shapes: Q queries, K keys, N tokens of a tree, P of its prefix, T of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treeward.errors import ModelError
from treeward.tree.batch import TreeLayout, TreeSpan
from treeward.tree.token_tree import Segment

CALL_COST = 4000
"""The cost of one more flash call, in mask elements per head: measured on 2 CPU cores (forward and backward, 4 heads of
64), where a call takes about 0.15 ms and a masked element about 34 ns. It decides between slices and a small mask."""

BLOCK = 256
"""Queries of one part in a layer with a window: the mask covers at most so many keys too many."""

MaskFunction = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Part:
    """Queries [q_start, q_end) against keys [k_start, k_end) of the row, or of the prefix of tree `prefix_of`.
    `causal`: query i sees keys up to i. `mask_QK`: the visible keys, or None for all. `first`: no earlier part wrote
    these queries."""

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
        return area // 2 if self.causal else area


class Run(NamedTuple):
    """Keys [start, end) of the row, or of the tree's prefix; `position`: of the first, in the conversation."""

    start: int
    end: int
    position: int
    in_prefix: bool

    @property
    def stop(self) -> int:
        """The position after the last key."""
        return self.position + self.end - self.start

    def clipped(self, low: int, stop: int) -> Run:
        """The keys at the positions [low, stop); empty if `start` is not below `end`."""
        first, last = max(low, self.position), min(stop, self.stop)
        offset = self.start - self.position
        return Run(first + offset, last + offset, first, self.in_prefix)


@dataclass(frozen=True, slots=True)
class Window:
    """Queries [q_start, q_end) of one segment, and the runs of keys of their path from the first visible one, root
    first. `start`: the position of the first query. `low`, `high`: the first position that the first, the last query
    sees."""

    q_start: int
    q_end: int
    start: int
    low: int
    high: int
    keys: tuple[Run, ...]


class PositionMask:
    """One layer type's mask over one row, for one forward pass and its backward. transformers passes it to attention
    layers in place of a tensor; its parts serve all layers of the type."""

    def __init__(self, mask_function: MaskFunction, layout: TreeLayout) -> None:
        self.mask_function, self.layout = mask_function, layout
        self._windows: dict[int, list[Window] | None] = {}
        self._masks: dict[tuple[int, torch.device], Tensor] = {}
        self._first_seen: dict[int, int] = {}

    def allowed(self, queries_Q: Tensor, keys_K: Tensor) -> Tensor:
        """The key positions that each query position sees, bool (Q, K)."""
        zero = torch.zeros((), dtype=torch.long)
        allowed = self.mask_function(zero, zero, queries_Q[:, None], keys_K[None, :])
        return torch.as_tensor(allowed).expand(len(queries_Q), len(keys_K))

    @cached_property
    def parts(self) -> list[Part]:
        """The parts, which cover exactly the visible keys of all tokens; small trees become one masked part. Raises
        `ModelError` for a mask that is not causal, or that has holes."""
        parts: list[Part] = []
        for t, tree in enumerate(self.layout.trees):
            tree_parts = list(self._tree_parts(tree))
            cost = sum(part.area for part in tree_parts) + CALL_COST * (len(tree_parts) - 1)
            if len(tree_parts) > 1 and len(tree) ** 2 <= cost:
                mask = self._visible(tree)[:, tree.num_prefix_tokens :]
                tree_parts = [Part(tree.start, tree.end, tree.start, tree.end, False, mask, first=True)]
            parts += [*tree_parts, *self._prefix_parts(t, tree)]
        return parts

    def windows(self, tree: TreeSpan) -> list[Window] | None:
        """A tree's queries in blocks, each with its keys; None if the last token sees everything."""
        if tree.start not in self._windows:
            last = torch.tensor([tree.depth - 1])
            if tree.depth > 1 and bool(self.allowed(torch.tensor([0]), last).any()):
                raise ModelError(
                    "this model's attention sees later tokens, so its conversations cannot share a prefix",
                    where="policy.attention",
                    fix="policy.attention=rows",
                )
            sees_all = bool(self.allowed(last, torch.arange(tree.depth)).all())
            self._windows[tree.start] = None if sees_all else list(self._cut(tree))
        return self._windows[tree.start]

    def tree_mask(self, tree: TreeSpan, device: torch.device) -> Tensor:
        """The mask of one tree's tokens over its prefix and themselves, bool (N, P + N)."""
        key = (tree.start, device)
        if key not in self._masks:
            self._masks[key] = self._visible(tree).to(device)
        return self._masks[key]

    def _visible(self, tree: TreeSpan) -> Tensor:
        """The rule `k <= q < subtree_end[k]` and the mask function, written out: bool (N, P + N)."""
        prefix = torch.arange(tree.num_prefix_tokens)
        tokens = torch.arange(tree.start, tree.end)
        lengths = torch.tensor([len(segment) for segment in tree.segments])
        ends = torch.tensor([segment.subtree_end for segment in tree.segments]).repeat_interleave(lengths)
        positions = torch.cat([torch.arange(segment.depth, segment.depth + len(segment)) for segment in tree.segments])
        seen = (tokens[None, :] <= tokens[:, None]) & (tokens[:, None] < ends[None, :])
        seen = torch.cat([torch.ones(len(tokens), len(prefix), dtype=torch.bool), seen], dim=1)
        return seen & self.allowed(positions, torch.cat([prefix, positions]))

    def _tree_parts(self, tree: TreeSpan) -> Iterator[Part]:
        windows = self.windows(tree)
        for segment in tree.segments if windows is None else ():
            yield Part(segment.start, segment.end, segment.start, segment.end, True, None, first=True)
        for segment in tree.segments if windows is None else ():
            if segment.subtree_end > segment.end:
                yield Part(segment.end, segment.subtree_end, segment.start, segment.end, False, None, first=False)
        for window in windows or ():
            yield self._diagonal(window)
            yield from self._before(window, in_prefix=False)

    def _prefix_parts(self, t: int, tree: TreeSpan) -> Iterator[Part]:
        """The parts of a tree's tokens against its prefix; each comes after the tokens' first part."""
        windows = self.windows(tree)
        if windows is None and tree.num_prefix_tokens:
            yield Part(tree.start, tree.end, 0, tree.num_prefix_tokens, False, None, first=False, prefix_of=t)
        for window in windows or ():
            yield from (replace(part, prefix_of=t) for part in self._before(window, in_prefix=True))

    def _cut(self, tree: TreeSpan) -> Iterator[Window]:
        for segment in tree.segments:
            path: list[Run] = []
            ancestor: Segment | None = segment
            while ancestor is not None:
                path.insert(0, Run(ancestor.start, ancestor.end, ancestor.depth, False))
                ancestor = None if ancestor.parent is None else tree.segments[ancestor.parent]
            if tree.num_prefix_tokens:
                path.insert(0, Run(0, tree.num_prefix_tokens, 0, True))
            for start in range(segment.depth, segment.depth + len(segment), BLOCK):
                end = min(start + BLOCK, segment.depth + len(segment))
                low, high = self._first(start), self._first(end - 1)
                keys = tuple(run for run in (run.clipped(low, end) for run in path) if run.start < run.end)
                q_start = segment.start + start - segment.depth
                yield Window(q_start, q_start + end - start, start, low, high, keys)

    def _first(self, query: int) -> int:
        """The first position that a query sees. Raises `ModelError` unless it sees all from there to itself."""
        if query not in self._first_seen:
            seen = self.allowed(torch.tensor([query]), torch.arange(query + 1))[0]
            self._first_seen[query] = first = int(seen.int().argmax())
            if not bool(seen[first:].all()):
                raise ModelError(
                    "this model's attention pattern has holes that tree attention cannot follow",
                    where="policy.attention",
                    fix="policy.attention=rows",
                )
        return self._first_seen[query]

    def _diagonal(self, window: Window) -> Part:
        """The part of a window's queries among themselves: causal, unless the window is too small."""
        q_start, q_end, start = window.q_start, window.q_end, window.start
        if window.high <= start:
            return Part(q_start, q_end, q_start, q_end, True, None, first=True)
        positions = torch.arange(start, start + q_end - q_start)
        return Part(q_start, q_end, q_start, q_end, False, self.allowed(positions, positions), first=True)

    def _before(self, window: Window, *, in_prefix: bool) -> Iterator[Part]:
        """The parts of a window's queries against earlier keys: keys that all of them see, and keys that some see."""
        high = max(window.low, min(window.high, window.start))
        queries = torch.arange(window.start, window.start + window.q_end - window.q_start)
        for run in window.keys:
            for low, stop in ((window.low, high), (high, window.start)):
                keys = run.clipped(low, stop)
                if run.in_prefix != in_prefix or keys.start >= keys.end:
                    continue
                mask, num_queries = None, len(queries)
                if low < high:
                    mask = self.allowed(queries, torch.arange(keys.position, keys.stop))
                    # Flash attention has no value for a query that sees no key: later ones see less.
                    num_queries = int(mask.any(dim=1).sum())
                    mask = mask[:num_queries].contiguous()
                if num_queries:
                    q_end = window.q_start + num_queries
                    yield Part(window.q_start, q_end, keys.start, keys.end, False, mask, first=False)
