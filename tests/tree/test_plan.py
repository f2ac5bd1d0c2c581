"""Plans and parts of large groups: nothing is lost, reordered or computed twice."""

from __future__ import annotations

import math
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treeward.data.encoding import count_tree_tokens
from treeward.tree.batch import RowBatch, TreeBatch
from treeward.tree.plan import (
    MIN_SHARED_BETWEEN_SEQUENCES,
    backward_in_parts,
    order_of_parts,
    plan_micro_batches,
    plan_padded,
    plan_parts,
    plan_sequences,
    split_group,
)
from treeward.tree.token_tree import TokenTree

SEQUENCE = st.lists(st.integers(0, 2), min_size=1, max_size=14)


def members_of(groups: list[list[int]], sequences: list[list[int]]) -> list[list[list[int]]]:
    """The sequences of a plan's groups."""
    return [list(map(sequences.__getitem__, group)) for group in groups]


@given(
    st.lists(st.integers(1, 50), max_size=40),
    st.one_of(st.none(), st.integers(1, 120)),
    st.one_of(st.none(), st.integers(1, 6)),
    st.integers(1, 5),
)
def test_micro_batches_keep_the_budget_and_lose_nothing(
    sizes: list[int], tokens: int | None, groups: int | None, ranks: int
) -> None:
    plan = plan_micro_batches(sizes, max_tokens=tokens, max_groups=groups, num_ranks=ranks)
    assert sorted(chain.from_iterable(plan)) == list(range(len(sizes)))
    assert len(plan) % ranks == 0 and (ranks > 1 or all(plan))
    for members in plan:
        assert members == sorted(members)
        assert groups is None or len(members) <= groups
        assert tokens is None or len(members) == 1 or sum(sizes[i] for i in members) <= tokens
    assert plan == plan_micro_batches(sizes, max_tokens=tokens, max_groups=groups, num_ranks=ranks)


def test_micro_batches_of_several_ranks_are_of_like_cost() -> None:
    """Also where one micro-batch would hold all, and where the last ones of one rank would be
    alone."""
    sizes = [int(size) for size in np.random.default_rng(0).integers(20, 400, 64)]
    for ranks, tokens in ((4, 100_000), (3, 3000)):
        plan = plan_micro_batches(sizes, max_tokens=tokens, num_ranks=ranks)
        assert len(plan) <= math.ceil(sum(sizes) / tokens) + ranks
        for start in range(0, len(plan), ranks):
            costs = []
            for members in plan[start : start + ranks]:
                costs.append(sum(sizes[i] for i in members))
            assert min(costs) > 0.9 * max(costs)
    shapes = [(2, size) for size in sizes]
    for ranks, tokens in ((4, 100_000), (3, 6000)):
        plan = plan_padded(shapes, max_tokens=tokens, num_ranks=ranks)
        for start in range(0, len(plan), ranks):
            costs = []
            for members in plan[start : start + ranks]:
                longest = max(sizes[i] for i in members)
                costs.append(2 * len(members) * longest)
            assert min(costs) > 0.6 * max(costs)


PROMPT = list(range(20, 20 + MIN_SHARED_BETWEEN_SEQUENCES))
CALL = st.lists(SEQUENCE | SEQUENCE.map(lambda sequence: PROMPT + sequence), max_size=14)


@given(CALL, st.integers(1, 60), st.booleans())
@settings(deadline=None)
def test_sequence_plans_hold_each_once_within_the_budget(
    sequences: list[list[int]], budget: int, share: bool
) -> None:
    plan = plan_sequences(sequences, max_tokens=budget, share=share)
    planned = chain.from_iterable(chain.from_iterable(plan))
    assert sorted(planned) == list(range(len(sequences)))
    for groups in plan:
        assert groups and all(groups)
        members = members_of(groups, sequences)
        rows = list(chain.from_iterable(members))
        if share:
            batch = TreeBatch.from_groups(members)
            is_single = len(set(map(tuple, rows))) == 1
        else:
            batch = RowBatch.from_groups(members, pad_token_id=0)
            is_single = len(rows) == 1
        assert batch.num_computed_tokens <= budget or is_single
    assert plan == plan_sequences(sequences, max_tokens=budget, share=share)


def test_prompts_are_shared_across_a_call() -> None:
    """Completions of two prompts, shuffled: each prompt is computed once, as if one had known."""
    one = list(range(10, 50))
    other = list(range(60, 90))
    sequences = []
    for i in range(20):
        prompt = one if i % 2 else other
        sequences.append(prompt + [200 + i, 300 + i])
    (groups,) = plan_sequences(sequences, max_tokens=1000)
    batch = TreeBatch.from_groups(members_of(groups, sequences))
    assert TokenTree.from_sequences(sequences).num_tokens == 40 + 30 + 20 * 2
    assert batch.num_computed_tokens == 40 + 30 + 20 * 2
    assert batch.num_row_tokens == sum(map(len, sequences))


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 300)), max_size=40),
    st.one_of(st.none(), st.integers(1, 1500)),
    st.one_of(st.none(), st.integers(1, 5)),
    st.integers(1, 5),
)
def test_padded_plans_keep_the_budget_and_lose_nothing(
    shapes: list[tuple[int, int]], max_tokens: int | None, max_groups: int | None, ranks: int
) -> None:
    plan = plan_padded(shapes, max_tokens=max_tokens, max_groups=max_groups, num_ranks=ranks)
    assert sorted(chain.from_iterable(plan)) == list(range(len(shapes)))
    assert len(plan) % ranks == 0
    for members in filter(None, plan):
        num_rows = sum(shapes[i][0] for i in members)
        longest = max(shapes[i][1] for i in members)
        padded = num_rows * longest
        assert max_groups is None or len(members) <= max_groups
        assert max_tokens is None or padded <= max_tokens or len(members) == 1


@given(
    groups=st.lists(st.lists(SEQUENCE, max_size=6), max_size=4),
    max_tokens=st.integers(1, 40),
    share=st.booleans(),
)
def test_a_plan_has_every_sequence_once_and_keeps_to_the_budget(
    groups: list[list[list[int]]], max_tokens: int, share: bool
) -> None:
    plan = plan_parts(groups, max_tokens=max_tokens, share=share)
    planned = []
    for part in chain.from_iterable(plan):
        planned += [(part.group, i) for i in part.members]
    everything = []
    for g, group in enumerate(groups):
        everything += [(g, i) for i in range(len(group))]
    assert sorted(planned) == everything
    for batch in plan:
        sizes = []
        for part in batch:
            rows = [np.array(groups[part.group][i]) for i in part.members]
            sizes.append(count_tree_tokens(rows) if share else len(rows) * max(map(len, rows)))
            assert part.num_tokens == sizes[-1]
        assert sum(sizes) <= max_tokens or len(batch) == len(batch[0].members) == 1 or not share
    for g, group in enumerate(groups):  # a group that fits is whole
        whole = [np.array(row) for row in group]
        if share and whole and count_tree_tokens(whole) <= max_tokens:
            assert len(split_group(group, max_tokens=max_tokens)) == 1, (
                f"group {g} fits and was split"
            )


def test_the_gradient_of_parts_is_that_of_the_whole() -> None:
    sequences = [[4, 5, 6, 7], [1, 2, 3], [1, 2], [1, 9]]
    order_S = order_of_parts([part.members for part in split_group(sequences, max_tokens=4)])
    assert order_S is not None
    assert not torch.equal(order_S[order_S], torch.arange(4)), "else an inverse order would pass"
    table = torch.nn.Embedding(10, 1)

    def gradient(
        max_tokens: int, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        table.weight.grad = None
        parts = split_group(sequences, max_tokens=max_tokens)

        def score(members: tuple[int, ...]) -> torch.Tensor:
            return torch.stack([table(torch.tensor(sequences[i])).exp().sum() for i in members])

        def loss_of(scores_S: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.softplus(scores_S[1:] - scores_S[0]).sum()

        scores, loss = backward_in_parts(
            [partial(score, part.members) for part in parts],
            loss_of,
            order_S=order_of_parts([part.members for part in parts]),
            scale=scale,
        )
        assert table.weight.grad is not None
        return scores, loss, table.weight.grad / scale, len(parts)

    whole = gradient(100, 1.0)
    several = gradient(4, 0.25)
    assert whole[3] == 1 and several[3] > 1
    in_order = [table(torch.tensor(sequence)).exp().sum().item() for sequence in sequences]
    assert whole[0].tolist() == pytest.approx(in_order, rel=1e-6)
    for ours, theirs in zip(several[:3], whole[:3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
