"""Which comparisons of a validation set are in the training data too, token for token.

num_shared(dataset, training_sets)      # 145 of len(dataset): the set says nothing of new data
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from treeward.data.encoding import EncodedDataset

__all__ = ["num_shared"]


def num_shared(dataset: EncodedDataset, training_sets: Iterable[EncodedDataset], *, limit: int | None = None) -> int:
    """How many of the first `limit` comparisons (None: all) have the same conversations and ranks as one of the
    training data, in any order. Completions of other prompts, which training may add, do not count."""
    trained_on = np.concatenate([np.zeros(0, np.int64), *(training.digests for training in training_sets)])
    return int(np.isin(dataset.digests[:limit], trained_on).sum())
