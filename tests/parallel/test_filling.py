"""A model that is filled in parts, by several processes, is the one that one process loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import causal_model, tiny_model
from torch.distributed.fsdp import fully_shard

from treeward.config.policy import LoraConfig
from treeward.errors import ModelError
from treeward.model.loading import load_policy, load_reward_model
from treeward.model.lora import adapter_state, add_adapters
from treeward.model.pretrained import load_tokenizer
from treeward.model.shards import whole

GROUPS = [[[5, 6, 7, 8], [5, 6, 9]], [[10, 11, 12]]]


def filled(folder: str) -> dict[str, bool]:
    """Whether each model has the bits of the one that one process loads."""
    found: dict[str, bool] = {}
    for name in ("llama", "causal", "mixtral", "gemma3", "inform", "adapted"):
        path, seeds = Path(folder) / name.replace("adapted", "llama"), {"head_seed": 3 if name == "causal" else None}
        tokenizers = [load_tokenizer(str(Path(folder) / "tokenizer")) for _ in range(2)]
        if name == "causal":  # gets a row for padding
            for one in tokenizers:
                one.pad_token = one.eos_token
        model = load_reward_model(path, tokenizer=tokenizers[0], on_meta=True, **seeds).model
        want = load_reward_model(path, tokenizer=tokenizers[1], **seeds).model
        if name == "adapted":
            for one in (model, want):
                add_adapters(one, LoraConfig(enabled=True, dim=2), seed=7)
        for layer in model.hf.base_model.layers:
            fully_shard(layer)
        fully_shard(model)
        model.fill("cpu")
        same = {key: torch.equal(whole(got.detach()), other) for (key, got), (_, other) in pairs(model.hf, want.hf)}
        if name == "adapted":
            other = adapter_state(want)
            same |= {key: torch.equal(whole(got.detach()), other[key]) for key, got in adapter_state(model).items()}
        with torch.no_grad():
            off = (model(model.make_batch(GROUPS)) - want(want.make_batch(GROUPS))).abs().max()
        found[name] = all(same.values()) and float(off) < 1e-5 and model.layout == want.layout
    model, want = (load_policy(Path(folder) / "tied", on_meta=on_meta).model for on_meta in (True, False))
    fully_shard(model)
    model.fill("cpu")
    same = {key: torch.equal(whole(got.detach()), other) for (key, got), (_, other) in pairs(model.hf, want.hf)}
    is_tied = model.hf.lm_head.weight is model.hf.get_input_embeddings().weight
    found["tied"] = all(same.values()) and is_tied
    broken = load_reward_model(Path(folder) / "causal", on_meta=True, tokenizer=tokenizers[0]).model
    with pytest.raises(ModelError, match="no reward head"):
        fully_shard(broken)
        broken.fill("cpu")
    return found


def pairs(got: torch.nn.Module, want: torch.nn.Module) -> Any:
    both = (dict(one.named_parameters()) | dict(one.named_buffers()) for one in (got, want))
    return zip(*(one.items() for one in both), strict=True)


@pytest.mark.slow
def test_each_process_gets_its_parts(
    run_processes: Callable[..., list[Any]], tmp_path: Path, tiny_tokenizer: Any
) -> None:
    inform: Any = tiny_model("llama")  # a published head of its own, which is known by its architecture
    inform.__class__ = type("INFORMForSequenceClassification", (type(inform),), {})
    inform.score = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    for name, model in {
        "llama": tiny_model("llama"),
        "causal": causal_model("llama"),
        "mixtral": tiny_model("mixtral"),  # whose experts are other tensors on the disk
        "gemma3": tiny_model("gemma3"),
        "inform": inform,
        "tied": causal_model("qwen3", tie_word_embeddings=True),
    }.items():
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer.save_pretrained(tmp_path / name)
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    for found in run_processes("test_filling:filled", 2, str(tmp_path)):
        assert all(found.values()), found


@pytest.mark.parametrize("labels", [(), ("helpful", "brief"), ("a", "b", "c", "d")])
def test_a_head_of_another_shape_is_refused_and_not_drawn_anew(
    labels: tuple[str, ...], tmp_path: Path, tiny_tokenizer: Any
) -> None:
    """As one process refuses it; a head of one row less is no embedding without its row for padding."""
    tiny_model("llama", num_labels=3).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    for on_meta in (False, True):
        with pytest.raises(ModelError, match="the weights do not have the shapes"):
            load_reward_model(tmp_path, head_seed=3, labels=labels, on_meta=on_meta).model.fill("cpu")
