"""The loss of a process reward model, a pure function, and the sums that become its metrics.

    steps = labelled_steps(labels, counts, step_weight="copies")
    loss_sum = step_cross_entropy(log_odds_R, steps)    # divide once, by `num_units` of the step
    sums = StepSums()
    sums.add(log_odds_R, steps, loss_sum)               # on the device; waits for nothing
    sums.read().means()                                 # {"loss": ..., "accuracy": ...}; waits once

A step that solutions share is one node of their tree. It has its label in each conversation, and
its weight in the first one alone.

Shapes: R reads, the marks of all conversations one after another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from treeward import processes
from treeward.tree.batch import Movable

StepWeight = Literal["copies", "node"]


@dataclass(frozen=True, slots=True)
class StepLabels(Movable):
    """The labels of steps, float32.

    `labels_R`: the probability that the step is right, 0 where nobody has judged it. `weight_R`: in
    the loss, 0 for a step that counts in another conversation or not at all. `counts_R`: 1 for
    each node with a label, in one conversation, else 0: what metrics count. `num_units`: the sum of
    the weights, which divides the loss. `num_steps`: the sum of `counts_R`."""

    labels_R: Tensor
    weight_R: Tensor
    counts_R: Tensor
    num_units: float
    num_steps: int


def step_weights(
    counts: Sequence[Sequence[int]], *, step_weight: StepWeight = "copies"
) -> list[list[float]]:
    """The weight of each step of the conversations of a problem. `counts`:
    `Comparison.step_counts`."""
    weights: list[list[float]] = []
    for path in counts:
        path_weights = [float(count) for count in path]
        if step_weight == "node":
            path_weights = [min(weight, 1.0) for weight in path_weights]
        weights.append(path_weights)
    return weights


def labelled_steps(
    labels: Sequence[Sequence[Sequence[float]]],
    counts: Sequence[Sequence[Sequence[int]]],
    *,
    step_weight: StepWeight = "copies",
) -> StepLabels:
    """The labels of problems whose conversations lie one problem after another: for each step a
    label, NaN for none, and how many have judged it (`Comparison`)."""
    all_labels: list[float] = []
    all_weights: list[float] = []
    all_counts: list[float] = []
    for problem_labels, problem_counts in zip(labels, counts, strict=True):
        all_labels += chain.from_iterable(problem_labels)
        weights = step_weights(problem_counts, step_weight=step_weight)
        all_weights += chain.from_iterable(weights)
        all_counts += [float(count > 0) for count in chain.from_iterable(problem_counts)]
    # NaN times a weight of 0 is NaN: a missing label becomes a number before any arithmetic.
    labels_R = torch.tensor(all_labels, dtype=torch.float32).nan_to_num(nan=0.0)
    return StepLabels(
        labels_R=labels_R,
        weight_R=torch.tensor(all_weights, dtype=torch.float32),
        counts_R=torch.tensor(all_counts, dtype=torch.float32),
        num_units=sum(all_weights),
        num_steps=int(sum(all_counts)),
    )


def step_cross_entropy(log_odds_R: Tensor, steps: StepLabels) -> Tensor:
    """The cross-entropy of the two labels of each step, the *sum* over steps of weight times loss;
    a scalar of the dtype of the log-odds.

    With the log-odds d that a step is right, the logit of LABEL_1 minus that of LABEL_0, and the
    label y, the probability that it is:

        y softplus(-d) + (1 - y) softplus(d)

    which is the cross-entropy of a softmax over the two logits (Lightman et al. 2023, arXiv
    2305.20050, for hard labels). It is linear in y: n copies of a step are one of weight n.
    """
    labels_R = steps.labels_R.to(log_odds_R.dtype)
    weight_R = steps.weight_R.to(log_odds_R.dtype)
    loss_R = labels_R * F.softplus(-log_odds_R) + (1 - labels_R) * F.softplus(log_odds_R)
    return (weight_R * loss_R).sum()


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums over steps: the loss over `num_units`, and of `num_steps` nodes with a label those that
    are `num_correct`: the more probable one of the two labels is the step's."""

    loss_sum: float = 0.0
    num_units: float = 0.0
    num_steps: int = 0
    num_correct: int = 0

    def __add__(self, other: StepTotals) -> StepTotals:
        return StepTotals(
            self.loss_sum + other.loss_sum,
            self.num_units + other.num_units,
            self.num_steps + other.num_steps,
            self.num_correct + other.num_correct,
        )

    def means(self) -> dict[str, float]:
        """The loss and the accuracy by step; NaN where there was nothing to average."""
        loss = math.nan
        accuracy = math.nan
        if self.num_units:
            loss = self.loss_sum / self.num_units
        if self.num_steps:
            accuracy = self.num_correct / self.num_steps
        return {"loss": loss, "accuracy": accuracy}


class StepSums:
    """The sums of `StepTotals` while they are made: they stay where the log-odds are until
    `read`."""

    def __init__(self) -> None:
        self._num_units = 0.0
        self._num_steps = 0
        self._sums_2: Tensor | None = None  # loss, correct; float64

    @torch.no_grad()
    def add(self, log_odds_R: Tensor, steps: StepLabels, loss_sum: Tensor) -> None:
        """Add one batch. `steps`: on the device of the log-odds."""
        says_right_R = log_odds_R >= 0
        # As in ProcessBench: a step is wrong where its probability is below 1/2.
        is_right_R = steps.labels_R >= 0.5
        correct_R = (says_right_R == is_right_R).double() * steps.counts_R
        sums_2 = torch.stack([loss_sum.double(), correct_R.sum()])
        self._sums_2 = sums_2 if self._sums_2 is None else self._sums_2 + sums_2
        self._num_units += steps.num_units
        self._num_steps += steps.num_steps

    def read(self, group: ProcessGroup | None = None) -> StepTotals:
        """The sums as numbers, over the processes of `group` (None: all). The host waits here for
        the device, once."""
        if self._sums_2 is None:
            return StepTotals()
        counts_2 = self._sums_2.new_tensor([self._num_units, self._num_steps])
        all_4 = torch.cat([self._sums_2, counts_2])
        if processes.size() > 1:
            all_4 = processes.summed(all_4, group)
        loss, correct, num_units, num_steps = all_4.tolist()
        return StepTotals(loss, num_units, int(num_steps), int(correct))
