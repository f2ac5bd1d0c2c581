"""How a model is called: activations are computed again, Liger's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import causal_model, forest, gradient_error, gradients, score_error, tiny_model

from treeward.model.liger import use_liger_kernel
from treeward.model.policy_model import PolicyModel
from treeward.model.reward_model import RewardModel


def held_bytes(run: Any) -> tuple[torch.Tensor, int]:
    """The result of `run`, and the bytes that autograd holds for its backward pass."""
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: sizes.append(x.nbytes) or x, lambda x: x
    ):
        return run(), sum(sizes)


@pytest.mark.parametrize(
    ("kind", "family"), [("reward", "gemma2"), ("reward", "gpt_oss"), ("policy", "gpt_neox")]
)
def test_gradients_are_the_same_bits_and_less_is_held(kind: str, family: str) -> None:
    model: Any = (
        RewardModel(tiny_model(family)) if kind == "reward" else PolicyModel(causal_model(family))
    )
    model.train()
    groups = forest()
    starts = [[1] * len(group) for group in forest()]
    batch = model.make_batch(groups)

    def run() -> Any:
        if kind == "reward":
            return model(batch)
        return model.log_probs(groups, starts).values_SL.sum(dim=1)

    want, all_bytes = held_bytes(run)
    want_gradients = gradients(model.hf, want)
    model.zero_grad()
    model.recompute_activations()
    got, few_bytes = held_bytes(run)
    assert torch.equal(got, want)
    for name, gradient in gradients(model.hf, got).items():
        assert torch.equal(gradient, want_gradients[name]), name
    assert all_bytes > 2 * few_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral"])
def test_scores_and_gradients_are_those_without_liger(family: str) -> None:
    pytest.importorskip("liger_kernel")
    model = RewardModel(tiny_model(family).to("cuda")).train()
    batch = model.make_batch(forest())
    names = list(model.hf.state_dict())
    plain = model(batch)
    plain_gradients = gradients(model.hf, plain.cpu())
    use_liger_kernel(model)
    fused = model(batch)
    assert score_error(fused, plain) <= 1e-5
    assert gradient_error(gradients(model.hf, fused.cpu()), plain_gradients) <= 1e-5
    assert list(model.hf.state_dict()) == names
    later = RewardModel(tiny_model(family))
    assert score_error(later(later.make_batch(forest())), plain.cpu()) <= 1e-5
