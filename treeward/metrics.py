"""`RewardMetrics`: sums and counts of a reward model's pairs, added up over micro-batches and sets, divided once.

    sums = RewardSums()
    for scores_S, pairs, loss_sum in ...: sums.add(scores_S, pairs, loss_sum)      # on the device; waits for nothing
    total = sums.read()                                                            # waits for the device, once
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


class RewardSums:
    """The sums of `RewardMetrics` while they are made: they stay where the scores are until `read`."""

    def __init__(self) -> None:
        self._num_groups = self._num_pairs = 0
        self._sums_5: Tensor | None = None  # loss, correct, chosen, rejected, gap; float64

    @torch.no_grad()
    def add(self, scores_S: Tensor, pairs: Pairs, loss_sum: Tensor) -> None:
        """Add one batch. `pairs`: on the device of the scores. `loss_sum`: as `losses.bradley_terry` gives it."""
        better_P, worse_P = scores_S.double()[pairs.better_P], scores_S.double()[pairs.worse_P]
        gap_P = better_P - worse_P
        # Not `better_P[~tied_P]`: the host would wait to know how many there are.
        ordered_4P = torch.stack([(gap_P > 0).double(), better_P, worse_P, gap_P.abs()]).masked_fill(pairs.tied_P, 0.0)
        sums_5 = torch.cat([loss_sum.double()[None], ordered_4P.sum(dim=1)])
        self._sums_5 = sums_5 if self._sums_5 is None else self._sums_5 + sums_5
        self._num_groups += pairs.num_groups
        self._num_pairs += pairs.num_ordered

    def read(self) -> RewardMetrics:
        """The sums as numbers. The host waits here for the device, once."""
        if self._sums_5 is None:
            return RewardMetrics()
        loss, correct, chosen, rejected, gap = self._sums_5.tolist()
        return RewardMetrics(loss, self._num_groups, self._num_pairs, int(correct), chosen, rejected, gap)


def _ratio(total: float, count: int) -> float:
    return total / count if count else math.nan
