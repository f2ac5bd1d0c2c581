"""How a model is called: activations are computed again, Liger's kernels."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from families import causal_model, forest, gradient_error, gradients, score_error, tiny_model
from torch.nn.attention import flex_attention as torch_flex
from transformers.models.llama import modeling_llama

from treeward.errors import ConfigError
from treeward.model.liger import use_liger_kernel
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


def test_models_that_are_made_after_liger_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_scores_and_gradients_are_those_without_liger(family: str) -> None:
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
