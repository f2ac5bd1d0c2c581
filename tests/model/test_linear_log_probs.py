"""The head's log-probabilities: value, entropy and gradients of the formula that is written out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from treeward.model.policy_model import VocabularyShard, linear_log_probs

N, D, V = 23, 16, 41


def tensors(bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, biases = (torch.randn(shape, generator=generator) for shape in ((N, D), (V, D), (V,)))
    targets = torch.randint(V, (N,), generator=generator)
    return hidden, weight, biases if bias else None, targets, torch.randn(N, generator=generator)


def written_out(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: float,
    temperature: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    logits = nn.functional.linear(hidden.double(), weight.double(), None if bias is None else bias.double()) * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_probs = (logits / temperature).log_softmax(dim=-1)
    return log_probs.gather(1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(dim=-1)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 23, 100])
@pytest.mark.parametrize(
    ("bias", "scale", "temperature", "softcap"),
    [(False, 1.0, 1.0, None), (True, 0.25, 1.0, None), (False, 3.0, 0.7, None), (True, 2.0, 0.7, 4.0)],
)
def test_equals_the_formula(
    chunk_tokens: int, bias: bool, scale: float, temperature: float, softcap: float | None
) -> None:
    hidden, weight, biases, targets, coefficients = tensors(bias)
    leaves = [x.requires_grad_() for x in (hidden, weight, biases) if x is not None]
    values, entropies = linear_log_probs(
        hidden,
        weight,
        biases,
        targets,
        chunk_tokens=chunk_tokens,
        scale=scale,
        softcap=softcap,
        temperature=temperature,
        entropies=True,
    )
    want, want_entropies = written_out(hidden, weight, biases, targets, scale, temperature, softcap)
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
    for grad, want_grad in zip(grads, torch.autograd.grad(want @ coefficients, leaves), strict=True):
        assert grad.dtype == want_grad.dtype == torch.float32
        torch.testing.assert_close(grad, want_grad, atol=0.02 * float(want_grad.abs().max()), rtol=0)
    # Chunks add up in float32: those of one gradient, sixty times, are sixty times it.
    chunk, many = (
        linear_log_probs(hidden.repeat(n, 1), weight, biases, targets.repeat(n), chunk_tokens=N)[0] for n in (1, 60)
    )
    [single] = torch.autograd.grad(chunk @ coefficients, weight)
    [total] = torch.autograd.grad(many @ coefficients.repeat(60), weight)
    torch.testing.assert_close(total, 60 * single, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("entropies", [False, True])
def test_a_vocabulary_that_two_processes_share_gives_the_same(entropies: bool) -> None:
    """Threads stand for the processes: each has a process group of its own, and not as many tokens as the other."""
    *whole, targets, coefficients = tensors(bias=True)
    store, parts = distributed.HashStore(), (slice(0, 15), slice(15, V))

    def part(rank: int) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        group: Any = distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        leaves = [x.detach().clone().requires_grad_() for x in (whole[0], *(x[parts[rank]] for x in whole[1:]))]
        options: dict[str, Any] = {"chunk_tokens": 7, "scale": 0.5, "temperature": 0.7, "entropies": entropies}
        shard = VocabularyShard(parts[rank].start, group)
        values, of_each = linear_log_probs(*leaves, targets, shard=shard, **options)
        return values, of_each, torch.autograd.grad(values @ coefficients, leaves)

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(part, range(2)))
    want, want_entropies = written_out(*(x.requires_grad_() for x in whole), targets, scale=0.5, temperature=0.7)
    hidden, weight, bias = torch.autograd.grad(want @ coefficients.double(), whole)
    for (values, of_each, grads), own in zip(results, parts, strict=True):
        torch.testing.assert_close(values.double(), want, atol=1e-5, rtol=1e-5)
        assert (of_each is not None) == entropies
        if of_each is not None:
            torch.testing.assert_close(of_each.double(), want_entropies, atol=1e-5, rtol=1e-5)
        for got, wanted in zip(grads, (hidden, weight[own], bias[own]), strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
