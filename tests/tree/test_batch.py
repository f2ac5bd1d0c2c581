"""Packing groups into a row: nothing is lost, reordered or computed twice."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treeward.tree.batch import MIN_SHARED_BETWEEN_GROUPS, RowBatch, TreeBatch
from treeward.tree.token_tree import TokenTree

SEQUENCE = st.lists(st.integers(0, 2), min_size=1, max_size=14)
GROUPS = st.lists(st.lists(SEQUENCE, min_size=1, max_size=4), min_size=1, max_size=5)
SYSTEM = list(range(100, 100 + MIN_SHARED_BETWEEN_GROUPS))


def with_prompt(group: list[list[int]]) -> list[list[int]]:
    return [SYSTEM + sequence for sequence in group]


def tensors_of(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    tensors: list[torch.Tensor] = []
    if is_dataclass(value):
        for field in fields(value):
            tensors += tensors_of(getattr(value, field.name))
    return tensors


@pytest.mark.parametrize(
    "batch",
    [TreeBatch.from_groups([[[1, 2], [1, 3]]]), RowBatch.from_groups([[[1, 2]]], pad_token_id=0)],
    ids=["trees", "rows"],
)
def test_every_tensor_goes_to_the_device(batch: TreeBatch | RowBatch) -> None:
    moved = tensors_of(batch.to("meta", non_blocking=True))
    assert len(moved) >= 2 and all(tensor.device.type == "meta" for tensor in moved)


@given(GROUPS, st.booleans())
@settings(deadline=None)
def test_computed_tokens_are_the_deduplicated_tokens(
    groups: list[list[list[int]]], with_system: bool
) -> None:
    if with_system:
        groups = [with_prompt(group) for group in groups]
    batch = TreeBatch.from_groups(groups)
    per_group = sum(TokenTree.from_sequences(group).num_tokens for group in groups)
    everything = TokenTree.from_sequences(list(chain.from_iterable(groups))).num_tokens
    # short beginnings are shared within a group, long ones within the batch
    assert batch.num_computed_tokens == (everything if with_system else per_group)


@pytest.mark.parametrize("groups", [[], [[]], [[[1]], []], [[[1], []]]])
def test_empty_batches_groups_and_sequences_are_refused(groups: list[list[list[int]]]) -> None:
    with pytest.raises(ValueError):
        TreeBatch.from_groups(groups)
    with pytest.raises(ValueError):
        RowBatch.from_groups(groups, pad_token_id=0)
