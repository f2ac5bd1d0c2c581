"""Attention over a `TreeBatch`: a token sees itself, the earlier tokens of its segment, and the segments above it.

    register()
    with over(batch.layout):
        model(...)          # set to one of the implementations below

- `TREE`: anywhere. On a CPU flash attention over slices, merged by their log-sum-exp, or one small mask where that is
  quicker; elsewhere one masked SDPA call per tree.
- `FLEX` (`treeward.tree.flex`): for GPUs, where compiled layers need it, in rows of few lengths.

Shapes: B batch (1: a row), H heads, J key/value heads, R = H / J, T tokens of the row, N of a tree, Q queries, K keys,
D head dimension.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._triton import has_triton
from transformers import AttentionInterface, AttentionMaskInterface

from treeward.errors import ModelError
from treeward.tree import flex
from treeward.tree.batch import TreeLayout, TreeSpan
from treeward.tree.flex import FlexMask
from treeward.tree.mask import MaskFunction, Part, PositionMask
from treeward.tree.prefix import Prefixes

TREE = "treeward_tree"
FLEX = "treeward_flex"

_row: ContextVar[TreeLayout | None] = ContextVar("_row", default=None)


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


def _mask_maker(make: Callable[[MaskFunction, TreeLayout], object]) -> Callable[..., object]:
    def make_mask(*, mask_function: MaskFunction, **_: Any) -> object:
        layout = _row.get()
        if layout is None:
            raise ModelError(
                "tree attention was called without a tree", where="policy.attention", fix="policy.attention=rows"
            )
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
