"""The formula of recurrent layers: by hand, and against the tensors that autograd saves."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from families import HYBRIDS, config_of
from torch import Tensor

from treeward.config.policy import LoraConfig
from treeward.model.lora import add_adapters
from treeward.model.reward_model import RewardModel
from treeward.planning.bare_models import bare_classifier
from treeward.planning.memory import layer_shapes
from treeward.planning.recurrent_memory import (
    GatedDeltaShape,
    Mamba1Shape,
    Mamba2Shape,
    ShortConvolutionShape,
)

_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 24,
    "linear_value_head_dim": 40,
}  # fmt: skip
_NEMOTRON = {
    "mamba_num_heads": 12, "mamba_head_dim": 16, "ssm_state_size": 24,
    "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
}  # fmt: skip
# No two widths of a layer are the same, so that no term can stand for another.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5", _DELTA),
    "qwen3_5, other sizes": ("qwen3_5", _DELTA | {"linear_key_head_dim": 56, "hidden_size": 64}),
    "olmo_hybrid": ("olmo_hybrid", {}),
    "nemotron_h": ("nemotron_h", _NEMOTRON),
    "nemotron_h, other sizes": ("nemotron_h", _NEMOTRON | {"ssm_state_size": 72, "n_groups": 4}),
    "mamba2": ("mamba2", {}),
    "falcon_h1": ("falcon_h1", {}),
    "bamba": ("bamba", {}),
    "mamba": ("mamba", {}),
    "mamba, other sizes": ("mamba", {"state_size": 10}),
    "lfm2": ("lfm2", {}),
    "lfm2, other sizes": ("lfm2", {"hidden_size": 80, "intermediate_size": 192}),
    "lfm3": ("lfm3", {}),
}


def test_the_gated_delta_rule_by_hand() -> None:
    """j = 2, q = 24, h = 6, v = 40, c = 32, in bfloat16: b = 2."""
    rule = 8 * 2 * 24 + 2 * 2 * 32 + 4 * 6 * 32 + 2 * 6 * (24 + 40) + 2 * 6 * 24 + 2 * 6 * 40
    rule += 2 * 6 * 24 * 40 // 32 + 12 * 6
    convolution = 8 * (2 * 2 * 24 + 6 * 40)
    norm = (12 + 3 * 2) * 6 * 40
    assert GatedDeltaShape(2, 24, 6, 40, 32, by_tree=True).kept_bytes(2, has_adapters=False) == (
        4 * rule + convolution + norm
    )
    elsewhere = 12 * 6 * 24 + 3 * 6 * 40 + 5 * 6 * 64 + 6 * 24 * 40 // 64 + 12 * 6
    assert GatedDeltaShape(2, 24, 6, 40, 64, by_tree=False).kept_bytes(2, has_adapters=False) == (
        4 * elsewhere + convolution // 2 + norm
    )


def test_mamba_2_by_hand() -> None:
    """h = 12, p = 32, g = 2, n = 24, c = 64; w = 384."""
    scan = 5 * 384 + 5 * 12 * 24 + 3 * 12 * 64 + 2 * 384 * 24 // 64 + 12 * 12
    convolution = 8 * (384 + 2 * 2 * 24)
    shape = Mamba2Shape(12, 32, 2, 24, 64, has_norm=True, by_tree=True)
    assert shape.kept_bytes(2, has_adapters=False) == 4 * scan + convolution + (16 + 4) * 384
    whole_projection = 4 * (384 + 2 * 2 * 24 + 12)
    assert (
        shape.kept_bytes(4, has_adapters=False)
        == 4 * scan + convolution + (16 + 8) * 384 + whole_projection
    )


def test_mamba_1_and_a_short_convolution_by_hand() -> None:
    """m = 64, n = 4; d = 32."""
    shape = Mamba1Shape(64, 4, by_tree=True)
    assert (
        shape.kept_bytes(2, has_adapters=False)
        == 12 * 64 * 4 + 16 * 64 + 6 * 2 * 64 + 16 * 4 + 8 * 64
    )
    assert (
        ShortConvolutionShape(32, by_tree=True).kept_bytes(2, has_adapters=False)
        == 4 * 32 + 5 * 2 * 32
    )


def saved_bytes(model: RewardModel, tokens: int) -> tuple[int, Counter[int]]:
    """The tokens of a tree, and the bytes that each layer saves for the backward pass of it."""
    prompt = [3] * (tokens // 3)
    batch = model.make_batch([[prompt + [n] * (tokens // 3) for n in (4, 5)]])
    counted = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    sizes: Counter[int] = Counter()
    alive = []  # else another tensor could have the address of one that is gone
    current = -1

    def enter(number: int) -> None:
        nonlocal current
        current = number

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            alive.append(tensor)
            sizes[current] += storage.nbytes()
        return tensor

    for number, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: enter(number))
        layer.register_forward_hook(lambda *_: enter(-1))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(batch)
    tokens_of_row: int = batch.tokens_T.numel() if model.layout == "tree" else batch.mask_SL.numel()
    return tokens_of_row, sizes


def model_of(case: str, dtype: torch.dtype, layout: Any) -> RewardModel:
    family, changes = CASES[case]
    model = RewardModel(bare_classifier(config_of(family, **changes)), layout=layout)
    model.cast(dtype)
    return model.train()


# Two sizes, so that a formula that was fitted to one fails; both are whole chunks of 64.
@pytest.mark.parametrize("tokens", [384, 960])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_layers_save_over_trees_what_the_formula_says(
    case: str, dtype: torch.dtype, tokens: int
) -> None:
    model = model_of(case, dtype, "tree")
    num_tokens, saved = saved_bytes(model, tokens)
    shapes = layer_shapes(model, on_cpu=True)
    assert any(shape.mixer is not None for shape in shapes)
    for number, shape in enumerate(shapes):
        if shape.mixer is None and dtype == torch.bfloat16:
            continue  # attention alone is held to measured peaks in float32 (test_plan.py)
        kept = shape.kept_bytes(dtype.itemsize, 1) * num_tokens
        # LFM's norms keep 6 w in bfloat16, where the formula says 8 w of each; LFM3 has four.
        tolerance = 0.1 if dtype == torch.float32 else 0.15
        assert kept == pytest.approx(saved[number], rel=tolerance), (number, shape)


@pytest.mark.parametrize("case", ["qwen3_5", "mamba2", "lfm2"])
@pytest.mark.parametrize("tokens", [384, 960])
def test_layers_save_over_rows_what_the_formula_says(case: str, tokens: int) -> None:
    """By transformers' own functions, as on a GPU without fused kernels."""
    model = model_of(case, torch.float32, "rows")
    num_tokens, saved = saved_bytes(model, tokens)
    for number, shape in enumerate(layer_shapes(model, on_cpu=True)):
        kept = shape.kept_bytes(4, 1) * num_tokens
        assert kept == pytest.approx(saved[number], rel=0.1), (number, shape)


@pytest.mark.parametrize("case", ["qwen3_5", "nemotron_h", "falcon_h1", "mamba", "lfm2"])
@pytest.mark.parametrize("tokens", [384, 960])
def test_layers_with_adapters_save_what_the_formula_says(case: str, tokens: int) -> None:
    model = model_of(case, torch.float32, "tree")
    add_adapters(model, LoraConfig(enabled=True, dim=4), seed=0)
    num_tokens, saved = saved_bytes(model, tokens)
    for number, shape in enumerate(layer_shapes(model, on_cpu=True)):
        assert shape.adapted_width > 0
        kept = shape.kept_bytes(4, 1) * num_tokens
        assert kept == pytest.approx(saved[number], rel=0.1), (number, shape)


def test_every_kind_of_mixer_has_a_case() -> None:
    families = {family for family, _ in CASES.values()}
    assert families <= HYBRIDS.keys()
    kinds = set()
    for case in CASES:
        shapes = layer_shapes(model_of(case, torch.float32, "tree"), on_cpu=True)
        kinds |= {type(shape.mixer) for shape in shapes if shape.mixer is not None}
    assert kinds == {GatedDeltaShape, Mamba1Shape, Mamba2Shape, ShortConvolutionShape}
