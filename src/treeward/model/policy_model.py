"""`PolicyModel`: the log-probabilities of completions, the prompt computed once for all of them.

    policy = PolicyModel(causal_lm)
    logprobs = policy.log_probs([[prompt_ids + completion_ids, prompt_ids + other_completion_ids]], [[40, 40]])

The completions of a prompt are one tree, and each value and gradient is that of the plain row.
`linear_log_probs` computes logits for at most `chunk_tokens` tokens at a time in one buffer; the
backward pass computes them again and turns them into their own gradient in place, g (1[v = target]
- p_v) scale / temperature with g = d loss / d log p(target). The product is of the weights' dtype,
the softmax float32. Processes may share the vocabulary (`VocabularyShard`).

Shapes: S sequences, L tokens of the longest completion, N predicted tokens, M tokens before them, D
hidden size, V vocabulary, C tokens of a chunk, R processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from treeward.errors import ModelError
from treeward.model.wrapped import Layout, WrappedModel
from treeward.tree.batch import TreeBatch, on_device
from treeward.tree.token_tree import TokenIds

_T = TypeVar("_T")

DEFAULT_CHUNK_TOKENS = 1024
"""Predicted tokens whose logits are in memory at a time."""


@dataclass(frozen=True, slots=True)
class CompletionLogProbs:
    """Log-probabilities of S completions with at most L tokens: `values_SL`, float32, 0 where
    `mask_SL` (bool) is False. `entropies_SL`: of the predicting distributions, without gradients;
    None unless requested. `num_computed_tokens`: tokens that went through the model."""

    values_SL: Tensor
    mask_SL: Tensor
    entropies_SL: Tensor | None
    num_computed_tokens: int


class PolicyModel(WrappedModel):
    """A causal language model, as a policy or a reference. `chunk_tokens`: predicted tokens with
    logits in memory at a time. Raises `ModelError` for a model that does not predict tokens."""

    def __init__(
        self,
        hf: PreTrainedModel,
        *,
        layout: Layout = "tree",
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    ) -> None:
        super().__init__(hf, layout=layout)
        self.chunk_tokens = chunk_tokens
        self.vocabulary: VocabularyShard | None = None
        """This process's part of the head, a DTensor under tensor parallelism."""
        _ = self.head  # raises now rather than in the first step

    @property
    def head(self) -> nn.Linear:
        """The module from hidden states to logits, tied to the embedding or not. Raises
        `ModelError`."""
        head = None if self.hf.config.is_encoder_decoder else self.hf.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise ModelError(
                "a policy needs a linear head that predicts the next token",
                where="policy.model_name",
                got=f"{type(self.hf).__name__}, with the head {type(head).__name__}",
                need="a causal language model, not a reward model or an encoder, and no adapters beside its head",
            )
        return head

    def log_probs(
        self,
        groups: Sequence[Sequence[TokenIds]],
        prompt_lengths: Sequence[Sequence[int]],
        *,
        temperature: float = 1.0,
        entropies: bool = False,
    ) -> CompletionLogProbs:
        """The log-probabilities of the tokens after each sequence's prompt.

        `groups`: whole sequences, one tree per group. `prompt_lengths`: of each sequence, at least
        1; a completion may be empty. `temperature`: of the sampling, divides logits. Raises
        `ModelError` for a sequence without a prompt.
        """
        sequences = [sequence for group in groups for sequence in group]
        starts = [length for group in prompt_lengths for length in group]
        if any(
            not 0 < start <= len(sequence)
            for sequence, start in zip(sequences, starts, strict=True)
        ):
            raise ModelError(
                "a completion needs a prompt of at least one token",
                need="1 <= prompt length <= length",
            )
        packed = self.pack(groups)
        if isinstance(packed, TreeBatch):
            places = packed.places()
        else:
            width = packed.tokens_SL.shape[1]
            places = [
                np.arange(s * width, s * width + len(sequence))
                for s, sequence in enumerate(sequences)
            ]
        completions, batch = _completions(places, starts, self.device), self.on_device(packed)
        if isinstance(batch, TreeBatch):
            hidden_MD, tokens_T = self.tree_hidden(batch, completions.before_M), batch.tokens_T
        else:
            hidden_MD = self.row_hidden(batch).flatten(0, 1).index_select(0, completions.before_M)
            tokens_T = batch.tokens_SL.flatten()
        targets_N, mask_SL = tokens_T[completions.at_N], completions.mask_SL
        hidden_ND = hidden_MD.index_select(0, completions.before_of_N)
        values_N, entropies_N = self._values(hidden_ND, targets_N, temperature, entropies)

        def spread(values: Tensor) -> Tensor:
            if not len(values):
                return values.new_zeros(mask_SL.shape)
            return torch.where(mask_SL, values[completions.index_SL], values.new_zeros(()))

        return CompletionLogProbs(
            spread(values_N),
            mask_SL,
            None if entropies_N is None else spread(entropies_N),
            batch.num_computed_tokens,
        )

    def _values(
        self, hidden_ND: Tensor, targets_N: Tensor, temperature: float, entropies: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The log-probability of each predicted token, float32 (N,), and the entropies."""
        head: Any = self.head
        weight, bias = head.weight, head.bias
        if self.vocabulary is not None:
            weight, bias = weight.to_local(), None if bias is None else bias.to_local()
        return linear_log_probs(
            hidden_ND,
            weight,
            bias,
            targets_N,
            chunk_tokens=self.chunk_tokens,
            scale=self._logit_scale,
            softcap=self._softcap,
            temperature=temperature,
            entropies=entropies,
            shard=self.vocabulary,
        )

    def within(self, work: Callable[[], _T]) -> _T:
        """What `work` returns; it may call the backbone and `logits` by themselves, also of a
        sharded policy."""
        return work()

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """As the model's own forward makes them of its last hidden states."""
        logits: Tensor = self.head(hidden_CD) * self._logit_scale
        softcap = self._softcap
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    @property
    def _logit_scale(self) -> float:
        # Granite divides, Cohere multiplies; `check_policy` finds a model that does something else.
        divisor: float = getattr(self.hf.config.get_text_config(), "logits_scaling", None) or 1.0
        factor: float = getattr(self.hf, "logit_scale", 1.0)
        return factor / divisor

    @property
    def _softcap(self) -> float | None:
        return getattr(self.hf.config.get_text_config(), "final_logit_softcapping", None)


class _Completions(NamedTuple):
    """The predicted tokens, each token of a tree once, int64: their places `at_N`; the places
    before them `before_M`, ascending and each once, and which is each token's, `before_of_N`.
    `index_SL`, `mask_SL`: each completion's among the N."""

    before_M: Tensor
    before_of_N: Tensor
    at_N: Tensor
    index_SL: Tensor
    mask_SL: Tensor


def _completions(
    places: Sequence[np.ndarray], starts: Sequence[int], device: torch.device
) -> _Completions:
    edges = [
        np.stack([place[start - 1 : -1], place[start:]])
        for place, start in zip(places, starts, strict=True)
    ]
    lengths_S = np.array([edge.shape[1] for edge in edges])
    joined = np.concatenate(edges, axis=1)
    # a token of a tree has one predecessor, so its own place names the pair; several may have the
    # same one
    at, first, inverse = np.unique(joined[1], return_index=True, return_inverse=True)
    before, before_of = np.unique(joined[0][first], return_inverse=True)
    mask = np.arange(lengths_S.max()) < lengths_S[:, None]
    index = np.zeros(mask.shape, dtype=np.int64)
    index[mask] = inverse
    return _Completions(
        *(on_device(values, device) for values in (before, before_of, at, index, mask))
    )


def linear_log_probs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    *,
    chunk_tokens: int,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    entropies: bool = False,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature) at the targets, float32 (N,), with gradients of first
    order; and the entropies (N,) without gradients, if requested. The logits are (hidden weight^T +
    bias) * scale, and with `softcap` c then c tanh(logits / c). `shard`: weight and bias are this
    process's rows; hidden states and targets are those of all."""
    settings = _Settings(chunk_tokens, scale, softcap, temperature, entropies, shard)
    values_N, entropies_N = _LinearLogProbs.apply(hidden_ND, weight_VD, bias_V, targets_N, settings)  # type: ignore[no-untyped-call]
    return values_N, entropies_N if entropies else None


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """This process has the rows of the tokens from `first` on; the processes of `group` have one
    part each."""

    first: int
    group: distributed.ProcessGroup

    def merged(
        self, values_N: Tensor, norms_N: Tensor, entropies_N: Tensor, is_here_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values, normalisers and entropies of the whole vocabulary, of those of each part: a part
        r with normaliser l_r has the probability w_r = exp(l_r - l), and the entropy is sum w_r
        (h_r - log w_r)."""
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
    softcap: float | None
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
        # in the number format of the model, as its own forward does
        if settings.softcap is not None:
            product_CV.div_(settings.softcap).tanh_().mul_(settings.softcap)
        if logits is not products:
            logits_CV.copy_(product_CV)
        if settings.temperature != 1.0:
            logits_CV /= settings.temperature
        yield chunk, logits_CV


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        settings: _Settings,
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
            values_N, norms_N, entropies_N = settings.shard.merged(
                values_N, norms_N, entropies_N, is_here_N
            )
        ctx.save_for_backward(hidden, weight, bias, targets_N, is_here_N, norms_N)
        ctx.settings, ctx.hidden_dtype = settings, hidden_ND.dtype
        ctx.mark_non_differentiable(entropies_N)
        return values_N, entropies_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_values_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, grad_values_N), None, None


def _gradients(
    ctx: Any, grad_values_N: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of hidden states, weight and bias; None if not required."""
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
        slope_CV = (
            None
            if settings.softcap is None
            else 1 - (logits_CV * settings.temperature / settings.softcap) ** 2
        )
        grad_CV = logits_CV.sub_(norms_N[chunk, None]).exp_().mul_(-grad_C1)
        grad_CV.scatter_add_(1, targets_N[chunk, None], picked_N[chunk, None])
        grad_CV = grad_CV if slope_CV is None else grad_CV.mul_(slope_CV)
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
