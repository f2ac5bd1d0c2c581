"""The table of layouts of an 8B model says what the layouts hold: counted on small layers, and multiplied."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import Tensor, nn
from torchao.optim.subclass_8bit import OptimState8bit
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from treeward.config.optimisation import OptimizerConfig
from treeward.training.optimisation import build_optimizer

DOCS = Path(__file__).parent.parent.parent / "docs" / "training.md"
RANK, WIDTH = 16, 2048


def num_bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def bytes_of_adamw(dtype: torch.dtype) -> tuple[float, float]:
    """Bytes of a parameter in training, without and with those of the optimiser."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
    optimizer: Any = build_optimizer(layer, OptimizerConfig(kwargs={"lr": 1e-3}))
    layer(torch.ones(1, WIDTH, dtype=dtype)).sum().backward()
    assert layer.weight.grad is not None
    own = num_bytes(layer.weight, layer.weight.grad)
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    every = own + num_bytes(*moments, *getattr(optimizer, "masters", ()))
    return own / layer.weight.numel(), every / layer.weight.numel()


def bytes_of_four_bits() -> float:
    layer = bitsandbytes.nn.Linear4bit(WIDTH, WIDTH, bias=False, quant_type="nf4", compress_statistics=True).to("cpu")
    state = layer.weight.quant_state
    return num_bytes(layer.weight.data, state.absmax, state.state2.absmax) / WIDTH**2


@pytest.mark.slow
def test_the_table_says_what_the_layouts_hold() -> None:
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, num_labels=1, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        models = [LlamaForSequenceClassification(config), LlamaForCausalLM(config)]
    layers = [layer for layer in models[0].model.modules() if isinstance(layer, nn.Linear)]
    linear = sum(layer.weight.numel() for layer in layers)
    adapters = sum(RANK * (layer.in_features + layer.out_features) for layer in layers)
    on_device, everything = bytes_of_adamw(torch.bfloat16)
    of_float32 = bytes_of_adamw(torch.float32)[1]
    moment = OptimState8bit.zeros((WIDTH, WIDTH), dtype=torch.bfloat16)
    eight_bit = 2 + 2 + 2 * num_bytes(moment.codes, moment.scale) / WIDTH**2
    rows = re.search(r"## An 8B model.*?(\|---.*?)\n\n", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert rows is not None
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows[1].splitlines()[1:]]
    first = [float(re.match(r"[\d.]+", row[1])[0]) for row in cells]  # type: ignore[index]
    assert first == pytest.approx([everything, eight_bit, on_device, 2, bytes_of_four_bits()], abs=6e-3)
    for column, model in enumerate(models, start=2):
        size = sum(weight.numel() for weight in model.parameters())
        lora = adapters * of_float32
        want = [size * each for each in first[:3]]
        want += [2 * size + lora, first[4] * linear + 2 * (size - linear) + lora]
        assert [row[column] for row in cells] == [f"{value / 1e9:.1f} GB" for value in want]
