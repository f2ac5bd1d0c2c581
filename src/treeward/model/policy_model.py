"""`PolicyModel`: the log-probabilities of completions, the prompt computed once for all of them.

    policy = PolicyModel(causal_lm)
    completions = [prompt_ids + completion_ids, prompt_ids + other_completion_ids]
    logprobs = policy.log_probs([completions], [[40, 40]])      # the prompt has 40 tokens

The completions of a prompt are one tree, and each value and gradient is that of the plain row.
`linear_log_probs` computes logits for at most `chunk_tokens` tokens at a time in one buffer; the
backward pass computes them again and turns them into their own gradient in place, g (1[v = target]
- p_v) scale / temperature with g = d loss / d log p(target). The product is of the weights' dtype,
the softmax float32. Processes may share the vocabulary (`VocabularyShard`).

Shapes: S sequences, L tokens of the longest completion, N predicted tokens, M tokens before them, D
hidden size, V vocabulary, C tokens of a chunk, R processes.
"""

from __future__ import annotations

import itertools
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
        head: Any = None
        if not self.hf.config.is_encoder_decoder:
            head = self.hf.get_output_embeddings()
        # The very class: an adapter or a quantized layer computes something else of its weight.
        if type(head) is not nn.Linear:
            raise ModelError(
                "a policy needs a linear head that predicts the next token",
                where="policy.model_name",
                got=f"{type(self.hf).__name__}, with the head {type(head).__name__}",
                need="a causal language model, not a reward model or an encoder, and no adapters "
                "beside its head",
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
        sequences = list(itertools.chain.from_iterable(groups))
        starts = list(itertools.chain.from_iterable(prompt_lengths))
        for sequence, start in zip(sequences, starts, strict=True):
            if not 0 < start <= len(sequence):
                raise ModelError(
                    "a completion needs a prompt of at least one token",
                    need="1 <= prompt length <= length",
                )
        packed = self.pack(groups)
        if isinstance(packed, TreeBatch):
            places = packed.places()
        else:
            # In the padded rows one after another.
            width = packed.tokens_SL.shape[1]
            places = []
            for s, sequence in enumerate(sequences):
                places.append(np.arange(s * width, s * width + len(sequence)))
        completions = _completions(places, starts, self.device)
        batch = self.on_device(packed)
        if isinstance(batch, TreeBatch):
            hidden_MD = self.tree_hidden(batch, completions.before_M)
            tokens_T = batch.tokens_T
        else:
            hidden_MD = self.row_hidden(batch).flatten(0, 1).index_select(0, completions.before_M)
            tokens_T = batch.tokens_SL.flatten()
        # The token at a place is predicted by the hidden state before it, which several may share.
        targets_N = tokens_T[completions.at_N]
        hidden_ND = hidden_MD.index_select(0, completions.before_of_N)
        values_N, entropies_N = self._values(hidden_ND, targets_N, temperature, entropies)
        mask_SL = completions.mask_SL

        def spread(values: Tensor) -> Tensor:
            if not len(values):  # an index into nothing is an error
                return values.new_zeros(mask_SL.shape)
            return torch.where(mask_SL, values[completions.index_SL], values.new_zeros(()))

        entropies_SL = None
        if entropies_N is not None:
            entropies_SL = spread(entropies_N)
        return CompletionLogProbs(
            values_SL=spread(values_N),
            mask_SL=mask_SL,
            entropies_SL=entropies_SL,
            num_computed_tokens=batch.num_computed_tokens,
        )

    def _values(
        self, hidden_ND: Tensor, targets_N: Tensor, temperature: float, entropies: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The log-probability of each predicted token, float32 (N,), and the entropies."""
        head: Any = self.head
        weight = head.weight
        bias = head.bias
        # The arithmetic below is on plain tensors; `VocabularyShard` puts the parts together.
        if self.vocabulary is not None:
            weight = weight.to_local()
            if bias is not None:
                bias = bias.to_local()
        # A Mamba's last norm gives float32, whatever the weights are.
        return linear_log_probs(
            hidden_ND.to(weight.dtype),
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
        logits: Tensor = self.head(hidden_CD.to(self.head.weight.dtype)) * self._logit_scale
        softcap = self._softcap
        if softcap is None:
            return logits
        return torch.tanh(logits / softcap) * softcap

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
    """`places`: of each sequence's tokens in the batch. `starts`: where each completion begins."""
    befores = []
    ats = []
    for place, start in zip(places, starts, strict=True):
        befores.append(place[start - 1 : -1])
        ats.append(place[start:])
    lengths_S = np.array([len(at) for at in ats])
    # A token of a tree has one predecessor, so its own place names the pair. Several tokens may
    # have the same predecessor: where completions part.
    at_N, first_N, index = np.unique(np.concatenate(ats), return_index=True, return_inverse=True)
    before_N = np.concatenate(befores)[first_N]
    before_M, before_of_N = np.unique(before_N, return_inverse=True)
    mask_SL = np.arange(lengths_S.max()) < lengths_S[:, None]
    index_SL = np.zeros(mask_SL.shape, dtype=np.int64)
    index_SL[mask_SL] = index
    return _Completions(
        before_M=on_device(before_M, device),
        before_of_N=on_device(before_of_N, device),
        at_N=on_device(at_N, device),
        index_SL=on_device(index_SL, device),
        mask_SL=on_device(mask_SL, device),
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
    apply: Any = _LinearLogProbs.apply  # which torch has no types for
    values_N, entropies_N = apply(hidden_ND, weight_VD, bias_V, targets_N, settings)
    if not entropies:
        return values_N, None
    return values_N, entropies_N


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
        # Each target's logit is on one process: the largest over all is that one.
        targets_N = (values_N + norms_N).masked_fill(~is_here_N, -torch.inf)
        rows = [targets_N, norms_N]
        if len(entropies_N):
            rows.append(entropies_N)
        own = torch.stack(rows)
        parts = own.new_empty(self.group.size(), *own.shape)
        # Into views of `parts`, one for each process.
        distributed.all_gather(list(parts), own, group=self.group)
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
    # One buffer for all chunks, and in a half precision a second one in float32.
    products = hidden_ND.new_empty(rows, len(weight_VD))
    logits = products
    if products.dtype != torch.float32:
        logits = products.float()
    for start in range(0, len(hidden_ND), settings.chunk_tokens):
        stop = min(start + settings.chunk_tokens, len(hidden_ND))
        chunk = slice(start, stop)
        product_CV = products[: stop - start]
        logits_CV = logits[: stop - start]
        if bias_V is None:
            torch.mm(hidden_ND[chunk], weight_VD.T, out=product_CV)
        else:
            torch.addmm(bias_V, hidden_ND[chunk], weight_VD.T, out=product_CV)
        if settings.scale != 1.0:
            product_CV *= settings.scale
        # In the number format of the model, as its own forward does.
        if settings.softcap is not None:
            product_CV.div_(settings.softcap).tanh_().mul_(settings.softcap)
        if logits is not products:
            logits_CV.copy_(product_CV)
        if settings.temperature != 1.0:
            logits_CV /= settings.temperature
        yield chunk, logits_CV


class _LinearLogProbs(torch.autograd.Function):
    """Autograd would keep the logits of all tokens, (N, V). This keeps the hidden states and the
    normalisers, and computes each chunk of logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor]:
        hidden_dtype = hidden_ND.dtype
        hidden_ND = hidden_ND.to(weight_VD.dtype)
        values_N = hidden_ND.new_empty(len(hidden_ND), dtype=torch.float32)
        norms_N = torch.empty_like(values_N)
        entropies_N = values_N.new_empty(0)
        if settings.entropies:
            entropies_N = torch.empty_like(values_N)
        log_probs = values_N.new_empty(min(settings.chunk_tokens, len(hidden_ND)), len(weight_VD))
        is_here_N = None
        if settings.shard is not None:
            # A target on another process reads any row here, which `merged` leaves out.
            places_N = targets_N - settings.shard.first
            targets_N = places_N.clamp(0, len(weight_VD) - 1)
            is_here_N = targets_N == places_N
        for chunk, logits_CV in _logits(hidden_ND, weight_VD, bias_V, settings):
            at_C1 = targets_N[chunk, None]
            targets_C1 = logits_CV.gather(1, at_C1)
            # Into one buffer, which is as large as the logits of a chunk.
            log_probs_CV = log_probs[: len(logits_CV)]
            torch.ops.aten._log_softmax.out(logits_CV, -1, False, out=log_probs_CV)
            values_C1 = log_probs_CV.gather(1, at_C1)
            values_N[chunk] = values_C1[:, 0]
            # log p = logit - normaliser
            norms_N[chunk] = (targets_C1 - values_C1)[:, 0]
            if settings.entropies:
                # The logits are not needed any more, and their place is.
                probs_CV = torch.exp(log_probs_CV, out=logits_CV)
                entropies_N[chunk] = -torch.linalg.vecdot(probs_CV, log_probs_CV)
        if settings.shard is not None:
            assert is_here_N is not None
            values_N, norms_N, entropies_N = settings.shard.merged(
                values_N, norms_N, entropies_N, is_here_N
            )
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, is_here_N, norms_N)
        ctx.settings = settings
        ctx.hidden_dtype = hidden_dtype
        ctx.mark_non_differentiable(entropies_N)
        return values_N, entropies_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_values_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, targets_N, is_here_N, norms_N = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        settings = ctx.settings
        grad_N = grad_values_N * (settings.scale / settings.temperature)
        # A target on another process picks no row of this part.
        picked_N = grad_N
        if is_here_N is not None:
            picked_N = grad_N.masked_fill(~is_here_N, 0.0)
        grad_hidden = None
        if needs_hidden:
            grad_hidden = torch.empty_like(hidden_ND)
        grad_weight = None
        if needs_weight:
            # In float32, because bfloat16 would round the sum at every chunk.
            grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32)
        grad_bias = None
        if needs_bias:
            grad_bias = norms_N.new_zeros(len(weight_VD))
        for chunk, logits_CV in _logits(hidden_ND, weight_VD, bias_V, settings):
            slope_CV = None
            if settings.softcap is not None:
                # The derivative of c tanh(x / c), from its value.
                slope_CV = 1 - (logits_CV * settings.temperature / settings.softcap) ** 2
            # g (1[v = target] - p_v), in the place of the logits.
            grad_CV = logits_CV.sub_(norms_N[chunk, None]).exp_().mul_(-grad_N[chunk, None])
            grad_CV.scatter_add_(1, targets_N[chunk, None], picked_N[chunk, None])
            if slope_CV is not None:
                grad_CV.mul_(slope_CV)
            if grad_bias is not None:
                grad_bias += grad_CV.sum(dim=0)
            grad_CV = grad_CV.to(weight_VD.dtype)
            if grad_hidden is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden[chunk])
            if grad_weight is None:
                continue
            if grad_weight.dtype == weight_VD.dtype:
                grad_weight.addmm_(grad_CV.T, hidden_ND[chunk])
            else:
                grad_weight += grad_CV.T @ hidden_ND[chunk]
        if grad_hidden is not None:
            if settings.shard is not None:
                # Each process has the part of its own rows of the head.
                distributed.all_reduce(grad_hidden, group=settings.shard.group)
            grad_hidden = grad_hidden.to(ctx.hidden_dtype)
        # Autograd casts the float32 gradients to the weights' dtype, or to the `grad_dtype` of
        # weights that have masters.
        # One for each argument of `forward`: the targets and the settings have none.
        return grad_hidden, grad_weight, grad_bias, None, None
