from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from treeward.cli.main import main

WEIGHTS = "model.safetensors"


@pytest.fixture
def members(tiny_tokenizer: Any, tmp_path: Path) -> list[Path]:
    """Two reward models, a small step apart."""
    from treeward.data.rendering import Renderer
    from treeward.model.export import export_model
    from treeward.model.loading import build_reward_model

    fields = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    folders = []
    for name in ("a", "b"):
        loaded = build_reward_model({"model_type": "llama", **fields}, tiny_tokenizer, seed=3)
        with torch.no_grad():
            for parameter in loaded.model.parameters():
                parameter.add_(0.1 * parameter if name == "b" else 0)
        export_model(loaded.model, tiny_tokenizer, tmp_path / name, rendering=Renderer(tiny_tokenizer).settings)
        folders.append(tmp_path / name)
    return folders


def test_two_folders_become_one(members: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    output = tmp_path / "new" / "merged"
    with caplog.at_level(logging.INFO, logger="treeward"):
        assert main(["merge", *map(str, members), "--output", str(output), "--weights", "0.25,0.75"]) == 0
    assert f"0.75 of {members[1]}" in caplog.text and f"into {output}" in caplog.text
    held = [load_file(folder / WEIGHTS) for folder in members]
    for name, tensor in load_file(output / WEIGHTS).items():
        want = 0.25 * held[0][name].double() + 0.75 * held[1][name].double()
        assert torch.equal(tensor, want.float()), name
    assert (output / "reward_contract.json").is_file()
    data, scores = tmp_path / "rows.jsonl", tmp_path / "scores.jsonl"
    data.write_text(json.dumps({"prompt": "2 + 2?", "responses": ["4", "5"]}) + "\n", encoding="utf-8")
    assert main(["score", str(output), "--data", str(data), "--output", str(scores)]) == 0
