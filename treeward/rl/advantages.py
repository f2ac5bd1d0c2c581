"""Advantages: how much better an answer is than could be expected, from the rewards of the answers beside it.

    rewards_PG = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    group_relative(rewards_PG, known_PG)             # (P, G): (r - mean) / (std + floor), within each group
    leave_one_out(rewards_PG, known_PG)              # r - mean of the others
    reinforce_plus_plus(rewards_PG, known_PG)        # r - group's mean, divided by the std of the whole batch

An answer without a reward is in no mean and no std, and its advantage is 0: nothing is learnt from it.

Shapes: P prompts, G answers to each.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["group_relative", "informative_groups", "leave_one_out", "reinforce_plus_plus"]


def group_relative(rewards_PG: Tensor, known_PG: Tensor, *, normalize: bool = True, floor: float = 1e-6) -> Tensor:
    """A = (r - mean_G r) / (std_G r + floor), float32 (P, G); without `normalize` the difference alone.

    std with G - 1 in the denominator; of a group whose rewards are equal every advantage is exactly 0, whatever the
    floor. Shao et al. 2024 (arXiv 2402.03300); without the std, Liu et al. 2025 (arXiv 2503.20783).
    """
    mean_P1, count_P1 = _mean(rewards_PG, known_PG)
    centred = _centred(rewards_PG, known_PG, mean_P1)
    if not normalize:
        return centred
    std_P1 = (centred.square().sum(dim=1, keepdim=True) / (count_P1 - 1).clamp_min(1)).sqrt()
    return centred / (std_P1 + floor)


def leave_one_out(rewards_PG: Tensor, known_PG: Tensor) -> Tensor:
    """A_i = r_i - 1/(G-1) sum_{j != i} r_j = G/(G-1) (r_i - mean), float32 (P, G); 0 in a group of one.

    Kool et al. 2019; Ahmadian et al. 2024 (arXiv 2402.14740).
    """
    mean_P1, count_P1 = _mean(rewards_PG, known_PG)
    return _centred(rewards_PG, known_PG, mean_P1) * count_P1 / (count_P1 - 1).clamp_min(1)


def reinforce_plus_plus(rewards_PG: Tensor, known_PG: Tensor, *, floor: float = 1e-6) -> Tensor:
    """A = (r - mean_G r) / (std over the batch of r - mean_G r), float32 (P, G).

    The group gives the baseline and the whole batch the scale, so that a group of nearly equal rewards is not blown up:
    REINFORCE++ with a baseline, Hu et al. 2025 (arXiv 2501.03262).
    """
    mean_P1, _ = _mean(rewards_PG, known_PG)
    centred = _centred(rewards_PG, known_PG, mean_P1)
    count = known_PG.sum()
    std = (centred.square().sum() / (count - 1).clamp_min(1)).sqrt()
    return centred / (std + floor)


def informative_groups(rewards_PG: Tensor, known_PG: Tensor) -> Tensor:
    """Which groups have two rewards that differ, bool (P,): the others teach nothing."""
    known = known_PG.bool()
    high = rewards_PG.float().masked_fill(~known, -torch.inf).amax(dim=1)
    low = rewards_PG.float().masked_fill(~known, torch.inf).amin(dim=1)
    return (known.sum(dim=1) > 1) & (high > low)


def _mean(rewards_PG: Tensor, known_PG: Tensor) -> tuple[Tensor, Tensor]:
    count_P1 = known_PG.sum(dim=1, keepdim=True).float()
    # Where it is not known a reward may be NaN, which times zero is NaN.
    total_P1 = torch.where(known_PG.bool(), rewards_PG.float(), 0.0).sum(dim=1, keepdim=True)
    return total_P1 / count_P1.clamp_min(1), count_P1


def _centred(rewards_PG: Tensor, known_PG: Tensor, mean_P1: Tensor) -> Tensor:
    # Equal rewards have a mean that is off by rounding, and a tiny std would make ones of it.
    equal_P1 = ~informative_groups(rewards_PG, known_PG)[:, None]
    return torch.where(known_PG.bool() & ~equal_P1, rewards_PG.float() - mean_P1, 0.0)
