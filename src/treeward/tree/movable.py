"""`Movable`: dataclasses of tensors that move to a device, or to page-locked memory, as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Movable:
    """A dataclass of tensors, of other `Movable`s, and of values that stay on the host."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """A copy on the device. With `non_blocking` the host does not wait for copies from page-locked memory."""
        moved: Self = _each(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))
        return moved

    def pin(self) -> Self:
        """A copy in page-locked memory. Needs CUDA."""
        pinned: Self = _each(self, Tensor.pin_memory)
        return pinned


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Movable):
        changed = {item.name: _each(getattr(value, item.name), change) for item in fields(value)}
        return replace(value, **changed)
    if isinstance(value, tuple) and value and isinstance(value[0], Movable):
        return tuple(_each(item, change) for item in value)
    return value
