"""A dry run against the first step of the run itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from treeward.config.load import load_file
from treeward.config.run import RewardModelRunConfig
from treeward.planning.dry_run import dry_run
from treeward.training.prefetch import BatchPreparer
from treeward.training.setup import set_up


@pytest.mark.parametrize("attention", ["tree", "rows"])
@pytest.mark.parametrize("max_tokens", [4096, 25])
def test_the_first_step_is_that_of_the_run(attention: str, max_tokens: int, tmp_path: Path) -> None:
    rows = []
    for number in range(8):
        # Some of them are too large for a pass of 25 tokens.
        question = "What is one more than this? " * (1 + number % 3)
        rows.append(
            {"prompt": question, "chosen": f"It is {number}.", "rejected": "I do not know that."}
        )
    data = tmp_path / "pairs.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    model = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16}
    model |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    values: dict[str, Any] = {
        "policy": {
            "model_config": model,
            "tokenizer": {"vocab_size": 300},
            "attention": attention,
            "max_total_sequence_length": 128,
            "train_global_batch_size": 8,
            "train_micro_batch_tokens": max_tokens,
        },
        "data": {
            "dataset_name": "auto",
            "train_data_path": str(data),
            "cache_dir": str(tmp_path / "cache"),
        },
    }
    config = load_file(RewardModelRunConfig, None, values=values)
    planned = dry_run(config, "cpu").first
    step = BatchPreparer(set_up(config)).step(1)
    num_passes = sum(len(micro_batch.batches) for micro_batch in step.micro_batches)
    assert (planned.passes > len(step.micro_batches)) == (max_tokens == 25)
    assert (planned.passes, planned.tokens) == (num_passes, step.num_computed_tokens)
    assert planned.row_tokens == step.num_row_tokens
