"""Small signed reward models in folders."""

from __future__ import annotations

import copy
from itertools import islice
from pathlib import Path
from typing import Any

from treeward.config.data import DatasetConfig
from treeward.data.datasets import open_dataset
from treeward.data.preference import Preference
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


def short_comparisons(split: str, count: int) -> list[Preference]:
    """Bundled comparisons with short prompts."""
    stream = open_dataset(DatasetConfig(dataset_name="Bundled", split=split))
    short = (p for p, _ in stream if sum(len(str(m["content"])) for m in p.context) < 120)
    return list(islice(short, count))


def add_spread(folder: Path, num_trained_on: int = 60) -> None:
    """Fit the spread of a signed model, and keep it in its folder."""
    from treeward.scoring.scorer import Scorer
    from treeward.scoring.spread import fit_spread, keep_spread

    scorer = Scorer.load(folder, device="cpu")
    trained_on = short_comparisons("validation", num_trained_on)
    held_out = short_comparisons("length_controlled", 30)
    names = ("train.jsonl", "held_out.jsonl")
    keep_spread(fit_spread(scorer, trained_on, held_out, names=names), scorer, folder)
