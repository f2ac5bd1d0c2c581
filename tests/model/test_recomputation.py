"""Activations that are computed again give the same gradients, and the fewer are kept, the less memory they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import causal_model, forest, gradients, tiny_model
from torch.profiler import ProfilerActivity, profile

from treeward.model.policy_model import PolicyModel
from treeward.model.reward_model import RewardModel


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


@pytest.mark.parametrize(("kind", "family"), [("reward", "qwen3"), ("reward", "gemma2"), ("policy", "gpt_neox")])
def test_gradients_are_the_same_bits_and_less_is_held(kind: str, family: str) -> None:
    everything, selective, full = (outputs_of(kind, family, mode) for mode in ("none", "selective", "full"))
    for outputs, weights, _ in (selective, full):
        assert torch.equal(outputs, everything[0])
        assert weights.keys() == everything[1].keys()
        assert all(torch.equal(weight, everything[1][name]) for name, weight in weights.items())
    assert everything[2] > 1.5 * selective[2] and selective[2] > 1.5 * full[2]
