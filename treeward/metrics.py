"""`RewardMetrics`: sums and counts of a reward model's pairs, added up over micro-batches and sets, divided once.

    sums = RewardSums()
    for scores_S, pairs, loss_sum in ...: sums.add(scores_S, pairs, loss_sum)      # on the device; waits for nothing
    sums.read().means()     # {"loss": ..., "accuracy": ..., "chosen_rewards": ..., ...}; waits once

Shapes: S scores of a batch, P pairs, H attributes; a number: so many sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from treeward import processes
from treeward.losses import Pairs, Targets

METRIC_NAMES = ("loss", "accuracy", "chosen_rewards", "rejected_rewards", "reward_margin")


@dataclass(frozen=True, slots=True)
class RewardMetrics:
    """Sums over pairs, and how many there were.

    `num_units`: what the loss is a mean over, comparisons (or pairs, or choices). `num_pairs` counts ordered pairs (no
    ties), over which everything else is summed. `num_correct`: the better one scored strictly higher; equal is not
    correct. `gap_sum`: of the absolute differences of the two scores.
    """

    loss_sum: float = 0.0
    num_units: int = 0
    num_pairs: int = 0
    num_correct: int = 0
    chosen_sum: float = 0.0
    rejected_sum: float = 0.0
    gap_sum: float = 0.0

    def __add__(self, other: RewardMetrics) -> RewardMetrics:
        return RewardMetrics(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def means(self) -> dict[str, float]:
        """The metrics of `METRIC_NAMES`; NaN where there was nothing to average."""
        chosen, rejected = _ratio(self.chosen_sum, self.num_pairs), _ratio(self.rejected_sum, self.num_pairs)
        return {
            "loss": _ratio(self.loss_sum, self.num_units),
            "accuracy": _ratio(self.num_correct, self.num_pairs),
            "chosen_rewards": chosen,
            "rejected_rewards": rejected,
            "reward_margin": chosen - rejected,
        }


class RewardSums:
    """The sums of `RewardMetrics` while they are made: they stay where the scores are until `read`."""

    def __init__(self) -> None:
        self._num_units = self._num_pairs = 0
        self._sums_5: Tensor | None = None  # loss, correct, chosen, rejected, gap; float64

    @torch.no_grad()
    def add(self, scores_S: Tensor, pairs: Pairs, loss_sum: Tensor, num_units: int | None = None) -> None:
        """Add one batch. `pairs`: on the device of the scores. `loss_sum`: as a loss gives it, over `num_units` (None:
        those of the pairs)."""
        better_P, worse_P = scores_S.double()[pairs.better_P], scores_S.double()[pairs.worse_P]
        gap_P = better_P - worse_P
        # Not `better_P[~tied_P]`: the host would wait to know how many there are.
        ordered_4P = torch.stack([(gap_P > 0).double(), better_P, worse_P, gap_P.abs()]).masked_fill(pairs.tied_P, 0.0)
        sums_5 = torch.cat([loss_sum.double()[None], ordered_4P.sum(dim=1)])
        self._sums_5 = sums_5 if self._sums_5 is None else self._sums_5 + sums_5
        self._num_units += pairs.num_units if num_units is None else num_units
        self._num_pairs += pairs.num_ordered

    def read(self, group: ProcessGroup | None = None) -> RewardMetrics:
        """The sums as numbers, over the processes of `group` (None: all). The host waits here for the device, once."""
        if self._sums_5 is None:
            return RewardMetrics()
        num_units, num_pairs, sums = self._num_units, self._num_pairs, self._sums_5
        if processes.size() > 1:
            counts_2 = sums.new_tensor([num_units, num_pairs])
            sums, counts_2 = processes.summed(torch.cat([sums, counts_2]), group).split([5, 2])
            num_units, num_pairs = map(int, counts_2.tolist())
        loss, correct, chosen, rejected, gap = sums.tolist()
        return RewardMetrics(loss, num_units, num_pairs, int(correct), chosen, rejected, gap)


class GradeSums:
    """Sums over the grades of each attribute, on the device until `read`: what squared error and correlation need."""

    def __init__(self) -> None:
        self.sums_6H: Tensor | None = None
        """Of this process: count, and of values x and grades y the sums of x, y, x^2, y^2, x y; float64."""

    @torch.no_grad()
    def add(self, values_SH: Tensor, targets: Targets) -> None:
        """Add one batch; what has no grade does not count."""
        known_SH = (targets.weight_SH > 0).double()
        x_SH, y_SH = values_SH.double() * known_SH, targets.values_SH.double()
        parts = torch.stack([known_SH, x_SH, y_SH, x_SH * x_SH, y_SH * y_SH, x_SH * y_SH])
        sums_6H = parts.sum(dim=1)
        self.sums_6H = sums_6H if self.sums_6H is None else self.sums_6H + sums_6H

    def read(self, group: ProcessGroup | None = None) -> Tensor | None:
        """The sums (6, H) over the processes of `group` (None: all); None where there are no grades."""
        if self.sums_6H is not None and processes.size() > 1:
            return processes.summed(self.sums_6H, group).cpu()
        return None if self.sums_6H is None else self.sums_6H.cpu()


def grade_metrics(sums_6H: Tensor, attributes: Sequence[str]) -> dict[str, float]:
    """The mean squared error `mse_<attribute>` and the correlation `pearson_<attribute>` of each attribute with the
    grades, and `mse` and `pearson`, their means; NaN where there is none."""
    count, x, y, xx, yy, xy = sums_6H
    mse_H = (xx - 2 * xy + yy) / count
    spread_H = ((count * xx - x * x) * (count * yy - y * y)).clamp_min(0).sqrt()
    pearson_H = torch.where(spread_H > 0, (count * xy - x * y) / spread_H, torch.nan)
    metrics = {"mse": float(mse_H.nanmean()), "pearson": float(pearson_H.nanmean())}
    for name, values_H in (("mse", mse_H), ("pearson", pearson_H)):
        metrics |= {f"{name}_{key}": value for key, value in zip(attributes, values_H.tolist(), strict=True)}
    return metrics


def _ratio(total: float, count: int) -> float:
    return total / count if count else math.nan
