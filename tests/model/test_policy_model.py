"""Log-probabilities on the tree are those of plain rows: values, gradients, after several steps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from families import (
    CAUSAL_ONLY,
    DECODERS,
    VOCABULARY,
    causal_model,
    gradient_error,
    plain_log_probs,
    randomise,
)
from torch import Tensor, distributed, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from treeward.model.checks import check_policy, tree_or_rows
from treeward.model.policy_model import PolicyModel, VocabularyShard, linear_log_probs

VALUES, GRADIENTS = 1e-5, 1e-5


def groups_of_completions(seed: int = 0) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Two prompts: completions that begin alike, are equal, are the beginning of another, and an
    empty one."""
    generator = np.random.default_rng(seed)

    def draw(length: int) -> list[int]:
        return [int(i) for i in generator.integers(3, VOCABULARY, length)]

    first = draw(13)
    second = draw(5)
    start = draw(4)
    tail = draw(6)
    completions = [start + tail, start + draw(3), draw(9), start + tail, start]
    groups = [
        [first + completion for completion in completions],
        [second + draw(7), second, second + draw(2)],
    ]
    return groups, [[13] * 5, [5] * 3]


@pytest.mark.parametrize("family", [*DECODERS, *CAUSAL_ONLY])
def test_values_and_gradients_are_those_of_plain_rows(family: str) -> None:
    hf = causal_model(family)
    assert tree_or_rows(hf, "tree") == "tree"
    policy = PolicyModel(hf, chunk_tokens=5)
    groups, starts = groups_of_completions()
    got = policy.log_probs(groups, starts, entropies=True)
    weights = torch.linspace(-1, 1, got.values_SL.numel()).reshape(got.values_SL.shape)
    (got.values_SL * weights).sum().backward()
    gradients = gradients_of(hf)
    rows = []
    for group, lengths in zip(groups, starts, strict=True):
        rows += [plain_log_probs(hf, ids, lengths[0]) for ids in group]
    assert got.mask_SL.sum(1).tolist() == [len(values) for values, _ in rows]
    for s, (values, entropies) in enumerate(rows):
        assert torch.allclose(got.values_SL[s, : len(values)], values, atol=VALUES)
        assert got.entropies_SL is not None
        assert torch.allclose(got.entropies_SL[s, : len(values)], entropies, atol=VALUES)
    sum((values * weights[s, : len(values)]).sum() for s, (values, _) in enumerate(rows)).backward()  # type: ignore[union-attr]
    assert gradient_error(gradients, gradients_of(hf)) < GRADIENTS


def gradients_of(hf: PreTrainedModel) -> dict[str, Tensor]:
    gradients = {name: p.grad.clone() for name, p in hf.named_parameters() if p.grad is not None}
    hf.zero_grad()
    return gradients


@pytest.mark.parametrize(
    ("model_type", "option"), [("granite", "logits_scaling"), ("cohere", "logit_scale")]
)
def test_logits_that_are_scaled(model_type: str, option: str) -> None:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = AutoConfig.for_model(
        model_type, vocab_size=VOCABULARY, num_key_value_heads=2, **sizes, **{option: 3.0}
    )
    hf = randomise(AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval())
    check_policy(PolicyModel(hf), [[5, 6, 7, 8, 9], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]])


N, D, V = 23, 16, 41


def tensors(bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, biases = (
        torch.randn(shape, generator=generator) for shape in ((N, D), (V, D), (V,))
    )
    targets = torch.randint(V, (N,), generator=generator)
    return hidden, weight, biases if bias else None, targets, torch.randn(N, generator=generator)


def written_out(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: float = 1.0,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    logits = (
        nn.functional.linear(
            hidden.double(), weight.double(), None if bias is None else bias.double()
        )
        * scale
    )
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_probs = (logits / temperature).log_softmax(dim=-1)
    return log_probs.gather(1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(dim=-1)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 23, 100])
@pytest.mark.parametrize(
    ("bias", "options"),
    [
        (False, {}),
        (True, {"scale": 0.25}),
        (False, {"scale": 3.0, "temperature": 0.7}),
        (True, {"scale": 2.0, "temperature": 0.7, "softcap": 4.0}),
    ],
)
def test_linear_log_probs_equal_the_formula(
    chunk_tokens: int, bias: bool, options: dict[str, float]
) -> None:
    *head, targets, coefficients = tensors(bias)
    leaves = [x.requires_grad_() for x in head if x is not None]
    values, entropies = linear_log_probs(
        *head, targets, chunk_tokens=chunk_tokens, entropies=True, **options
    )
    want, want_entropies = written_out(*head, targets, **options)
    torch.testing.assert_close(values.double(), want, atol=1e-5, rtol=1e-5)
    assert entropies is not None and not entropies.requires_grad
    torch.testing.assert_close(entropies.double(), want_entropies, atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad(values @ coefficients, leaves)
    wants = torch.autograd.grad(want @ coefficients.double(), leaves)
    for grad, want_grad in zip(grads, wants, strict=True):
        torch.testing.assert_close(grad, want_grad, atol=1e-5, rtol=1e-5)


def test_in_bfloat16_the_softmax_is_float32_and_gradients_may_be() -> None:
    hidden, weight, biases, targets, coefficients = tensors(bias=True)
    assert biases is not None
    leaves = [nn.Parameter(x.bfloat16()) for x in (hidden, weight, biases)]
    for leaf in leaves:
        leaf.grad_dtype = torch.float32
    hidden, weight, biases = leaves
    values, _ = linear_log_probs(hidden, weight, biases, targets, chunk_tokens=9)
    logits = nn.functional.linear(hidden, weight, biases).float()
    want = logits.log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(values, want, atol=1e-6, rtol=1e-6)
    grads = torch.autograd.grad(values @ coefficients, leaves)
    for grad, want_grad in zip(
        grads, torch.autograd.grad(want @ coefficients, leaves), strict=True
    ):
        assert grad.dtype == want_grad.dtype == torch.float32
        torch.testing.assert_close(
            grad, want_grad, atol=0.02 * float(want_grad.abs().max()), rtol=0
        )
    # Chunks add up in float32: those of one gradient, sixty times, are sixty times it.
    chunk, many = (
        linear_log_probs(hidden.repeat(n, 1), weight, biases, targets.repeat(n), chunk_tokens=N)[0]
        for n in (1, 60)
    )
    [single] = torch.autograd.grad(chunk @ coefficients, weight)
    [total] = torch.autograd.grad(many @ coefficients.repeat(60), weight)
    torch.testing.assert_close(total, 60 * single, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("entropies", [False, True])
def test_a_vocabulary_that_two_processes_share_gives_the_same(entropies: bool) -> None:
    """Threads stand for the processes: each has a process group of its own, and not as many tokens
    as the other."""
    *whole, targets, coefficients = tensors(bias=True)
    store = distributed.HashStore()
    parts = (slice(0, 15), slice(15, V))

    def part(rank: int) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        group: Any = distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        own = [whole[0], *(x[parts[rank]] for x in whole[1:])]
        leaves = [x.detach().clone().requires_grad_() for x in own]
        options: dict[str, Any] = {
            "chunk_tokens": 7,
            "scale": 0.5,
            "temperature": 0.7,
            "entropies": entropies,
        }
        shard = VocabularyShard(parts[rank].start, group)
        values, of_each = linear_log_probs(*leaves, targets, shard=shard, **options)
        return values, of_each, torch.autograd.grad(values @ coefficients, leaves)

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(part, range(2)))
    want, want_entropies = written_out(
        *(x.requires_grad_() for x in whole), targets, scale=0.5, temperature=0.7
    )
    hidden, weight, bias = torch.autograd.grad(want @ coefficients.double(), whole)
    for (values, of_each, grads), own in zip(results, parts, strict=True):
        torch.testing.assert_close(values.double(), want, atol=1e-5, rtol=1e-5)
        assert (of_each is not None) == entropies
        if of_each is not None:
            torch.testing.assert_close(of_each.double(), want_entropies, atol=1e-5, rtol=1e-5)
        for got, wanted in zip(grads, (hidden, weight[own], bias[own]), strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
