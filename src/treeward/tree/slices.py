"""Flash attention over slices of a row of trees, on a CPU: the parts of a `PositionMask`, merged by their log-sum-exp.

    out_BHTD = sliced_attention(query_BHTD, key_BJTD, value_BJTD, mask.parts, scale)

With the parts p of a query, their outputs o_p and log-sum-exps l_p, the whole is

    L = log sum_p exp(l_p),    o = sum_p exp(l_p - L) o_p.

Given the *merged* o and L, the backward pass of flash attention gives each part's gradient, because its probabilities
are exp(s - L).

Shapes: B batch (1: a row), H heads, J key/value heads, R = H / J, T tokens of the row, Q queries, K keys, D head
dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from treeward.tree.position_mask import Part
from treeward.tree.prefix import Prefixes


def sliced_attention(
    query_BHTD: Tensor,
    key_BJTD: Tensor,
    value_BJTD: Tensor,
    parts: Sequence[Part],
    scale: float,
    prefixes: Prefixes | None = None,
) -> Tensor:
    """The output (B, H, T, D), in float32 or the wider format of the values. Without gradients if there are `prefixes`,
    for each tree its keys and values or None."""
    # In half precision flash attention on a CPU is no faster for long segments, and much slower for short ones.
    at_least = torch.promote_types(value_BJTD.dtype, torch.float32)
    query = query_BHTD.to(at_least)
    key = key_BJTD.to(at_least)
    value = value_BJTD.to(at_least)
    if prefixes is not None:
        out, _ = _merged(query, key, value, parts, scale, prefixes)
        return out.view(query.shape)
    attended: Tensor = SlicedAttention.apply(query, key, value, parts, scale)  # type: ignore[no-untyped-call]
    return attended


class SlicedAttention(torch.autograd.Function):
    """`sliced_attention` with its gradient."""

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
        grad_query = torch.empty_like(query)
        grad_key = torch.zeros_like(key_BJTD[0])
        grad_value = torch.zeros_like(value_BJTD[0])
        for part in ctx.parts:
            q = slice(part.q_start, part.q_end)
            k = slice(part.k_start, part.k_end)
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
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
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
        merged = torch.logaddexp(lse[:, :, q], part_lse)
        old_weight = torch.exp(lse[:, :, q] - merged).unsqueeze(-1)
        weight = torch.exp(part_lse - merged).unsqueeze(-1)
        out[:, :, q] = out[:, :, q] * old_weight + part_out * weight
        lse[:, :, q] = merged
    return out, lse


def _of_prefix(kept_JPD: Tensor, query_JRTD: Tensor) -> Tensor:
    """The keys or values of a prefix, a view (J, R, P, D) in the number format of the queries."""
    repeats = query_JRTD.shape[1]
    return kept_JPD.to(query_JRTD.dtype).unsqueeze(1).expand(-1, repeats, -1, -1)


def _by_key_head(query_BHTD: Tensor, key_BJTD: Tensor, value_BJTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views (J, R, T, D): the key heads become the batch, and the heads that share one read it with stride 0."""
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
