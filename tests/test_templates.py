"""Every real chat template: real conversations, rendered by it and tokenized, score the same as a
tree and as rows."""

from __future__ import annotations

from typing import Any

import pytest
from families import assert_tree_equals_rows, tiny_model
from templates import CASES, TEMPLATES, family_renderer

from treeward.model.reward_model import RewardModel
from treeward.tree.batch import TreeBatch


@pytest.fixture(scope="module")
def model() -> RewardModel:
    """One small Llama serves all: its vocabulary holds every tokenizer's tokens."""
    return RewardModel(tiny_model("llama"))


@pytest.mark.skipif(not TEMPLATES, reason="trl, which carries the templates, is not installed")
@pytest.mark.parametrize("name", CASES)
def test_trees_equal_rows_under_every_template(
    name: str, model: RewardModel, real_chats: list[Any]
) -> None:
    renderer = family_renderer(name)
    # not every template takes one
    chats = [p for p in real_chats if all(m["role"] != "system" for m in p.context)]
    groups: list[list[list[int]]] = []
    for p in [*chats[:3], *chats[-3:]]:
        groups.append([renderer.encode([*p.context, *c.messages]) for c in p.completions])
        # Cohere's preamble has hundreds of tokens
        if sum(len(row) for group in groups for row in group) > 2500:
            break
    assert max(max(row) for group in groups for row in group) < model.num_embeddings
    batch = TreeBatch.from_groups(groups)
    assert batch.num_computed_tokens < 0.9 * batch.num_row_tokens  # the prompts are shared
    # Over Cohere's 1400 tokens plain rows are off by 5e-6 themselves (against float64), and so are
    # trees.
    assert_tree_equals_rows(model, groups, grads=2e-5)
