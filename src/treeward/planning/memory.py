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

A recurrent layer has a mixer in place of the attention, or beside it (Falcon-H1); what that keeps is
in `recurrent_memory.py`. A layer of one module alone (Mamba, Nemotron-H) keeps what that module
does. An attention whose output has a gate (Qwen3.5) keeps 3 b h e more: the gate, its activation and
their product. Experts keep 2 b d more for each that a token goes through: its input and its output.

Without gradients, as the prompts of a sampling are read, a layer holds the most of these at a time,
beside its input:

    attention            b (d + 3 h e + 4 g e), with a gate b h e more; and in half precision on a
                         CPU copies in float32, 4 (2 h e + 2 g e)
    MLP                  b (3 d + 3 f), and 2 b d more for each expert
    mixer                b d and what `recurrent_memory.py` says
    adapters             of attention or MLP 4 max(d, f, h e) more: the output of one; in half
                         precision twice that, because its input is there in float32 too

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
from treeward.planning.recurrent_memory import LayerMixer, MixerShape, find_mixer

_FLOAT32 = 4
_INTERMEDIATE_KEYS = ("intermediate_size", "n_inner", "ffn_dim", "hidden_dim")
"""The key of most families, of GPT-2, of OPT and of DistilBERT."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The widths of a layer, in numbers: d, f, h, g and e of the formula.

    `intermediate`: of all experts that a token goes through; 0 without an MLP. `heads`,
    `key_value_heads`: 0 without attention. `rms_width`, `layer_norm_width`: of all norms of the
    layer together, without those of the mixer. `adapted_width`: of the inputs of all linear layers
    that have adapters; `adapter_rank`: of these adapters together. `is_trained`: the layer has
    trained weights. `num_inputs`: how many modules read d numbers: attention, MLP, mixer.
    `num_experts`: that a token is sent to. `mixer`: of a recurrent layer.
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
    has_output_gate: bool = False
    num_inputs: int = 2
    num_experts: int = 0
    mixer: MixerShape | None = None

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
        inputs = itemsize * (self.num_inputs * self.hidden + intermediate)
        # queries and the output; keys and values; the log-sum-exp of each head
        attention = itemsize * (2 * queries + 2 * keys) + _FLOAT32 * self.heads // tensor_size
        if self.has_output_gate:
            attention += 3 * itemsize * queries
        # of the 4 f and 2 f of the formula one f is among the inputs
        kept_of_mlp = 1
        if self.is_gated:
            kept_of_mlp = 3
        mlp = itemsize * (kept_of_mlp * intermediate + 2 * self.num_experts * self.hidden)
        if self.adapted_width:
            norms = 4 * (self.rms_width + self.layer_norm_width)
            if itemsize < _FLOAT32:
                inputs = _FLOAT32 * self.adapted_width
            inputs += _FLOAT32 * self.adapter_rank
        mixer = 0
        if self.mixer is not None:
            # Tensor parallelism gathers what a mixer's projections give, and leaves it whole.
            mixer = self.mixer.kept_bytes(itemsize, has_adapters=self.adapted_width > 0)
        return norms + inputs + attention + mlp + mixer

    def bytes_without_gradients(self, itemsize: int, tensor_size: int, *, on_cpu: bool) -> int:
        """The most that a forward pass without gradients holds of a token, beside the layer's
        input."""
        queries = self.heads * self.head_size // tensor_size
        keys = self.key_value_heads * self.head_size // tensor_size
        intermediate = self.intermediate // tensor_size
        attention = itemsize * (self.hidden + 3 * queries + 4 * keys)
        if self.has_output_gate:
            attention += itemsize * queries
        if on_cpu and itemsize < _FLOAT32:
            attention += _FLOAT32 * 2 * (queries + keys)
        mlp = itemsize * (3 * intermediate + (3 + 2 * self.num_experts) * self.hidden)
        most = max(attention, mlp)
        if self.adapted_width:
            widths = [self.hidden, queries]
            if not self.num_experts:  # which have no adapters
                widths.append(intermediate)
            num_copies = 1
            if itemsize < _FLOAT32:
                num_copies = 2
            most += num_copies * _FLOAT32 * max(widths)
        if self.mixer is not None:
            mixer = itemsize * self.hidden + self.mixer.bytes_without_gradients(itemsize)
            most = max(most, mixer)
        return most

    def transient_bytes(self, itemsize: int, tensor_size: int) -> int:
        """What the layer holds of a token for a short time. `itemsize`: of gradients."""
        intermediate = self.intermediate // tensor_size
        mlp = itemsize * (2 * intermediate + self.hidden)
        if self.mixer is None:
            return mlp
        mixer = self.mixer.transient_bytes(itemsize) + itemsize * self.hidden
        # The backward pass of the MLP comes first, and what it has kept is free then.
        kept_of_mlp = itemsize * (self.hidden + 2 * intermediate) if intermediate else 0
        return max(mlp, mixer - kept_of_mlp)


def layer_shapes(model: WrappedModel, *, on_cpu: bool = False) -> list[LayerShape]:
    """The shape of each layer, from the configuration and the modules. The model may be without
    weights. `on_cpu`: it is to run there, where recurrent layers compute in another way."""
    config = model.hf.config.get_text_config()
    hidden = config.hidden_size
    heads = getattr(config, "num_attention_heads", 0)  # Mamba has none
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None)
    if not head_size and heads:
        head_size = hidden // heads
    adapters = set(adapted_layers(model).values())
    mixers = find_mixers(model, on_cpu=on_cpu)
    is_recurrent = any(mixer is not None for mixer in mixers)
    shapes = []
    for layer, mixer in zip(model.layers, mixers, strict=True):
        outside_mixer = _outside_mixer(layer, mixer)
        has_attention = True
        has_mlp = True
        if is_recurrent:
            # Its layers differ: the names of the classes tell what each has.
            has_attention = _has_class(outside_mixer, "Attention")
            has_mlp = _has_class(outside_mixer, "MLP", "MoE", "Moe", "Experts")
        intermediate = 0
        is_gated = False
        if has_mlp:
            intermediate, is_gated = _mlp_shape(layer, config)
        widths = _norm_widths(outside_mixer, heads, key_value_heads, head_size)
        adapted: list[Any] = [module for module in layer.modules() if module in adapters]
        shapes.append(
            LayerShape(
                hidden=hidden,
                intermediate=intermediate,
                is_gated=is_gated,
                heads=heads if has_attention else 0,
                key_value_heads=key_value_heads if has_attention else 0,
                head_size=head_size or 0,
                rms_width=widths["rms"],
                layer_norm_width=widths["layer_norm"],
                adapted_width=sum(module.in_features for module in adapted),
                adapter_rank=sum(sum(module.r.values()) for module in adapted),
                is_trained=any(weight.requires_grad for weight in layer.parameters()),
                has_output_gate=_has_output_gate(outside_mixer, heads * (head_size or 0)),
                num_experts=config.num_experts_per_tok if _has_experts(layer) else 0,
                num_inputs=has_attention + has_mlp + (mixer is not None),
                mixer=mixer.shape if mixer is not None else None,
            )
        )
    return shapes


def find_mixers(model: WrappedModel, *, on_cpu: bool) -> list[LayerMixer | None]:
    """The recurrent module of each layer; None for a layer without one that is known."""
    on_trees = model.layout == "tree"
    return [find_mixer(layer, on_cpu=on_cpu, on_trees=on_trees) for layer in model.layers]


def _outside_mixer(layer: nn.Module, mixer: LayerMixer | None) -> dict[str, nn.Module]:
    """The modules of a layer by name, without those of its mixer."""
    inside: set[nn.Module] = set()
    if mixer is not None:
        inside = set(mixer.module.modules())
    modules = layer.named_modules()
    return {name: module for name, module in modules if name and module not in inside}


def _norm_widths(
    modules: dict[str, nn.Module], heads: int, key_value_heads: int, head_size: int | None
) -> dict[str, int]:
    """The numbers that all norms of a layer read together, of each kind."""
    # The modules are counted, and not the configuration: families differ in their norms, and
    # configurations do not say how many a layer has.
    widths = {"rms": 0, "layer_norm": 0}
    for name, module in modules.items():
        if isinstance(module, nn.LayerNorm):
            widths["layer_norm"] += math.prod(module.normalized_shape)
        elif "Norm" in type(module).__name__:
            width = sum(weight.numel() for weight in module.parameters())
            if width == head_size:  # one norm for all heads of the queries, or of the keys
                is_of_queries = name.rpartition(".")[2].startswith("q")
                width *= heads if is_of_queries else key_value_heads
            widths["rms"] += width
    return widths


def _has_output_gate(modules: dict[str, nn.Module], width: int) -> bool:
    """Whether one projection makes the queries, of `width` numbers, and a gate as wide."""
    for name, module in modules.items():
        if name.endswith("q_proj") and width:
            return getattr(module, "out_features", None) == 2 * width
    return False


def _has_class(modules: dict[str, nn.Module], *parts: str) -> bool:
    """Whether the name of a module's class has one of these parts."""
    names = [type(module).__name__ for module in modules.values()]
    return any(part in name for name in names for part in parts)


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
    itemsize_of_gradients = itemsize
    if any(layer.adapted_width for layer in layers):
        # Adapters compute, and their inputs have gradients, in float32.
        itemsize_of_gradients = _FLOAT32
    transients = [layer.transient_bytes(itemsize_of_gradients, tensor_size) for layer in layers]
    if recomputes:
        # a frozen layer keeps nothing here either, as in `kept_bytes`
        num_kept = sum(1 for layer in layers if layer.is_trained)
        of_inputs = num_tokens * num_kept * itemsize * hidden
        most = max(sum(of_layer) for of_layer in zip(kept, transients, strict=True))
        # the head is done before a layer is computed again
        return of_inputs + max(num_tokens * most, head_bytes)
    # While a layer is at its most, the layers above it have kept nothing yet, or no more.
    most = 0
    kept_so_far = 0
    for of_layer, transient in zip(kept, transients, strict=True):
        kept_so_far += of_layer
        most = max(most, kept_so_far + transient)
    return num_tokens * (most + 12 * hidden) + head_bytes


def _mlp_shape(layer: nn.Module, config: Any) -> tuple[int, bool]:
    """The intermediate size of a layer's MLP, and whether it has a gate."""
    modules = dict(layer.named_modules())
    for name, module in modules.items():
        # LFM2 computes its size from the configuration's; w1 is the gate, and w3 has the values.
        last: Any = modules.get(f"{name}.w2")
        # A layer with adapters is not `nn.Linear`, and has its `in_features` too.
        if hasattr(last, "in_features") and hasattr(module, "w3"):
            return int(last.in_features), True
    intermediate = _intermediate_size(layer, config)
    # Llama has `gate_proj`, Phi-3 `gate_up_proj`. ModernBERT's `Wi` makes both halves and names
    # neither: it is known by its size.
    is_gated = any(
        "gate" in name or len(weight) == 2 * intermediate
        for name, weight in layer.named_parameters()
    )
    return intermediate, is_gated


def _intermediate_size(layer: nn.Module, config: Any) -> int:
    dense = 4 * config.hidden_size  # what GPT-2 means by a missing n_inner
    for key in _INTERMEDIATE_KEYS:
        size = getattr(config, key, None)
        if size:
            dense = size
            break
    if not _has_experts(layer):
        return int(dense)
    # The experts that a token goes through, and the one that every token goes through.
    of_expert = getattr(config, "moe_intermediate_size", None) or dense
    of_shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return int(config.num_experts_per_tok * of_expert + of_shared)


def _has_experts(layer: nn.Module) -> bool:
    """Asked of each layer: models with experts may have some dense layers."""
    return any(name.rpartition(".")[2] == "experts" for name, _ in layer.named_modules())
