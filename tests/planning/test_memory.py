"""The formula for activations, by hand."""

from __future__ import annotations

import torch

from treeward.model.loading import classifier_class
from treeward.model.pretrained import bare_config
from treeward.model.reward_model import RewardModel
from treeward.planning.memory import activation_bytes, layer_shapes

LLAMA = {
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


def model_of(fields: dict[str, object]) -> RewardModel:
    config = bare_config(fields)
    with torch.device("meta"):
        family = classifier_class(config, False)
        return RewardModel(family._from_config(config, dtype=torch.float32), layout="tree")


def test_a_layer_of_llama_by_hand() -> None:
    """d = 96, f = 256, h = 6, g = 2, e = 16, in float32: b = 4."""
    norms = 2 * 8 * 96
    attention = 4 * (96 + 2 * 96 + 2 * 32) + 4 * 6
    mlp = 4 * (96 + 4 * 256)
    assert layer_shapes(model_of(LLAMA))[0].kept_bytes(4, 1) == norms + attention + mlp


def test_qwens_norms_of_queries_and_keys_count_once_a_head() -> None:
    plain = layer_shapes(model_of(LLAMA))[0]
    normed = layer_shapes(model_of(LLAMA | {"model_type": "qwen3", "head_dim": 16}))[0]
    assert normed.rms_width - plain.rms_width == (6 + 2) * 16


def test_a_layer_without_a_gate_and_with_layer_norms() -> None:
    sizes = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    shape = layer_shapes(model_of(sizes | {"model_type": "gpt_neox"}))[0]
    assert not shape.is_gated
    assert (shape.rms_width, shape.layer_norm_width) == (0, 2 * 96)
    assert shape.key_value_heads == 6


def test_a_token_goes_through_some_of_the_experts() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    shape = layer_shapes(model_of(LLAMA | {"model_type": "qwen3_moe"} | experts))[0]
    assert shape.intermediate == 2 * 64
    assert shape.is_gated


def test_checkpointing_keeps_the_input_of_each_layer_and_one_layer() -> None:
    layers = layer_shapes(model_of(LLAMA))
    of_layer = layers[0].kept_bytes(2, 1)
    transient = 2 * (2 * 256 + 96)
    kept = activation_bytes(layers, 10, itemsize=2, recomputes=True)
    assert kept == 10 * (3 * 2 * 96 + of_layer + transient)
    kept = activation_bytes(layers, 10, itemsize=2, recomputes=False)
    assert kept == 10 * (3 * of_layer + 12 * 96 + transient)


def test_frozen_layers_keep_nothing() -> None:
    model = model_of(LLAMA)
    model.backbone.requires_grad_(False)
    assert layer_shapes(model)[0].kept_bytes(4, 1) == 0


def test_tensor_parallelism_divides_heads_and_columns_but_not_the_hidden_states() -> None:
    shape = layer_shapes(model_of(LLAMA))[0]
    halved = 4 * (2 * 96 + 2 * 32 + 4 * 256) + 4 * 6
    assert shape.kept_bytes(4, 1) - shape.kept_bytes(4, 2) == halved // 2
