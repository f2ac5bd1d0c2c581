"""`PolicyModel`: the log-probabilities of answers, the prompt computed once for all of them.

    policy = PolicyModel(causal_lm)
    logprobs = policy.log_probs([[prompt_ids + answer_ids, prompt_ids + other_answer_ids]], [[40, 40]])
    logprobs.values_SL      # float32 (S, L): of each answer token, given what comes before it; with gradients
    logprobs.mask_SL        # which of them there are

It wraps a Hugging Face `...ForCausalLM`. The G answers to a prompt are one tree, as in `RewardModel`: what they share
is computed once, and so is the vocabulary's row of logits behind every token, at most `chunk_tokens` of them at a time,
so that logits of a whole batch never lie in memory. Each value, and each gradient, is that of the plain row.

Shapes: S sequences, L tokens of the longest answer, N tokens that are predicted, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from treeward.errors import ModelError
from treeward.model.wrapped import Layout, WrappedModel
from treeward.tree.batch import RowBatch, TreeBatch, TreeLayout
from treeward.tree.token_tree import TokenIds

__all__ = ["AnswerLogProbs", "PolicyModel"]

DEFAULT_CHUNK_TOKENS = 1024
"""Predicted tokens whose logits are in memory at a time."""


@dataclass(frozen=True, slots=True)
class AnswerLogProbs:
    """Of S answers with at most L tokens.

    `values_SL`: log p(token | what comes before it), float32 (S, L), 0 where `mask_SL` is not.
    `entropies_SL`: of the distribution that each token was predicted by, without gradients; None unless asked for.
    `num_computed_tokens`: tokens that went through the model.
    """

    values_SL: Tensor
    mask_SL: Tensor
    entropies_SL: Tensor | None
    num_computed_tokens: int


class PolicyModel(WrappedModel):
    """A causal language model that is trained or compared with. `layout`: "tree" or, for models that cannot, "rows"."""

    def __init__(
        self,
        hf: PreTrainedModel,
        *,
        layout: Layout = "tree",
        compute_dtype: torch.dtype | None = None,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    ) -> None:
        super().__init__(hf, layout=layout, compute_dtype=compute_dtype)
        self.chunk_tokens = chunk_tokens

    def log_probs(
        self,
        groups: Sequence[Sequence[TokenIds]],
        prompt_lengths: Sequence[Sequence[int]],
        *,
        temperature: float = 1.0,
        entropies: bool = False,
    ) -> AnswerLogProbs:
        """The log-probabilities of the tokens after each sequence's prompt.

        `groups`: whole sequences, prompt and answer; those of a group share one tree. `prompt_lengths`: tokens of each
        sequence's prompt, at least 1; an answer may be empty. `temperature`: logits are divided by it, as they were
        for sampling. With `torch.no_grad` nothing is kept for a backward pass.
        """
        sequences = [sequence for group in groups for sequence in group]
        starts = [length for group in prompt_lengths for length in group]
        if any(not 0 < start <= len(sequence) for sequence, start in zip(sequences, starts, strict=True)):
            raise ModelError("an answer needs a prompt of at least one token", need="1 <= prompt length <= length")
        batch: TreeBatch | RowBatch
        if self.layout == "tree":
            batch = TreeBatch.from_groups(groups).to(self.device)
            places = _tree_places(batch.layout, batch.reads_S.tolist())
        else:
            batch = RowBatch.from_groups(groups, pad_token_id=0).to(self.device)
            width = batch.tokens_SL.shape[1]
            places = [np.arange(s * width, s * width + len(sequence)) for s, sequence in enumerate(sequences)]
        with self._autocast():
            if isinstance(batch, TreeBatch):
                hidden_TD, tokens_T = self._tree_hidden(batch), batch.tokens_T
            else:
                hidden_TD, tokens_T = self._row_hidden(batch).flatten(0, 1), batch.tokens_SL.flatten()
        predicted, index_SL, mask_SL = _answers(places, starts, self.device)
        values_N, entropies_N = self._values(hidden_TD, tokens_T, predicted, temperature, entropies)

        def spread(values: Tensor) -> Tensor:
            if not len(values):
                return values.new_zeros(mask_SL.shape)
            return torch.where(mask_SL, values[index_SL], values.new_zeros(()))

        return AnswerLogProbs(
            spread(values_N),
            mask_SL,
            None if entropies_N is None else spread(entropies_N),
            batch.num_computed_tokens,
        )

    def _values(
        self, hidden_TD: Tensor, tokens_T: Tensor, predicted: tuple[Tensor, Tensor], temperature: float, entropies: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The log-probability of each predicted token, float32 (N,), and the entropies."""
        before_N, at_N = predicted
        values: list[Tensor] = [hidden_TD.new_zeros(0, dtype=torch.float32)]
        all_entropies: list[Tensor] = [hidden_TD.new_zeros(0, dtype=torch.float32)]
        for chunk in torch.arange(len(before_N), device=hidden_TD.device).split(self.chunk_tokens):
            hidden, targets = hidden_TD[before_N[chunk]], tokens_T[at_N[chunk]]
            if torch.is_grad_enabled():
                # computed again in the backward pass: the logits of a chunk are the largest tensor there is
                value, entropy = checkpoint(
                    self._chunk, hidden, targets, temperature, entropies, use_reentrant=False, preserve_rng_state=False
                )
            else:
                value, entropy = self._chunk(hidden, targets, temperature, entropies)
            values.append(value)
            all_entropies.append(entropy)
        return torch.cat(values), torch.cat(all_entropies) if entropies else None

    def _chunk(
        self, hidden_CD: Tensor, targets_C: Tensor, temperature: float, entropies: bool
    ) -> tuple[Tensor, Tensor]:
        with self._autocast():
            logits_CV = self._logits(hidden_CD)
        logits_CV = logits_CV.float() / temperature
        total_C = torch.logsumexp(logits_CV, dim=-1)
        values_C = logits_CV.gather(-1, targets_C[:, None])[:, 0] - total_C
        entropies_C = values_C.new_zeros(0)
        if entropies:
            with torch.no_grad():
                log_probs_CV = logits_CV - total_C[:, None]
                entropies_C = -(log_probs_CV.exp() * log_probs_CV).sum(dim=-1)
        return values_C, entropies_C

    def _logits(self, hidden_CD: Tensor) -> Tensor:
        """As the model's own forward makes them of its last hidden states."""
        head = self.hf.get_output_embeddings()
        assert isinstance(head, nn.Module)
        config = self.hf.config.get_text_config()
        logits: Tensor = head(hidden_CD / (getattr(config, "logits_scaling", None) or 1.0))
        softcap = getattr(config, "final_logit_softcapping", None)
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _tree_places(layout: TreeLayout, reads: Sequence[int]) -> list[np.ndarray]:
    """For each sequence, where in the row each of its tokens lies."""
    places = []
    for read in reads:
        tree = next(tree for tree in layout.trees if tree.start <= read < tree.end)
        at: int | None = next(i for i, segment in enumerate(tree.segments) if segment.start <= read < segment.end)
        parts: list[np.ndarray] = []
        end = read + 1  # a sequence may end within a segment that another continues
        while at is not None:
            segment = tree.segments[at]
            parts.append(np.arange(segment.start, min(end, segment.end)))
            at, end = segment.parent, tree.end
        places.append(np.concatenate(parts[::-1]))
    return places


def _answers(
    places: Sequence[np.ndarray], starts: Sequence[int], device: torch.device
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """What is predicted, each token of a tree once: (where its predecessor lies, where it lies), int64 (N,) each.

    And for each answer which of them its tokens are, int64 (S, L), with the mask of those that there are.
    """
    edges = [np.stack([place[start - 1 : -1], place[start:]]) for place, start in zip(places, starts, strict=True)]
    longest = max((edge.shape[1] for edge in edges), default=0)
    joined = np.concatenate(edges, axis=1)
    # a token of a tree has one predecessor, so its own place names the pair
    at, inverse = np.unique(joined[1], return_inverse=True)
    before = np.empty_like(at)
    before[inverse] = joined[0]
    index = np.zeros((len(edges), longest), dtype=np.int64)
    mask = np.zeros((len(edges), longest), dtype=bool)
    offset = 0
    for s, edge in enumerate(edges):
        length = edge.shape[1]
        index[s, :length] = inverse[offset : offset + length]
        mask[s, :length] = True
        offset += length
    predicted = torch.from_numpy(before).to(device), torch.from_numpy(at).to(device)
    return predicted, torch.from_numpy(index).to(device), torch.from_numpy(mask).to(device)
