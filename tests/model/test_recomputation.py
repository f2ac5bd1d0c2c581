"""Activations that are computed again give the same gradients, and the fewer are kept, the less memory they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import causal_model, forest, gradient_error, gradients, score_error, tiny_model
from torch.nn.attention import flex_attention as torch_flex
from torch.profiler import ProfilerActivity, profile

from treeward.model.policy_model import PolicyModel
from treeward.model.reward_model import RewardModel
from treeward.tree.attention import FLEX


def outputs_of(kind: str, family: str, mode: str) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Outputs and gradients on trees, and the bytes that are held between forward and backward."""
    model: Any
    if kind == "policy":
        model = PolicyModel(causal_model(family), layout="tree").train()
        groups = forest()
        run = lambda: model.log_probs(groups, [[1] * len(group) for group in groups]).values_SL.sum(dim=1)  # noqa: E731
    else:
        model = RewardModel(tiny_model(family)).train()
        batch = model.make_batch(forest())
        run = lambda: model(batch)  # noqa: E731
    if mode != "none":
        model.recompute_activations(selective=mode == "selective")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        outputs = run()
    held = sum(event.self_cpu_memory_usage for event in profiled.key_averages())
    return outputs.detach(), gradients(model.hf, outputs), held


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "family"), [("reward", "qwen3"), ("reward", "gemma2"), ("policy", "gpt_neox")])
def test_gradients_are_the_same_bits_and_less_is_held(kind: str, family: str) -> None:
    everything, selective, full = (outputs_of(kind, family, mode) for mode in ("none", "selective", "full"))
    for outputs, weights, _ in (selective, full):
        assert torch.equal(outputs, everything[0])
        assert weights.keys() == everything[1].keys()
        assert all(torch.equal(weight, everything[1][name]) for name, weight in weights.items())
    assert everything[2] > 1.5 * selective[2] and selective[2] > 1.5 * full[2]


@pytest.mark.slow
def test_compiled_layers_with_flex_attention_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU compiles, cut into forward and backward as there, and run by PyTorch's own operations."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)  # which refuses gradients on a CPU
    plain = RewardModel(tiny_model("qwen3")).train()
    batch = plain.make_batch(forest())
    want = plain(batch)
    want_gradients, kept = gradients(plain.hf, want), {}
    for mode in ("none", "selective", "full"):
        again, sizes = RewardModel(tiny_model("qwen3")).train(), []
        again.tree_attention = FLEX
        if mode != "none":
            again.recompute_activations(selective=mode == "selective")
        again.compile_layers(backend="aot_eager_decomp_partition", fullgraph=True)
        try:
            with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.nbytes) or x, lambda x: x):  # noqa: B023
                got = again(batch)
            assert score_error(got, want) <= 1e-6
            assert gradient_error(gradients(again.hf, got), want_gradients) <= 2e-6
        finally:
            torch._dynamo.reset()
        kept[mode] = sum(sizes)
    assert kept["none"] > 1.2 * kept["selective"] > 1.2 * kept["full"], kept
