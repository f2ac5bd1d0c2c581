"""A group larger than the budget is computed in parts: nothing is lost, every part fits, and gradients are equal."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from treeward.data.encoding import count_tree_tokens
from treeward.tree.batch import backward_in_parts, order_of_parts, plan_parts, split_group

groups = st.lists(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=6), max_size=4)


@given(groups=groups, max_tokens=st.integers(1, 40), share=st.booleans())
def test_a_plan_has_every_sequence_once_and_keeps_to_the_budget(
    groups: list[list[list[int]]], max_tokens: int, share: bool
) -> None:
    plan = plan_parts(groups, max_tokens=max_tokens, share=share)
    assert sorted((part.group, i) for batch in plan for part in batch for i in part.members) == [
        (g, i) for g, group in enumerate(groups) for i in range(len(group))
    ]
    for batch in plan:
        sizes = []
        for part in batch:
            rows = [np.array(groups[part.group][i]) for i in part.members]
            sizes.append(count_tree_tokens(rows) if share else len(rows) * max(map(len, rows)))
            assert part.num_tokens == sizes[-1]
        assert sum(sizes) <= max_tokens or len(batch) == len(batch[0].members) == 1 or not share
    for g, group in enumerate(groups):
        whole = [np.array(row) for row in group]
        if share and whole and count_tree_tokens(whole) <= max_tokens:
            assert len(split_group(group, max_tokens=max_tokens)) == 1, f"group {g} fits and was split"


def test_the_gradient_of_parts_is_that_of_the_whole() -> None:
    sequences = [[1, 2, 3], [1, 2], [4, 5, 6, 7], [1, 9]]
    table = torch.nn.Embedding(10, 1)

    def gradient(max_tokens: int, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        table.weight.grad = None
        parts = split_group(sequences, max_tokens=max_tokens)

        def score(members: tuple[int, ...]) -> torch.Tensor:
            return torch.stack([table(torch.tensor(sequences[i])).exp().sum() for i in members])

        scores, loss = backward_in_parts(
            [partial(score, part.members) for part in parts],
            lambda scores_S: torch.nn.functional.softplus(scores_S[1:] - scores_S[0]).sum(),
            order_S=order_of_parts([part.members for part in parts]),
            scale=scale,
        )
        assert table.weight.grad is not None
        return scores, loss, table.weight.grad / scale, len(parts)

    whole, several = gradient(100, 1.0), gradient(4, 0.25)
    assert whole[3] == 1 and several[3] > 1
    for ours, theirs in zip(several[:3], whole[:3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
