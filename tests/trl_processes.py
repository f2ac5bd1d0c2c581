"""What each process of `accelerate launch` does in tests/compat/test_trl.py: `trl_processes.py HOW
FOLDER`."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate import PartialState
from families import tiny_model
from test_trl import train_policy, train_rewards
from torch import Tensor, distributed
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoTokenizer

from treeward.compat import trl as compat


def train(folder: Path) -> dict[str, Any]:
    """Losses of the runs of both trainers, of all processes, with DDP."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    own = folder / os.environ["RANK"]
    options = {
        "reference": folder / "reference",
        "num_iterations": 2,
        "gradient_accumulation_steps": 2,
        "beta": 0.05,
        "max_steps": 4,
    }
    pairs = [
        [
            train_rewards(kind, tokenizer, own, max_steps=5)
            for kind in (compat.RewardTrainer, trl.RewardTrainer)
        ],
        [
            train_policy(kind, tokenizer, own, **options)
            for kind in (compat.GRPOTrainer, trl.GRPOTrainer)
        ],
    ]
    ours, theirs = (
        [entry["loss"] for one in trainers for entry in one.state.log_history if "loss" in entry]
        for trainers in zip(*pairs, strict=True)
    )
    trees = [tree for one, _ in pairs for tree in one.trees]
    return {
        "processes": PartialState().num_processes,
        "ours": ours,
        "theirs": theirs,
        "computed": sum(tree.num_computed_tokens for tree in trees),
        "rows": sum(tree.num_row_tokens for tree in trees),
    }


def shard(how: str) -> dict[str, Any]:
    """Scores and their gradients with sharded weights, against a model that is whole."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    plain = tiny_model("qwen3").train()
    hf = tiny_model("qwen3").train()
    tree = compat.ScoresForward(hf)
    hf.gradient_checkpointing_enable({"use_reentrant": False})
    layer = type(hf.model.layers[0])
    model: Any = hf
    if how == "fsdp2":
        for module in (*hf.model.layers, hf):
            fully_shard(module, mesh=distributed.init_device_mesh("cpu", (2,)))
    else:
        policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={layer})
        device = torch.device("cpu")
        model = FullyShardedDataParallel(
            hf, auto_wrap_policy=policy, use_orig_params=True, device_id=device
        )

    def loss_of(one: Any, seed: int) -> Tensor:
        ids = torch.randint(2, 600, (8, 40), generator=torch.Generator().manual_seed(seed))
        ids[4:, :30] = ids[:4, :30]
        loss: Tensor = (
            one(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
            .logits.square()
            .sum()
        )
        return loss

    loss = loss_of(model, rank)
    loss.backward()
    ((loss_of(plain, 0) + loss_of(plain, 1)) / 2).backward()
    if how == "fsdp2":
        norms = [p.grad.full_tensor().norm() for p in hf.parameters() if p.grad is not None]
    else:
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            norms = [p.grad.norm() for p in hf.parameters() if p.grad is not None]
    wanted = [p.grad.norm() for p in plain.parameters() if p.grad is not None]
    return {
        "processes": distributed.get_world_size(),
        "ours": [float(loss), *map(float, norms)],
        "theirs": [float(loss_of(plain, rank)), *map(float, wanted)],
        "computed": tree.num_computed_tokens,
        "rows": tree.num_row_tokens,
    }


if __name__ == "__main__":
    how = sys.argv[1]
    folder = Path(sys.argv[2])
    found = train(folder) if how == "ddp" else shard(how)
    (folder / f"{how}{distributed.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.destroy_process_group()
