"""`RewardMetrics`: sums and counts of a reward model's pairs, added up over micro-batches and sets, divided once.

    total = RewardMetrics()
    for scores_S, pairs, loss in ...: total += RewardMetrics.of(scores_S, pairs, loss)
    total.means()     # {"loss": ..., "accuracy": ..., "chosen_rewards": ..., ...}

How a set was cut into batches changes nothing, nor does an uneven last one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from treeward.losses import Pairs

METRIC_NAMES = ("loss", "accuracy", "chosen_rewards", "rejected_rewards", "reward_margin")


@dataclass(frozen=True, slots=True)
class RewardMetrics:
    """Sums over pairs, and how many there were.

    `num_groups` counts comparison groups, each with weight 1 in the loss. `num_pairs` counts ordered pairs (no ties),
    over which everything else is summed. `num_correct`: the better one scored strictly higher; equal is not correct.
    `gap_sum`: of the absolute differences of the two scores.
    """

    loss_sum: float = 0.0
    num_groups: int = 0
    num_pairs: int = 0
    num_correct: int = 0
    chosen_sum: float = 0.0
    rejected_sum: float = 0.0
    gap_sum: float = 0.0

    @classmethod
    @torch.no_grad()
    def of(cls, scores_S: Tensor, pairs: Pairs, loss_sum: Tensor) -> RewardMetrics:
        """The sums of one batch. `loss_sum`: as `losses.bradley_terry` gives it."""
        ordered_P = ~pairs.tied_P
        chosen_P = scores_S.double()[pairs.better_P][ordered_P]
        rejected_P = scores_S.double()[pairs.worse_P][ordered_P]
        return cls(
            loss_sum=float(loss_sum),
            num_groups=pairs.num_groups,
            num_pairs=len(chosen_P),
            num_correct=int((chosen_P > rejected_P).sum()),
            chosen_sum=float(chosen_P.sum()),
            rejected_sum=float(rejected_P.sum()),
            gap_sum=float((chosen_P - rejected_P).abs().sum()),
        )

    def __add__(self, other: RewardMetrics) -> RewardMetrics:
        return RewardMetrics(
            self.loss_sum + other.loss_sum,
            self.num_groups + other.num_groups,
            self.num_pairs + other.num_pairs,
            self.num_correct + other.num_correct,
            self.chosen_sum + other.chosen_sum,
            self.rejected_sum + other.rejected_sum,
            self.gap_sum + other.gap_sum,
        )

    def means(self) -> dict[str, float]:
        """The metrics of `METRIC_NAMES`; NaN where there was nothing to average."""
        chosen, rejected = _ratio(self.chosen_sum, self.num_pairs), _ratio(self.rejected_sum, self.num_pairs)
        return {
            "loss": _ratio(self.loss_sum, self.num_groups),
            "accuracy": _ratio(self.num_correct, self.num_pairs),
            "chosen_rewards": chosen,
            "rejected_rewards": rejected,
            "reward_margin": chosen - rejected,
        }


def _ratio(total: float, count: int) -> float:
    return total / count if count else math.nan
