"""Attention over a `TreeBatch`: a token sees itself, the earlier tokens of its segment, and the segments above it.

    register()
    with over(batch.layout):
        model(...)          # set to one of the implementations below

- `TREE`: anywhere. On a CPU flash attention over slices, merged by their log-sum-exp, or one small mask where that is
  quicker; elsewhere one masked SDPA call per tree.
- `FLEX` (`treeward.tree.flex`): for GPUs, where compiled layers need it, in rows of few lengths.

`PositionMask` says which tokens see each other, as parts that a CPU computes one by one. For windows and chunks queries
are cut into blocks, so that cost and memory follow the window.

Shapes: B batch (1: a row), H heads, J key/value heads, R = H / J, T tokens of the row, N of a tree, P of its prefix, Q
queries, K keys, D head dimension.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._triton import has_triton
from transformers import AttentionInterface, AttentionMaskInterface

from treeward.errors import ModelError
from treeward.tree import flex
from treeward.tree.batch import TreeLayout, TreeSpan
from treeward.tree.flex import FlexMask, MaskFunction
from treeward.tree.prefix import Prefixes

TREE = "treeward_tree"
FLEX = "treeward_flex"

CALL_COST = 4000
"""The cost of one more flash call, in mask elements per head: measured on 2 CPU cores (forward and backward, 4 heads of
64), where a call takes about 0.15 ms and a masked element about 34 ns. It decides between slices and a small mask."""

BLOCK = 256
"""Queries of one part in a layer with a window: the mask covers at most so many keys too many."""

_row: ContextVar[TreeLayout | None] = ContextVar("_row", default=None)
_probed_depth: ContextVar[int | None] = ContextVar("_probed_depth", default=None)


def register() -> None:
    """Make the implementations known to transformers. Safe to repeat."""
    for name, attend, mask in (
        (TREE, _tree_attention, PositionMask),
        (FLEX, flex.attend, FlexMask),
    ):
        AttentionInterface.register(name, _layer_attention(attend))
        # Without a mask function of its own an implementation gets no mask, and never learns of a sliding window.
        AttentionMaskInterface.register(name, _mask_maker(mask))


def default_for(device: torch.device, head_sizes: Collection[int]) -> str:
    """The implementation for a device. FlexAttention has no smaller heads than 16."""
    return FLEX if device.type == "cuda" and has_triton() and all(size >= 16 for size in head_sizes) else TREE


@contextlib.contextmanager
def over(layout: TreeLayout) -> Iterator[None]:
    """A context in which models make their masks for this row."""
    token = _row.set(layout)
    try:
        yield
    finally:
        _row.reset(token)


@contextlib.contextmanager
def probing(depth: int) -> Iterator[None]:
    """A context in which a layer's mask raises `ModelError` if it has holes in a path of `depth` tokens. `FlexMask`
    takes for granted that there are none, and a short conversation may have none."""
    token = _probed_depth.set(depth)
    try:
        yield
    finally:
        _probed_depth.reset(token)


def _mask_maker(make: Callable[[MaskFunction, TreeLayout], object]) -> Callable[..., object]:
    def make_mask(*, mask_function: MaskFunction, **_: Any) -> object:
        layout = _row.get()
        if layout is None:
            raise ModelError(
                "tree attention was called without a tree", where="policy.attention", fix="policy.attention=rows"
            )
        if (depth := _probed_depth.get()) is not None:
            PositionMask(mask_function, layout).first_seen(depth - 1)
        return make(mask_function, layout)

    return make_mask


Attend = Callable[[Tensor, Tensor, Tensor, Any, float, float | None, Tensor | None], Tensor]
"""The output (B, H, T, D) of queries, keys and values, a mask of ours, the scale, a soft-cap and sinks (H,)."""


@functools.cache
def _layer_attention(attend: Attend) -> Callable[..., tuple[Tensor, None]]:
    """The function that transformers' layers call; always the same one, by which compilers distinguish layers."""

    def layer_attention(
        module: torch.nn.Module,
        query_BHTD: Tensor,
        key_BJTD: Tensor,
        value_BJTD: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        _check(module, query_BHTD, attention_mask, kwargs)
        scale = query_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
        out = attend(query_BHTD, key_BJTD, value_BJTD, attention_mask, scale, softcap, s_aux)
        return out.transpose(1, 2), None

    return layer_attention


def _check(module: torch.nn.Module, query_BHTD: Tensor, mask: Any, kwargs: dict[str, Any]) -> None:
    """Raise `ModelError` for a call that tree attention cannot compute exactly."""
    if not isinstance(mask, PositionMask | FlexMask):
        raise ModelError(
            "this model builds its attention mask by itself",
            where=type(module).__name__,
            got=type(mask).__name__,
            need="a model that builds its masks through transformers' mask interface",
            fix="policy.attention=rows",
        )
    for name in ("position_bias", "indices"):  # relative positions; keys that the model selects by itself
        if kwargs.get(name) is not None:
            raise ModelError(f"tree attention has no {name}", where=type(module).__name__, fix="policy.attention=rows")
    dropout = kwargs.get("dropout")
    assert not dropout, f"dropout is off in reward models, got {dropout}"
    assert query_BHTD.shape[0] == 1 and query_BHTD.shape[2] == len(mask.layout.positions_T), query_BHTD.shape


def _tree_attention(
    query_BHTD: Tensor,
    key_BJTD: Tensor,
    value_BJTD: Tensor,
    mask: PositionMask,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    layout = mask.layout
    if padding := query_BHTD.shape[2] - layout.num_tokens:  # the padding of a row sees nothing
        query, key, value = (x[:, :, : layout.num_tokens] for x in (query_BHTD, key_BJTD, value_BJTD))
        return F.pad(_tree_attention(query, key, value, mask, scale, softcap, sinks_H), (0, 0, 0, padding))
    prefixes = None if layout.exchange is None else layout.exchange.enter(key_BJTD, value_BJTD)
    if softcap is not None or sinks_H is not None:
        return _by_tree(
            query_BHTD,
            key_BJTD,
            value_BJTD,
            layout,
            lambda q, k, v, tree: _written_out(q, k, v, mask, tree, scale, softcap, sinks_H),
            prefixes,
        )
    if query_BHTD.device.type != "cpu" or query_BHTD.shape[-1] != value_BJTD.shape[-1]:
        return _masked_attention(query_BHTD, key_BJTD, value_BJTD, mask, scale, prefixes)
    dtype = value_BJTD.dtype
    # In half precision flash attention on a CPU is no faster for long segments, and much slower for short ones.
    at_least = torch.promote_types(dtype, torch.float32)
    query_BHTD, key_BJTD, value_BJTD = (x.to(at_least) for x in (query_BHTD, key_BJTD, value_BJTD))
    out: Tensor
    if prefixes is None:
        out = _SlicedAttention.apply(query_BHTD, key_BJTD, value_BJTD, mask.parts, scale)  # type: ignore[no-untyped-call]
    else:
        out, _ = _sliced(query_BHTD, key_BJTD, value_BJTD, mask.parts, scale, prefixes)
        out = out.view(query_BHTD.shape)
    return out.to(dtype)


def _by_tree(
    query_BHTD: Tensor,
    key_BJTD: Tensor,
    value_BJTD: Tensor,
    layout: TreeLayout,
    attend: Callable[[Tensor, Tensor, Tensor, TreeSpan], Tensor],
    prefixes: Prefixes | None = None,
) -> Tensor:
    sizes = [len(tree) for tree in layout.trees]
    # split, not slices: its backward writes each gradient once, where a slice's fills a whole row with zeros
    queries, keys, values = (torch.split(x, sizes, dim=2) for x in (query_BHTD, key_BJTD, value_BJTD))
    outs = []
    for t, tree in enumerate(layout.trees):
        key, value = keys[t], values[t]
        if prefixes is not None and (prefix := prefixes[t]) is not None:
            key, value = (torch.cat([x.to(new)[None], new], dim=2) for x, new in zip(prefix, (key, value), strict=True))
        outs.append(attend(queries[t], key, value, tree))
    return torch.cat(outs, dim=2)


def _masked_attention(
    query_BHTD: Tensor,
    key_BJTD: Tensor,
    value_BJTD: Tensor,
    mask: PositionMask,
    scale: float,
    prefixes: Prefixes | None = None,
) -> Tensor:
    """One call of PyTorch's attention per tree, with a mask (any device)."""
    # Not `enable_gqa`: together with a mask it leaves CUDA only the slow kernel (transformers avoids it too).
    repeats = query_BHTD.shape[1] // key_BJTD.shape[1]

    def attend(query: Tensor, key: Tensor, value: Tensor, tree: TreeSpan) -> Tensor:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, mask.tree_mask(tree, query.device), scale=scale)

    return _by_tree(query_BHTD, key_BJTD, value_BJTD, mask.layout, attend, prefixes)


def _written_out(
    query_BHND: Tensor,
    key_BJKD: Tensor,
    value_BJKD: Tensor,
    mask: PositionMask,
    tree: TreeSpan,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """`_arithmetic` of one tree, with the keys of its prefix and its N tokens; by windows if it has them."""
    windows = mask.windows(tree)
    if windows is None:
        seen = mask.tree_mask(tree, query_BHND.device)
        return _arithmetic(query_BHND, key_BJKD, value_BJKD, seen, scale, softcap, sinks_H)
    before, outs = tree.num_prefix_tokens - tree.start, []
    for window in windows:
        places = [
            (low, high) if in_prefix else (low + before, high + before) for low, high, _, in_prefix in window.keys
        ]
        key, value = (torch.cat([x[:, :, a:b] for a, b in places], dim=2) for x in (key_BJKD, value_BJKD))
        query = query_BHND[:, :, window.q_start - tree.start : window.q_end - tree.start]
        positions = torch.arange(window.low, window.start + query.shape[2])
        seen = mask.allowed(positions[window.start - window.low :], positions).to(query.device)
        outs.append(_arithmetic(query, key, value, seen, scale, softcap, sinks_H))
    return torch.cat(outs, dim=2)


def _arithmetic(
    query_BHND: Tensor,
    key_BJND: Tensor,
    value_BJND: Tensor,
    mask_NN: Tensor,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attention written out: soft-cap c tanh(s / c) before the mask; a sink is one more key without a value."""
    repeats = query_BHND.shape[1] // key_BJND.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key_BJND, value_BJND))
    scores = (query_BHND @ key.transpose(2, 3)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask_NN, torch.finfo(scores.dtype).min).float()
    if sinks_H is not None:
        sinks = sinks_H.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return weights.to(value.dtype) @ value


def _sliced(
    query_BHTD: Tensor,
    key_BJTD: Tensor,
    value_BJTD: Tensor,
    parts: Sequence[Part],
    scale: float,
    prefixes: Prefixes | None = None,
) -> tuple[Tensor, Tensor]:
    """The merged output of the parts of a row (J, R, T, D), and its log-sum-exp (J, R, T)."""
    query, key, value = _by_key_head(query_BHTD, key_BJTD, value_BJTD)
    repeats = query.shape[1]
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    for part in parts:
        q, k = slice(part.q_start, part.q_end), slice(part.k_start, part.k_end)
        keys, values = key, value
        if part.prefix_of is not None:
            assert prefixes is not None and (prefix := prefixes[part.prefix_of]) is not None
            keys, values = (x.to(query.dtype).unsqueeze(1).expand(-1, repeats, -1, -1) for x in prefix)
        part_out, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[:, :, q],
            keys[:, :, k],
            values[:, :, k],
            0.0,
            part.causal,
            attn_mask=_additive(part.mask_QK, query.dtype),
            scale=scale,
        )
        if part.first:
            out[:, :, q], lse[:, :, q] = part_out, part_lse
        else:
            merged = torch.logaddexp(lse[:, :, q], part_lse)
            old_weight, weight = (torch.exp(x - merged).unsqueeze(-1) for x in (lse[:, :, q], part_lse))
            out[:, :, q] = out[:, :, q] * old_weight + part_out * weight
            lse[:, :, q] = merged
    return out, lse


class _SlicedAttention(torch.autograd.Function):
    """Flash attention over the parts p of a row, merged by log-sum-exp (CPU): L = log sum_p exp(l_p), o = sum_p exp(l_p
    - L) o_p. Given the *merged* o and L, flash attention's backward gives each part's gradient: its probabilities are
    exp(s - L)."""

    @staticmethod
    def forward(
        ctx: Any, query_BHTD: Tensor, key_BJTD: Tensor, value_BJTD: Tensor, parts: Sequence[Part], scale: float
    ) -> Tensor:
        out, lse = _sliced(query_BHTD, key_BJTD, value_BJTD, parts, scale)
        ctx.save_for_backward(query_BHTD, key_BJTD, value_BJTD, out, lse)
        ctx.parts, ctx.scale = parts, scale
        return out.view(query_BHTD.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query_BHTD, key_BJTD, value_BJTD, out, lse = ctx.saved_tensors
        query, key, value = _by_key_head(query_BHTD, key_BJTD, value_BJTD)
        grad_out = grads[0].reshape(query.shape)
        grad_query = torch.empty_like(query)
        grad_key, grad_value = torch.zeros_like(key_BJTD[0]), torch.zeros_like(value_BJTD[0])
        for part in ctx.parts:
            q, k = slice(part.q_start, part.q_end), slice(part.k_start, part.k_end)
            part_query, part_key, part_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out[:, :, q],
                query[:, :, q],
                key[:, :, k],
                value[:, :, k],
                out[:, :, q],
                lse[:, :, q],
                0.0,
                part.causal,
                attn_mask=_additive(part.mask_QK, query.dtype),
                scale=ctx.scale,
            )
            if part.first:
                grad_query[:, :, q] = part_query
            else:
                grad_query[:, :, q] += part_query
            grad_key[:, k] += part_key.sum(dim=1)
            grad_value[:, k] += part_value.sum(dim=1)
        return grad_query.view(query_BHTD.shape), grad_key.unsqueeze(0), grad_value.unsqueeze(0), None, None


def _by_key_head(query_BHTD: Tensor, key_BJTD: Tensor, value_BJTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views (J, R, T, D): the key heads become the batch, and the heads that share one read it with stride 0."""
    _, heads, tokens, dim = query_BHTD.shape
    key_heads = key_BJTD.shape[1]
    query = query_BHTD.reshape(key_heads, heads // key_heads, tokens, dim)
    key, value = (x.transpose(0, 1).expand(query.shape) for x in (key_BJTD, value_BJTD))
    return query, key, value


def _additive(mask_QK: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask_QK is None:
        return None
    return torch.zeros(mask_QK.shape, dtype=dtype).masked_fill_(~mask_QK, float("-inf"))


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


class QueryRun(NamedTuple):
    """Keys [start, end) of the row, or of the tree's prefix; `position`: of the first, in the conversation."""

    start: int
    end: int
    position: int
    in_prefix: bool

    @property
    def stop(self) -> int:
        """The position after the last key."""
        return self.position + self.end - self.start

    def clipped(self, low: int, stop: int) -> QueryRun:
        """The keys at the positions [low, stop); empty if `start` is not below `end`."""
        first, last = max(low, self.position), min(stop, self.stop)
        offset = self.start - self.position
        return QueryRun(first + offset, last + offset, first, self.in_prefix)


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
    keys: tuple[QueryRun, ...]


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
            path = [QueryRun(above.start, above.end, above.depth, False) for above in tree.path(segment)]
            if tree.num_prefix_tokens:
                path.insert(0, QueryRun(0, tree.num_prefix_tokens, 0, True))
            for start in range(segment.depth, segment.depth + len(segment), BLOCK):
                end = min(start + BLOCK, segment.depth + len(segment))
                low, high = self.first_seen(start), self.first_seen(end - 1)
                keys = tuple(run for run in (run.clipped(low, end) for run in path) if run.start < run.end)
                q_start = segment.start + start - segment.depth
                yield Window(q_start, q_start + end - start, start, low, high, keys)

    def first_seen(self, query: int) -> int:
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
