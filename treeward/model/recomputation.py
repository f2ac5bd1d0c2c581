"""`compute_again_selectively`: keeps some activations of a layer, and recomputes the others in the backward pass.

    for layer in layers: compute_again_selectively(layer)

The rule is torchtitan's (`selective`, by operation). Attention and matrix products cost the most to repeat, so it keeps
the outputs of attention and of every second product, and repeats the others. The gradient is the same.

It changes the layer's forward, and so its graph if the layer is compiled: around a compiled layer there would be only
one operation to keep or to repeat.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_PRODUCTS = {"aten::mm", "aten::addmm"}
_ATTENTION = {
    "flex_attention",
    "inductor_compiled_code",  # FlexAttention that is compiled alone, in a layer that is not
    "torch_attn::_varlen_attn",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
}


def compute_again_selectively(layer: nn.Module) -> None:
    """Change the forward of a layer in training; without gradients it is unchanged."""
    plain = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (layer.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        return checkpoint(plain, *args, use_reentrant=False, context_fn=_contexts, **kwargs)

    layer.forward = forward


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of one layer's forward pass and of its repetition."""
    num_products = 0

    def policy(context: SelectiveCheckpointContext, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        nonlocal num_products
        name = operation.name()
        num_products += name in _PRODUCTS
        is_kept = name in _ATTENTION or (name in _PRODUCTS and num_products % 2)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts
