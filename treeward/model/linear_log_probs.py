"""Log-probabilities behind a linear head, a chunk of logits at a time.

    values_N, entropies_N = linear_log_probs(hidden_ND, head.weight, head.bias, targets_N, entropies=True)

The logits of a batch are the largest tensor that training a policy makes, and reading and writing them costs about as
much as their matrix product. Here every chunk uses the same buffer, and the backward pass computes the logits a second
time and turns them into their own gradient in place:

    d loss / d logit_v = g (1[v = target] - p_v) scale / temperature,        g = d loss / d log p(target)

The product is of the weights' dtype, the softmax float32; the gradient of the weights is added up in float32.

The vocabulary may be shared out over processes (`VocabularyShard`), each with the logits of its tokens: they tell each
other three numbers a token, the normaliser, the target's log-probability and the entropy, and add up the gradients of
the hidden states.

Shapes: N predicted tokens, D hidden size, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable


def linear_log_probs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    *,
    chunk_tokens: int,
    scale: float = 1.0,
    temperature: float = 1.0,
    entropies: bool = False,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax((hidden weight^T + bias) * scale / temperature) at the targets, float32 (N,), with gradients.

    And the entropies of those distributions, without gradients, where they are asked for. There is no second
    derivative. `shard`: weight and bias are this process's rows; hidden states and targets are those of all.
    """
    settings = _Settings(chunk_tokens, scale, temperature, entropies, shard)
    values_N, entropies_N = _LinearLogProbs.apply(hidden_ND, weight_VD, bias_V, targets_N, settings)  # type: ignore[no-untyped-call]
    return values_N, entropies_N if entropies else None


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """This process has the rows of the tokens from `first` on; the processes of `group` have one part each."""

    first: int
    group: distributed.ProcessGroup

    def merged(
        self, values_N: Tensor, norms_N: Tensor, entropies_N: Tensor, is_here_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values, normalisers and entropies of the whole vocabulary, of those of each part: a part r with normaliser
        l_r has the probability w_r = exp(l_r - l), and the entropy is sum w_r (h_r - log w_r)."""
        stacked = torch.stack([(values_N + norms_N).masked_fill(~is_here_N, -torch.inf), norms_N])
        stacked = torch.cat([stacked, entropies_N[None]]) if len(entropies_N) else stacked
        parts = stacked.new_empty(self.group.size(), *stacked.shape)
        distributed.all_gather(list(parts), stacked, group=self.group)
        targets_RN, norms_RN, *entropies = parts.unbind(dim=1)
        norms_N = norms_RN.logsumexp(dim=0)
        if entropies:
            log_w_RN = norms_RN - norms_N
            entropies_N = (log_w_RN.exp() * (entropies[0] - log_w_RN)).sum(dim=0)
        return targets_RN.amax(dim=0) - norms_N, norms_N, entropies_N


@dataclass(frozen=True, slots=True)
class _Settings:
    chunk_tokens: int
    scale: float
    temperature: float
    entropies: bool
    shard: VocabularyShard | None


def _logits(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, settings: _Settings
) -> Iterator[tuple[slice, Tensor]]:
    """The float32 logits of one chunk after another, each in the place of the one before."""
    rows = min(settings.chunk_tokens, len(hidden_ND))
    products = hidden_ND.new_empty(rows, len(weight_VD))
    logits = products if products.dtype == torch.float32 else products.float()
    for start in range(0, len(hidden_ND), settings.chunk_tokens):
        chunk = slice(start, min(start + settings.chunk_tokens, len(hidden_ND)))
        product_CV, logits_CV = (x[: chunk.stop - chunk.start] for x in (products, logits))
        if bias_V is None:
            torch.mm(hidden_ND[chunk], weight_VD.T, out=product_CV)
        else:
            torch.addmm(bias_V, hidden_ND[chunk], weight_VD.T, out=product_CV)
        if settings.scale != 1.0:
            product_CV *= settings.scale
        if logits is not products:
            logits_CV.copy_(product_CV)
        if settings.temperature != 1.0:
            logits_CV /= settings.temperature
        yield chunk, logits_CV


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        hidden, weight, bias = hidden_ND.to(weight_VD.dtype), weight_VD, bias_V
        values_N = hidden_ND.new_empty(len(hidden_ND), dtype=torch.float32)
        norms_N = torch.empty_like(values_N)
        entropies_N = torch.empty_like(values_N) if settings.entropies else values_N.new_empty(0)
        log_probs = values_N.new_empty(min(settings.chunk_tokens, len(hidden)), len(weight))
        is_here_N = None
        if settings.shard is not None:
            places_N = targets_N - settings.shard.first
            targets_N = places_N.clamp(0, len(weight) - 1)
            is_here_N = targets_N == places_N
        for chunk, logits_CV in _logits(hidden, weight, bias, settings):
            log_probs_CV, at_C1 = log_probs[: len(logits_CV)], targets_N[chunk, None]
            targets_C1 = logits_CV.gather(1, at_C1)
            torch.ops.aten._log_softmax.out(logits_CV, -1, False, out=log_probs_CV)
            values_C1 = log_probs_CV.gather(1, at_C1)
            values_N[chunk], norms_N[chunk] = values_C1[:, 0], (targets_C1 - values_C1)[:, 0]
            if settings.entropies:
                probs_CV = torch.exp(log_probs_CV, out=logits_CV)
                entropies_N[chunk] = -torch.linalg.vecdot(probs_CV, log_probs_CV)
        if settings.shard is not None:
            assert is_here_N is not None
            values_N, norms_N, entropies_N = settings.shard.merged(values_N, norms_N, entropies_N, is_here_N)
        ctx.save_for_backward(hidden, weight, bias, targets_N, is_here_N, norms_N)
        ctx.settings, ctx.hidden_dtype = settings, hidden_ND.dtype
        ctx.mark_non_differentiable(entropies_N)
        return values_N, entropies_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_values_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, grad_values_N), None, None


def _gradients(ctx: Any, grad_values_N: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of hidden states, weight and bias; None where none is asked for."""
    hidden, weight, bias, targets_N, is_here_N, norms_N = ctx.saved_tensors
    needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    settings = ctx.settings
    grad_N = grad_values_N * (settings.scale / settings.temperature)
    picked_N = grad_N if is_here_N is None else grad_N.masked_fill(~is_here_N, 0.0)
    grad_hidden = torch.empty_like(hidden) if needs_hidden else None
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
    grad_bias = weight.new_zeros(len(weight), dtype=torch.float32) if needs_bias else None
    for chunk, logits_CV in _logits(hidden, weight, bias, settings):
        grad_C1 = grad_N[chunk, None]
        grad_CV = logits_CV.sub_(norms_N[chunk, None]).exp_().mul_(-grad_C1)
        grad_CV.scatter_add_(1, targets_N[chunk, None], picked_N[chunk, None])
        if grad_bias is not None:
            grad_bias += grad_CV.sum(dim=0)
        grad_CV = grad_CV.to(weight.dtype)
        if grad_hidden is not None:
            torch.mm(grad_CV, weight, out=grad_hidden[chunk])
        if grad_weight is None:
            continue
        if grad_weight.dtype == weight.dtype:
            grad_weight.addmm_(grad_CV.T, hidden[chunk])
        else:
            grad_weight += grad_CV.T @ hidden[chunk]
    if grad_hidden is not None and settings.shard is not None:
        distributed.all_reduce(grad_hidden, group=settings.shard.group)
    return None if grad_hidden is None else grad_hidden.to(ctx.hidden_dtype), grad_weight, grad_bias
