"""`MasterWeights`: an optimiser that steps float32 copies of bfloat16 weights.

    make = partial(torch.optim.AdamW, lr=1e-6)
    optimizer = MasterWeights(model.parameters(), make)

bfloat16 has 8 bits: a step of less than 1/512 of a weight would be rounded away. Gradients of these
weights are float32 too. `on_host=True` keeps masters and states in the host's memory, and steps
them there. (torchao's `CPUOffloadOptimizer` keeps no float32 weights, and copies gradients before
they are clipped.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class MasterWeights(torch.optim.Optimizer):
    """`make`: builds the inner optimiser, of the masters and of the `parameters` that need none;
    its groups, state and defaults are shared. `on_host`: every parameter has a master, on the
    CPU."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        *,
        on_host: bool = False,
    ) -> None:
        parameters = list(parameters)
        self.on_host = on_host
        self.low: list[nn.Parameter] = []
        self.masters: list[nn.Parameter] = []
        stepped: list[nn.Parameter] = []
        for parameter in parameters:
            if not on_host and parameter.dtype != torch.bfloat16:
                stepped.append(parameter)
                continue
            # Else autograd would round the sum of the micro-batches' gradients at each addition.
            parameter.grad_dtype = torch.float32
            if on_host:
                copy = _on_host(parameter)
            else:
                copy = parameter.detach().float()
            master = nn.Parameter(copy)
            self.low.append(parameter)
            self.masters.append(master)
            stepped.append(master)
        self.inner = make(stepped)
        super().__init__(parameters, self.inner.defaults)
        self._share()

    def _share(self) -> None:
        """Show the inner optimiser's groups and state as this one's: schedules write into them."""
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the masters by the gradients of the weights, and round them to the weights."""
        assert closure is None, "the loss is computed once a step"
        pairs = list(zip(self.low, self.masters, strict=True))
        if self.on_host:
            # The host holds one gradient at a time: a parameter without one rests.
            for parameter, master in pairs:
                if parameter.grad is not None:
                    master.grad = _on_host(parameter.grad)
                    self.inner.step()
                    master.grad = None
        else:
            for parameter, master in pairs:
                master.grad = parameter.grad  # the same memory, and no copy
            self.inner.step()
        self._round()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)
        for parameter in [*self.low, *self.masters]:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The inner optimiser's state; the masters are parameters of its groups."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state after the masters, and round these to the weights."""
        self.inner.load_state_dict(state_dict)
        self._share()  # loading gives the inner optimiser new groups and a new state
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        if not self.on_host:
            torch._foreach_copy_(list[Tensor](self.low), list[Tensor](self.masters))
            return
        for parameter, master in zip(self.low, self.masters, strict=True):
            # Moved first: the device rounds faster than the host.
            parameter.copy_(master.to(parameter.device, non_blocking=True))


def _on_host(tensor: Tensor) -> Tensor:
    """A float32 copy, in page-locked memory, which moves faster; PyTorch keeps such memory and
    gives it out again."""
    copy = torch.empty_like(tensor, device="cpu", dtype=torch.float32, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach())
