"""The memory of the activations of a training step, by arithmetic that anyone can check by hand.

    layers = layer_shapes(model)
    activation_bytes(layers, num_tokens=8192, itemsize=2, recomputes=False)

A decoder layer of hidden size d, intermediate size f, h heads and g key-value heads of e numbers
keeps for the backward pass of each token, with b bytes a number:

    RMSNorm of width w   8 w                      its input and its normalised input, in float32
    LayerNorm            4 w                      its kernel keeps the input alone
    attention            b (d + 2 h e + 2 g e)    its input, queries, keys, values and its output
                         4 h                      the log-sum-exp of each head
    MLP                  b (d + 4 f)              its input, gate, activated gate, up, their product
                         b (d + 2 f)              without a gate

The backward pass of an MLP holds 2 f + d more numbers for a short time, and the final norm keeps 12
d bytes. With activation checkpointing every layer keeps its input alone, b d, and one layer at a
time is computed again.

With adapters nothing needs the normalised input of a norm (4 w stay), and an adapted layer reads
its input in float32, so every adapted layer of a bfloat16 model keeps a copy of its own.

A test holds the formula to measured runs. It is an upper estimate: Llama's and Qwen's norms keep 6
w in bfloat16, and compiled layers keep less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from treeward.model.lora import adapted_layers
from treeward.model.wrapped import WrappedModel

_FLOAT32 = 4
_INTERMEDIATE_KEYS = ("intermediate_size", "n_inner", "ffn_dim", "hidden_dim")
"""The key of most families, of GPT-2, of OPT and of DistilBERT."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The widths of a layer, in numbers: d, f, h, g and e of the formula.

    `intermediate`: of all experts that a token goes through. `rms_width`, `layer_norm_width`: of
    all norms of the layer together. `adapted_width`: of the inputs of all linear layers that have
    adapters; `adapter_rank`: of these adapters together. `is_trained`: the layer has trained
    weights.
    """

    hidden: int
    intermediate: int
    is_gated: bool
    heads: int
    key_value_heads: int
    head_size: int
    rms_width: int
    layer_norm_width: int
    adapted_width: int
    adapter_rank: int
    is_trained: bool

    def kept_bytes(self, itemsize: int, tensor_size: int) -> int:
        """What the layer keeps of a token, where `tensor_size` processes share its heads and
        columns."""
        if not self.is_trained:
            return 0
        queries = self.heads * self.head_size // tensor_size
        keys = self.key_value_heads * self.head_size // tensor_size
        intermediate = self.intermediate // tensor_size
        norms = 8 * self.rms_width + 4 * self.layer_norm_width
        # The inputs of linear layers stand apart, because adapters read them in another dtype: d of
        # attention and d of the MLP, and f of its last layer. The hidden states are whole in each
        # process of tensor parallelism.
        inputs = itemsize * (2 * self.hidden + intermediate)
        # queries and the output; keys and values; the log-sum-exp of each head
        attention = itemsize * (2 * queries + 2 * keys) + _FLOAT32 * self.heads // tensor_size
        # of the 4 f and 2 f of the formula one f is among the inputs
        kept_of_mlp = 1
        if self.is_gated:
            kept_of_mlp = 3
        mlp = itemsize * kept_of_mlp * intermediate
        if self.adapted_width:
            norms = 4 * (self.rms_width + self.layer_norm_width)
            if itemsize < _FLOAT32:
                inputs = _FLOAT32 * self.adapted_width
            inputs += _FLOAT32 * self.adapter_rank
        return norms + inputs + attention + mlp


def layer_shapes(model: WrappedModel) -> list[LayerShape]:
    """The shape of each layer, from the configuration and the modules. The model may be without
    weights."""
    config = model.hf.config.get_text_config()
    hidden = config.hidden_size
    heads = config.num_attention_heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or hidden // heads
    adapters = set(adapted_layers(model).values())
    shapes = []
    for layer in model.layers:
        intermediate = _intermediate_size(layer, config)
        # Llama has `gate_proj`, Phi-3 `gate_up_proj`. ModernBERT's `Wi` makes both halves and names
        # neither: it is known by its size.
        is_gated = any(
            "gate" in name or len(weight) == 2 * intermediate
            for name, weight in layer.named_parameters()
        )
        # The modules are counted, and not the configuration: families differ in their norms, and
        # configurations do not say how many a layer has.
        widths = {"rms": 0, "layer_norm": 0, "adapted": 0, "rank": 0}
        for name, module in layer.named_modules():
            if module in adapters:
                adapter: Any = module
                widths["adapted"] += adapter.in_features
                widths["rank"] += sum(adapter.r.values())
            elif isinstance(module, nn.LayerNorm):
                widths["layer_norm"] += math.prod(module.normalized_shape)
            elif "Norm" in type(module).__name__:
                width = sum(weight.numel() for weight in module.parameters())
                if width == head_size:  # one norm for all heads of the queries, or of the keys
                    is_of_queries = name.rpartition(".")[2].startswith("q")
                    width *= heads if is_of_queries else key_value_heads
                widths["rms"] += width
        shapes.append(
            LayerShape(
                hidden=hidden,
                intermediate=intermediate,
                is_gated=is_gated,
                heads=heads,
                key_value_heads=key_value_heads,
                head_size=head_size,
                rms_width=widths["rms"],
                layer_norm_width=widths["layer_norm"],
                adapted_width=widths["adapted"],
                adapter_rank=widths["rank"],
                is_trained=any(weight.requires_grad for weight in layer.parameters()),
            )
        )
    return shapes


def activation_bytes(
    layers: Sequence[LayerShape],
    num_tokens: int,
    *,
    itemsize: int,
    recomputes: bool,
    tensor_size: int = 1,
    head_bytes: int = 0,
) -> int:
    """The most bytes that the activations of `num_tokens` tokens take, gradients of them included.

    `itemsize`: bytes of a number. `recomputes`: activation checkpointing. `tensor_size`: of tensor
    parallelism. `head_bytes`: what a policy's head needs for its logits.
    """
    hidden = layers[0].hidden
    kept = [layer.kept_bytes(itemsize, tensor_size) for layer in layers]
    intermediate = max(layer.intermediate for layer in layers) // tensor_size
    itemsize_of_gradients = itemsize
    if any(layer.adapted_width for layer in layers):
        # Adapters compute, and their inputs have gradients, in float32.
        itemsize_of_gradients = _FLOAT32
    transient = itemsize_of_gradients * (2 * intermediate + hidden)
    if recomputes:
        # a frozen layer keeps nothing here either, as in `kept_bytes`
        num_kept = sum(1 for layer in layers if layer.is_trained)
        of_inputs = num_tokens * num_kept * itemsize * hidden
        # the head is done before a layer is computed again
        return of_inputs + max(num_tokens * (max(kept) + transient), head_bytes)
    return num_tokens * (sum(kept) + 12 * hidden + transient) + head_bytes


def _intermediate_size(layer: nn.Module, config: Any) -> int:
    dense = 4 * config.hidden_size  # what GPT-2 means by a missing n_inner
    for key in _INTERMEDIATE_KEYS:
        size = getattr(config, key, None)
        if size:
            dense = size
            break
    # Asked of each layer: models with experts may have some dense layers.
    has_experts = any(name.rpartition(".")[2] == "experts" for name, _ in layer.named_modules())
    if not has_experts:
        return int(dense)
    # The experts that a token goes through, and the one that every token goes through.
    of_expert = getattr(config, "moe_intermediate_size", None) or dense
    of_shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return int(config.num_experts_per_tok * of_expert + of_shared)
