"""Log-probabilities on the tree are those of plain rows: values, gradients, after several steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import CAUSAL_ONLY, DECODERS, VOCABULARY, causal_model, plain_log_probs, randomise, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from treeward.errors import ModelError
from treeward.model.checks import check_policy, tree_or_rows
from treeward.model.policy_model import PolicyModel

VALUES, GRADIENTS = 1e-5, 1e-5


def groups_of_completions(seed: int = 0) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Two prompts: completions that begin alike, are equal, are the beginning of another, and an empty one."""
    generator = np.random.default_rng(seed)
    draw = lambda n: [int(i) for i in generator.integers(3, VOCABULARY, n)]  # noqa: E731
    first, second = draw(13), draw(5)
    start, tail = draw(4), draw(6)
    completions = [start + tail, start + draw(3), draw(9), start + tail, start]
    groups = [[first + completion for completion in completions], [second + draw(7), second, second + draw(2)]]
    return groups, [[13] * 5, [5] * 3]


@pytest.mark.parametrize("family", [*DECODERS, *CAUSAL_ONLY])
def test_values_and_gradients_are_those_of_plain_rows(family: str) -> None:
    hf = causal_model(family)
    assert tree_or_rows(hf, "tree") == "tree"  # Gemma 3n and Llama 4 without the shortcut of the last layer
    policy = PolicyModel(hf, chunk_tokens=5)
    groups, starts = groups_of_completions()
    got = policy.log_probs(groups, starts, entropies=True)
    weights = torch.linspace(-1, 1, got.values_SL.numel()).reshape(got.values_SL.shape)
    hf.zero_grad()
    (got.values_SL * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in hf.named_parameters() if p.grad is not None}
    hf.zero_grad()
    rows = [plain_log_probs(hf, ids, of[0]) for group, of in zip(groups, starts, strict=True) for ids in group]
    assert got.mask_SL.sum(1).tolist() == [len(values) for values, _ in rows]
    for s, (values, entropies) in enumerate(rows):
        assert torch.allclose(got.values_SL[s, : len(values)], values, atol=VALUES)
        assert got.entropies_SL is not None
        assert torch.allclose(got.entropies_SL[s, : len(values)], entropies, atol=VALUES)
    sum((values * weights[s, : len(values)]).sum() for s, (values, _) in enumerate(rows)).backward()  # type: ignore[union-attr]
    for name, parameter in hf.named_parameters():
        if parameter.grad is not None:
            scale = (
                parameter.grad.abs()
                .max()
                .clamp_min(1e-2 * max(p.grad.abs().max() for p in hf.parameters() if p.grad is not None))
            )
            assert (gradients[name] - parameter.grad).abs().max() / scale < GRADIENTS, name


@pytest.mark.parametrize("layout", ["tree", "rows"])
def test_layouts_and_temperature(layout: str) -> None:
    hf = causal_model("qwen3")
    groups, starts = groups_of_completions(1)
    policy = PolicyModel(hf, layout=layout)  # type: ignore[arg-type]
    with torch.no_grad():
        got = policy.log_probs(groups, starts, temperature=0.7)
        rows = [plain_log_probs(hf, ids, of[0], 0.7) for group, of in zip(groups, starts, strict=True) for ids in group]
    for values, (row, _) in zip(got.values_SL, rows, strict=True):
        assert torch.allclose(values[: len(row)], row, atol=VALUES) and not values[len(row) :].any()


def test_the_softmax_of_capped_logits_is_float32() -> None:
    policy, generator = PolicyModel(causal_model("gemma2").bfloat16(), chunk_tokens=5), torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 32, generator=generator).bfloat16()
    targets = torch.randint(VOCABULARY, (9,), generator=generator)
    with torch.no_grad():
        values, entropies = policy._values(hidden, targets, 0.7, entropies=True)
        log_probs = (policy.logits(hidden).float() / 0.7).log_softmax(-1)
    assert torch.allclose(values, log_probs.gather(-1, targets[:, None])[:, 0], atol=1e-5)
    assert entropies is not None and torch.allclose(entropies, -(log_probs.exp() * log_probs).sum(-1), atol=1e-5)


@pytest.mark.parametrize(("model_type", "option"), [("granite", "logits_scaling"), ("cohere", "logit_scale")])
def test_logits_that_are_scaled(model_type: str, option: str) -> None:
    hf = scaled_model(model_type, option)
    check_policy(PolicyModel(hf), [[5, 6, 7, 8, 9], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]])


def scaled_model(model_type: str, option: str) -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(model_type, vocab_size=VOCABULARY, num_key_value_heads=2, **sizes, **{option: 3.0})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return randomise(AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval())


def test_a_policy_needs_a_head_for_tokens() -> None:
    t5 = AutoConfig.for_model("t5", vocab_size=60, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    for model in (tiny_model("llama"), AutoModelForSeq2SeqLM.from_config(t5)):
        with pytest.raises(ModelError, match="a linear head that predicts the next token") as raised:
            PolicyModel(model)
        assert type(model).__name__ in str(raised.value)
