"""What a completion's length does to its reward, and which completions are learnt from.

    lengths_PG, truncated_PG = completion_lengths(groups), truncated_completions(groups)
    rewards_PG = scaled(rewards_PG, source_min=-5, source_max=5, target_min=0, target_max=1)
    rewards_PG = less_truncation_penalty(rewards_PG, truncated_PG, penalty=1.0)
    rewards_PG = less_overlong_penalty(rewards_PG, lengths_PG, max_response_length=1024, buffer_length=128, penalty=1)
    used_PG = used_completions(groups, known_PG, truncated="mask")

Penalties are subtracted, never multiplied: a factor below 1 would raise a negative reward. A reward that is NaN, one
that is not known, stays NaN.

Shapes: P prompts, G completions to each (the most of any).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from treeward.errors import ConfigError
from treeward.rl.experience import CompletionGroup, SampledCompletion

__all__ = [
    "Truncated",
    "completion_lengths",
    "less_overlong_penalty",
    "less_truncation_penalty",
    "scaled",
    "truncated_completions",
    "used_completions",
]

Truncated = Literal["keep", "mask", "penalty"]
"""What becomes of completions that hit the length limit: learnt from as they are, not learnt from, or penalised."""


def completion_lengths(groups: Sequence[CompletionGroup]) -> Tensor:
    """Tokens of each completion, int64 (P, G); 0 where a group has no such completion."""
    return torch.tensor([[0 if a is None else len(a.token_ids) for a in row] for row in _table(groups)]).long()


def truncated_completions(groups: Sequence[CompletionGroup]) -> Tensor:
    """Which completions the length limit cut, bool (P, G), as their generator says."""
    return torch.tensor([[a is not None and a.truncated for a in row] for row in _table(groups)]).bool()


def less_truncation_penalty(rewards_PG: Tensor, truncated_PG: Tensor, *, penalty: float) -> Tensor:
    """r - penalty for truncated completions, r for others, (P, G). Raises `ConfigError` for a penalty below 0."""
    _check_penalty("grpo.truncation_penalty", penalty)
    return torch.where(truncated_PG.bool(), rewards_PG - penalty, rewards_PG)


def less_overlong_penalty(
    rewards_PG: Tensor, lengths_PG: Tensor, *, max_response_length: int, buffer_length: int, penalty: float
) -> Tensor:
    """r - penalty * min(max(0, length - (max - buffer)) / buffer, 1), (P, G).

    Nothing up to `max_response_length - buffer_length` tokens, all of `penalty` from `max_response_length` on, a line
    between: DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476, eq. 13), there with a penalty of 1.
    (NeMo RL's grows on beyond the maximum.) Raises `ConfigError` for a buffer that is not within the maximum, or a
    penalty below 0.
    """
    _check_penalty("grpo.reward_shaping.overlong_buffer_penalty", penalty)
    if not 0 < buffer_length <= max_response_length:
        raise ConfigError(
            "the buffer does not lie within the longest response",
            where="grpo.reward_shaping.overlong_buffer_length",
            got=buffer_length,
            need=f"1 to max_response_length, {max_response_length}",
        )
    share = (lengths_PG.to(rewards_PG) - (max_response_length - buffer_length)) / buffer_length
    return rewards_PG - penalty * share.clamp(0, 1)


def scaled(rewards_PG: Tensor, *, source_min: float, source_max: float, target_min: float, target_max: float) -> Tensor:
    """Rewards clipped to [source_min, source_max], and this mapped linearly to [target_min, target_max], (P, G).

    Raises `ConfigError` for an interval whose ends are not in order.
    """
    for name, low, high in (("source", source_min, source_max), ("target", target_min, target_max)):
        if not low < high:
            raise ConfigError(
                f"{name}_min is not below {name}_max",
                where=f"grpo.reward_scaling.{name}_min",
                got=f"{low} and {high}",
                need="the smaller one first",
            )
    share = (rewards_PG.clamp(source_min, source_max) - source_min) / (source_max - source_min)
    return target_min + share * (target_max - target_min)


def used_completions(groups: Sequence[CompletionGroup], known_PG: Tensor, *, truncated: Truncated = "keep") -> Tensor:
    """Which completions are learnt from, bool (P, G): those with a reward and at least one token.

    With `truncated="mask"` only those that came to an end; their rewards still belong into the baseline of their group
    (overlong filtering, arXiv 2503.14476, section 3.4).
    """
    used = known_PG.bool() & (completion_lengths(groups) > 0).to(known_PG.device)
    if truncated == "mask":
        used &= ~truncated_completions(groups).to(known_PG.device)
    return used


def _table(groups: Sequence[CompletionGroup]) -> list[list[SampledCompletion | None]]:
    """(P, G), None where a group has no such completion."""
    width = max((len(group.completions) for group in groups), default=0)
    return [[*group.completions, *[None] * (width - len(group.completions))] for group in groups]


def _check_penalty(where: str, penalty: float) -> None:
    if not penalty >= 0:
        raise ConfigError("a penalty is subtracted", where=where, got=penalty, need="0 or more")
