"""`MasterWeights`: an optimiser that steps float32 copies of bfloat16 weights.

    optimizer = MasterWeights(model.parameters(), lambda parameters: torch.optim.AdamW(parameters, lr=1e-6))

bfloat16 has 8 bits: a step of less than 1/512 of a weight would be rounded away. The copies (masters) take such steps,
and the model computes with them rounded. Gradients of these weights are float32 too, so that many micro-batches add up.
Loading a model in bfloat16 and then its optimiser's state gives both back, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class MasterWeights(torch.optim.Optimizer):
    """`make`: builds the optimiser that is stepped, of the masters and of those `parameters` that need none.

    `param_groups`, `state` and `defaults` are that optimiser's, so schedules work as with any other.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        parameters = list(parameters)
        self.low = [parameter for parameter in parameters if parameter.dtype == torch.bfloat16]
        for parameter in self.low:
            parameter.grad_dtype = torch.float32
        self.masters = [nn.Parameter(parameter.detach().float()) for parameter in self.low]
        of = dict(zip(self.low, self.masters, strict=True))
        self.inner = make([of.get(parameter, parameter) for parameter in parameters])
        super().__init__(parameters, self.inner.defaults)
        self._share()

    def _share(self) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the masters by the gradients of the weights, and round them to the weights."""
        assert closure is None, "the loss is computed once a step"
        for parameter, master in zip(self.low, self.masters, strict=True):
            master.grad = parameter.grad
        self.inner.step()
        self._round()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)
        for parameter in [*self.low, *self.masters]:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "masters": [master.detach() for master in self.masters]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        masters: list[Tensor] = state_dict["masters"]
        self.inner.load_state_dict({name: value for name, value in state_dict.items() if name != "masters"})
        self._share()
        for master, saved in zip(self.masters, masters, strict=True):
            master.copy_(saved)
        self._round()

    def _round(self) -> None:
        torch._foreach_copy_(list[Tensor](self.low), list[Tensor](self.masters))
