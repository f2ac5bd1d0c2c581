"""`NoSyncs`: fails where the code within it would make the host wait for a GPU; it needs none.

    with NoSyncs():
        run.backward(micro_batch, num_units, sums)

On CUDA `torch.cuda.set_sync_debug_mode("error")` does the same; without it, this sees what would
wait there:

- values that are read: `float(x)`, `x.item()`, `x.tolist()`, `x.cpu()`, `x.numpy()`, `if x:`, also
  within transformers and in a backward pass;
- results whose size depends on values: `nonzero`, `x[mask]`, `masked_select`, `unique`;
- memory of the host that is copied to the device: tensors made of Python's numbers, an index that
  is a list, and, in our own files, `x.to(device)` without `non_blocking=True`.

`excused`: files whose calls are not looked at. Attention on a CPU (`ATTENTION`) reads its plan,
which a GPU has as block masks: it is excused, unless FlexAttention computes the trees.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import treeward

# not any path with our name in it: a clone has it, and its .venv too
OURS = f"{Path(treeward.__file__).parent}/"
ATTENTION = ("treeward/tree/attention.py", "treeward/tree/position_mask.py")

_READS = {
    "item",
    "tolist",
    "cpu",
    "numpy",
    "__float__",
    "__int__",
    "__bool__",
    "__index__",
    "__array__",
}
_OPERATIONS = {
    "_local_scalar_dense",
    "item",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "is_nonzero",
    "equal",
}
_MADE = {
    "lift_fresh": "a tensor is made of Python's numbers",
    "lift": "a tensor is made of Python's numbers",
}


class NoSyncs:
    """Raises `AssertionError` at the first call that would wait."""

    def __init__(self, excused: Iterable[str] = ATTENTION) -> None:
        excused = tuple(excused)
        self._modes: tuple[Any, ...] = (_Functions(excused), _Operations(excused))
        self._entered = ExitStack()

    def __enter__(self) -> NoSyncs:
        for mode in self._modes:
            self._entered.enter_context(mode)
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()


class _Functions(TorchFunctionMode):
    """What Python calls: a tensor on the CPU is read without an operation of the dispatcher."""

    def __init__(self, excused: tuple[str, ...]) -> None:
        super().__init__()
        self.excused = excused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if name in _READS:
            _refuse(f"Tensor.{name}", self.excused)
        if (
            name == "to"
            and _has_device(args[1:], kwargs)
            and not kwargs.get("non_blocking")
            and _caller().startswith(OURS)
        ):
            _refuse("Tensor.to(device) without non_blocking=True", self.excused)
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    """What reaches the dispatcher, from C++ and backward passes too."""

    supports_higher_order_operators = True  # FlexAttention is one

    def __init__(self, excused: tuple[str, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.excused = excused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        if name in _OPERATIONS:
            _refuse(f"aten.{name}", self.excused)
        if name in _MADE:
            _refuse(_MADE[name], self.excused)
        if name in ("index", "index_put", "index_put_"):
            masks = [
                index
                for index in args[1]
                if index is not None and index.dtype in (torch.bool, torch.uint8)
            ]
            if masks:
                _refuse("an index that is a mask", self.excused)
        return func(*args, **(kwargs or {}))


def _has_device(args: Any, kwargs: dict[str, Any]) -> bool:
    return "device" in kwargs or any(isinstance(one, torch.device | str) for one in args)


def _caller() -> str:
    """The file that called the function that a mode was asked about."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__
    ):
        frame = frame.f_back
    return frame.f_code.co_filename


def _refuse(what: str, excused: tuple[str, ...]) -> None:
    frame: Any = sys._getframe(2)
    lines = []
    while frame is not None:
        if frame.f_code.co_filename.endswith(excused or ("\0",)):
            return
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    places = "\n  ".join(
        [line for line in lines if "/torch/" not in line and not line.startswith(__file__)][:8]
    )
    raise AssertionError(f"the host would wait for a GPU: {what}\n  {places}")
