"""`Tracker`: what a step takes of one device, counted operation by operation, on fake tensors or real ones.

    with no_storage():                              # tensors have shapes and no storage from here on
        model = ...
        (tracker := Tracker(devices_per_node=8)).track_external(model)
        with tracker:
            step()
    tracker.peak_bytes, tracker.flops, tracker.sent

Memory is counted by PyTorch's own `MemTracker`, operations by the formulas of its `flop_counter`, communication by its
`CollectiveOp`. Tensors that meet no fake tensor stay real, so that a batch is planned and packed as in a run; a number
that the host reads of a fake tensor is 0, and a truth value True.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.attention import flex_attention as torch_flex
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from treeward.tree import flex

_DEVICE = torch.ops.prim.device.default  # asked for at every other operation on fake tensors


class Link(NamedTuple):
    """Where bytes go, and when: while the device computes, as FSDP's do; once in a step, as copies of the model add up
    their gradients."""

    leaves_node: bool
    overlaps: bool
    is_once: bool


class _Uncounted:
    """Within it trackers count nothing."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


UNCOUNTED = _Uncounted()


class Tracker(MemTracker):
    """`flops`: floating-point operations. `sent`: bytes that one device sends, by the usual rings. `density`: the share
    of pairs that a FlexAttention computes, whose formula counts all."""

    supports_higher_order_operators = True

    def __init__(self, *, devices_per_node: int = 1, density: float = 1.0) -> None:
        super().__init__()
        self.devices_per_node, self.density = devices_per_node, density
        self.flops, self.sent = 0.0, Counter[Link]()

    @property
    def peak_bytes(self) -> int:
        """The most that was held at a time."""
        return sum(self._peak_mem.values())

    def _nothing(self, *_: Any) -> None:
        """Modules and optimisers are not told apart: the original refuses a model that is called twice."""

    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = _nothing  # type: ignore[assignment]
    _register_global_optimizer_hook = _nothing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if UNCOUNTED.depth or func is _DEVICE:
            return func(*args, **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if result is NotImplemented or torch._guards.active_fake_mode() is not self._fake_mode_on_entry:
            return result
        if formula := flop_registry.get(getattr(func, "overloadpacket", func)):
            share = self.density if isinstance(func, HigherOrderOperator) else 1.0
            self.flops += share * formula(*args, **(kwargs or {}), out_val=result)
        if func in collective_ops and func not in sync_ops:
            self._count(func, result, args, kwargs)
        return result

    def _count(self, func: Any, result: Any, args: Any, kwargs: Any) -> None:
        ranks = distributed.get_process_group_ranks(CollectiveOp.get_process_group(func, args))
        nodes = len({rank // self.devices_per_node for rank in ranks})
        sums, overlaps = "reduce" in func.name() and "scatter" not in func.name(), func.namespace == "c10d"
        size = CollectiveOp.get_comm_tensor_size(func, result, args, kwargs) * (len(ranks) - 1) // len(ranks)
        size *= 2 if sums else 1  # a scatter and a gather
        leaving = size * nodes // len(ranks) if nodes > 1 else 0  # a ring leaves each node once
        self.sent[Link(True, overlaps, sums and overlaps)] += leaving
        self.sent[Link(False, overlaps, sums and overlaps)] += size - leaving


class _RealOrNothing(TorchDispatchMode):
    """Computes what has real tensors alone; gives 0 for what is read of others."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [] if func is _DEVICE else [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if tensors and all(type(x) in (Tensor, nn.Parameter) for x in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if torch.Tag.data_dependent_output in getattr(func, "tags", ()):
            return 0 if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype != torch.bool else True
        return func(*args, **kwargs)


@contextlib.contextmanager
def no_storage() -> Iterator[None]:
    """Within it new tensors are fake, and FlexAttention takes them as an operation that keeps what its kernel keeps."""
    changes = [
        (torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
        (torch_flex, "_validate_device", lambda *_: None),  # which refuses gradients without a GPU
        (flex, "_compiled", lambda: torch_flex.flex_attention),
        # DTensor asks operations for the shapes of their results, with whole tensors, which nothing holds
        (ShardingPropagator, "_fake_mode_lock", UNCOUNTED),
        (nn.Module, "_apply", _converted),  # PyTorch's swaps fake parameters, and cannot where nothing changes
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in changes:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_RealOrNothing())  # type: ignore[no-untyped-call]
        yield


def _converted(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    for child in module.children() if recurse else ():
        child._apply(convert)
    for weight in module._parameters.values():
        if weight is not None:
            weight.data = convert(weight.data)
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else convert(buffer)
    return module
