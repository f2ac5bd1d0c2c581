"""Attention over a `TreeBatch` by FlashAttention: each segment's queries against the keys of its path, gathered.

    out_BHTD = attend(query_BHTD, key_BJTD, value_BJTD, PathPlan(layout), scale=0.125)

A shared token's keys are copied once for each segment below it. It needs a GPU, half precision, and keys and values of
one dimension, a multiple of 8; it has no windows, soft-caps, sinks (its log-sum-exp has no gradient) and prefixes.

Shapes: B batch (1: a row), H heads, J key/value heads, T tokens of the row, K gathered keys, D head dimension, G
segments.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from treeward.tree.batch import TreeLayout, on_device
from treeward.tree.token_tree import Segment

# Older versions of PyTorch take fewer key heads without a word.
GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


class PathPlan:
    """The keys of each segment of a row, on the row's device; the row's padding is one more segment. `keys_K`: places
    in the row, int64. `query_starts`, `key_starts`: of each segment, int32 (G + 1,)."""

    def __init__(self, layout: TreeLayout) -> None:
        self.layout = layout
        device, length = layout.positions_T.device, len(layout.positions_T)
        paths: list[np.ndarray] = []
        sizes: list[int] = []
        for tree in layout.trees:
            for segment in tree.segments:
                at: Segment | None = segment
                path: list[np.ndarray] = []
                while at is not None:
                    path.append(np.arange(at.start, at.end))
                    at = None if at.parent is None else tree.segments[at.parent]
                paths.append(np.concatenate(path[::-1]))
                sizes.append(len(segment))
        if layout.num_tokens < length:
            paths.append(np.arange(layout.num_tokens, length))
            sizes.append(length - layout.num_tokens)
        self.max_queries, self.max_keys = max(sizes), max(map(len, paths))
        self.keys_K = on_device(np.concatenate(paths), device)
        self.query_starts, self.key_starts = (
            on_device(np.array([0, *itertools.accumulate(lengths)], dtype=np.int32), device)
            for lengths in (sizes, map(len, paths))
        )


def attend(
    query_BHTD: Tensor,
    key_BJTD: Tensor,
    value_BJTD: Tensor,
    plan: PathPlan,
    *,
    scale: float,
) -> Tensor:
    """The output (B, H, T, D)."""
    query_BHTD, key_BJTD = (x.to(value_BJTD.dtype) for x in (query_BHTD, key_BJTD))  # under autocast, as in `flex`
    # The gradients of a key that is gathered several times are added up in float32.
    key, value = (x[0].transpose(0, 1).float().index_select(0, plan.keys_K).to(x.dtype) for x in (key_BJTD, value_BJTD))
    out = varlen_attn(
        query_BHTD[0].transpose(0, 1),
        key,
        value,
        plan.query_starts,
        plan.key_starts,
        plan.max_queries,
        plan.max_keys,
        scale=scale,
        window_size=(-1, 0),
        **GROUPED,
    )
    assert isinstance(out, Tensor)
    return out.transpose(0, 1)[None]
