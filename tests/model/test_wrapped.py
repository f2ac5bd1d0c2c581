"""How a model is called: the last layer computes what is read, activations are computed again, Liger's kernels."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch
from families import assert_tree_equals_rows, causal_model, forest, gradient_error, gradients, score_error, tiny_model
from torch import nn
from torch.nn.attention import flex_attention as torch_flex
from transformers.models.llama import modeling_llama

from treeward.errors import ConfigError
from treeward.model.checks import why_not_tree
from treeward.model.liger import use_liger_kernel
from treeward.model.policy_model import PolicyModel
from treeward.model.reward_model import RewardModel
from treeward.tree.attention import FLEX

PROMPT = [5, 6, 7, 8]
GROUPS = [[[*PROMPT, 9, 10, 11], [*PROMPT, 9, 12], [*PROMPT, 9, 10, 11]], [[20, 21, 22]]]


def count_tokens(mlps: Sequence[nn.Module]) -> list[int]:
    """The tokens that the first matrix of each MLP gets from now on, one entry a call."""
    counts: list[int] = []
    for mlp in mlps:
        first = next(module for module in mlp.modules() if not list(module.children()))
        first.register_forward_pre_hook(lambda _, args: counts.append(args[0].shape[-2]))
    return counts


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_last_mlp_of_a_reward_model_computes_what_is_read(family: str, checkpointing: bool) -> None:
    hf = tiny_model(family)
    model = RewardModel(hf).train()
    if checkpointing:
        model.recompute_activations()
    blocks = hf.base_model.h if family == "gpt2" else hf.base_model.layers
    counts = count_tokens([block.mlp for block in blocks])
    scores_S = model(model.make_batch(GROUPS))
    assert counts == [8 + 3, 2 + 1]  # two different ends in the first tree, one in the second
    assert scores_S[0] == scores_S[2]
    scores_S.sum().backward()
    assert sorted(counts[2:]) == ([3, 11] if checkpointing else [])
    counts.clear()
    blocks[-1].mlp(torch.zeros(1, 20, 32))  # by itself it computes all that it gets
    assert counts == [20]
    with model.plain_attention():  # all tokens, as transformers would
        counts.clear()
        hf(input_ids=torch.tensor([GROUPS[0][0]]))
        assert counts == [7, 7]


def test_two_threads_do_not_meet_in_the_last_layer() -> None:
    model = RewardModel(tiny_model("llama"))
    batch, other = model.make_batch(GROUPS), model.make_batch([[[5, 6]]])
    want = model(batch)
    calls = [other]
    attention = model.hf.base_model.layers[1].self_attn

    def meanwhile(*_: object) -> None:
        if calls:
            ThreadPoolExecutor(1).submit(model, calls.pop()).result()

    attention.register_forward_hook(meanwhile)
    assert torch.equal(model(batch), want)


def test_the_last_mlp_of_a_policy_computes_what_predicts() -> None:
    hf = causal_model("llama")
    counts = count_tokens([layer.mlp for layer in hf.base_model.layers])
    PolicyModel(hf).log_probs(GROUPS, [[4, 4, 4], [2]])
    assert counts == [8 + 3, 3 + 1]  # 8, 9 and 10 predict 9, 10, 12 and 11; and 21 predicts 22


def test_a_layer_that_is_used_twice_computes_everything(caplog: pytest.LogCaptureFixture) -> None:
    hf = tiny_model("llama")
    hf.base_model.layers[0] = hf.base_model.layers[1]
    with caplog.at_level(logging.DEBUG, "treeward"):
        assert why_not_tree(hf) is None
    assert "computes its last layer for all tokens" in caplog.text
    assert_tree_equals_rows(RewardModel(hf), forest())


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
