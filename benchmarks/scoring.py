"""Scoring K answers to one prompt: trees against Hugging Face rows, one by one and in padded
batches.

    python benchmarks/scoring.py [--size xs|s|m|l | --model FOLDER] [--prompts 6] [--rounds 5]
                                  [--device cuda] [--profile]

Real answers of many models to real prompts (alpaca_eval), as they are and behind about 1000 tokens
of earlier turns. The rows are plain transformers: one sequence a forward without padding, and
right-padded batches of 8. Every variant gives the same scores; the largest difference is printed.
Float32 on a CPU, bfloat16 on a GPU. A completion's tokens see the whole prompt either way: "by
FLOPs" is how many times fewer operations a tree needs, attention included.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import (
    add_model,
    add_options,
    build,
    describe,
    flops,
    interleave,
    median_ratio,
    model_name,
    print_profile,
    real_data,
    tokenizer_of,
    use_device,
)
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from treeward.data.bundled import bundled_path
from treeward.data.conversation import Message
from treeward.data.rendering import Renderer
from treeward.model.reward_model import RewardModel
from treeward.tables import Column, results_table
from treeward.tree.batch import TreeBatch

Group = list[list[int]]
Prompt = tuple[str, list[str]]

COLUMNS = [
    Column("answers", title="K"),
    Column("prompt", title="prompt tokens", format=".0f"),
    Column("shared", title="row / tree tokens", format=".2f"),
    Column("limit", title="by FLOPs", format=".2f"),
    Column("one", title="x one by one", format=".2f"),
    Column("padded", title="x padded batch", format=".2f"),
    Column("ms", title="ms a prompt", format=".0f"),
    Column("difference", title="largest difference", format=".1e"),
]


def main() -> None:
    arguments = parse()
    device = use_device(arguments.device)
    data, prompts = load_prompts(arguments.size)
    tokenizer = tokenizer_of(
        arguments.size, (text for prompt, answers in prompts for text in (prompt, *answers))
    )
    model = build(
        arguments.size, tokenizer, device, torch.bfloat16 if device.type == "cuda" else None
    ).eval()
    print(
        f"{data}, {model_name(arguments.size)}, {describe(device)}, {arguments.prompts} prompts\n"
    )
    for num_answers in (8, 16):
        for earlier in (0, 1000):
            groups = make_groups(prompts, tokenizer, num_answers, earlier, arguments.prompts)
            if groups:
                row = measure(model, tokenizer, groups, num_answers, arguments.rounds)
                # at once: a large model takes minutes
                print(results_table([row], COLUMNS), flush=True)
    if arguments.profile and groups:
        print_profile(
            "the last line", lambda: [_on_trees(model, group) for group in groups], device
        )


def measure(
    model: RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    groups: list[Group],
    num_answers: int,
    rounds: int,
) -> dict[str, Any]:
    variants: dict[str, Callable[[Group], list[float]]] = {
        "one": lambda group: _hugging_face(model, group, tokenizer, 1),
        "padded": lambda group: _hugging_face(model, group, tokenizer, 8),
        "tree": partial(_on_trees, model),
    }
    scores = {name: [call(group) for group in groups] for name, call in variants.items()}
    difference = 0.0
    for name in ("padded", "tree"):
        for got, want in zip(scores[name], scores["one"], strict=True):
            for a, b in zip(got, want, strict=True):
                difference = max(difference, abs(a - b))
    model.num_computed_tokens = model.num_row_tokens = 0
    for group in groups:
        _on_trees(model, group)

    def score_all(call: Callable[[Group], list[float]], _: int) -> object:
        return [call(group) for group in groups]

    seconds = interleave(
        {name: partial(score_all, call) for name, call in variants.items()},
        rounds,
        device=model.device,
    )
    prefixes = [_common(group) for group in groups]
    lengths = [len(sequence) for group in groups for sequence in group]
    trees = []
    for group in groups:
        batch = TreeBatch.from_groups([group])
        trees.append(batch.layout.positions_T + 1)
    by_rows = flops(
        model.hf, sum(lengths), sum(n * (n + 1) // 2 for n in lengths), passes=(1, 1, 1)
    )
    by_trees = flops(
        model.hf, sum(map(len, trees)), sum(int(seen_T.sum()) for seen_T in trees), passes=(1, 1, 1)
    )
    return {
        "limit": by_rows / by_trees,
        "answers": num_answers,
        "prompt": sum(prefixes) / len(prefixes),
        "shared": model.num_row_tokens / model.num_computed_tokens,
        "one": median_ratio(seconds["one"], seconds["tree"]),
        "padded": median_ratio(seconds["padded"], seconds["tree"]),
        "ms": 1000 * sorted(seconds["tree"])[rounds // 2] / len(groups),
        "seconds": {name: sorted(values)[rounds // 2] for name, values in seconds.items()},
        "difference": difference,
    }


def _on_trees(model: RewardModel, group: Group) -> list[float]:
    scores: list[float] = model.score_tokens(group, max_tokens=8192)[:, 0].tolist()
    return scores


@torch.inference_mode()
def _hugging_face(
    model: RewardModel, group: Group, tokenizer: PreTrainedTokenizerBase, batch_size: int
) -> list[float]:
    """Plain transformers: SDPA on right-padded batches, the head in float32, read back once."""
    found: list[Tensor] = []
    with model.attention("sdpa"):
        for n in range(0, len(group), batch_size):
            rows = group[n : n + batch_size]
            padded = tokenizer.pad(
                {"input_ids": rows}, padding_side="right", return_tensors="pt"
            ).to(model.device)
            mask = padded["attention_mask"] if len(rows) > 1 else None
            hidden = model.backbone(
                input_ids=padded["input_ids"], attention_mask=mask, use_cache=False
            )[0]
            last = torch.tensor([len(ids) - 1 for ids in rows], device=model.device)
            found.append(
                model.head(hidden[torch.arange(len(rows), device=model.device), last].float())[:, 0]
            )
    scores: list[float] = torch.cat(found).tolist()
    return scores


def make_groups(
    prompts: list[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    num_answers: int,
    earlier: int,
    wanted: int,
) -> list[Group]:
    renderer = Renderer(tokenizer)
    groups: list[Group] = []
    for n, (prompt, answers) in enumerate(prompts):
        if len(groups) == wanted or len(answers) < num_answers:
            continue
        context: list[Message] = []
        k = n
        while earlier and (not context or len(renderer.encode(context)) < earlier):
            k = (k + 1) % len(prompts)
            turn = [
                {"role": "user", "content": prompts[k][0]},
                {"role": "assistant", "content": prompts[k][1][0]},
            ]
            context = context + turn
        context = [*context, {"role": "user", "content": prompt}]
        conversations = [
            [*context, {"role": "assistant", "content": answer}] for answer in answers[:num_answers]
        ]
        group = renderer.encode_many(conversations)
        if max(map(len, group)) <= 4096:
            groups.append(group)
    return groups


def load_prompts(size: str = "xs") -> tuple[str, list[Prompt]]:
    """(name of the data, prompts) of alpaca_eval, or of the bundled data without it; `size` as for
    `real_data`."""
    folder = real_data(size)
    if folder is not None:
        with gzip.open(folder / "alpaca_eval" / "train.jsonl.gz", "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        prompts = []
        for row in rows:
            answers = [output["output"] for output in row["outputs"]]
            prompts.append((row["instruction"], answers))
        return "alpaca_eval", prompts
    row_lines = bundled_path("train").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in row_lines]
    texts = []
    for row in rows:
        for completion in row["completions"]:
            texts.append(completion["completion"][0]["content"])
    # Rows have few completions: each prompt gets 16 of the whole data, whatever they answer.
    prompts = []
    for n, row in enumerate(rows[: len(texts) // 16]):
        prompts.append((row["context"][-1]["content"], texts[16 * n : 16 * n + 16]))
    return "bundled data", prompts


def _common(group: Group) -> int:
    return next(
        (i for i, tokens in enumerate(zip(*group, strict=False)) if len(set(tokens)) > 1),
        min(map(len, group)),
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model(parser)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    add_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
