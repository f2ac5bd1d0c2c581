"""How a model is called: activations are computed again, compiled layers, Liger's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import (
    causal_model,
    forest,
    gradient_error,
    gradients,
    model_of,
    score_error,
    tiny_model,
)

from treeward.config.load import load_run
from treeward.errors import ConfigError
from treeward.model.liger import use_liger_kernel
from treeward.model.policy_model import PolicyModel
from treeward.model.reward_model import RewardModel
from treeward.parallel.mesh import Mesh
from treeward.training.models import make_ready
from treeward.tree import attention


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


@pytest.mark.parametrize(
    ("family", "changes", "can_compile"),
    [
        ("llama", {"head_dim": 16}, True),
        ("llama", {"head_dim": 8}, False),
        ("qwen3_5", {"head_dim": 16}, True),
        ("falcon_h1", {"head_dim": 16, "mamba_d_head": 16, "mamba_n_heads": 4}, True),
        ("mamba", {}, False),
    ],
)
def test_layers_are_compiled_where_trees_run_by_flex_attention(
    family: str, changes: dict[str, Any], can_compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere `torch_compile` did nothing, and did not say so."""
    policy = load_run("quickstart", ["policy.torch_compile=true"]).policy
    model = RewardModel(model_of(family, **changes), layout="tree")
    assert not model.can_compile
    monkeypatch.setattr(attention, "has_triton", lambda: True)
    model.compute_device = torch.device("cuda")
    assert model.can_compile == can_compile
    if can_compile:
        return
    with pytest.raises(ConfigError, match="not compiled here(?s:.*)heads of 16 numbers"):
        make_ready(model, policy, Mesh(), role="reward model")


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
