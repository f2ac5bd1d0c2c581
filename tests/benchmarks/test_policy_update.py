"""The benchmark of the policy update at toy size: it runs, counts tokens exactly, and stops where
variants differ."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from treeward.rl.generation import CompletionGroup, Prompt, SampledCompletion

pytest.importorskip("trl")


def work_of(benchmark: ModuleType) -> Any:
    """Two prompts of 6 tokens with 4 completions each: those of the first share 2 tokens, those of
    the second none."""
    prompts = [tuple(range(10, 16)), tuple(range(20, 26))]
    completions = [
        [(1, 2, 3), (1, 2, 4, 5), (1, 2, 6), (1, 2, 7)],
        [(3, 1), (4, 1, 2), (5,), (6, 1)],
    ]
    groups = tuple(
        CompletionGroup(
            Prompt(({"role": "user", "content": "?"},), {}),
            ids,
            tuple(SampledCompletion(a, "", False) for a in given),
        )
        for ids, given in zip(prompts, completions, strict=True)
    )
    return benchmark.Work(groups, torch.tensor([[1.0, -1.0, 0.5, -0.5], [0.2, 1.0, -1.5, 0.3]]))


def test_tokens_are_counted_exactly_and_computed(
    benchmark: ModuleType, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules["common"].SIZES, "toy", {"hidden_size": 64, "num_hidden_layers": 1}
    )
    work = work_of(benchmark)
    policy = benchmark.build_causal("toy", tiny_tokenizer)
    counts = benchmark.count_tokens(work, policy)
    assert counts["row tokens"] == 8 * 6 + (3 + 4 + 3 + 3) + (2 + 3 + 1 + 2)
    assert counts["tree tokens"] == 2 * 6 + (2 + 1 + 2 + 1 + 1) + 8
    assert counts["padded tokens"] == 8 * (6 + 4)
    assert (counts["row head tokens"], counts["tree head tokens"]) == (21, 7 + 8)
    assert counts["tokens"] == 69 / 27
    assert benchmark.our_variant(benchmark.PolicyModel, policy, policy, work).log_probs() == 27
    assert benchmark.our_variant(benchmark.PackedRows, policy, policy, work.alone).log_probs() == 69
