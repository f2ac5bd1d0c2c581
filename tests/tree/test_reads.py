"""Where sequences are read: one place or many of each, in a tree and in padded rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from treeward.tree.batch import Batch, Reads, RowBatch, TreeBatch


def test_a_place_that_several_sequences_read_is_held_once() -> None:
    reads = Reads.of([[7], [3, 9], [], [9]])
    assert reads.places_N.tolist() == [3, 7, 9]
    assert reads.places_N[reads.index_R].tolist() == [7, 3, 9, 9]
    assert reads.counts == (1, 2, 0, 1)


def tokens_read(batch: Batch) -> list[list[int]]:
    tokens = batch.tokens_T if isinstance(batch, TreeBatch) else batch.tokens_SL.flatten()
    places_R = batch.reads.places_N[batch.reads.index_R]
    return [part.tolist() for part in tokens[places_R].split(batch.reads.counts)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("pack", [TreeBatch.from_groups, RowBatch.from_groups])
def test_any_positions_of_a_sequence_are_found(pack: object, seed: int) -> None:
    """Sequences of few different tokens branch, contain one another and are equal."""
    random = np.random.default_rng(seed)
    groups = []
    read_at = []
    want = []
    for _ in range(3):
        group = [random.integers(1, 3, size=random.integers(1, 12)).tolist() for _ in range(4)]
        groups.append(group)
        for ids in group:
            number = random.integers(0, len(ids) + 1)
            positions = np.sort(random.choice(len(ids), size=number, replace=False)).tolist()
            read_at.append(positions)
            want.append([ids[position] for position in positions])
    settings = {} if pack == TreeBatch.from_groups else {"pad_token_id": 0}
    batch = pack(groups, read_at=read_at, **settings)  # type: ignore[operator]
    assert tokens_read(batch) == want


def test_without_positions_the_last_token_is_read() -> None:
    group = [[5, 6, 7], [5, 6], [5, 6, 7]]
    for batch in (TreeBatch.from_groups([group]), RowBatch.from_groups([group], pad_token_id=0)):
        assert tokens_read(batch) == [[7], [6], [7]]
    tree = TreeBatch.from_groups([group])
    assert torch.equal(tree.ends_S, torch.tensor([2, 1, 2]))
