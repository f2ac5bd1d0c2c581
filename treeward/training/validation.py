"""Validation: the metrics of each named set, over every comparison or the first so many.

metrics = validate(model, dataset, pairs_of, loss_of, plan, limit=None)     # RewardMetrics of one set
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from treeward.data.encoding import Comparison, EncodedDataset
from treeward.losses import Pairs
from treeward.metrics import RewardMetrics
from treeward.model.reward_model import RewardModel

__all__ = ["LossFunction", "PairsFunction", "PlanFunction", "validate"]

PairsFunction = Callable[[Sequence[Comparison]], Pairs]
PlanFunction = Callable[[Sequence[Comparison]], list[list[int]]]
LossFunction = Callable[[Tensor, Pairs], Tensor]

_COMPARISONS_AT_ONCE = 1024  # planned together; the plan is as good as for the whole set, and the rows stay on disk


@torch.no_grad()
def validate(
    model: RewardModel,
    dataset: EncodedDataset,
    pairs_of: PairsFunction,
    loss_of: LossFunction,
    plan: PlanFunction,
    *,
    limit: int | None = None,
    should_stop: Callable[[], object] = lambda: False,
) -> RewardMetrics | None:
    """The metrics of a set, or None where `should_stop` said so on the way.

    `plan` says which comparisons share a forward pass. `limit`: only the first so many comparisons.
    """
    training = model.training
    model.eval()
    total = RewardMetrics()
    size = len(dataset) if limit is None else min(limit, len(dataset))
    for start in range(0, size, _COMPARISONS_AT_ONCE):
        loaded = dataset[start : min(start + _COMPARISONS_AT_ONCE, size)]
        for members in plan(loaded):
            if should_stop():
                model.train(training)
                return None
            comparisons = [loaded[i] for i in members]
            pairs = pairs_of(comparisons).to(model.device)
            scores_S = model(model.make_batch([comparison.token_ids for comparison in comparisons]))
            total += RewardMetrics.of(scores_S, pairs, loss_of(scores_S, pairs))
    model.train(training)
    return total
