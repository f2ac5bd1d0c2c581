"""Groups of ranked completions: losses of rankings and of pairs, and what the tree saves.

    python benchmarks/labels.py [--steps 60] [--seeds 3] [--rounds 6]

1. A small reward model from scratch on alpaca_eval (a judge's graded preference ranks the
   completions of a prompt), by Plackett-Luce and Bradley-Terry over whole groups, and by
   Bradley-Terry over the same completions in disjoint pairs, as toolkits of pairs have them.
   Held-out Kendall's tau, the mean over the seeds with a 95 % interval (Student's t).
2. A training step on groups of K = 2, 4 and 8 of the same prompts, on trees and as padded rows.

Without the shared data it says so and ends.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import add_options, build, describe, interleave, median_ratio, shared_data, use_device
from scipy import stats

from treeward.config.data import DatasetConfig
from treeward.config.load import load_config
from treeward.data.datasets import open_dataset
from treeward.data.rendering import Renderer
from treeward.data.tokenizers import texts_of, train_tokenizer
from treeward.losses import bradley_terry, ranked_pairs
from treeward.tables import Column, results_table
from treeward.training.train import train
from treeward.tree.batch import RowBatch, TreeBatch

_QUICKSTART = Path(__file__).parents[1] / "examples" / "configs" / "quickstart.yaml"
_LONGEST = 512  # tokens
_GROUP = 8  # completions of a prompt
_PROMPTS = 8  # in a step
_RANKINGS = "policy.reward_model_cfg.reward_model_type=plackett_luce"
_VARIANTS = {
    "Plackett-Luce": "groups",
    "Bradley-Terry, all pairs": "groups",
    "Bradley-Terry, disjoint pairs": "pairs",
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--size", default="xs")
    add_options(parser)
    arguments = parser.parse_args()
    data = shared_data()
    if data is None:
        print("The shared data is not here.")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for split in ("train", "validation"):
            groups = list(_groups(data / "alpaca_eval" / f"{split}.jsonl.gz"))
            _write(folder / f"{split}_groups.jsonl", groups)
            _write(
                folder / f"{split}_pairs.jsonl",
                [pair for group in groups for pair in _disjoint(group)],
            )
        _compare_losses(folder, arguments.steps, arguments.seeds)
        _time_groups(folder, arguments)


def _groups(path: Path) -> Iterator[dict[str, Any]]:
    generator = random.Random(0)
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            outputs = generator.sample(row["outputs"], min(_GROUP, len(row["outputs"])))
            graded = [
                {"completion": one["output"], "probability": one["preference_over_gpt4"]}
                for one in outputs
            ]
            yield {"prompt": row["instruction"], "completions": graded}


def _disjoint(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    completions = group["completions"]
    for first, second in zip(completions[::2], completions[1::2], strict=False):
        yield {**group, "completions": [first, second]}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _compare_losses(folder: Path, steps: int, seeds: int) -> None:
    rows = []
    for name, form in _VARIANTS.items():
        taus = [_tau(folder, name, form, steps, seed) for seed in range(seeds)]
        mean = statistics.fmean(taus)
        half = (
            stats.t.ppf(0.975, seeds - 1) * statistics.stdev(taus) / math.sqrt(seeds)
            if seeds > 1
            else math.nan
        )
        rows.append({"loss": name, "tau": mean, "low": mean - half, "high": mean + half})
    columns = [Column("loss"), Column("tau", title="Kendall's tau", format=".3f")]
    columns += [Column(key, title=key, format=".3f") for key in ("low", "high")]
    print(f"\nalpaca_eval, up to {_GROUP} completions of a prompt, {steps} steps, {seeds} seeds")
    print(results_table(rows, columns))


def _tau(folder: Path, name: str, form: str, steps: int, seed: int) -> float:
    """Held out, of whole groups; a step of either form has the completions of as many prompts."""
    own = folder / f"{name}_{seed}"
    sets = [
        f"data={{train: [{{data_path: {folder}/train_{form}.jsonl}}], "
        f"validation: [{{data_path: {folder}/validation_groups.jsonl, name: held_out}}], "
        f"cache_dir: {folder}/cache}}"
    ]
    size = _PROMPTS * (_GROUP // 2 if form == "pairs" else 1)
    settings = [
        *(
            f"rm.seed={seed}",
            f"rm.max_num_steps={steps}",
            "rm.max_num_epochs=100",
            "rm.val_period=null",
        ),
        *(f"policy.train_global_batch_size={size}", f"policy.max_total_sequence_length={_LONGEST}"),
        *(f"checkpointing.checkpoint_dir={own}/checkpoints", "checkpointing.metric_name=null"),
        *("checkpointing.save_period=null", f"logger.log_dir={own}/logs"),
    ]
    kind = [_RANKINGS] if name == "Plackett-Luce" else []
    outcome = train(
        load_config(_QUICKSTART, ["~data", *(f"+{one}" for one in sets), *settings, *kind])
    )
    tau: float = outcome.validation["held_out"]["kendall_tau"]
    return tau


def _time_groups(folder: Path, arguments: argparse.Namespace) -> None:
    device = use_device(arguments.device)
    config = DatasetConfig(data_path=str(folder / "train_groups.jsonl"))
    tokenizer = train_tokenizer(texts_of([open_dataset(config)]), vocab_size=4096)
    renderer = Renderer(tokenizer)
    model = build(arguments.size, tokenizer, device)
    groups = []
    for preference, _ in open_dataset(config):
        ids = renderer.encode_many(
            [[*preference.context, *one.messages] for one in preference.completions]
        )
        groups += [ids] if len(ids) == _GROUP and max(map(len, ids)) <= _LONGEST else []
    rows = []
    for size in (2, 4, 8):
        prompts = 4 * _GROUP // size  # the same number of completions in a step
        steps = [
            [ids[:size] for ids in groups[n : n + prompts]] for n in range(0, len(groups), prompts)
        ]

        def take(layout: type[TreeBatch] | type[RowBatch], number: int, steps: Any = steps) -> None:
            batch = steps[number % len(steps)]
            packed = (
                TreeBatch.from_groups(batch)
                if layout is TreeBatch
                else RowBatch.from_groups(batch, pad_token_id=tokenizer.pad_token_id)
            )
            pairs = ranked_pairs([range(len(group)) for group in batch])
            bradley_terry(model(packed.to(device)), pairs.to(device)).backward()
            model.zero_grad(set_to_none=True)

        taken = interleave(
            {one.__name__: partial(take, one) for one in (TreeBatch, RowBatch)},
            arguments.rounds,
            device=device,
        )
        plain = sum(len(ids) for batch in steps for group in batch for ids in group)
        tree = sum(TreeBatch.from_groups(batch).num_computed_tokens for batch in steps)
        rows.append(
            {
                "K": size,
                "shared": plain / tree,
                "faster": median_ratio(taken["RowBatch"], taken["TreeBatch"]),
            }
        )
    columns = [
        Column("K"),
        Column("shared", title="tokens of rows for 1 of the tree", format=".2f"),
    ]
    print(f"\na step on groups of K, Qwen3 {arguments.size}, {describe(device)}")
    print(results_table(rows, [*columns, Column("faster", title="x padded rows", format=".2f")]))


if __name__ == "__main__":
    torch.set_float32_matmul_precision("highest")
    main()
