"""A base model whose padding token is its end of turn, as SmolLM2's: a resumed run equals the undisturbed one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from families import tiny_model

from treeward.training.train import train


def test_a_resumed_run_equals_the_undisturbed_one(
    tiny_run: Callable[..., Any],
    tiny_tokenizer: Any,
    tmp_path: Path,
    read_weights: Callable[[Path], dict[str, torch.Tensor]],
) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    end = tokenizer.eos_token_id
    base = tmp_path / "base"
    tiny_model("llama", pad_token_id=end, eos_token_id=end).save_pretrained(base)
    tokenizer.save_pretrained(base)

    def run(name: str, *overrides: str) -> Any:
        folders = [f"checkpointing.checkpoint_dir={tmp_path}/{name}", f"logger.log_dir={tmp_path}/{name}-logs"]
        model = [f"policy.model_name={base}", "~policy.model_config", "~policy.tokenizer"]
        model.append("rm.max_num_steps=3")
        model.append("policy.optimizer.kwargs.weight_decay=0.0")  # it would move a frozen token too
        return train(tiny_run(*model, *folders, *overrides), show_progress=False)

    undisturbed = run("undisturbed").model_folder
    assert run("stopped", "checkpointing.checkpoint_must_save_by=0.01").interrupted_by == "checkpoint_must_save_by"
    resumed = run("stopped").model_folder
    weights, again = read_weights(undisturbed), read_weights(resumed)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    before = read_weights(base)["model.embed_tokens.weight"]
    assert not torch.equal(weights["model.embed_tokens.weight"][end], before[end])
