"""`shifted_sums`: a causal convolution of each channel, fast on a CPU.

    out_ED = shifted_sums(inputs_ED, taps_DK)

Shapes: E tokens of a row, D channels, K taps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def shifted_sums(inputs_ED: Tensor, taps_DK: Tensor) -> Tensor:
    """out[e] = sum_k taps[k] inputs[e + k], (E - K + 1, D): the sum of a place is that of the K
    inputs that begin there."""
    apply: Any = _ShiftedSums.apply  # which torch has no types for
    out: Tensor = apply(inputs_ED, taps_DK)
    return out


class _ShiftedSums(torch.autograd.Function):
    """It keeps the inputs alone for the backward pass, and no tensor for each tap."""

    @staticmethod
    def forward(ctx: Any, inputs_ED: Tensor, taps_DK: Tensor) -> Tensor:
        ctx.save_for_backward(inputs_ED, taps_DK)
        taps = taps_DK.shape[1]
        length = len(inputs_ED) - taps + 1
        out_ED = inputs_ED[:length] * taps_DK[:, 0]
        for k in range(1, taps):
            out_ED.addcmul_(inputs_ED[k : k + length], taps_DK[:, k])
        return out_ED

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        inputs_ED, taps_DK = ctx.saved_tensors
        (grad_ED,) = grads
        length = len(grad_ED)
        grad_inputs = torch.zeros_like(inputs_ED)
        grad_taps = torch.empty_like(taps_DK)
        for k in range(taps_DK.shape[1]):
            grad_inputs[k : k + length].addcmul_(grad_ED, taps_DK[:, k])
            grad_taps[:, k] = torch.linalg.vecdot(grad_ED, inputs_ED[k : k + length], dim=0)
        return grad_inputs, grad_taps
