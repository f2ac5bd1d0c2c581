"""A training step on prefix trees against TRL's RewardTrainer, on the same comparisons in one
interleaved run.

    python benchmarks/training_step.py [--size xs|s|m|l | --model FOLDER] [--float32 | --default] [--pairs 8]
                                       [--rounds 12] [--longest 1024] [--device cuda] [--profile]

A step is forward, backward, clipping and fused AdamW on the same real comparisons. For TRL it is
the peer's own collator and `training_step`, without its data loader and logging. Rows are padded as
each does it; "packed" is treeward's own packing without sharing. Every variant begins with the same
weights. Tokens a second are those of the plain rows without padding, the same for all variants.
`benchmarks/gpu.py` has the models that a GPU is for.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import (
    activation_bytes,
    add_model,
    add_options,
    build,
    describe,
    interleave,
    load_pairs,
    median_ratio,
    model_name,
    print_profile,
    use_device,
)
from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer

from treeward.config.policy import OptimizerConfig
from treeward.losses import bradley_terry, ranked_pairs
from treeward.model.reward_model import RewardModel
from treeward.tables import Column, results_table
from treeward.training.optimisation import build_optimizer
from treeward.tree.batch import RowBatch, TreeBatch

Pair = tuple[list[int], list[int]]
Batch = list[Pair]
Step = Callable[[Batch], torch.Tensor]
Variant = tuple[Step, Callable[[Batch], int]]
"""A step on a batch, which gives the loss; and the bytes of the activations that it keeps."""

LEARNING_RATE = 1e-5
TRL, TRL_DEFAULT, PACKED = (
    "TRL, float32",
    "TRL, default (bf16, checkpointing)",
    "treeward, packed rows",
)
TREE, TREE_BF16 = "treeward, tree", "treeward, tree, bf16"
PEERS = {"TRL float32": TRL, "TRL default": TRL_DEFAULT, "packed": PACKED}


def main() -> None:
    arguments = parse()
    device = use_device(arguments.device)
    size = arguments.size
    data, tokenizer, pairs = load_pairs(arguments.longest, size)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(pairs), generator=generator).tolist()
    batches = [
        [pairs[i] for i in order[n : n + arguments.pairs]]
        for n in range(0, len(order), arguments.pairs)
    ]
    makers = {
        TRL: partial(_trl, size, tokenizer, pairs, device, default=False),
        TRL_DEFAULT: partial(_trl, size, tokenizer, pairs, device, default=True),
        "treeward, padded rows": partial(_ours, size, tokenizer, "rows", device),
        PACKED: partial(_ours, size, tokenizer, "packed", device),
        TREE: partial(_ours, size, tokenizer, "tree", device),
        "treeward, tree, medium": partial(_ours, size, tokenizer, "tree", device, matmul="medium"),
        TREE_BF16: partial(_ours, size, tokenizer, "tree", device, dtype=torch.bfloat16),
    }
    chosen = list(makers)
    if arguments.float32:
        chosen = [TRL, TREE]
    elif arguments.default:
        chosen = [TRL_DEFAULT, TREE_BF16]
    names = {name: makers[name]() for name in chosen}
    # same weights: the same loss
    first = {name: float(step(batches[0])) for name, (step, _) in names.items()}

    def take(step: Step, number: int) -> torch.Tensor:
        return step(batches[number % len(batches)])

    seconds = interleave(
        {name: partial(take, step) for name, (step, _) in names.items()},
        arguments.rounds,
        device=device,
    )
    base = seconds[chosen[0]]
    real, computed, padded = _tokens(
        [batches[n % len(batches)] for n in range(1, arguments.rounds + 1)]
    )
    peers = {key: other for key, other in PEERS.items() if other in seconds}
    rows = []
    for name, (_, kept) in names.items():
        row = {
            "variant": name,
            "ms": 1000 * sorted(seconds[name])[len(base) // 2],
            "rate": real / sum(seconds[name]),
            "memory": kept(batches[0]) / 1e6,
            "loss": first[name],
        }
        for key, other in peers.items():
            row[key] = median_ratio(seconds[other], seconds[name])
        rows.append(row)
    columns = [
        Column("variant"),
        Column("ms", title="ms a step", format=".0f"),
        Column("rate", title="tokens/s", format=",.0f"),
        *(Column(key, title=f"x {key}", format=".2f") for key in peers),
        Column("memory", title="activations MB", format=".0f"),
        Column("loss", title="first loss", format=".6f"),
    ]
    print(f"\n{data}, {arguments.pairs} pairs a step, {model_name(size)}, {describe(device)}")
    print(f"tokens: {padded / computed:.2f} padded, {real / computed:.2f} packed for 1 on trees\n")
    print(results_table(rows, columns))
    if arguments.profile:
        for name in [name for name in (TREE, TREE_BF16) if name in names]:
            print_profile(name, partial(names[name][0], batches[0]), device)


def _ours(
    size: str,
    tokenizer: PreTrainedTokenizerBase,
    layout: str,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    matmul: str = "highest",
) -> Variant:
    model = build(size, tokenizer, device)
    model.cast(dtype)
    model.train()
    return our_variant(model, lambda batch: model(_pack(batch, layout, model)), matmul=matmul)


def our_variant(
    model: nn.Module, score: Callable[[Batch], torch.Tensor], *, matmul: str = "highest"
) -> Variant:
    """`score`: the scores of all sequences of a batch, (2 * pairs,), chosen and rejected in
    turns."""
    optimizer = build_optimizer(model, OptimizerConfig(kwargs={"lr": LEARNING_RATE}))

    def loss_of(batch: Batch) -> torch.Tensor:
        scores = score(batch)
        return bradley_terry(scores, ranked_pairs([(0, 1)] * len(batch)).to(scores.device)) / len(
            batch
        )

    def step(batch: Batch) -> torch.Tensor:
        torch.set_float32_matmul_precision(matmul)
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.set_float32_matmul_precision("highest")
        return loss.detach()

    def kept(batch: Batch) -> int:
        with activation_bytes(model) as count:
            loss = loss_of(batch)
        return count() + 0 * int(loss.isnan())

    return step, kept


def _pack(batch: Batch, layout: str, model: RewardModel) -> TreeBatch | RowBatch:
    if layout == "rows":
        return RowBatch.from_groups(batch, pad_token_id=model.hf.config.pad_token_id).to(
            model.device
        )
    if layout == "packed":
        alone = [[sequence] for pair in batch for sequence in pair]
        return TreeBatch.from_groups(alone, min_shared=1 << 30).to(model.device)
    return TreeBatch.from_groups(batch).to(model.device)


def _trl(
    size: str,
    tokenizer: PreTrainedTokenizerBase,
    pairs: list[Pair],
    device: torch.device,
    *,
    default: bool,
) -> Variant:
    options: dict[str, Any] = {} if default else {"bf16": False, "gradient_checkpointing": False}
    return trl_variant(build(size, tokenizer, device).hf, tokenizer, pairs, **options)


def trl_variant(
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: list[Pair],
    attention: str = "sdpa",
    kind: Any = RewardTrainer,
    **options: Any,
) -> Variant:
    """TRL's trainer on a model where it is, or a subclass (`kind`) of it.

    `options`: of its configuration, whose defaults are its own otherwise.
    """
    hf.set_attn_implementation(attention)
    config = RewardConfig(
        output_dir=tempfile.mkdtemp(),
        report_to=[],
        max_length=None,
        use_cpu=hf.device.type == "cpu",
        learning_rate=LEARNING_RATE,
        **options,
    )
    rows = Dataset.from_list(
        [{"chosen_ids": chosen, "rejected_ids": rejected} for chosen, rejected in pairs[:64]]
    )
    trainer = kind(model=hf, args=config, train_dataset=rows, processing_class=tokenizer)
    # What `trainer.train()` does before its first step:
    trainer.current_gradient_accumulation_steps = 1
    if config.gradient_checkpointing:
        hf.gradient_checkpointing_enable(config.gradient_checkpointing_kwargs)
    model = trainer.accelerator.prepare_model(hf)
    optimizer = torch.optim.AdamW(hf.parameters(), lr=LEARNING_RATE, fused=True)
    hf.train()

    def collate(batch: Batch) -> Any:
        return trainer.data_collator(
            [{"chosen_ids": chosen, "rejected_ids": rejected} for chosen, rejected in batch]
        )

    def step(batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = trainer.training_step(model, collate(batch))
        torch.nn.utils.clip_grad_norm_(hf.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def kept(batch: Batch) -> int:
        with activation_bytes(hf) as count:
            loss = trainer.compute_loss(model, trainer._prepare_inputs(collate(batch)))
        return count() + 0 * int(loss.isnan())

    return step, kept


def _tokens(batches: list[Batch]) -> tuple[int, int, int]:
    trees = [TreeBatch.from_groups(batch) for batch in batches]
    padded = [2 * len(batch) * max(len(s) for pair in batch for s in pair) for batch in batches]
    return (
        sum(t.num_row_tokens for t in trees),
        sum(t.num_computed_tokens for t in trees),
        sum(padded),
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model(
        parser, few="only trees against TRL in float32, for models of which few fit into memory"
    )
    parser.add_argument(
        "--default", action="store_true", help="only trees in bfloat16 against TRL's default"
    )
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a conversation")
    parser.add_argument("--pairs", type=int, default=8, help="comparisons a step")
    parser.add_argument("--rounds", type=int, default=12)
    add_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
