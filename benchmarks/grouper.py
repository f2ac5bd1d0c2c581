"""`GroupedPolicy`: the log-probabilities of completions with PrefixGrouper, on SDPA.

PrefixGrouper (https://github.com/johncaged/PrefixGrouper, verl's `use_prefix_grouper`) puts a
prompt and its completions into one padded row. Attention is two calls: prompts alone, and
completions, as rows, over their prompt repeated and themselves. It is given what costs it least
here: masks that are made once a batch and then shared by reference and policy, and on a CPU keys
that are not repeated for grouped queries. Its README and verl compute the logits of all tokens,
prompts and padding too (`all_logits`); without, the head computes real completion tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from prefix_grouper import PrefixGrouper
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv

from treeward.rl.generation import CompletionGroup

NAME = "benchmark_prefix_grouper"


@dataclass(frozen=True, slots=True)
class GroupedBatch:
    """P prompts with S completions of at most L tokens, in P rows.

    `mask_SL`: bool, True where a completion has a token.
    """

    grouper: PrefixGrouper
    tokens_PT: Tensor
    positions_PT: Tensor
    completions_SL: Tensor
    mask_SL: Tensor

    @classmethod
    def from_groups(
        cls, groups: Sequence[CompletionGroup], device: torch.device, dtype: torch.dtype
    ) -> GroupedBatch:
        lengths = []  # of each group's prompt, and of its completions
        rows = []
        positions = []
        completions = []
        for g in groups:
            prompt = len(g.prompt_ids)
            group_lengths = [prompt]
            row = list(g.prompt_ids)
            group_positions = [torch.arange(prompt)]
            for completion in g.completions:
                length = len(completion.token_ids)
                group_lengths.append(length)
                row += completion.token_ids
                # Each completion goes on from the prompt.
                group_positions.append(torch.arange(prompt, prompt + length))
                completions.append(torch.tensor(completion.token_ids))
            lengths.append(group_lengths)
            rows.append(torch.tensor(row))
            positions.append(torch.cat(group_positions))
        grouper = PrefixGrouper(lengths, device=device, padding_mode="right")
        tokens, places, targets = (
            pad_sequence(tensors, batch_first=True).to(device)
            for tensors in (rows, positions, completions)
        )
        made = cls(grouper, tokens, places, targets, grouper.ungrouped_suffix_mask)
        made._set_masks(dtype)
        return made

    def _set_masks(self, dtype: torch.dtype) -> None:
        """Of the two calls; the prompts' is empty, for plain causal attention, where they are
        equally long.

        Padding at the end of a completion is hidden by causality from all that is read.
        """
        info = self.grouper.group_info
        prefixes_PL = info.ungrouped_prefix_mask
        width = self.mask_SL.shape[1]
        longest = prefixes_PL.shape[1]
        alike = bool(prefixes_PL.all())
        own = torch.ones(width, width, dtype=torch.bool, device=prefixes_PL.device).tril()
        before = (
            prefixes_PL[:1] if alike else prefixes_PL.repeat_interleave(info.num_samples, dim=0)
        )
        seen = torch.cat(
            [before[:, None].expand(-1, width, -1), own.expand(len(before), -1, -1)], dim=2
        )
        info.suffix_attn_mask = _additive(seen[:, None], dtype)
        causal = torch.ones(longest, longest, dtype=torch.bool, device=prefixes_PL.device).tril()
        info.prefix_attn_mask = (
            seen.new_empty(0)
            if alike
            else _additive((causal & prefixes_PL[:, None])[:, None], dtype)
        )


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Finite, so that a padded query, which sees nothing, has a value."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(
        ~seen, torch.finfo(dtype).min
    )


class GroupedPolicy(nn.Module):
    """A causal language model that is called on grouped rows."""

    def __init__(self, hf: PreTrainedModel, *, all_logits: bool) -> None:
        super().__init__()
        AttentionInterface.register(NAME, _attention)
        hf.set_attn_implementation(NAME)
        self.hf, self.all_logits = hf, all_logits

    def log_probs(self, batch: GroupedBatch) -> Tensor:
        """log p(token | tokens before it), float32 (S, L), 0 where there is no token."""
        hidden_PTD = self.hf.base_model(
            input_ids=batch.tokens_PT,
            position_ids=batch.positions_PT,
            use_cache=False,
            prefix_grouper=batch.grouper,
        ).last_hidden_state
        head = self.hf.get_output_embeddings()
        read_PTX = head(hidden_PTD) if self.all_logits else hidden_PTD
        read_NX = batch.grouper.split_output(read_PTX, include_prefix_last=1)[2][:, :-1][
            batch.mask_SL
        ]
        logits_NV = (read_NX if self.all_logits else head(read_NX)).float()
        values_N = -cross_entropy(logits_NV, batch.completions_SL[batch.mask_SL], reduction="none")
        values_SL = values_N.new_zeros(batch.mask_SL.shape)
        return values_SL.masked_scatter(batch.mask_SL, values_N)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    prefix_grouper: PrefixGrouper | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    assert prefix_grouper is not None

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        # no fused kernel of a GPU takes both a mask and grouped queries
        if query.is_cuda and mask.numel():
            groups = query.shape[1] // key.shape[1]
            key = repeat_kv(key, groups)
            value = repeat_kv(value, groups)
        out = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask if mask.numel() else None,
            is_causal=not mask.numel(),
            scale=scaling,
            enable_gqa=True,
        )
        return out.transpose(1, 2)

    return prefix_grouper.forward(attend, query, key, value), None
