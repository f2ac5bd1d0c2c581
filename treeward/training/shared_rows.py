"""Which comparisons of a validation set are in the training data too, token for token.

    num_shared(dataset, training_sets)      # 145 of len(dataset): the set says nothing of new data

Asked before the first step of every run, so it must cost little: rows are read only where a training row has the size
of one that is looked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from treeward.data.encoded import Comparison, EncodedDataset

__all__ = ["num_shared"]


def num_shared(dataset: EncodedDataset, training_sets: Iterable[EncodedDataset], *, limit: int | None = None) -> int:
    """How many of the first `limit` comparisons (None: all) have the same conversations and ranks as one that is
    trained on, whatever their order. Answers to other prompts, which training may add, do not count."""
    sizes = dataset.own_sizes[:limit]
    wanted = {_digest(dataset[i]) for i in range(len(sizes))}
    found: set[bytes] = set()
    for training in training_sets:
        candidates = np.flatnonzero(np.isin(training.own_sizes, sizes))
        found |= {digest for i in candidates.tolist() if (digest := _digest(training[i])) in wanted}
    return sum(_digest(dataset[i]) in found for i in range(len(sizes))) if found else 0


def _digest(comparison: Comparison) -> bytes:
    own = comparison.token_ids[: comparison.num_own]
    parts = sorted(
        ids.tobytes() + rank.to_bytes(8, "little", signed=True)
        for ids, rank in zip(own, comparison.ranks[: len(own)], strict=True)
    )
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
