"""Liger's kernels change how a model computes, and nothing of what it is."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from families import forest, gradient_error, gradients, score_error, tiny_model
from transformers.models.llama import modeling_llama

from treeward.errors import ConfigError
from treeward.model.liger import use_liger_kernel
from treeward.model.reward_model import RewardModel


def test_models_that_are_made_later_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for Liger, which needs Triton: like it, it replaces classes in the module of the family."""

    def apply(model: Any, *, rope: bool = True, **_: bool) -> None:
        assert not rope, "Liger would replace the function of all models"
        model.model.norm.forward = lambda hidden: hidden
        monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", torch.nn.Identity)

    stand_in = ModuleType("liger_kernel.transformers")
    vars(stand_in)["_apply_liger_kernel_to_instance"] = apply
    patches = ModuleType("liger_kernel.transformers.monkey_patch")
    vars(patches)["MODEL_TYPE_TO_APPLY_LIGER_FN"] = {"llama": None}
    for module in (ModuleType("liger_kernel"), stand_in, patches):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    plain, norm = RewardModel(tiny_model("llama")), modeling_llama.LlamaRMSNorm
    batch = plain.make_batch(forest())
    want = plain(batch)
    use_liger_kernel(plain)
    assert modeling_llama.LlamaRMSNorm is norm
    assert not torch.equal(plain(batch), want)
    assert torch.equal(RewardModel(tiny_model("llama"))(batch), want)
    with pytest.raises(ConfigError, match="no kernels for this family"):
        use_liger_kernel(RewardModel(tiny_model("gpt2")))


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
    later = RewardModel(tiny_model(family))
    assert score_error(later(later.make_batch(forest())), plain.cpu()) <= 1e-5
