"""The benchmark of the policy update at toy size: it runs, counts tokens exactly, and stops where variants differ."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from treeward.rl.generation import CompletionGroup, Prompt, SampledCompletion

FOLDER = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    pytest.importorskip("trl")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        for name in ("common", "grouper", "scoring", "policy_update"):
            patch.delitem(sys.modules, name, raising=False)
        patch.setenv("TREEWARD_SHARED_DATA", "nowhere")
        module = importlib.import_module("policy_update")
        sizes = importlib.import_module("common").SIZES
        patch.setitem(sizes, "toy", {"hidden_size": 64, "num_hidden_layers": 1})
        yield module
        for name in ("common", "grouper", "scoring", "policy_update"):
            sys.modules.pop(name)


def work_of(benchmark: ModuleType) -> Any:
    """Two prompts of 6 tokens. Of the first the completions share 2 tokens, of the second none; 4 completions of
    each.
    """
    prompts = [tuple(range(10, 16)), tuple(range(20, 26))]
    completions = [
        [(1, 2, 3), (1, 2, 4, 5), (1, 2, 6), (1, 2, 7)],
        [(3, 1), (4, 1, 2), (5,), (6, 1)],
    ]
    groups = tuple(
        CompletionGroup(
            Prompt(({"role": "user", "content": "?"},), {}), ids, tuple(SampledCompletion(a, "", False) for a in given)
        )
        for ids, given in zip(prompts, completions, strict=True)
    )
    return benchmark.Work(groups, torch.tensor([[1.0, -1.0, 0.5, -0.5], [0.2, 1.0, -1.5, 0.3]]))


@pytest.fixture(scope="module")
def tokenizer(benchmark: ModuleType) -> PreTrainedTokenizerBase:
    _, prompts = benchmark.load_prompts()
    tokenizer: PreTrainedTokenizerBase = benchmark.tokenizer_of(
        "xs", (text for prompt, texts in prompts for text in (prompt, *texts)), vocab_size=400
    )
    return tokenizer


def test_tokens_are_counted_exactly(benchmark: ModuleType, tokenizer: PreTrainedTokenizerBase) -> None:
    counts = benchmark.count_tokens(work_of(benchmark), benchmark.build_causal("toy", tokenizer))
    assert counts["row tokens"] == 8 * 6 + (3 + 4 + 3 + 3) + (2 + 3 + 1 + 2)
    assert counts["tree tokens"] == 2 * 6 + (2 + 1 + 2 + 1 + 1) + 8
    assert counts["padded tokens"] == 8 * (6 + 4)
    assert (counts["row head tokens"], counts["tree head tokens"]) == (21, 7 + 8)
    assert counts["tokens"] == 69 / 27


def test_the_variants_compute_what_was_counted(benchmark: ModuleType, tokenizer: PreTrainedTokenizerBase) -> None:
    work = work_of(benchmark)
    policy = benchmark.build_causal("toy", tokenizer)
    assert benchmark._ours(benchmark.PolicyModel, policy, policy, work).log_probs() == 27
    assert benchmark._ours(benchmark.PackedRows, policy, policy, work.alone).log_probs() == 69


def test_it_stops_where_the_variants_differ(benchmark: ModuleType) -> None:
    gradient = {"weight": torch.ones(3)}

    def variant(loss: float, gradients: dict[str, torch.Tensor]) -> Any:
        return benchmark.Variant(lambda: loss, lambda: (loss, gradients))

    tree = variant(1.0, gradient)
    for other in (variant(1.0 + 1e-4, gradient), variant(1.0, {"weight": torch.tensor([1.0, 1.0, 1.0001])})):
        with pytest.raises(RuntimeError, match="is off by"):
            benchmark.check_exact({benchmark.TREE: tree, benchmark.TRL: other})
