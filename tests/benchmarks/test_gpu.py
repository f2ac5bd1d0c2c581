"""What `benchmarks/gpu.py` compares with computes the same; a part that is ended is in its
table."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from families import causal_model, forest, gradient_error, gradients, score_error, tiny_model
from torch.utils.flop_counter import FlopCounterMode

from treeward.model.reward_model import RewardModel


@pytest.mark.parametrize("share", [False, True])
def test_packed_rows_score_as_trees(benchmark: ModuleType, share: bool) -> None:
    model = RewardModel(tiny_model("llama"))
    want = model(model.make_batch(forest()))
    want_gradients = gradients(model.hf, want)
    rows = sys.modules["flash_rows"].FlashRows(model, share=share)
    got = rows(forest())
    assert score_error(got, want) <= 1e-5
    assert gradient_error(gradients(model.hf, got), want_gradients) <= 1e-5


def test_operations_are_those_that_torch_counts(benchmark: ModuleType) -> None:
    """Plain attention computes every pair of a query and a key, seen or not."""
    model = causal_model("llama")
    tokens = torch.arange(5, 45)[None]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    found = sys.modules["common"].flops(model, 40, 40 * 40, 40, (1, 1, 1))
    assert found == pytest.approx(counter.get_total_flops(), rel=0.01)
