"""Losses of scores, pure functions, each with its formula and source; and the sums that become
metrics.

    pairs = ranked_pairs([(0, 1), (0, 1, 1)], ties="drop")
    loss_sum = bradley_terry(scores_S, pairs)        # divide once, by `num_units` of the whole step
    heads = heads_of(section, loss, grades_NH, ...)  # all that a training step knows of its loss
    sums = RewardSums()
    for scores_S, pairs, loss_sum in ...:
        sums.add(scores_S, pairs, loss_sum)          # on the device; waits for nothing
    sums.read().means()     # {"loss": ..., "accuracy": ..., "chosen_rewards": ..., ...}; waits once

A comparison group of K completions gives the pairs of completions with different ranks. By default
each group weighs 1 however many pairs it has (Ouyang et al. 2022, arXiv 2203.02155, eq. 1). Grades
are learnt as they are, for the heads of decoders in transformers have no bias to hold a mean;
squared errors are in units of the training data's standard deviation, so that no attribute counts
more for its scale alone.

Shapes: S scores of a batch, H heads or attributes, G groups, P pairs, N completions of the training
data; a number: so many sums.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from treeward import processes
from treeward.config.loss import LOSSES, LossConfig
from treeward.config.policy import RewardModelConfig
from treeward.data.encoding import Comparison
from treeward.model.contract import ESTIMATE_MEANING, HeadContract
from treeward.step_losses import (
    StepLabels,
    labelled_steps,
    step_cross_entropy,  # noqa: F401  `function_of` finds it by its name
    step_weights,
)
from treeward.tree.batch import Movable

Strength = Literal["margin", "soft_label", "weight"]
"""What the strength of a pair becomes; see `ranked_pairs`."""
PairLabels = Sequence[tuple[float, float]]
"""For each ordered pair of a group, in the order of its better and then its worse completion, what
it counts and the probability that its better one wins; () where each counts 1 and is right."""


@dataclass(frozen=True, slots=True)
class Pairs(Movable):
    """Which scores are compared.

    `better_P`, `worse_P`: int64, places among the scores. `weight_P`, `margin_P`: float32.
    `target_P`: float32, the probability that the better one wins, 1/2 of a tie. `tied_P`: bool.
    `num_units`: what the sum of the loss is divided by, groups that have a pair, or pairs (or
    choices) where each of them weighs 1. `num_ordered`: pairs that are not tied, counted on the
    host.
    """

    better_P: Tensor
    worse_P: Tensor
    weight_P: Tensor
    margin_P: Tensor
    target_P: Tensor
    tied_P: Tensor
    num_units: int
    num_ordered: int


def ranked_pairs(
    ranks: Sequence[Sequence[int]],
    *,
    strengths: Sequence[float | Sequence[float | None] | None] | None = None,
    pair_labels: Sequence[PairLabels] | None = None,
    strength: Strength = "margin",
    strength_scale: float = 1.0,
    ties: Literal["drop", "half"] = "drop",
    weight: Literal["group", "pair"] = "group",
    unit: Literal["pair", "choice"] = "pair",
) -> Pairs:
    """The pairs of G groups whose scores lie one group after another.

    `ranks`: for each group the rank of each completion, lower is better. `strengths`: one per
    group, None for none, or a number for each completion, whose difference is a pair's strength, 0
    where it contradicts the ranks. Times `strength_scale` it is the pair's `margin`, its `weight`
    (both at least 0), or the log-odds of its `soft_label`. `pair_labels`: one per group, what was
    found of its ordered pairs; see `PairLabels`. `ties`: completions of equal rank are no pair
    ("drop"), or a tied one ("half"). `weight`: each group weighs 1, or each pair. `unit`: what
    shares the weight of a group, its pairs, or the choices of `plackett_luce`.
    """
    better: list[int] = []
    worse: list[int] = []
    weights: list[float] = []
    margins: list[float] = []
    targets: list[float] = []
    tied: list[bool] = []
    num_units = 0
    offset = 0  # of the group's scores among all
    for g, group in enumerate(ranks):
        pairs = _pairs_of_group(group, ties, pair_labels[g] if pair_labels else ())
        if unit == "pair":
            units = len(pairs)
        else:
            units = len({pair.better for pair in pairs})
        if weight == "pair":
            num_units += units
        elif pairs:
            num_units += 1
        for i, j, label_weight, target in pairs:
            is_tie = group[i] == group[j]
            pair_weight = label_weight
            if weight == "group":
                # By their number, not by the sum of their weights: a group of pairs whose labels
                # are doubted counts less.
                pair_weight = label_weight / units
            margin = 0.0
            value = None
            if strengths is not None and not is_tie:
                value = _strength(strengths[g], i, j)
            if value is not None:
                if strength == "margin":
                    margin = strength_scale * max(value, 0.0)
                elif strength == "weight":
                    pair_weight *= strength_scale * max(value, 0.0)
                else:  # the sigmoid of the log-odds, by tanh, which does not overflow
                    # No label is lost: beside a strength `data.labels` can only drop pairs.
                    target = (1 + math.tanh(strength_scale * value / 2)) / 2
            better.append(offset + i)
            worse.append(offset + j)
            weights.append(pair_weight)
            margins.append(margin)
            targets.append(target)
            tied.append(is_tie)
        offset += len(group)
    return Pairs(
        better_P=torch.tensor(better, dtype=torch.long),
        worse_P=torch.tensor(worse, dtype=torch.long),
        weight_P=torch.tensor(weights, dtype=torch.float32),
        margin_P=torch.tensor(margins, dtype=torch.float32),
        target_P=torch.tensor(targets, dtype=torch.float32),
        tied_P=torch.tensor(tied, dtype=torch.bool),
        num_units=num_units,
        num_ordered=len(tied) - sum(tied),
    )


class _Pair(NamedTuple):
    """Places in a group, the better one's first; what the pair counts, and the probability that the
    better one wins."""

    better: int
    worse: int
    weight: float
    target: float


def _pairs_of_group(
    group: Sequence[int], ties: Literal["drop", "half"], labels: PairLabels
) -> list[_Pair]:
    """The pairs of a group, as its ranks and its labels have them; a tied pair comes once."""
    pairs: list[_Pair] = []
    next_label = iter(labels)
    for i, rank in enumerate(group):
        for j, other in enumerate(group):
            if rank == other and ties == "half" and i < j:
                pairs.append(_Pair(i, j, 1.0, 0.5))
            if rank >= other:
                continue
            weight, target = next(next_label, (1.0, 1.0))
            if weight == 0:
                continue  # it is no pair, so that the others of the group share its weight
            if target < 0.5:
                # The other one is the likelier winner: accuracy and margins are then of that order.
                pairs.append(_Pair(j, i, weight, 1 - target))
            else:
                pairs.append(_Pair(i, j, weight, target))
    return pairs


def _strength(
    group_strength: float | Sequence[float | None] | None, better: int, worse: int
) -> float | None:
    """The strength of one pair; None where nothing says it."""
    if group_strength is None or isinstance(group_strength, int | float):
        return group_strength
    if max(better, worse) >= len(group_strength):
        return None  # `Comparison.scores` is () by default
    better_value = group_strength[better]
    worse_value = group_strength[worse]
    if better_value is None or worse_value is None:
        return None
    return max(better_value - worse_value, 0.0)  # 0 where the values contradict the ranks


def bradley_terry(
    scores_S: Tensor,
    pairs: Pairs,
    *,
    label_smoothing: float = 0.0,
    center_rewards_coefficient: float = 0.0,
) -> Tensor:
    """The Bradley-Terry loss, the *sum* over pairs of weight times loss; a float32 scalar.

    With d = score(better) - score(worse) - margin, the probability q that the better one wins
    (`target_P`), label smoothing e and p = q (1 - e) + (1 - q) e, a pair's loss is

        p softplus(-d) + (1 - p) softplus(d)   [+ c (score(better) + score(worse))^2]

    (Bradley and Terry 1952; margin: Touvron et al. 2023, arXiv 2307.09288, eq. 2; smoothing: Wang
    et al. 2024, arXiv 2401.06080; c: Eisenstein et al. 2023, arXiv 2312.09244). A tied pair has p =
    1/2 and no margin.
    """
    scores_S = scores_S.float()
    better_P = scores_S[pairs.better_P]
    worse_P = scores_S[pairs.worse_P]
    excess_P = better_P - worse_P - pairs.margin_P
    # 1 - p, written so that it is exactly 0 without smoothing and ties.
    wrong_P = (1 - pairs.target_P) * (1 - 2 * label_smoothing) + label_smoothing
    # softplus(-d) is -log sigmoid(d), without the overflow of either.
    loss_P = (1 - wrong_P) * F.softplus(-excess_P) + wrong_P * F.softplus(excess_P)
    if center_rewards_coefficient:
        loss_P = loss_P + center_rewards_coefficient * (better_P + worse_P).square()
    return (pairs.weight_P * loss_P).sum()


def plackett_luce(scores_S: Tensor, pairs: Pairs) -> Tensor:
    """The Plackett-Luce loss (Luce 1959, Plackett 1975), the *sum* over choices of weight times
    loss; a float32 scalar.

    Completion i, chosen from itself and the set W of those that are strictly worse, costs

        log(1 + sum over W of exp(score(j) - score(i)))

    Tied completions are never compared with each other. Of two completions this is the
    Bradley-Terry loss. `pairs`: of `unit="choice"`.
    """
    scores_S = scores_S.float()
    excess_P = scores_S[pairs.worse_P] - scores_S[pairs.better_P]
    none_S = torch.zeros_like(scores_S)
    # The largest of 0 and the excesses, taken out of the exponentials so that none overflows. It is
    # detached, because its derivatives below cancel.
    largest_S = none_S.scatter_reduce(0, pairs.better_P, excess_P.detach(), "amax")
    rest_S = none_S.index_add(0, pairs.better_P, (excess_P - largest_S[pairs.better_P]).exp())
    # A completion that is the better one of no pair has log(1) = 0 here, and the weight 0.
    loss_S = largest_S + (torch.exp(-largest_S) + rest_S).log()
    # All pairs of a choice have its weight: this loss takes neither strengths nor labels of pairs.
    weight_S = none_S.scatter_reduce(0, pairs.better_P, pairs.weight_P, "amax")
    return (weight_S * loss_S).sum()


@dataclass(frozen=True, slots=True)
class Targets(Movable):
    """Grades of S completions under H attributes, float32: `values_SH`, and `weight_SH`; both 0
    where there is none. `num_units`: groups with a grade."""

    values_SH: Tensor
    weight_SH: Tensor
    num_units: int


def graded(groups: Sequence[Sequence[Sequence[float]]], stds: Sequence[float]) -> Targets:
    """The grades of G groups whose values lie one group after another: for each completion H
    grades, NaN for none. Each group weighs 1, each of its K completions 1/K, each attribute 1/H of
    that. `stds`: the units of the attributes."""
    num_attributes = len(stds)
    rows: list[Sequence[float]] = []
    shares: list[float] = []
    num_units = 0
    for group in groups:
        rows += group
        shares += [1 / (len(group) * num_attributes) for _ in group]  # none for an empty group
        grades = itertools.chain.from_iterable(group)
        if not all(map(math.isnan, grades)):
            num_units += 1
    grades_SH = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), num_attributes)
    known_SH = ~grades_SH.isnan()
    shares_S = torch.tensor(shares)
    weight_SH = known_SH * shares_S[:, None] / torch.tensor(stds).square()
    return Targets(torch.where(known_SH, grades_SH, 0.0), weight_SH, num_units)


def squared_error(values_SH: Tensor, targets: Targets) -> Tensor:
    """The *sum* of weight times (value - grade)^2 over completions and attributes; a float32
    scalar."""
    return (targets.weight_SH * (values_SH.float() - targets.values_SH).square()).sum()


def function_of(name: str) -> Callable[..., Tensor]:
    """The function that computes a loss of `config.loss.LOSSES`, of this module or of
    `step_losses`."""
    function: Callable[..., Tensor] = globals()[LOSSES[name].function]
    return function


@dataclass(frozen=True, slots=True)
class Labels(Movable):
    """The labels of completions: `pairs` of them, the `targets` of a loss of grades, or the `steps`
    of a process reward model."""

    pairs: Pairs
    targets: Targets | None = None
    steps: StepLabels | None = None

    @property
    def num_units(self) -> float:
        """What the sum of the loss is divided by."""
        if self.steps is not None:
            return self.steps.num_units
        return self.pairs.num_units if self.targets is None else self.targets.num_units


@dataclass(frozen=True, slots=True)
class Heads:
    """What each head of a reward model learns, and how the heads make one score.

    `attributes`: the grades that are learnt; none where the score learns an order. `weights`: of
    each head in the score; `stds`: the standard deviations of its grades in the training data, 1
    without. `are_estimates`: several heads of one score, each from other initial weights.
    `function`: of the loss, with its options. `pair_options`: of `ranked_pairs`. `step_options`: of
    `labelled_steps`, for a process reward model; None for any other.
    """

    attributes: tuple[str, ...] = ()
    weights: tuple[float, ...] = (1.0,)
    stds: tuple[float, ...] = (1.0,)
    are_estimates: bool = False
    function: Callable[..., Tensor] = bradley_terry
    pair_options: Mapping[str, Any] = field(default_factory=dict)
    step_options: Mapping[str, Any] | None = None

    def labels(self, comparisons: Sequence[Comparison]) -> Labels:
        """The labels of comparisons whose values lie one comparison after another."""
        if self.step_options is not None:
            steps = labelled_steps(
                [item.step_labels for item in comparisons],
                [item.step_counts for item in comparisons],
                **self.step_options,
            )
            return Labels(ranked_pairs([]), steps=steps)
        ranks = [item.ranks for item in comparisons]
        strengths = None
        if "strength" in self.pair_options:
            strengths = []
            for item in comparisons:
                strengths.append(item.scores if item.strength is None else item.strength)
        pair_labels = [item.pair_labels for item in comparisons]
        pairs = ranked_pairs(
            ranks, strengths=strengths, pair_labels=pair_labels, **self.pair_options
        )
        if not self.attributes:
            return Labels(pairs)
        grades = [item.grades for item in comparisons]
        # Of several estimates each has the deviations once more; the grades are the same for all.
        return Labels(pairs, graded(grades, self.stds[: len(self.attributes)]))

    def num_units_of_steps(self, counts: Sequence[Sequence[Sequence[int]]]) -> float:
        """What the loss of problems is divided by, from the `step_counts` of each."""
        assert self.step_options is not None
        total = 0.0
        for problem in counts:
            total += sum(map(sum, step_weights(problem, **self.step_options)))
        return total

    def combine(self, values_SH: Tensor) -> Tensor:
        """The scores (S,); of a process reward model the log-odds of each step."""
        weighted = []
        # By numbers: a tensor of the weights would be copied to the device at each call.
        for weight, values_S in zip(self.weights, values_SH.unbind(dim=1), strict=True):
            weighted.append(weight * values_S)
        return torch.stack(weighted, dim=1).sum(dim=1)

    def grades(self, values_SH: Tensor) -> Tensor:
        """The values that are compared with grades, one for each attribute."""
        return self.combine(values_SH)[:, None] if self.are_estimates else values_SH

    def loss(self, values_SH: Tensor, labels: Labels) -> Tensor:
        """The sum of the loss of a training step, a float32 scalar; of estimates the mean over
        heads."""
        if not self.are_estimates:
            return self.score_loss(values_SH, labels)
        losses = [self._loss_of_scores(values_S, labels) for values_S in values_SH.unbind(dim=1)]
        return torch.stack(losses).mean()

    def score_loss(self, values_SH: Tensor, labels: Labels) -> Tensor:
        """The sum of the loss of the score, of the attributes' values, or of the log-odds of steps;
        a float32 scalar."""
        if labels.steps is not None:
            return self.function(self.combine(values_SH), labels.steps)
        if labels.targets is None or self.are_estimates:
            return self._loss_of_scores(self.combine(values_SH), labels)
        return self.function(values_SH, labels.targets)

    def _loss_of_scores(self, scores_S: Tensor, labels: Labels) -> Tensor:
        if labels.targets is None:
            return self.function(scores_S, labels.pairs)
        return self.function(scores_S[:, None], labels.targets)

    def contract(self) -> list[HeadContract] | None:
        """The heads of the scoring contract; None: the model's own."""
        heads = []
        if self.are_estimates:
            for h, weight in enumerate(self.weights):
                heads.append(
                    HeadContract(name=f"LABEL_{h}", meaning=ESTIMATE_MEANING, weight=weight)
                )
            return heads
        if not self.attributes:
            return None
        for name, weight in zip(self.attributes, self.weights, strict=True):
            meaning = f"the grade {name} of the training data"
            heads.append(HeadContract(name=name, meaning=meaning, weight=weight))
        return heads


def heads_of(
    section: RewardModelConfig,
    loss: LossConfig,
    grades_NH: npt.NDArray[np.floating[Any]],
    *,
    ties: Literal["drop", "half"],
    num_heads: int,
) -> Heads:
    """The heads of a run, whose model has `num_heads`.

    `grades_NH`: those of the training data, for each label of `section`. `ties`: `data.ties`.
    """
    names = section.labels
    num_estimates = section.num_heads
    if names:
        weight_of = section.attribute_weights
        if not isinstance(weight_of, dict):
            weight_of = dict.fromkeys(names, 1 / len(names))
        weights = tuple(weight_of.get(name, 0.0) / num_estimates for name in names)
        # A grade that is the same everywhere has no deviation to be measured in.
        stds_H = np.nanstd(grades_NH, axis=0)
        stds = tuple(np.where(stds_H > 0, stds_H, 1.0).tolist())
        # Every estimate has a head for each label.
        weights *= num_estimates
        stds *= num_estimates
    else:
        weights = (1 / num_estimates,) * num_heads
        stds = (1.0,) * num_heads
    kind = section.reward_model_type
    pair_options: dict[str, Any] = {
        "ties": ties,
        "weight": loss.weight,
        "unit": "choice" if LOSSES[kind].learns == "choices" else "pair",
    }
    if loss.strength is not None:
        pair_options |= {"strength": loss.strength, "strength_scale": loss.strength_scale}
    step_options = None
    if section.learns_steps:
        step_options = {"step_weight": loss.step_weight}
    return Heads(
        attributes=names,
        weights=weights,
        stds=stds,
        are_estimates=num_estimates > 1,
        function=partial(function_of(kind), **loss.arguments(kind)),
        pair_options=pair_options,
        step_options=step_options,
    )


METRIC_NAMES = ("loss", "accuracy", "chosen_rewards", "rejected_rewards", "reward_margin")


@dataclass(frozen=True, slots=True)
class RewardMetrics:
    """Sums over pairs, and how many there were.

    `num_units`: what the loss is a mean over, comparisons (or pairs, or choices). `num_pairs`
    counts ordered pairs (no ties), over which everything else is summed. `num_correct`: the better
    one scored strictly higher; equal is not correct.
    """

    loss_sum: float = 0.0
    num_units: int = 0
    num_pairs: int = 0
    num_correct: int = 0
    chosen_sum: float = 0.0
    rejected_sum: float = 0.0

    def __add__(self, other: RewardMetrics) -> RewardMetrics:
        return RewardMetrics(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def means(self) -> dict[str, float]:
        """The metrics of `METRIC_NAMES`; NaN where there was nothing to average."""
        chosen = _ratio(self.chosen_sum, self.num_pairs)
        rejected = _ratio(self.rejected_sum, self.num_pairs)
        return {
            "loss": _ratio(self.loss_sum, self.num_units),
            "accuracy": _ratio(self.num_correct, self.num_pairs),
            "chosen_rewards": chosen,
            "rejected_rewards": rejected,
            "reward_margin": chosen - rejected,
        }


class RewardSums:
    """The sums of `RewardMetrics` while they are made: they stay where the scores are until
    `read`."""

    def __init__(self) -> None:
        self._num_units = 0
        self._num_pairs = 0
        self._sums_4: Tensor | None = None  # loss, correct, chosen, rejected; float64

    @torch.no_grad()
    def add(
        self, scores_S: Tensor, pairs: Pairs, loss_sum: Tensor, num_units: int | None = None
    ) -> None:
        """Add one batch. `pairs`: on the device of the scores. `loss_sum`: as a loss gives it, over
        `num_units` (None: those of the pairs)."""
        # Sums of many batches: float32 would stop counting single pairs at 2^24.
        scores_S = scores_S.double()
        better_P = scores_S[pairs.better_P]
        worse_P = scores_S[pairs.worse_P]
        correct_P = (better_P > worse_P).double()
        # Not `better_P[~tied_P]`: the host would wait to know how many there are.
        ordered_3P = torch.stack([correct_P, better_P, worse_P]).masked_fill(pairs.tied_P, 0.0)
        sums_4 = torch.cat([loss_sum.double()[None], ordered_3P.sum(dim=1)])
        self._sums_4 = sums_4 if self._sums_4 is None else self._sums_4 + sums_4
        self._num_units += pairs.num_units if num_units is None else num_units
        self._num_pairs += pairs.num_ordered

    def read(self, group: ProcessGroup | None = None) -> RewardMetrics:
        """The sums as numbers, over the processes of `group` (None: all). The host waits here for
        the device, once."""
        if self._sums_4 is None:
            return RewardMetrics()
        num_units = self._num_units
        num_pairs = self._num_pairs
        sums_4 = self._sums_4
        if processes.size() > 1:
            # One exchange for all six; float64 holds counts to 2^53 exactly.
            counts_2 = sums_4.new_tensor([num_units, num_pairs])
            all_6 = processes.summed(torch.cat([sums_4, counts_2]), group)
            sums_4, counts_2 = all_6.split([4, 2])
            num_units, num_pairs = map(int, counts_2.tolist())
        loss, correct, chosen, rejected = sums_4.tolist()
        return RewardMetrics(loss, num_units, num_pairs, int(correct), chosen, rejected)


class GradeSums:
    """Sums over the grades of each attribute, on the device until `read`: what squared error and
    correlation need."""

    def __init__(self) -> None:
        self.sums_6H: Tensor | None = None
        """This process's count, and for values x and grades y the sums of x, y, x^2, y^2 and x y;
        float64."""

    @torch.no_grad()
    def add(self, values_SH: Tensor, targets: Targets) -> None:
        """Add one batch; what has no grade does not count."""
        known_SH = (targets.weight_SH > 0).double()
        # The grades are 0 already where there are none.
        x_SH = values_SH.double() * known_SH
        y_SH = targets.values_SH.double()
        parts = torch.stack([known_SH, x_SH, y_SH, x_SH * x_SH, y_SH * y_SH, x_SH * y_SH])
        sums_6H = parts.sum(dim=1)
        self.sums_6H = sums_6H if self.sums_6H is None else self.sums_6H + sums_6H

    def read(self, group: ProcessGroup | None = None) -> Tensor | None:
        """The sums (6, H) over the processes of `group` (None: all); None where there are no
        grades."""
        if self.sums_6H is None:
            return None
        return processes.summed(self.sums_6H, group).cpu()


def grade_metrics(sums_6H: Tensor, attributes: Sequence[str]) -> dict[str, float]:
    """The mean squared error `mse_<attribute>` and the correlation `pearson_<attribute>` of each
    attribute with the grades, and `mse` and `pearson`, their means; NaN where there is none."""
    count, x, y, xx, yy, xy = sums_6H
    mse_H = (xx - 2 * xy + yy) / count
    # Pearson's r is the covariance over the product of the deviations, each times count^2.
    covariance_H = count * xy - x * y
    # Rounding can make the variance of equal values slightly negative.
    spread_H = ((count * xx - x * x) * (count * yy - y * y)).clamp_min(0).sqrt()
    pearson_H = torch.where(spread_H > 0, covariance_H / spread_H, torch.nan)
    metrics = {"mse": float(mse_H.nanmean()), "pearson": float(pearson_H.nanmean())}
    for name, values_H in (("mse", mse_H), ("pearson", pearson_H)):
        for attribute, value in zip(attributes, values_H.tolist(), strict=True):
            metrics[f"{name}_{attribute}"] = value
    return metrics


def _ratio(total: float, count: int) -> float:
    return total / count if count else math.nan
