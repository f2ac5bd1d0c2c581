"""Validation: the metrics of each named set, over every comparison or the first so many.

metrics = validate(model, dataset, loss_of, limit=None, max_tokens=4096)     # RewardMetrics of one set
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from treeward.data.encoding import Comparison, EncodedDataset
from treeward.losses import Pairs
from treeward.metrics import RewardMetrics
from treeward.model.reward_model import RewardModel
from treeward.tree.batch import plan_micro_batches

__all__ = ["LossFunction", "PairsFunction", "validate"]

PairsFunction = Callable[[Sequence[Comparison]], Pairs]
LossFunction = Callable[[Tensor, Pairs], Tensor]

_COMPARISONS_AT_ONCE = 1024  # planned together; the plan is as good as for the whole set, and the rows stay on disk


@torch.no_grad()
def validate(
    model: RewardModel,
    dataset: EncodedDataset,
    pairs_of: PairsFunction,
    loss_of: LossFunction,
    *,
    limit: int | None = None,
    max_tokens: int | None = None,
    max_groups: int | None = None,
) -> RewardMetrics:
    """The metrics of a set. `limit`: only its first comparisons. Budgets: as in `plan_micro_batches`."""
    training = model.training
    model.eval()
    total = RewardMetrics()
    size = len(dataset) if limit is None else min(limit, len(dataset))
    for start in range(0, size, _COMPARISONS_AT_ONCE):
        rows = range(start, min(start + _COMPARISONS_AT_ONCE, size))
        sizes: Sequence[int] = np.asarray(dataset.tree_tokens[rows.start : rows.stop]).tolist()
        for members in plan_micro_batches(sizes, max_tokens=max_tokens, max_groups=max_groups):
            comparisons = [dataset[rows[i]] for i in members]
            pairs = pairs_of(comparisons).to(model.device)
            scores_S = model(model.make_batch([comparison.token_ids for comparison in comparisons]))
            total += RewardMetrics.of(scores_S, pairs, loss_of(scores_S, pairs))
    model.train(training)
    return total
