"""Losses of scores: pure functions, each with its formula and source.

    pairs = ranked_pairs([(0, 1), (0, 1, 1)], ties="drop")
    loss_sum = bradley_terry(scores_S, pairs)        # divide once, by the comparisons of the whole step

A comparison group of K completions gives the pairs of completions with different ranks. Each group weighs 1 however
many pairs it has (Ouyang et al. 2022, arXiv 2203.02155, eq. 1): its loss is the mean over its pairs, and sums over
groups go up to whoever knows the count of the whole step.

Shapes: S scores of a batch, G groups, P pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from treeward.tree.batch import Movable


@dataclass(frozen=True, slots=True)
class Pairs(Movable):
    """Which scores are compared.

    `better_P`, `worse_P`: int64 (P,), places among the scores of the batch. `weight_P`: float32 (P,), 1 / the number of
    pairs of the group. `margin_P`: float32 (P,), 0 where the data has none. `tied_P`: bool (P,), the two are equally
    good. `num_groups`: groups that have a pair at all. `num_ordered`: pairs that are not tied; counted where the pairs
    are made, for reading it from a GPU would wait for it.
    """

    better_P: Tensor
    worse_P: Tensor
    weight_P: Tensor
    margin_P: Tensor
    tied_P: Tensor
    num_groups: int
    num_ordered: int


def ranked_pairs(
    ranks: Sequence[Sequence[int]],
    *,
    margins: Sequence[float | Sequence[float | None] | None] | None = None,
    ties: Literal["drop", "half"] = "drop",
) -> Pairs:
    """The pairs of G groups whose scores lie one group after another.

    `ranks`: for each group the rank of each completion, lower is better. `margins`: one per group, None for no margin,
    or a number for each completion, whose difference is a pair's margin (0 where it is negative or one is None).
    `ties`: what becomes of two completions of equal rank: no pair ("drop"), or one that either wins by half ("half").
    """
    better: list[int] = []
    worse: list[int] = []
    weight: list[float] = []
    margin: list[float] = []
    tied: list[bool] = []
    num_groups = offset = 0
    for g, group in enumerate(ranks):
        pairs = [
            (i, j, group[i] == group[j])
            for i in range(len(group))
            for j in range(len(group))
            if group[i] < group[j] or (ties == "half" and i < j and group[i] == group[j])
        ]
        num_groups += bool(pairs)
        group_margin = margins[g] if margins is not None else None
        for i, j, is_tie in pairs:
            better.append(offset + i)
            worse.append(offset + j)
            weight.append(1 / len(pairs))
            margin.append(0.0 if is_tie else _margin(group_margin, i, j))
            tied.append(is_tie)
        offset += len(group)
    return Pairs(
        torch.tensor(better, dtype=torch.long),
        torch.tensor(worse, dtype=torch.long),
        torch.tensor(weight),
        torch.tensor(margin),
        torch.tensor(tied, dtype=torch.bool),
        num_groups,
        num_ordered=len(tied) - sum(tied),
    )


def _margin(of_group: float | Sequence[float | None] | None, better: int, worse: int) -> float:
    if of_group is None or isinstance(of_group, int | float):
        return of_group or 0.0
    a, b = (of_group[i] if i < len(of_group) else None for i in (better, worse))
    return 0.0 if a is None or b is None else max(a - b, 0.0)


def bradley_terry(
    scores_S: Tensor, pairs: Pairs, *, label_smoothing: float = 0.0, center_rewards_coefficient: float = 0.0
) -> Tensor:
    """The Bradley-Terry loss, *summed* over groups (each the mean of its pairs); a float32 scalar.

    With d = score(better) - score(worse), margin m and label smoothing e, a pair's loss is

        (1 - e) softplus(m - d) + e softplus(d - m)   [+ c (score(better) + score(worse))^2]

    which for e = m = 0 is -log sigmoid(d) (Bradley and Terry 1952; Stiennon et al. 2020, arXiv 2009.01325), in the form
    that does not overflow. The margin is that of Touvron et al. 2023 (Llama 2, arXiv 2307.09288, eq. 2), the smoothing
    that of Wang et al. 2024 (arXiv 2401.06080), and the last term, with coefficient c, centres rewards at zero
    (Eisenstein et al. 2023, arXiv 2312.09244). A tied pair has e = 1/2 and no margin. Divide by the number of groups of
    the whole step for the mean.
    """
    better_P, worse_P = scores_S.float()[pairs.better_P], scores_S.float()[pairs.worse_P]
    excess_P = better_P - worse_P - pairs.margin_P
    smoothing_P = torch.where(pairs.tied_P, 0.5, label_smoothing)
    loss_P = (1 - smoothing_P) * F.softplus(-excess_P) + smoothing_P * F.softplus(excess_P)
    if center_rewards_coefficient:
        loss_P = loss_P + center_rewards_coefficient * (better_P + worse_P).square()
    return (pairs.weight_P * loss_P).sum()


LOSSES: Mapping[str, Callable[..., Tensor]] = {"bradley_terry": bradley_terry}
"""By `rm.loss.name`. Each takes scores (S,), `Pairs` and its options, the keys of `LossConfig` of the same names and
defaults, and gives the sum over groups."""
