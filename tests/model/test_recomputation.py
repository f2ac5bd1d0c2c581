"""Activations that are computed again give the same gradients, and less memory is held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import causal_model, forest, gradient_error, gradients, score_error, tiny_model
from torch.nn.attention import flex_attention as torch_flex

from treeward.model.policy_model import PolicyModel
from treeward.model.reward_model import RewardModel
from treeward.tree.attention import FLEX


def held_bytes(run: Any) -> tuple[torch.Tensor, int]:
    """The result of `run`, and the bytes that autograd holds for its backward pass."""
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.nbytes) or x, lambda x: x):
        return run(), sum(sizes)


@pytest.mark.parametrize(("kind", "family"), [("reward", "gemma2"), ("reward", "gpt_oss"), ("policy", "gpt_neox")])
def test_gradients_are_the_same_bits_and_less_is_held(kind: str, family: str) -> None:
    model: Any = RewardModel(tiny_model(family)) if kind == "reward" else PolicyModel(causal_model(family))
    model.train()
    groups, starts = forest(), [[1] * len(group) for group in forest()]
    batch = model.make_batch(groups)
    run = (lambda: model(batch)) if kind == "reward" else (lambda: model.log_probs(groups, starts).values_SL.sum(dim=1))
    want, all_bytes = held_bytes(run)
    want_gradients = gradients(model.hf, want)
    model.zero_grad()
    model.recompute_activations()
    got, few_bytes = held_bytes(run)
    assert torch.equal(got, want)
    for name, gradient in gradients(model.hf, got).items():
        assert torch.equal(gradient, want_gradients[name]), name
    assert all_bytes > 2 * few_bytes


@pytest.mark.slow
def test_compiled_layers_with_flex_attention_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU compiles, cut into forward and backward as there, and run by PyTorch's own operations."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)  # which refuses gradients on a CPU
    plain = RewardModel(tiny_model("qwen3")).train()
    batch = plain.make_batch(forest())
    want = plain(batch)
    want_gradients, kept = gradients(plain.hf, want), []
    for is_recomputed in (False, True):
        model = RewardModel(tiny_model("qwen3")).train()
        model.tree_attention = FLEX
        if is_recomputed:
            model.recompute_activations()
        model.compile_layers(backend="aot_eager_decomp_partition", fullgraph=True)
        try:
            got, num_bytes = held_bytes(lambda: model(batch))  # noqa: B023
            assert score_error(got, want) <= 1e-6
            assert gradient_error(gradients(model.hf, got), want_gradients) <= 2e-6
        finally:
            torch._dynamo.reset()
        kept.append(num_bytes)
    assert kept[0] > 1.4 * kept[1], kept
