"""`fastest`: the faster attention for a model's trees on this GPU, by measurement: FlashAttention has the faster kernel
and copies the keys of a path for each segment; FlexAttention copies nothing and visits blocks of 128.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from treeward.tree import attention, flex, varlen
from treeward.tree.batch import TreeLayout

logger = logging.getLogger(__name__)

_WARM_UP, _REPEATS = 3, 10


def fastest(layout: TreeLayout, *, heads: int, key_heads: int, head_dim: int, dtype: torch.dtype) -> str:
    """`attention.FLEX` or `attention.VARLEN`: the faster one for one layer of a row, forward and backward, on the
    device of `layout`. Logs both times."""
    device, length = layout.positions_T.device, len(layout.positions_T)
    query, key, value = (
        torch.randn(1, n, length, head_dim, device=device, dtype=dtype, requires_grad=True)
        for n in (heads, key_heads, key_heads)
    )
    mask, plan, scale = flex.FlexMask(causal_mask_function, layout), varlen.PathPlan(layout), head_dim**-0.5
    seconds = {
        attention.FLEX: _seconds(lambda: flex.attend(query, key, value, mask, scale=scale), device),
        attention.VARLEN: _seconds(lambda: varlen.attend(query, key, value, plan, scale=scale), device),
    }
    chosen = min(seconds, key=seconds.__getitem__)
    logger.info(
        "Attention of a layer over %s tokens, forward and backward: FlexAttention %.2f ms, FlashAttention over "
        "gathered paths %.2f ms: %s.", f"{length:,}", *(1000 * time for time in seconds.values()), chosen,
    )  # fmt: skip
    return chosen


def _seconds(attend: Callable[[], Tensor], device: torch.device) -> float:
    """The median of several runs, after a few that compile."""
    seconds: list[float] = []
    for run in range(_WARM_UP + _REPEATS):
        _wait(device)
        started = time.perf_counter()
        attend().sum().backward()
        _wait(device)
        if run >= _WARM_UP:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
