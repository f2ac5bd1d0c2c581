"""TRL's trainers against the same trainers on trees (`treeward.compat.trl`), in one interleaved
run.

    python benchmarks/trl_dropin.py [--size xs|s|m|l] [--pairs 8] [--completions 8] [--prompt-tokens 128 512]
                                     [--prompts 4] [--rounds 7] [--device cuda] [--profile]

Steps of the two are those of `training_step.py` (RewardTrainer, real comparisons) and of
`policy_variants.py` (GRPOTrainer, its update with a reference, real completions), each in float32
and as TRL's defaults have it (bfloat16, checkpointing). Both have equal losses in the first step,
or the run stops.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import (
    SIZES,
    VOCAB_SIZE,
    add_options,
    build,
    build_causal,
    describe,
    interleave,
    load_pairs,
    median_ratio,
    print_profile,
    use_device,
)
from policy_variants import Setting, make_work, moved, trl_update
from scoring import load_prompts
from training_step import trl_variant
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.reward_trainer import RewardTrainer

from treeward.compat import trl as trees
from treeward.data.tokenizers import train_tokenizer
from treeward.tables import Column, results_table

KINDS = {"TRL": (RewardTrainer, GRPOTrainer), "on trees": (trees.RewardTrainer, trees.GRPOTrainer)}
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"bf16": False, "gradient_checkpointing": False},
    "TRL's default": {},
}


def main() -> None:
    arguments = parse()
    device = use_device(arguments.device)
    rows = _rewards(arguments, device)
    for prompt in arguments.prompt_tokens:
        rows += _policies(arguments, prompt, device)
    columns = [
        Column("what", title="a step of"),
        Column("precision"),
        Column("theirs", title="TRL ms", format=".0f"),
        Column("ours", title="on trees ms", format=".0f"),
        Column("ratio", title="x", format=".2f"),
        Column("difference", title="difference of the first loss", format=".1e"),
    ]
    print(f"\nQwen3 {arguments.size}, {describe(device)}, {arguments.rounds} rounds\n")
    print(results_table(rows, columns))


def _rewards(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    data, tokenizer, pairs = load_pairs(512)
    batches = [
        pairs[n : n + arguments.pairs]
        for n in range(0, len(pairs) - arguments.pairs, arguments.pairs)
    ]
    rows = []
    for precision, options in PRECISIONS.items():
        steps = {
            name: trl_variant(
                build(arguments.size, tokenizer, device).hf,
                tokenizer,
                pairs,
                kind=kinds[0],
                **options,
            )[0]
            for name, kinds in KINDS.items()
        }
        first = {name: float(step(batches[0])) for name, step in steps.items()}
        calls = {
            name: partial(lambda step, n: step(batches[n % len(batches)]), step)
            for name, step in steps.items()
        }
        what = f"RewardTrainer, {arguments.pairs} pairs of {data}"
        rows.append(
            _row(what, precision, first, interleave(calls, arguments.rounds, device=device))
        )
        if arguments.profile:
            print_profile(
                f"{what}, on trees, {precision}", partial(steps["on trees"], batches[0]), device
            )
    return rows


def _policies(
    arguments: argparse.Namespace, prompt: int, device: torch.device
) -> list[dict[str, Any]]:
    _, prompts = load_prompts()
    texts = (text for question, completions in prompts for text in (question, *completions))
    tokenizer = train_tokenizer(texts, vocab_size=arguments.vocabulary)
    work = make_work(
        prompts, tokenizer, Setting(arguments.completions, prompt, 128), arguments.prompts
    )
    reference = build_causal(arguments.size, tokenizer, device)
    policy = moved(reference)
    rows = []
    for precision, options in PRECISIONS.items():
        with tempfile.TemporaryDirectory() as folder:
            reference.save_pretrained(folder)
            updates = {
                name: trl_update(
                    policy, Path(folder), tokenizer, work, default=not options, kind=kinds[1]
                )
                for name, kinds in KINDS.items()
            }
        first = {name: update.gradients()[0] for name, update in updates.items()}
        calls = {
            name: partial(lambda update, _: update.update(), update)
            for name, update in updates.items()
        }
        what = f"GRPOTrainer, {arguments.prompts} prompts of {prompt}, {arguments.completions} completions each"
        rows.append(
            _row(what, precision, first, interleave(calls, arguments.rounds, device=device))
        )
        if arguments.profile:
            print_profile(f"{what}, on trees, {precision}", updates["on trees"].update, device)
    return rows


def _row(
    what: str, precision: str, first: dict[str, float], seconds: dict[str, list[float]]
) -> dict[str, Any]:
    """Raises `RuntimeError` where the first losses differ: 1e-4 in float32, 0.05 in bfloat16."""
    difference = abs(first["TRL"] - first["on trees"])
    if not difference <= (1e-4 if PRECISIONS[precision] else 0.05):
        raise RuntimeError(f"{what}, {precision}: the first losses are {first}")
    theirs, ours = (seconds[name] for name in KINDS)
    return {
        "what": what,
        "precision": precision,
        "theirs": 1000 * statistics.median(theirs),
        "ours": 1000 * statistics.median(ours),
        "ratio": median_ratio(theirs, ours),
        "difference": difference,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="xs", choices=tuple(SIZES))
    parser.add_argument(
        "--vocabulary", type=int, default=VOCAB_SIZE, help="of the policy's tokenizer"
    )
    parser.add_argument("--pairs", type=int, default=8, help="comparisons a step")
    parser.add_argument("--completions", type=int, default=8, help="to each prompt")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--prompts", type=int, default=4, help="an update")
    parser.add_argument("--rounds", type=int, default=7)
    add_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
