"""The last MLP computes the tokens that are read and no others; that values stay the same is tested per family."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from families import assert_tree_equals_rows, causal_model, forest, tiny_model
from torch import nn

from treeward.model.checks import why_not_tree
from treeward.model.policy_model import PolicyModel
from treeward.model.reward_model import RewardModel

PROMPT = [5, 6, 7, 8]
GROUPS = [[[*PROMPT, 9, 10, 11], [*PROMPT, 9, 12], [*PROMPT, 9, 10, 11]], [[20, 21, 22]]]


def count_tokens(mlps: Sequence[nn.Module]) -> list[int]:
    """The tokens that the first matrix of each MLP gets from now on, one entry a call."""
    counts: list[int] = []
    for mlp in mlps:
        first = next(module for module in mlp.modules() if not list(module.children()))
        first.register_forward_pre_hook(lambda _, args: counts.append(args[0].shape[-2]))
    return counts


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_reward_model(family: str, checkpointing: bool) -> None:
    hf = tiny_model(family)
    model = RewardModel(hf).train()
    if checkpointing:
        model.recompute_activations()
    blocks = hf.base_model.h if family == "gpt2" else hf.base_model.layers
    counts = count_tokens([block.mlp for block in blocks])
    scores_S = model(model.make_batch(GROUPS))
    assert counts == [8 + 3, 2 + 1]  # two different ends in the first tree, one in the second
    assert scores_S[0] == scores_S[2]
    scores_S.sum().backward()
    assert sorted(counts[2:]) == ([3, 11] if checkpointing else [])
    counts.clear()
    blocks[-1].mlp(torch.zeros(1, 20, 32))  # by itself it computes all that it gets
    assert counts == [20]
    with model.plain_attention():  # all tokens, as transformers would
        counts.clear()
        hf(input_ids=torch.tensor([GROUPS[0][0]]))
        assert counts == [7, 7]


def test_two_threads() -> None:
    model = RewardModel(tiny_model("llama"))
    batch, other = model.make_batch(GROUPS), model.make_batch([[[5, 6]]])
    want = model(batch)
    calls = [other]
    attention = model.hf.base_model.layers[1].self_attn

    def meanwhile(*_: object) -> None:
        if calls:
            ThreadPoolExecutor(1).submit(model, calls.pop()).result()

    attention.register_forward_hook(meanwhile)
    assert torch.equal(model(batch), want)


def test_a_policy() -> None:
    hf = causal_model("llama")
    counts = count_tokens([layer.mlp for layer in hf.base_model.layers])
    PolicyModel(hf).log_probs(GROUPS, [[4, 4, 4], [2]])
    assert counts == [8 + 3, 3 + 1]  # 8, 9 and 10 predict 9, 10, 12 and 11; and 21 predicts 22


def test_a_layer_that_is_used_twice_computes_everything(caplog: pytest.LogCaptureFixture) -> None:
    hf = tiny_model("llama")
    hf.base_model.layers[0] = hf.base_model.layers[1]
    with caplog.at_level(logging.DEBUG, "treeward"):
        assert why_not_tree(hf) is None
    assert "computes its last layer for all tokens" in caplog.text
    assert_tree_equals_rows(RewardModel(hf), forest())
