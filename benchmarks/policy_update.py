"""A policy update on prefix trees against treeward's own packed rows, TRL's GRPOTrainer and
PrefixGrouper.

    python benchmarks/policy_update.py [--size xs|s|m|l | --model FOLDER] [--float32] [--completions 4 8 16]
                                        [--prompt-tokens 128 512] [--prompts 4] [--rounds 5] [--json FILE]
                                        [--device cuda] [--profile]

Real completions of many models to real prompts (alpaca_eval), prompts as long as the completions
and four times as long. Two things are timed: log-probabilities without gradients, and a whole
update with a KL penalty: the reference, forward, backward, clipping and fused AdamW. "Packed rows"
is the same code with every completion a tree of its own, in micro-batches of as many tokens. For
TRL it is the peer's own padding, reference pass, shuffling, `training_step` and loss (`dapo`, its
default: the mean over all tokens, as ours; without its correction of the penalty's gradient, which
costs nothing), without its data loader, generation and logging. `grouper.py` says how PrefixGrouper
is called: as its README does, and with our head, loss and micro-batches, which leaves its attention
and its padding to compare.

Before anything is timed, loss and gradients of the float32 variants must be equal to 1e-5 (of a
pretrained model 1e-4). "By FLOPs" is what the operations of backbone, attention and head come to:
the head computes every completion token either way, so less can be saved than the ratio of row
tokens to tree tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import (
    SIZES,
    VOCAB_SIZE,
    add_model,
    add_options,
    build_causal,
    describe,
    flops,
    interleave,
    model_name,
    print_profile,
    tokenizer_of,
    use_device,
)
from policy_variants import (
    MICRO_BATCH_TOKENS,
    PackedRows,
    Setting,
    Variant,
    Work,
    grouper_variant,
    make_work,
    moved,
    our_variant,
    sequences_of,
    tree_tokens,
    trl_update,
)
from scoring import load_prompts
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from treeward.model.policy_model import PolicyModel
from treeward.tables import Column, results_table
from treeward.tree.batch import TreeBatch

GATE_SHARE = 0.9
"""Promised: this share of the ratio of row tokens to tree tokens."""
GATE_TRL = 2.0
"""Promised: so many times faster than TRL, at 8 completions and prompts as long as completions."""
GATE_GROUPER = 1.8
"""The goal: so many times faster than PrefixGrouper, at 8 completions."""

EXACT = 1e-5
EXACT_PRETRAINED = 1e-4
TREE = "tree"
PACKED = "packed rows"
TREE_BF16 = "tree, bfloat16"
TRL = "TRL, float32"
TRL_DEFAULT = "TRL, default"
GROUPER = "PrefixGrouper"
GROUPER_OUR_HEAD = "PrefixGrouper, our head"
FLOAT32 = (PACKED, TRL, GROUPER, GROUPER_OUR_HEAD)


def main() -> None:
    arguments = parse()
    device = use_device(arguments.device)
    data, prompts = load_prompts(arguments.size)
    texts = (text for prompt, completions in prompts for text in (prompt, *completions))
    tokenizer = tokenizer_of(arguments.size, texts, arguments.vocabulary)
    print(f"{data}, {model_name(arguments.size)}, {len(tokenizer)} tokens, {describe(device)}")
    print(
        f"{arguments.prompts} prompts an update, micro-batches of {MICRO_BATCH_TOKENS} "
        "computed tokens"
    )
    rows = []
    for prompt, completions in product(arguments.prompt_tokens, arguments.completions):
        work = make_work(prompts, tokenizer, Setting(completions, prompt, 128), arguments.prompts)
        rows.append(
            measure(arguments.size, tokenizer, work, arguments.rounds, device=device,
                    profile=arguments.profile,
                    few=arguments.float32,
                    exact=EXACT if arguments.size in SIZES else EXACT_PRETRAINED)
        )  # fmt: skip
        if arguments.json is not None:  # after each: a run takes long
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print_tables(rows)


def measure(
    size: str,
    tokenizer: PreTrainedTokenizerBase,
    work: Work,
    rounds: int,
    warmup: int = 1,
    *,
    device: torch.device = torch.device("cpu"),  # noqa: B008
    profile: bool = False,
    exact: float = EXACT,
    few: bool = False,
) -> dict[str, Any]:
    """Everything about one setting; `few`: without PrefixGrouper and bfloat16. Raises
    `RuntimeError` where variants do not compute the same."""
    reference = build_causal(size, tokenizer, device)
    policy = moved(reference)
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        variants = {
            TREE: our_variant(PolicyModel, policy, reference, work),
            PACKED: our_variant(PackedRows, policy, reference, work.alone),
            TRL: trl_update(policy, Path(folder), tokenizer, work, default=False),
        }
        if not few:
            variants |= {
                TREE_BF16: our_variant(PolicyModel, policy, reference, work, dtype=torch.bfloat16),
                TRL_DEFAULT: trl_update(policy, Path(folder), tokenizer, work, default=True),
                GROUPER: grouper_variant(policy, reference, work, all_logits=True),
                GROUPER_OUR_HEAD: grouper_variant(policy, reference, work, all_logits=False),
            }
    differences = check_exact(variants, exact)
    calls: dict[str, Callable[[int], object]] = {
        **{
            f"log_probs {name}": partial(_ignore_round, variants[name].log_probs)
            for name in (TREE, PACKED)
        },
        **{
            f"update {name}": partial(_ignore_round, variant.update)
            for name, variant in variants.items()
        },
    }
    seconds = interleave(calls, rounds, warmup, device)
    if profile:
        print_profile("an update on trees", variants[TREE].update, device)
    counts = count_tokens(work, policy)
    row: dict[str, Any] = {
        "completions": len(work.groups[0].completions),
        "prompt": len(work.groups[0].prompt_ids),
        "completion": work.num_tokens / sum(len(group.completions) for group in work.groups),
        **counts,
        **{f"difference {name}": difference for name, difference in differences.items()},
        **{f"ms {name}": 1000 * statistics.median(values) for name, values in seconds.items()},
    }
    for what, base, ours in [
        ("log_probs", PACKED, TREE),
        ("update", PACKED, TREE),
        ("update", TRL, TREE),
        ("update", TRL_DEFAULT, TREE_BF16),
        ("update", GROUPER, TREE),
        ("update", GROUPER_OUR_HEAD, TREE),
    ]:
        if base in variants:
            row[f"{what} x {base}"] = _ratio(seconds[f"{what} {base}"], seconds[f"{what} {ours}"])
    return row


def _ignore_round(call: Callable[[], object], number: int) -> object:
    return call()


def check_exact(variants: dict[str, Variant], limit: float = EXACT) -> dict[str, float]:
    """How far each is off from the tree: the larger of the relative differences of loss and
    gradient.

    Raises `RuntimeError` where a float32 variant is off by more than `limit`.
    """
    loss, gradients = variants[TREE].gradients()
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    found = {}
    for name, variant in variants.items():
        if name == TREE:
            continue
        other_loss, others = variant.gradients()
        if others.keys() != gradients.keys():
            raise RuntimeError(
                f"{name} has gradients of other parameters: {others.keys() ^ gradients.keys()}"
            )
        off = torch.stack(
            [(others[key] - gradient).norm() for key, gradient in gradients.items()]
        ).norm()
        found[name] = max(abs(other_loss - loss) / abs(loss), float(off / norm))
        if name in FLOAT32 and not found[name] <= limit:
            raise RuntimeError(
                f"{name} is off by {found[name]:.1e}: loss {other_loss} for {loss}, limit {limit}"
            )
    return found


def count_tokens(work: Work, policy: PreTrainedModel) -> dict[str, float]:
    """Tokens of the backbone and of the head, and the saving that they, and all operations,
    allow."""
    rows = sum(group.num_row_tokens for group in work.groups)
    trees = sum(map(tree_tokens, work.groups))
    lengths = [len(sequence) for group in work.groups for sequence in sequences_of(group)]
    # what completions share is predicted once
    heads = trees - sum(len(group.prompt_ids) for group in work.groups)
    completions = [completion for group in work.groups for completion in group.completions]
    padded = max(len(group.prompt_ids) for group in work.groups) + max(
        len(completion.token_ids) for completion in completions
    )
    batches = [TreeBatch.from_groups([sequences_of(group)]) for group in work.groups]
    row_pairs = sum(length * (length + 1) // 2 for length in lengths)
    tree_pairs = sum(int((batch.layout.positions_T + 1).sum()) for batch in batches)
    found = {
        "row tokens": rows,
        "tree tokens": trees,
        "padded tokens": len(completions) * padded,
        "row head tokens": work.num_tokens,
        "tree head tokens": heads,
        "tokens": rows / trees,
    }
    # An update has two forward passes (the reference's too) and a backward of two; in it attention
    # is computed 2.5 times and the head's logits once more.
    for what, passes in [("log_probs", (1.0, 1.0, 1.0)), ("update", (4.0, 4.5, 5.0))]:
        by_rows = flops(policy, rows, row_pairs, work.num_tokens, passes)
        found[f"{what} by FLOPs"] = by_rows / flops(policy, trees, tree_pairs, heads, passes)
    return found


def _ratio(base: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """(of the medians, least, most of a round)."""
    rounds = [b / o for b, o in zip(base, other, strict=True)]
    return statistics.median(base) / statistics.median(other), min(rounds), max(rounds)


def print_tables(rows: Sequence[dict[str, Any]]) -> None:
    shown = []
    for row in rows:
        ratios = {
            key: "{:.2f} ({:.2f}..{:.2f})".format(*value)
            for key, value in row.items()
            if " x " in key
        }
        shares = {
            f"{what} share": row[f"{what} x {PACKED}"][0] / row["tokens"]
            for what in ("log_probs", "update")
        }
        shown.append(row | ratios | shares)
    setting = [
        Column("completions", title="G"),
        Column("prompt"),
        Column("completion", format=".0f"),
    ]
    print("\nAgainst treeward's own packed rows (median over rounds, and least..most)\n")
    print(
        results_table(
            shown,
            [
                *setting,
                Column("tokens", title="row / tree tokens", format=".2f"),
                Column("log_probs by FLOPs", title="by FLOPs", format=".2f"),
                Column(f"log_probs x {PACKED}", title="log-probabilities x"),
                Column("log_probs share", title="of the tokens", format=".0%"),
                Column("update by FLOPs", title="by FLOPs", format=".2f"),
                Column(f"update x {PACKED}", title="update x"),
                Column("update share", title="of the tokens", format=".0%"),
                Column(f"difference {PACKED}", title="difference", format=".1e"),
            ],
        )
    )
    print(
        "\nAgainst the update of PrefixGrouper and of GRPOTrainer, whose default is bfloat16 "
        "with checkpointing\n"
    )
    columns = [
        Column(f"ms update {TREE}", title="ms, float32", format=".0f"),
        Column(f"ms update {GROUPER}", title="PrefixGrouper ms", format=".0f"),
        Column(f"update x {GROUPER}", title="x PrefixGrouper"),
        Column(f"update x {GROUPER_OUR_HEAD}", title="x it with our head"),
        Column(f"difference {GROUPER}", title="difference", format=".1e"),
        Column(f"ms update {TRL}", title="TRL ms", format=".0f"),
        Column(f"update x {TRL}", title="x TRL"),
        Column(f"difference {TRL}", title="difference", format=".1e"),
        Column(f"ms update {TREE_BF16}", title="ms, bfloat16", format=".0f"),
        Column(f"ms update {TRL_DEFAULT}", title="TRL's default ms", format=".0f"),
        Column(f"update x {TRL_DEFAULT}", title="x TRL's default"),
    ]
    print(
        results_table(shown, [*setting, *(column for column in columns if column.key in shown[0])])
    )
    print()
    for gate, passed in gates(rows):
        print(f"{'passed' if passed else 'MISSED'}  {gate}")


def gates(rows: Sequence[dict[str, Any]]) -> list[tuple[str, bool]]:
    """What is promised, and whether it was kept."""
    found = []
    for row in rows:
        setting = f"{row['completions']} completions, prompts of {row['prompt']}"
        for what in ("log_probs", "update"):
            share = row[f"{what} x {PACKED}"][0] / row["tokens"]
            allowed = row[f"{what} by FLOPs"] / row["tokens"]
            gate = f"{what}, {setting}: {share:.0%} of the saving of tokens (by FLOPs at most {allowed:.0%})"
            found.append((f"{gate}; promised {GATE_SHARE:.0%}", share >= GATE_SHARE))
        if row["completions"] == 8 and row["prompt"] <= 1.25 * row["completion"]:
            for base in [base for base in (TRL, TRL_DEFAULT) if f"update x {base}" in row]:
                times = row[f"update x {base}"][0]
                found.append(
                    (
                        f"update, {setting}: {times:.2f} x {base}; promised {GATE_TRL:.0f} x",
                        times >= GATE_TRL,
                    )
                )
        if row["completions"] == 8 and f"update x {GROUPER}" in row:
            times = row[f"update x {GROUPER}"][0]
            found.append(
                (
                    f"update, {setting}: {times:.2f} x {GROUPER}; goal {GATE_GROUPER}",
                    times >= GATE_GROUPER,
                )
            )
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model(
        parser,
        few="only trees, packed rows and TRL in float32, for models of which few fit into memory",
    )
    parser.add_argument(
        "--vocabulary",
        type=int,
        default=VOCAB_SIZE,
        help="of the tokenizer: how much the head costs",
    )
    parser.add_argument(
        "--prompts", type=int, default=4, help="an update; with 4 completions each, an even number"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--completions", type=int, nargs="+", default=[4, 8, 16], help="to each prompt"
    )
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        nargs="+",
        default=[128, 512],
        help="completions have at most 128",
    )
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    add_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
