"""Models with recurrent layers on trees against rows, as padded batch, one by one, and packed, in
one interleaved run.

    python benchmarks/hybrids.py [qwen3_5 nemotron_h lfm2] [--prompts 256 1024] [--completions 2 8] [--rounds 5]
                                 [--device cuda]

K completions of 70 to 130 tokens follow one prompt. A step is what training computes of them, the
scores and their gradients; scoring is the forward pass alone. Rows are those of plain transformers;
packed rows are treeward's row of trees in which nothing is shared. The models have the layers of
the families in the size of a laptop: 4 of 256 channels, three recurrent and one of attention.
Weights and tokens are random, which changes no time.

Seconds are wall clock. A column `x rows` says how many times faster a tree is, the median of the
ratios within each round; `tokens` says the same of the tokens that are computed, the limit of what
sharing alone can give.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from common import HYBRIDS, LAPTOP, activation_bytes, describe, interleave, median_ratio, use_device
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from treeward.model.wrapped import WrappedModel
from treeward.tables import Column, results_table
from treeward.tree.batch import RowBatch, TreeBatch

VOCABULARY = 1024
FAMILIES: dict[str, dict[str, Any]] = {
    **HYBRIDS,
    # Attention alone, to compare with.
    "qwen3": {**LAPTOP, "model_type": "qwen3"},
}
TREE, PADDED, ALONE, PACKED = "tree", "padded rows", "rows one by one", "packed rows"


def main() -> None:
    arguments = _parse()
    device = use_device(arguments.device)
    for family in arguments.families:
        model = _build(family, device)
        size = sum(weight.numel() for weight in model.parameters()) / 1e6
        print(f"\n{family}, {size:.1f} million parameters, float32, {describe(device)}\n")
        rows = []
        for prompt in arguments.prompts:
            for completions in arguments.completions:
                rows += _measure(model, prompt, completions, arguments.rounds, device)
        columns = [
            Column("prompt"),
            Column("completions", title="K"),
            Column("what", title="computed"),
            Column("tree", title="tree, s", format=".2f"),
            *(Column(name, title=f"x {name}", format=".2f") for name in (PADDED, ALONE, PACKED)),
            Column("tokens", title="tokens", format=".2f"),
            Column("memory", title="memory", format=".2f"),
        ]
        print(results_table(rows, columns))


def _measure(
    model: WrappedModel, prompt: int, completions: int, rounds: int, device: torch.device
) -> list[dict[str, Any]]:
    """Two lines of the table: a step, and scoring."""
    sequences = _sequences(prompt, completions)
    tree = TreeBatch.from_groups([sequences]).to(device)
    packed = TreeBatch.from_groups([[row] for row in sequences], min_shared=10**6).to(device)
    padded = RowBatch.from_groups([sequences], pad_token_id=0).to(device)
    alone = [RowBatch.from_groups([[row]], pad_token_id=0).to(device) for row in sequences]
    passes: dict[str, list[Callable[[], Tensor]]] = {
        TREE: [partial(_of_tree, model, tree)],
        PADDED: [partial(_of_rows, model, padded)],
        ALONE: [partial(_of_rows, model, batch) for batch in alone],
        PACKED: [partial(_of_tree, model, packed)],
    }
    lines = []
    for what, run in (("step", _step), ("scores", _scores)):
        variants = {name: partial(run, model, forwards) for name, forwards in passes.items()}
        seconds = interleave(variants, rounds, device=device)
        line: dict[str, Any] = {"prompt": prompt, "completions": completions, "what": what}
        line["tree"] = sorted(seconds[TREE])[rounds // 2]
        for name in (PADDED, ALONE, PACKED):
            line[name] = median_ratio(seconds[name], seconds[TREE])
        line["tokens"] = padded.num_computed_tokens / tree.num_computed_tokens
        if what == "step":
            line["memory"] = _kept(model, passes[PADDED][0]) / _kept(model, passes[TREE][0])
        lines.append(line)
    return lines


def _build(family: str, device: torch.device) -> WrappedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(vocab_size=VOCABULARY, **FAMILIES[family])
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return WrappedModel(hf.to(device).train(), layout="tree")


def _sequences(prompt: int, completions: int) -> list[list[int]]:
    """A prompt with completions of 70 to 130 tokens."""
    generator = np.random.default_rng(0)
    beginning = generator.integers(3, VOCABULARY, prompt).tolist()
    sequences = []
    for length in np.linspace(70, 130, completions).astype(int):
        sequences.append([*beginning, *generator.integers(3, VOCABULARY, length).tolist()])
    return sequences


def _of_tree(model: WrappedModel, batch: TreeBatch) -> Tensor:
    hidden_ND = model.tree_hidden(batch, batch.reads.places_N)
    return hidden_ND.tanh().sum()


def _of_rows(model: WrappedModel, batch: RowBatch) -> Tensor:
    hidden_SLD = model.row_hidden(batch)
    hidden_ND = hidden_SLD.flatten(0, 1).index_select(0, batch.reads.places_N)
    return hidden_ND.tanh().sum()


def _step(model: WrappedModel, forwards: Sequence[Callable[[], Tensor]], _: int) -> None:
    for forward in forwards:
        forward().backward()
    model.zero_grad(set_to_none=True)


@torch.no_grad()
def _scores(_: WrappedModel, forwards: Sequence[Callable[[], Tensor]], number: int) -> None:
    for forward in forwards:
        forward()


def _kept(model: WrappedModel, forward: Callable[[], Tensor]) -> int:
    """Bytes that a forward pass keeps for the backward pass."""
    with activation_bytes(model) as count:
        forward()
    return count()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", default=["qwen3_5", "nemotron_h", "lfm2"])
    parser.add_argument("--prompts", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--completions", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
