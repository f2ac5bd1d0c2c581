"""A small signed reward model in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["write_signed_model"]


def write_signed_model(folder: Path, tokenizer: Any, *, seed: int, max_length: int) -> Path:
    """A decoder with random weights that reads so many tokens, with its scoring contract."""
    from treeward.data.rendering import Renderer
    from treeward.model.export import export_model
    from treeward.model.loading import build_reward_model
    from treeward.scoring.golden import sign_folder

    fields = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    loaded = build_reward_model({"model_type": "llama", **fields}, tokenizer, seed=seed)
    renderer = Renderer(tokenizer, max_length=max_length)
    export_model(loaded.model, tokenizer, folder, rendering=renderer.settings)
    sign_folder(folder, model=loaded.model, renderer=renderer)
    return folder
