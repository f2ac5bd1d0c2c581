"""`sample`: rows sampled token by token; a prompt is computed once for all its rows, and rows that have ended leave.

    rows = [Row(prompt_ids, most=64, uniforms=uniforms(seed, p, g, 64)) for g in range(8)]
    sample(policy, rows, temperature=1.0, ended=lambda tokens: tokens[-1] == end)
    rows[0].token_ids, rows[0].log_probs

Every token of a row is chosen by one number of its own, drawn before: where it falls among the cumulated probabilities.
So what a row is depends on its prompt and its numbers, not on the rows beside it or on their number, but for the
rounding of the logits: a number that falls within it of a border takes the token on the other side.

Shapes: P distinct prompts, S rows, L tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, TopKLogitsWarper, TopPLogitsWarper

from treeward.errors import ModelError
from treeward.model.policy_model import PolicyModel

_PADDING = 0  # masked, so that any token will do


@dataclass(slots=True)
class Row:
    """One completion: `most`: tokens it may have, at least 1; `uniforms`: `most` numbers in [0, 1).

    `sample` fills `token_ids`, with the token that ended it, and their `log_probs`, at the temperature, before top-k
    and top-p.
    """

    prompt_ids: tuple[int, ...]
    most: int
    uniforms: np.ndarray
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


def uniforms(seed: int, prompt: int, completion: int, count: int) -> np.ndarray:
    """The numbers that choose the tokens of a completion, float64 (count,); a longer count begins with the same."""
    return np.random.default_rng([seed % 2**64, prompt, completion]).random(count)


@torch.no_grad()
def sample(
    policy: PolicyModel,
    rows: Sequence[Row],
    *,
    ended: Callable[[list[int]], bool],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> None:
    """Sample each row until `ended` says so of its tokens, or it has `most` of them.

    Raises `ModelError` where the policy's logits are not finite. The caller puts the policy in evaluation mode.

    As in `PolicyModel.log_probs` the model computes in the dtype of its weights, and the softmax is float32.
    """
    decoder = _Decoder(policy.hf)
    places = {prompt: p for p, prompt in enumerate(dict.fromkeys(row.prompt_ids for row in rows))}
    tokens_PL, mask_PL = _padded(list(places), policy.device)
    with policy.plain_attention():
        logits_PV = decoder(tokens_PL, mask_PL)
        of_row_S = torch.tensor([places[row.prompt_ids] for row in rows], device=policy.device)
        decoder.choose(of_row_S)
        logits_SV, mask_SL = logits_PV[of_row_S], mask_PL[of_row_S]
        going = list(rows)
        for step in range(max(row.most for row in rows)):
            numbers_S = torch.tensor([row.uniforms[step] for row in going], device=policy.device)
            tokens_S, log_probs_S = _choose(logits_SV, numbers_S, temperature, top_k, top_p)
            if not bool(torch.isfinite(log_probs_S).all()):
                raise ModelError(
                    "the policy's logits are not finite",
                    got=f"a token with the log-probability {log_probs_S[~torch.isfinite(log_probs_S)][0].item()}",
                    fix="go back to a checkpoint before the weights went wrong, and lower the learning rate",
                )
            for row, token, log_prob in zip(going, tokens_S.tolist(), log_probs_S.tolist(), strict=True):
                row.token_ids.append(token)
                row.log_probs.append(log_prob)
            kept = [s for s, row in enumerate(going) if step + 1 < row.most and not ended(row.token_ids)]
            if not kept:
                break
            if len(kept) < len(going):
                kept_S = torch.tensor(kept, device=policy.device)
                decoder.choose(kept_S)
                tokens_S, mask_SL, going = tokens_S[kept_S], mask_SL[kept_S], [going[s] for s in kept]
            mask_SL = torch.cat([mask_SL, mask_SL.new_ones(len(going), 1)], dim=1)
            logits_SV = decoder(tokens_S[:, None], mask_SL)


class _Decoder:
    """A model with the cache of what it has read."""

    def __init__(self, hf: PreTrainedModel) -> None:
        self.hf = hf
        self._parameters = inspect.signature(hf.forward).parameters
        self.cache = DynamicCache(config=hf.config)

    def __call__(self, tokens_SL: Tensor, mask_SL: Tensor) -> Tensor:
        """The logits after the last of `tokens_SL`, float32 (S, V). `mask_SL`: of all tokens so far."""
        given: dict[str, Any] = {"input_ids": tokens_SL, "use_cache": True}
        if "past_key_values" in self._parameters:
            given |= {"past_key_values": self.cache, "attention_mask": mask_SL}
        else:  # state-space models: the mask is for the padding of the prompt alone
            given["cache_params"] = self.cache
            given["attention_mask"] = mask_SL if tokens_SL.shape == mask_SL.shape else None
        if "position_ids" in self._parameters:
            given["position_ids"] = (mask_SL.cumsum(dim=1) - 1).clamp_min(0)[:, -tokens_SL.shape[1] :]
        if "logits_to_keep" in self._parameters:
            given["logits_to_keep"] = 1
        logits: Tensor = self.hf(**given).logits
        return logits[:, -1].float()

    def choose(self, rows: Tensor) -> None:
        """Go on with these of its rows, int64 (S,); one may be named several times."""
        self.cache.reorder_cache(rows)  # type: ignore[arg-type]


def _padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Padded on the left, int64 (P, L), and the mask of what is no padding."""
    longest = max(map(len, prompts))
    rows = [[_PADDING] * (longest - len(ids)) + list(ids) for ids in prompts]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
    return torch.tensor(rows, device=device), torch.tensor(mask, device=device)


def _choose(
    logits_SV: Tensor, numbers_S: Tensor, temperature: float, top_k: int | None, top_p: float
) -> tuple[Tensor, Tensor]:
    """The tokens, int64 (S,), and their log-probabilities before top-k and top-p."""
    scores_SV = logits_SV / temperature
    kept_SV = scores_SV if top_k is None else TopKLogitsWarper(top_k)(None, scores_SV)
    kept_SV = kept_SV if top_p == 1.0 else TopPLogitsWarper(top_p)(None, kept_SV)
    # In float64: beside the sum of a large vocabulary a rare token's probability is below float32's rounding.
    sums_SV = kept_SV.softmax(dim=-1).double().cumsum(dim=-1)
    found_S1 = torch.searchsorted(sums_SV, numbers_S[:, None] * sums_SV[:, -1:], right=True)
    tokens_S = found_S1[:, 0].clamp_max(logits_SV.shape[-1] - 1)
    return tokens_S, scores_SV.log_softmax(dim=-1).gather(-1, tokens_S[:, None])[:, 0]
