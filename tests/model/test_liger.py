"""Liger's kernels change how a model computes, and nothing of what it is."""

from __future__ import annotations

import pytest
from families import forest, gradient_error, gradients, score_error, tiny_model

from treeward.errors import ConfigError
from treeward.model.liger import use_liger_kernel
from treeward.model.reward_model import RewardModel


def test_it_is_refused_on_a_cpu() -> None:
    model = RewardModel(tiny_model("llama"))
    with pytest.raises(ConfigError, match="need a GPU") as caught:
        use_liger_kernel(model)
    assert caught.value.where == "policy.use_liger_kernel"


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral"])
def test_scores_and_gradients_are_those_without_it(family: str) -> None:
    pytest.importorskip("liger_kernel")
    model = RewardModel(tiny_model(family).to("cuda")).train()
    batch, names = model.make_batch(forest()), list(model.hf.state_dict())
    plain = model(batch)
    plain_gradients = gradients(model.hf, plain.cpu())
    use_liger_kernel(model)
    fused = model(batch)
    assert score_error(fused, plain) <= 1e-5
    assert gradient_error(gradients(model.hf, fused.cpu()), plain_gradients) <= 1e-5
    assert list(model.hf.state_dict()) == names


@pytest.mark.gpu
def test_a_family_without_kernels_is_refused() -> None:
    pytest.importorskip("liger_kernel")
    with pytest.raises(ConfigError, match="no kernels for this family"):
        use_liger_kernel(RewardModel(tiny_model("gpt2").to("cuda")))
