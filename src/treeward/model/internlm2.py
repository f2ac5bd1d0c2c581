"""InternLM2 as a Llama: its configuration and its weights, for the reward models of that family.

    config = as_llama(fields)       # of config.json
    BACKBONE                        # its weights, by the names that Llama has

It is a Llama with other names, and its own code would have to be downloaded and run.
"""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming

from treeward.model.heads import Fields


def as_llama(fields: Fields) -> LlamaConfig:
    """The configuration of a Llama from InternLM2's config.json."""
    left_out = {"auto_map", "model_type", "bias", "attn_implementation", "transformers_version"}
    llama_fields = {name: value for name, value in fields.items() if name not in left_out}
    llama_fields["attention_bias"] = fields.get("bias", False)
    config: LlamaConfig = LlamaConfig(**llama_fields)
    return config


class SplitGroups(ConversionOps):
    """InternLM2's one matrix of queries, keys and values: for each key head its queries, its key
    and its value."""

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        config = kwargs["config"]
        [weight] = input_dict.values()
        # Either form, as transformers' own operations take it.
        if isinstance(weight, list):
            weight = weight[0]
        num_groups = config.num_key_value_heads
        queries_each = config.num_attention_heads // num_groups
        grouped = weight.unflatten(0, (num_groups, queries_each + 2, -1))
        parts = grouped.split([queries_each, 1, 1], dim=1)
        matrices = {}
        for name, part in zip(target_patterns, parts, strict=True):
            matrices[name] = part.flatten(0, 2).contiguous()
        return matrices


BACKBONE: list[WeightRenaming | WeightConverter] = [
    WeightConverter(
        ".attention.wqkv.weight", [f".self_attn.{x}_proj.weight" for x in "qkv"], [SplitGroups()]
    ),
    WeightRenaming("model.tok_embeddings", "model.embed_tokens"),
    WeightRenaming(".attention.wo", ".self_attn.o_proj"),
    WeightRenaming(".feed_forward.w1", ".mlp.gate_proj"),
    WeightRenaming(".feed_forward.w2", ".mlp.down_proj"),
    WeightRenaming(".feed_forward.w3", ".mlp.up_proj"),
    WeightRenaming(".attention_norm", ".input_layernorm"),
    WeightRenaming(".ffn_norm", ".post_attention_layernorm"),
]
"""How InternLM2's tensors become those of Llama."""
