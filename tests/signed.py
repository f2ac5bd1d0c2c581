"""Small signed reward models in folders."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from treeward.model.contract import ScoringContract, read_contract

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def contract_of(folder: Path) -> ScoringContract:
    contract = read_contract(folder)
    assert contract is not None
    return contract


def write_signed_model(folder: Path, tokenizer: Any, *, seed: int, max_length: int) -> Path:
    """A decoder with random weights that has so many positions and was trained with as many, with
    its contract."""
    from treeward.data.rendering import Renderer
    from treeward.model.export import export_model
    from treeward.model.loading import build_reward_model
    from treeward.scoring.golden import sign_exported

    fields = {"model_type": "llama", "max_position_embeddings": max_length, **SIZES}
    loaded = build_reward_model(fields, tokenizer, seed=seed)
    renderer = Renderer(tokenizer, max_length=max_length)
    export_model(loaded.model, tokenizer, folder, chat_template=renderer.chat_template)
    sign_exported(folder, model=loaded.model, renderer=renderer)
    return folder


def signed(
    folder: Path, tokenizer: Any, hf: Any, *, dtype: Any = None, heads: Any = None, **rendering: Any
) -> Any:
    """Export a Hugging Face classifier and sign the folder: the `RewardModel`, its `Renderer` and
    the contract.

    `rendering`: of the renderer, which has a copy of the tokenizer with a padding token that ends
    nothing.
    """
    import torch

    from treeward.data.rendering import Renderer
    from treeward.model.export import export_model
    from treeward.model.loading import ensure_pad_token
    from treeward.model.reward_model import RewardModel
    from treeward.scoring.golden import sign_exported

    tokenizer = copy.deepcopy(tokenizer)
    ensure_pad_token(hf, tokenizer)
    model = RewardModel(hf, layout="encoder" if hasattr(hf, "classifier") else "tree")
    renderer = Renderer(tokenizer, **rendering)
    export_model(
        model, tokenizer, folder, chat_template=renderer.chat_template, dtype=dtype or torch.float32
    )
    return model, renderer, sign_exported(folder, model=model, renderer=renderer, heads=heads)
