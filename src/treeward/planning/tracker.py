"""`MemoryTracker`: the memory that a step takes of one device, counted by operation, on fake tensors or real ones.

    with no_storage():                              # tensors have shapes and no storage from here on
        model = ...
        (tracker := MemoryTracker()).track_external(model)
        with tracker:
            step()
    tracker.peak_bytes

Tensors that meet no fake tensor stay real, so that a batch is planned and packed as in a run; a number that the host
reads of a fake tensor is 0, and a truth value True.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.attention import flex_attention as torch_flex
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from treeward.tree import flex

_DEVICE = torch.ops.prim.device.default  # asked for at every other operation on fake tensors


class _Uncounted:
    """Within it trackers count nothing."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


UNCOUNTED = _Uncounted()


class MemoryTracker(MemTracker):
    """PyTorch's, for models that are called twice, on fake tensors and real ones."""

    supports_higher_order_operators = True

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
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


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
