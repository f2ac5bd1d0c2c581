"""`selective_contexts`: which activations a layer keeps when the others are computed again in the backward pass.

    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=selective_contexts)

The rule is torchtitan's (`selective`, by operation). Attention and matrix products cost the most to repeat: the outputs
of attention and of every second product are kept; norms, activation functions, rotations and the other products are
repeated. The gradient is the same, for what is repeated is what was computed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

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


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of one layer's forward pass and of its repetition, as `context_fn` of a checkpoint."""
    num_products = 0

    def policy(context: SelectiveCheckpointContext, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        nonlocal num_products
        name = operation.name()
        num_products += name in _PRODUCTS
        is_kept = name in _ATTENTION or (name in _PRODUCTS and num_products % 2)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts
