"""Attention over a `TreeBatch` by FlexAttention: one compiled kernel a layer, on a GPU.

    mask = FlexMask(mask_function, layout)      # of one layer type of transformers, and of one row
    out_BHTD = attend(query_BHTD, key_BJTD, value_BJTD, mask, scale=0.125)

The kernel evaluates the rule `k <= q < subtree_end[k]` and the layer's mask function only in blocks
of 128 x 128 tokens that are neither empty nor full, as the extremes of each block's numbers tell.
The keys of a tree's prefix lie behind the row's.

Shapes: B batch (1: a row), H heads, J key/value heads, T tokens of the row, P of a prefix, K keys
(of the row and of prefixes), D head dimension, N any number of values, Q and L blocks of queries
and of keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers.masking_utils import causal_mask_function

from treeward.tree.batch import TreeLayout, on_device
from treeward.tree.prefix import Exchange

# Queries and keys of a block: FlexAttention's own default.
BLOCK = 128

MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""Of transformers: whether a query position sees a key position, of (batch, head, query, key)."""

# Compilations of the kernel that a process may need: by head shapes, masks, and with or without
# gradients.
_MOST_CASES = 64


class FlexMask:
    """One layer type's mask over one row, for FlexAttention. With the mask function each query must
    see all positions from a first one, which never decreases: causal masks, sliding windows and
    chunks do."""

    def __init__(self, mask_function: MaskFunction, layout: TreeLayout) -> None:
        self.layout = layout
        self.block_mask = _block_mask(mask_function, layout)


def attend(
    query_BHTD: Tensor,
    key_BJTD: Tensor,
    value_BJTD: Tensor,
    mask: FlexMask,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """The output (B, H, T, D). `softcap`: scores become c tanh(s / c). `sinks_H`: one more key
    without a value."""
    # Autocast leaves queries and keys in float32 (norms) beside values in half precision (a
    # projection).
    query_BHTD = query_BHTD.to(value_BJTD.dtype)
    key_BJTD = key_BJTD.to(value_BJTD.dtype)
    exchange = mask.layout.exchange
    if exchange is not None:
        key_BJTD, value_BJTD = _with_prefixes(key_BJTD, value_BJTD, exchange)
    kernel: Any = flex_attention  # a compiled layer compiles it with the rest
    if not torch.compiler.is_compiling():
        kernel = compiled_kernel()
    score_mod = None
    if softcap is not None:

        def score_mod(score: Tensor, *_: Tensor) -> Tensor:
            return softcap * torch.tanh(score / softcap)

    options: dict[str, Any] = {
        "score_mod": score_mod,
        "block_mask": mask.block_mask,
        "scale": scale,
        "enable_gqa": True,
    }
    if sinks_H is None:
        out: Tensor = kernel(query_BHTD, key_BJTD, value_BJTD, **options)
        return out
    out, aux = kernel(query_BHTD, key_BJTD, value_BJTD, **options, return_aux=AuxRequest(lse=True))
    # softmax with one more score s: every weight times exp(lse) / (exp(lse) + exp(s))
    share = torch.sigmoid(aux.lse - sinks_H.float()[None, :, None])
    return out * share[..., None].to(out.dtype)


def compiled_kernel() -> Callable[..., Any]:
    """The kernel of layers that are not compiled themselves."""
    # It serves all head shapes, masks, training and scoring of a process. Beyond PyTorch's limit of
    # eight such cases it would run uncompiled, with all scores of a row in memory. The limit is per
    # thread.
    if torch._dynamo.config.recompile_limit < _MOST_CASES:
        torch._dynamo.config.recompile_limit = _MOST_CASES
    return shared_kernel()


@functools.cache
def shared_kernel() -> Callable[..., Any]:
    """The second length of a row compiles it again, for all lengths; `dynamic=True` would make more
    than lengths variable."""
    return torch.compile(flex_attention)


# Not compiled: a compiled layer would be compiled again for each number of the layer, of prompts
# and of their tokens.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _with_prefixes(
    key_BJTD: Tensor, value_BJTD: Tensor, exchange: Exchange
) -> tuple[Tensor, Tensor]:
    # In the order of the trees, as `_block_mask` counts them: behind the row's own keys.
    prefixes = [prefix for prefix in exchange.enter(key_BJTD, value_BJTD) if prefix is not None]
    keys = [key_BJTD, *(key_JPD.to(key_BJTD)[None] for key_JPD, _ in prefixes)]
    values = [value_BJTD, *(value_JPD.to(value_BJTD)[None] for _, value_JPD in prefixes)]
    return torch.cat(keys, dim=2), torch.cat(values, dim=2)


def _block_mask(mask_function: MaskFunction, layout: TreeLayout) -> BlockMask:
    # 32 bits: the rule is evaluated for each pair of a partial block, beside products of 16 bits.
    positions_T = layout.positions_T.int()
    device = positions_T.device
    length = len(positions_T)
    # A key is seen by the queries from `first_K` on, up to `end_K`.
    first_K = torch.arange(length, dtype=torch.int32, device=device)
    end_K = layout.subtree_end_T.int()
    positions_K = positions_T
    trees = [tree for tree in layout.trees if tree.num_prefix_tokens]
    has_prefixes = bool(trees)
    if has_prefixes:
        # The keys of a prefix are seen by the whole tree.
        sizes = [tree.num_prefix_tokens for tree in trees]
        starts = np.array([tree.start for tree in trees], dtype=np.int32)
        ends = np.array([tree.end for tree in trees], dtype=np.int32)
        depths = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
        first_K = torch.cat([first_K, on_device(np.repeat(starts, sizes), device)])
        end_K = torch.cat([end_K, on_device(np.repeat(ends, sizes), device)])
        positions_K = torch.cat([positions_K, on_device(depths, device)])
    # A tree is ordered by position, so a causal mask adds nothing.
    is_causal = mask_function is causal_mask_function

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # Without prefixes `first_K[key]` is the key itself, and the kernel reads one number less.
        first = key
        if has_prefixes:
            first = first_K[key]
        seen = (first <= query) & (query < end_K[key])
        if is_causal:
            return seen
        visible: Tensor = seen & mask_function(batch, head, positions_T[query], positions_K[key])
        return visible

    any_QL, full_QL = _blocks(mask_function, positions_T, (first_K, end_K, positions_K))
    partial_QL = any_QL & ~full_QL
    return BlockMask.from_kv_blocks(
        *_ordered(partial_QL),
        *_ordered(full_QL),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(length, len(first_K)),
    )


def _blocks(
    mask_function: MaskFunction, positions_T: Tensor, keys: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Which blocks may hold visible pairs, and which hold no others, bool (Q, L) each."""
    first_K, end_K, positions_K = keys
    length = len(positions_T)
    start_Q1 = torch.arange(0, length, BLOCK, device=positions_T.device)[:, None]
    last_Q1 = (start_Q1 + BLOCK - 1).clamp_max(length - 1)
    # Keys that fill the last block begin after the row and end before it, so no query sees them,
    # and the block is never full.
    first_low, first_high = _extremes(first_K, length)
    end_low, end_high = _extremes(end_K, 0)
    any_QL = (first_low <= last_Q1) & (end_high > start_Q1)
    full_QL = (first_high <= start_Q1) & (end_low > last_Q1)
    query_low, query_high = _extremes(positions_T, None)
    query_low = query_low[:, None]
    query_high = query_high[:, None]
    key_low, key_high = _extremes(positions_K, None)
    zero = torch.zeros((), dtype=torch.long, device=positions_T.device)
    # The nearest pair of a block is visible if any is, and the farthest only if all are.
    nearest = mask_function(zero, zero, query_low, torch.minimum(key_high, query_low))
    farthest = mask_function(zero, zero, query_high, torch.minimum(key_low, query_high))
    return any_QL & nearest, full_QL & farthest


def _extremes(values_N: Tensor, padding: int | None) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of each block; `padding`, or the last value, fills the
    last block."""
    padding_size = -len(values_N) % BLOCK
    if padding is None:
        filling = values_N[-1:].expand(padding_size)
    else:
        filling = values_N.new_full((padding_size,), padding)
    blocks = torch.cat([values_N, filling]).view(-1, BLOCK)
    return blocks.amin(dim=1), blocks.amax(dim=1)


def _ordered(chosen_QL: Tensor) -> tuple[Tensor, Tensor]:
    """The number of chosen blocks of each row, int32 (1, 1, Q), and their places first, int32 (1,
    1, Q, L)."""
    # Stable: the chosen blocks stay in the order of the keys, which FlexAttention reads them in.
    places = chosen_QL.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    counts = chosen_QL.sum(dim=1, dtype=torch.int32)
    return counts[None, None], places.to(torch.int32)[None, None].contiguous()
