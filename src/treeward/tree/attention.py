"""Attention over a `TreeBatch`: a token sees itself, the earlier tokens of its segment, and the
segments above it.

    register()
    with current_row.over(batch.layout):
        model(...)          # set to one of the implementations below

- `TREE`: anywhere. On a CPU flash attention over slices; elsewhere one masked SDPA call per tree;
  with a soft-cap or sinks written out.
- `FLEX` (`flex.py`): for GPUs, where compiled layers need it, in rows of few lengths.

Shapes: B batch (1: a row), H heads, J key/value heads, R = H / J, T tokens of the row, N of a tree,
P of a prefix, K of its prefix and the tree, Q queries, D head dimension.
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
from treeward.tree import current_row, flex
from treeward.tree.batch import TreeLayout, TreeSpan
from treeward.tree.flex import FlexMask, MaskFunction
from treeward.tree.position_mask import Part, PositionMask
from treeward.tree.prefix import Prefixes

TREE = "treeward_tree"
FLEX = "treeward_flex"

_probed_depth: ContextVar[int | None] = ContextVar("_probed_depth", default=None)


def register() -> None:
    """Make the implementations known to transformers. Safe to repeat."""
    # Without a mask function of its own an implementation gets no mask, and never learns of a
    # sliding window.
    AttentionInterface.register(TREE, layer_attention_of(tree_attention))
    AttentionMaskInterface.register(TREE, mask_maker(PositionMask))
    AttentionInterface.register(FLEX, layer_attention_of(flex.attend))
    AttentionMaskInterface.register(FLEX, mask_maker(FlexMask))


def default_for(device: torch.device, head_sizes: Collection[int]) -> str:
    """The implementation for a device. FlexAttention has no smaller heads than 16."""
    can_flex = device.type == "cuda" and has_triton() and min(head_sizes, default=0) >= 16
    if can_flex:
        return FLEX
    return TREE


@contextlib.contextmanager
def probing(depth: int) -> Iterator[None]:
    """A context in which a layer's mask raises `ModelError` if it has holes in a path of `depth`
    tokens. `FlexMask` takes for granted that there are none, and a short conversation may have
    none."""
    token = _probed_depth.set(depth)
    try:
        yield
    finally:
        _probed_depth.reset(token)


def mask_maker(make: Callable[[MaskFunction, TreeLayout], object]) -> Callable[..., object]:
    def make_mask(*, mask_function: MaskFunction, **_: Any) -> object:
        row = current_row.current()
        if row is None:
            raise ModelError(
                "tree attention was called without a tree",
                where="policy.attention",
                fix="policy.attention=rows",
            )
        layout = row.layout
        depth = _probed_depth.get()
        if depth is not None:
            # The last query of the path sees most keys, so a hole shows there; it raises.
            PositionMask(mask_function, layout).first_seen(depth - 1)
        return make(mask_function, layout)

    return make_mask


Attend = Callable[[Tensor, Tensor, Tensor, Any, float, float | None, Tensor | None], Tensor]
"""The output (B, H, T, D) of queries, keys and values, a mask of ours, the scale, a soft-cap and
sinks (H,)."""


@functools.cache
def layer_attention_of(attend: Attend) -> Callable[..., tuple[Tensor, None]]:
    """The function that transformers' layers call; always the same one, by which compilers
    distinguish layers."""

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
        # `kwargs` may have the layer's sliding window too, which its mask knows already.
        _check(module, query_BHTD, attention_mask, kwargs)
        if scaling is None:
            scaling = query_BHTD.shape[-1] ** -0.5
        out = attend(query_BHTD, key_BJTD, value_BJTD, attention_mask, scaling, softcap, s_aux)
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
    # Relative positions, and keys that the model selects by itself: neither is in the mask.
    for name in ("position_bias", "indices"):
        if kwargs.get(name) is not None:
            raise ModelError(
                f"tree attention has no {name}",
                where=type(module).__name__,
                fix="policy.attention=rows",
            )
    # The kernels have none: a shared prompt would draw once where its rows draw each for itself.
    dropout = kwargs.get("dropout")
    assert not dropout, f"dropout is off in reward models, got {dropout}"
    assert query_BHTD.shape[0] == 1 and query_BHTD.shape[2] == len(mask.layout.positions_T), (
        query_BHTD.shape
    )


def tree_attention(
    query_BHTD: Tensor,
    key_BJTD: Tensor,
    value_BJTD: Tensor,
    mask: PositionMask,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """`TREE`: the output (B, H, T, D)."""
    layout = mask.layout
    num_tokens = layout.num_tokens
    padding = query_BHTD.shape[2] - num_tokens
    # Of a batch that its caller has padded: models pad for FlexAttention alone.
    if padding:  # which no sequence reads, so that any value will do
        query = query_BHTD[:, :, :num_tokens]
        key = key_BJTD[:, :, :num_tokens]
        value = value_BJTD[:, :, :num_tokens]
        out = tree_attention(query, key, value, mask, scale, softcap, sinks_H)
        return F.pad(out, (0, 0, 0, padding))
    # Every layer enters once, whatever kernel follows: the exchange counts the calls.
    prefixes = None
    if layout.exchange is not None:
        prefixes = layout.exchange.enter(key_BJTD, value_BJTD)
    if softcap is None and sinks_H is None:
        # flash attention on a CPU has one head size for queries, keys and values
        has_one_size = query_BHTD.shape[-1] == value_BJTD.shape[-1]
        if query_BHTD.device.type == "cpu" and has_one_size:
            out = sliced_attention(query_BHTD, key_BJTD, value_BJTD, mask.parts, scale, prefixes)
            return out.to(value_BJTD.dtype)
        return masked_attention(query_BHTD, key_BJTD, value_BJTD, mask, scale, prefixes)

    def attend(query: Tensor, key: Tensor, value: Tensor, tree: TreeSpan) -> Tensor:
        if mask.windows(tree) is not None:
            return _written_out_by_windows(query, key, value, mask, tree, scale, softcap, sinks_H)
        seen = mask.tree_mask(tree, query.device)
        return written_out(query, key, value, seen, scale, softcap, sinks_H)

    return _by_tree(query_BHTD, key_BJTD, value_BJTD, layout, attend, prefixes)


def masked_attention(
    query_BHTD: Tensor,
    key_BJTD: Tensor,
    value_BJTD: Tensor,
    mask: PositionMask,
    scale: float,
    prefixes: Prefixes | None = None,
) -> Tensor:
    """One call of PyTorch's attention per tree, with a mask (any device)."""
    # Not `enable_gqa`: together with a mask it leaves CUDA only the slow kernel (transformers
    # avoids it too).
    repeats = query_BHTD.shape[1] // key_BJTD.shape[1]

    def attend(query: Tensor, key: Tensor, value: Tensor, tree: TreeSpan) -> Tensor:
        key = key.repeat_interleave(repeats, dim=1)
        value = value.repeat_interleave(repeats, dim=1)
        seen = mask.tree_mask(tree, query.device)
        return F.scaled_dot_product_attention(query, key, value, seen, scale=scale)

    return _by_tree(query_BHTD, key_BJTD, value_BJTD, mask.layout, attend, prefixes)


def written_out(
    query_BHND: Tensor,
    key_BJKD: Tensor,
    value_BJKD: Tensor,
    mask_NK: Tensor,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attention by its arithmetic: soft-cap c tanh(s / c) before the mask; a sink is one more key
    without a value."""
    repeats = query_BHND.shape[1] // key_BJKD.shape[1]
    key = key_BJKD.repeat_interleave(repeats, dim=1)
    value = value_BJKD.repeat_interleave(repeats, dim=1)
    scores = (query_BHND @ key.transpose(2, 3)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    # The softmax in float32, as eager attention of transformers has it; the least number of the
    # format instead of -inf, of which a row without any key would make NaN.
    scores = scores.masked_fill(~mask_NK, torch.finfo(scores.dtype).min).float()
    if sinks_H is None:
        weights = scores.softmax(dim=-1)
    else:
        # The sink takes its share of the weights and is cut off, because it has no value.
        sinks = sinks_H.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    return weights.to(value.dtype) @ value


def _written_out_by_windows(
    query_BHND: Tensor,
    key_BJKD: Tensor,
    value_BJKD: Tensor,
    mask: PositionMask,
    tree: TreeSpan,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """`written_out` for one tree in blocks of queries, so that memory follows the window."""
    outs = []
    # In the order of the row: segments lie one after another, and so do the blocks of each.
    for window in mask.windows(tree) or ():
        keys = []
        values = []
        for run in window.keys:
            # The keys of the prefix are in front of the tree's.
            offset = 0
            if not run.in_prefix:
                offset = tree.num_prefix_tokens - tree.start
            keys.append(key_BJKD[:, :, run.start + offset : run.end + offset])
            values.append(value_BJKD[:, :, run.start + offset : run.end + offset])
        query = query_BHND[:, :, window.q_start - tree.start : window.q_end - tree.start]
        # The keys of a path are at consecutive positions, wherever its segments lie in the row.
        query_positions = torch.arange(window.start, window.start + query.shape[2])
        key_positions = torch.arange(window.low, window.start + query.shape[2])
        seen = mask.allowed(query_positions, key_positions).to(query.device)
        key = torch.cat(keys, dim=2)
        value = torch.cat(values, dim=2)
        outs.append(written_out(query, key, value, seen, scale, softcap, sinks_H))
    return torch.cat(outs, dim=2)


def _by_tree(
    query_BHTD: Tensor,
    key_BJTD: Tensor,
    value_BJTD: Tensor,
    layout: TreeLayout,
    attend: Callable[[Tensor, Tensor, Tensor, TreeSpan], Tensor],
    prefixes: Prefixes | None,
) -> Tensor:
    """`attend` for each tree, whose keys and values begin with those of its prefix."""
    sizes = [len(tree) for tree in layout.trees]
    # split, not slices: its backward writes each gradient once, where a slice's fills a whole row
    # with zeros
    queries = torch.split(query_BHTD, sizes, dim=2)
    keys = torch.split(key_BJTD, sizes, dim=2)
    values = torch.split(value_BJTD, sizes, dim=2)
    outs = []
    for number, tree in enumerate(layout.trees):
        key = keys[number]
        value = values[number]
        prefix = None
        if prefixes is not None:
            prefix = prefixes[number]
        if prefix is not None:
            prefix_key, prefix_value = prefix
            key = torch.cat([prefix_key.to(key)[None], key], dim=2)
            value = torch.cat([prefix_value.to(value)[None], value], dim=2)
        outs.append(attend(queries[number], key, value, tree))
    return torch.cat(outs, dim=2)


def sliced_attention(
    query_BHTD: Tensor,
    key_BJTD: Tensor,
    value_BJTD: Tensor,
    parts: Sequence[Part],
    scale: float,
    prefixes: Prefixes | None = None,
) -> Tensor:
    """Flash attention over slices of a row, on a CPU: the parts of a `PositionMask`, merged by
    their log-sum-exp.

    The output (B, H, T, D) is in float32 or the wider format of the values. It has no gradients if
    there are `prefixes`, for each tree its keys and values or None.
    """
    # In half precision flash attention on a CPU is no faster for long segments, and much slower for
    # short ones.
    at_least = torch.promote_types(value_BJTD.dtype, torch.float32)
    query = query_BHTD.to(at_least)
    key = key_BJTD.to(at_least)
    value = value_BJTD.to(at_least)
    if prefixes is not None:
        out, _ = _merged(query, key, value, parts, scale, prefixes)
        return out.view(query.shape)
    apply: Any = SlicedAttention.apply  # which torch has no types for
    attended: Tensor = apply(query, key, value, parts, scale)
    return attended


class SlicedAttention(torch.autograd.Function):
    """`sliced_attention` with its gradient.

    With the parts p of a query, their outputs o_p and log-sum-exps l_p, the whole is

        L = log sum_p exp(l_p),    o = sum_p exp(l_p - L) o_p.

    Given the *merged* o and L, the backward pass of flash attention gives each part's gradient,
    because its probabilities are exp(s - L).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_BHTD: Tensor,
        key_BJTD: Tensor,
        value_BJTD: Tensor,
        parts: Sequence[Part],
        scale: float,
    ) -> Tensor:
        out, lse = _merged(query_BHTD, key_BJTD, value_BJTD, parts, scale)
        ctx.save_for_backward(query_BHTD, key_BJTD, value_BJTD, out, lse)
        ctx.parts = parts
        ctx.scale = scale
        return out.view(query_BHTD.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query_BHTD, key_BJTD, value_BJTD, out, lse = ctx.saved_tensors
        query, key, value = _by_key_head(query_BHTD, key_BJTD, value_BJTD)
        grad_out = grads[0].reshape(query.shape)
        # Every query has a first part, which writes; keys without a query below them have none.
        grad_query = torch.empty_like(query)
        grad_key = torch.zeros_like(key_BJTD[0])
        grad_value = torch.zeros_like(value_BJTD[0])
        for part in ctx.parts:
            q = slice(part.q_start, part.q_end)
            k = slice(part.k_start, part.k_end)
            part_query, part_key, part_value = (
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
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
            )
            if part.first:
                grad_query[:, :, q] = part_query
            else:
                grad_query[:, :, q] += part_query
            # Over the query heads that share a key head.
            grad_key[:, k] += part_key.sum(dim=1)
            grad_value[:, k] += part_value.sum(dim=1)
        of_query = grad_query.view(query_BHTD.shape)
        return of_query, grad_key.unsqueeze(0), grad_value.unsqueeze(0), None, None


def _merged(
    query_BHTD: Tensor,
    key_BJTD: Tensor,
    value_BJTD: Tensor,
    parts: Sequence[Part],
    scale: float,
    prefixes: Prefixes | None = None,
) -> tuple[Tensor, Tensor]:
    """The merged output of the parts of a row (J, R, T, D), and its log-sum-exp (J, R, T)."""
    query, key, value = _by_key_head(query_BHTD, key_BJTD, value_BJTD)
    out = torch.empty_like(query)
    # In the kernel's own format: of float64, its backward pass takes no float32.
    lse = query.new_empty(query.shape[:3])
    for part in parts:
        q = slice(part.q_start, part.q_end)
        k = slice(part.k_start, part.k_end)
        keys = key
        values = value
        if part.prefix_of is not None:
            assert prefixes is not None
            prefix = prefixes[part.prefix_of]
            assert prefix is not None
            keys = _of_prefix(prefix[0], query)
            values = _of_prefix(prefix[1], query)
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
            out[:, :, q] = part_out
            lse[:, :, q] = part_lse
            continue
        # L and o of `SlicedAttention`, one more part at a time: of two parts the second has the
        # weight exp(l_2 - L) = sigmoid(l_2 - l_1). So written it is one pass over the outputs, and
        # more exact: L is large beside the difference.
        before = lse[:, :, q]
        weight = torch.sigmoid(part_lse - before).unsqueeze(-1)
        out[:, :, q].lerp_(part_out, weight)
        lse[:, :, q] = torch.logaddexp(before, part_lse)
    return out, lse


def _of_prefix(kept_JPD: Tensor, query_JRTD: Tensor) -> Tensor:
    """The keys or values of a prefix, a view (J, R, P, D) in the number format of the queries."""
    repeats = query_JRTD.shape[1]
    return kept_JPD.to(query_JRTD.dtype).unsqueeze(1).expand(-1, repeats, -1, -1)


def _by_key_head(
    query_BHTD: Tensor, key_BJTD: Tensor, value_BJTD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Views (J, R, T, D): the key heads become the batch, and the heads that share one read it with
    stride 0."""
    _, heads, tokens, dim = query_BHTD.shape
    key_heads = key_BJTD.shape[1]
    query = query_BHTD.reshape(key_heads, heads // key_heads, tokens, dim)
    key = key_BJTD.transpose(0, 1).expand(query.shape)
    value = value_BJTD.transpose(0, 1).expand(query.shape)
    return query, key, value


def _additive(mask_QK: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """0 where a query sees a key, and -inf elsewhere."""
    if mask_QK is None:
        return None
    return torch.zeros(mask_QK.shape, dtype=dtype).masked_fill_(~mask_QK, float("-inf"))
