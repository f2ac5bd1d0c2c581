"""`FlashRows`: a reward model on packed rows with FlashAttention, as training without padding runs
it everywhere; and with the first level of each group's prefix shared, as flash-pref does it.

flash-pref (https://github.com/li-plus/flash-preference, 0.1.1) replaces functions of transformers <
4.52 that are gone, so here is its scheme in transformers' attention interface: a group is its first
sequence and, behind it, what the others do not have in common with all of it; their keys are the
gathered prefix and their own. FlashAttention is PyTorch's `varlen_attn`. On a CPU, where it does
not exist, each sequence is a call of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from treeward.model.reward_model import RewardModel

NAME = "benchmark_packed_rows"  # transformers takes names with "flash" for kernels to load

# Older versions of PyTorch take fewer key heads without a word.
GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


@dataclass(frozen=True, slots=True)
class FlashBatch:
    """S sequences in T tokens.

    `keys_K`: places in the row of the keys of one sequence after another; None where they are the
    row. `query_starts`, `key_starts`: where those of each sequence begin, and the end, (S + 1,).
    """

    tokens_T: Tensor
    positions_T: Tensor
    keys_K: Tensor | None
    query_starts: list[int]
    key_starts: list[int]
    query_starts_S: Tensor
    key_starts_S: Tensor

    @classmethod
    def from_groups(
        cls, groups: Sequence[Sequence[Sequence[int]]], device: torch.device, *, share: bool
    ) -> FlashBatch:
        tokens: list[int] = []
        positions: list[int] = []
        keys: list[int] = []
        queries: list[int] = []
        lengths: list[int] = []
        for group in groups:
            prefix = _shared(group) if share else 0
            first = len(tokens)
            for k, ids in enumerate(group):
                skipped = prefix if k else 0  # the first one has the prefix
                keys += [
                    *range(first, first + skipped),
                    *range(len(tokens), len(tokens) + len(ids) - skipped),
                ]
                tokens += ids[skipped:]
                positions += range(skipped, len(ids))
                queries.append(len(ids) - skipped)
                lengths.append(len(ids))
        query_starts = [0, *accumulate(queries)]
        key_starts = [0, *accumulate(lengths)]
        return cls(
            torch.tensor(tokens, device=device),
            torch.tensor(positions, device=device),
            torch.tensor(keys, device=device) if share else None,
            query_starts,
            key_starts,
            torch.tensor(query_starts, dtype=torch.int32, device=device),
            torch.tensor(key_starts, dtype=torch.int32, device=device),
        )


def _shared(group: Sequence[Sequence[int]]) -> int:
    """Leading tokens that all have in common; the last one of each, where its score is read, is its
    own."""
    most = min(map(len, group)) - 1
    return next((i for i in range(most) if len({ids[i] for ids in group}) > 1), most)


class FlashRows(nn.Module):
    """A reward model called this way. `share`: the first level of each group's prefix is computed
    once."""

    def __init__(self, model: RewardModel, *, share: bool) -> None:
        super().__init__()
        AttentionInterface.register(NAME, _attention)
        self.model, self.share = model, share

    def forward(self, groups: Sequence[Sequence[Sequence[int]]]) -> Tensor:
        """Scores, float32 (S,)."""
        batch = FlashBatch.from_groups(groups, self.model.device, share=self.share)
        with self.model.attention(NAME):
            hidden_TD = self.model.backbone(
                input_ids=batch.tokens_T[None],
                position_ids=batch.positions_T[None],
                use_cache=False,
                flash_batch=batch,
            ).last_hidden_state[0]
        scores_S: Tensor = self.model.head(hidden_TD[batch.query_starts_S[1:] - 1].float())[:, 0]
        return scores_S


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    flash_batch: FlashBatch | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    assert flash_batch is not None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if flash_batch.keys_K is not None:
        k = k.index_select(0, flash_batch.keys_K)
        v = v.index_select(0, flash_batch.keys_K)
    if q.is_cuda:
        out: Any = varlen_attn(
            q,
            k,
            v,
            flash_batch.query_starts_S,
            flash_batch.key_starts_S,
            max(_sizes(flash_batch.query_starts)),
            max(_sizes(flash_batch.key_starts)),
            scale=scaling,
            window_size=(-1, 0),
            **GROUPED,
        )
        return out[None], None
    sequences = zip(
        q.split(_sizes(flash_batch.query_starts)),
        k.split(_sizes(flash_batch.key_starts)),
        v.split(_sizes(flash_batch.key_starts)),
        strict=True,
    )
    return torch.cat([_causal(*sequence, scaling) for sequence in sequences])[None], None


def _sizes(starts: Sequence[int]) -> list[int]:
    return [end - start for start, end in zip(starts, starts[1:], strict=False)]


def _causal(q_QHD: Tensor, k_KJD: Tensor, v_KJD: Tensor, scale: float | None) -> Tensor:
    """Attention of one sequence, whose queries are the last of its keys; (Q, H, D)."""
    before = len(k_KJD) - len(q_QHD)
    seen = torch.ones(len(q_QHD), len(k_KJD), dtype=torch.bool, device=q_QHD.device).tril(before)
    q, k, v = (x.transpose(0, 1)[None] for x in (q_QHD, k_KJD, v_KJD))
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)[
        0
    ].transpose(0, 1)
