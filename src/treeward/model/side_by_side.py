"""`side_by_side`: parts of a forward pass at the same time, each with a part of the CPU's threads.

    results = side_by_side(compute, parts)      # [compute(part) for part in parts]

One forward pass on all threads waits at the end of each of its operations, and its elementwise
operations wait for memory meanwhile no thread multiplies. Two passes fill each other's gaps: on two
cores (SmolLM2-135M, conversations of 400 tokens) they took 0.82 to 0.9 of the time of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

import torch
from torch import distributed
from transformers import PreTrainedModel

from treeward.model.wrapped import WrappedModel
from treeward.tree.plan import plan_micro_batches

Part = TypeVar("Part")
Result = TypeVar("Result")

_PASSES = 2
"""At the same time. More were not measured: they need more memory, and read the weights more
often."""
_PART_TOKENS = 1024
"""Of a part: larger ones are no faster, and the last one of a batch keeps one half of the CPU
waiting for longer."""
_MOST_SHARE = 0.6
"""Of the tokens, which the busier half of the threads may have: beyond it one pass is faster."""


def can_divide(model: WrappedModel) -> bool:
    """Whether parts are computed at the same time: on a CPU with several threads, of which no other
    process of the run has some, by a model that a forward pass does not change."""
    is_alone = not (distributed.is_available() and distributed.is_initialized())
    has_threads = model.device.type == "cpu" and torch.get_num_threads() >= _PASSES
    return is_alone and has_threads and not _is_changed_by_passes(model.hf)


def _is_changed_by_passes(hf: PreTrainedModel) -> bool:
    """Whether a forward pass writes into the model what another one at the same time would read.

    Dynamic rotary frequencies and those of longrope (Phi) depend on the longest row. Code that is
    not transformers' own may write too, so it counts as changed.
    """
    if not type(hf).__module__.startswith("transformers."):
        return True
    for module in hf.modules():
        kinds = getattr(module, "rope_type", None)
        # One for each type of layers, in models with several.
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind is not None and ("dynamic" in kind or kind == "longrope"):
                return True
    return False


def divided(sizes: Sequence[int]) -> list[list[int]]:
    """The groups of a batch, of so many tokens each, in parts: indices. One part where dividing
    does not pay, as with a single group."""
    whole = [list(range(len(sizes)))]
    parts = plan_micro_batches(sizes, max_tokens=_PART_TOKENS, num_ranks=_PASSES)
    parts = [part for part in parts if part]
    if len(parts) < _PASSES:
        return whole
    # In this order a part goes to the half of the threads that is free first.
    loads = [0] * _PASSES
    for part in parts:
        free = loads.index(min(loads))
        loads[free] += sum(sizes[i] for i in part)
    if max(loads) > _MOST_SHARE * math.fsum(loads):
        return whole
    return parts


def side_by_side(compute: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
    """The result of each part, in order. Raises what `compute` raises, when all have ended."""
    if len(parts) == 1:
        return [compute(parts[0])]
    num_threads = torch.get_num_threads()

    def begin() -> None:
        torch.set_num_threads(num_threads // _PASSES)

    try:
        with ThreadPoolExecutor(_PASSES, initializer=begin) as threads:
            # A context for each: it can be entered once at a time.
            futures = [threads.submit(copy_context().run, compute, part) for part in parts]
        return [future.result() for future in futures]
    finally:
        # The number is of a thread, but that of MKL is of the process.
        torch.set_num_threads(num_threads)
