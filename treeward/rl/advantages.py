"""Advantages: how much better a completion is than could be expected, from the rewards of the completions beside it.

    rewards_PG = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    advantages(rewards_PG, known_PG, AdvantageSettings())      # (P, G): (r - mean) / (std + floor), within each group
    advantages(rewards_PG, known_PG, AdvantageSettings("leave_one_out"))           # r - mean of the others
    advantages(rewards_PG, known_PG, AdvantageSettings("reinforce_plus_plus"))     # scaled by the whole batch

A completion without a reward is in no mean and no std, and its advantage is 0: nothing is learnt from it.

Shapes: P prompts, G completions to each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["AdvantageSettings", "advantages", "informative_groups"]


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """`name`: the estimator; see `advantages`. `normalize_rewards`, `use_leave_one_out_baseline`: of "grpo".
    `minus_baseline`: of "reinforce_plus_plus". `std_floor`: what is added to every std that is divided by.
    """

    name: Literal["grpo", "leave_one_out", "reinforce_plus_plus"] = "grpo"
    normalize_rewards: bool = True
    use_leave_one_out_baseline: bool = False
    minus_baseline: bool = True
    std_floor: float = 1e-6


def advantages(rewards_PG: Tensor, known_PG: Tensor, settings: AdvantageSettings) -> Tensor:
    """The advantage of each completion, float32 (P, G); 0 where `known_PG` (bool) is not, whatever the reward says
    there.

    With n known rewards r_i in a group, mean and std those of the group, std with n - 1 in its denominator:

    - grpo: (r_i - mean) / (std + floor) (Shao et al. 2024, arXiv 2402.03300). Without `normalize_rewards` it is not
      divided: Dr. GRPO (Liu et al. 2025, arXiv 2503.20783). With `use_leave_one_out_baseline` the mean is that of the
      other n - 1 completions; the std is still that of all n. (NeMo RL takes the std of the others as well: it differs
      from completion to completion, and is 0 for the only completion that is better than the rest.)
    - leave_one_out: r_i - sum_{j != i} r_j / (n - 1) = (r_i - mean) n / (n - 1): RLOO (Kool et al. 2019; Ahmadian et
      al. 2024, arXiv 2402.14740).
    - reinforce_plus_plus: d_i / (std_batch + floor), with d_i = r_i - mean and std_batch = sqrt(sum d^2 / (N - 1)) over
      the N known completions of the batch, so that a group of nearly equal rewards is not blown up: REINFORCE++ with a
      baseline (Hu et al. 2025, arXiv 2501.03262). Without `minus_baseline`, d_i = r_i - mean of the batch. Completions
      count the same in it, however long.

    Where the rewards that are compared (of the group; of the batch without `minus_baseline`) are all equal, every
    advantage is exactly 0, whatever the floor.
    """
    known = known_PG.bool()
    # Where it is not known a reward may be NaN, which times zero is NaN.
    rewards = torch.where(known, rewards_PG.double(), 0.0)
    if settings.name == "reinforce_plus_plus":
        alike = (known, rewards) if settings.minus_baseline else (known.reshape(1, -1), rewards.reshape(1, -1))
        centred = _centred(*alike).reshape(rewards.shape)
        std = (centred.square().sum() / (known.sum() - 1).clamp_min(1)).sqrt()
        return (centred / (std + settings.std_floor)).float()
    centred = _centred(known, rewards)
    count_P1 = known.sum(dim=1, keepdim=True)
    others_P1 = (count_P1 - 1).clamp_min(1)
    found = centred
    if settings.name == "leave_one_out" or settings.use_leave_one_out_baseline:
        found = centred * count_P1 / others_P1
    if settings.name == "grpo" and settings.normalize_rewards:
        std_P1 = (centred.square().sum(dim=1, keepdim=True) / others_P1).sqrt()
        found = found / (std_P1 + settings.std_floor)
    return found.float()


def informative_groups(rewards_PG: Tensor, known_PG: Tensor) -> Tensor:
    """Which groups have two known rewards that differ, bool (P,): the others teach nothing."""
    known = known_PG.bool()
    if not known.shape[1]:
        return known.any(dim=1)
    high = rewards_PG.masked_fill(~known, -torch.inf).amax(dim=1)
    low = rewards_PG.masked_fill(~known, torch.inf).amin(dim=1)
    return (known.sum(dim=1) > 1) & (high > low)


def _centred(known_PG: Tensor, rewards_PG: Tensor) -> Tensor:
    """Less the mean of the row; exactly 0 in rows of equal rewards, whose mean is off by rounding, for a tiny std would
    make ones of that.
    """
    mean_P1 = rewards_PG.sum(dim=1, keepdim=True) / known_PG.sum(dim=1, keepdim=True).clamp_min(1)
    differ_P1 = informative_groups(rewards_PG, known_PG)[:, None]
    return torch.where(known_PG & differ_P1, rewards_PG - mean_P1, 0.0)
