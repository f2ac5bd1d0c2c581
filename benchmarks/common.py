"""What the benchmarks share: models of three sizes, real comparisons, interleaved timing, and a table.

Variants are timed in turns within one process, so that whatever else the machine does falls on all of them alike, and
only ratios are compared between runs.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from treeward.config.data import DatasetConfig
from treeward.data.datasets import open_dataset
from treeward.data.rendering import Renderer
from treeward.data.tokenizers import texts_of, train_tokenizer
from treeward.model.loading import build_policy, build_reward_model
from treeward.model.pretrained import quiet_transformers
from treeward.model.reward_model import RewardModel

__all__ = ["SIZES", "activation_bytes", "build", "build_causal", "interleave", "load_pairs", "shared_data"]

SIZES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2},  # to see that a benchmark runs
    "xs": {"hidden_size": 256, "num_hidden_layers": 6},
    "s": {"hidden_size": 384, "num_hidden_layers": 6},
    "m": {"hidden_size": 512, "num_hidden_layers": 8},
    "l": {"hidden_size": 768, "num_hidden_layers": 8},
}
VOCAB_SIZE = 8192

Ids = list[int]


def shared_data() -> Path | None:
    """The folder of real data, if it is here: TREEWARD_SHARED_DATA, or shared/data beside the repository."""
    folder = Path(os.environ.get("TREEWARD_SHARED_DATA", Path(__file__).parent.parent.parent / "shared" / "data"))
    return folder if folder.is_dir() else None


def load_pairs(longest: int) -> tuple[str, PreTrainedTokenizerBase, list[tuple[Ids, Ids]]]:
    """(name of the data, tokenizer, (chosen, rejected) token ids) of HH harmless, or of the bundled data without it."""
    folder = shared_data()
    if folder is None:
        config = DatasetConfig(dataset_name="Bundled")
    else:
        config = DatasetConfig(dataset_name="HHTranscripts", data_path=str(folder / "hh_harmless" / "train.jsonl.gz"))
    tokenizer = train_tokenizer(texts_of([open_dataset(config)]), vocab_size=VOCAB_SIZE)
    renderer = Renderer(tokenizer)
    pairs = []
    for preference, _ in open_dataset(config):
        ranked = sorted(preference.completions, key=lambda completion: completion.rank)
        chosen, rejected = renderer.encode_many([[*preference.context, *c.messages] for c in (ranked[0], ranked[-1])])
        if max(len(chosen), len(rejected)) <= longest and chosen != rejected:
            pairs.append((chosen, rejected))
    return ("bundled data" if folder is None else "HH harmless"), tokenizer, pairs


def build(size: str, tokenizer: PreTrainedTokenizerBase, **changes: Any) -> RewardModel:
    """A Qwen3 sequence classifier with random weights, the same for the same size."""
    return build_reward_model(_fields(size) | changes, tokenizer, seed=0).model


def build_causal(size: str, tokenizer: PreTrainedTokenizerBase, **changes: Any) -> PreTrainedModel:
    """The same as a causal language model."""
    return build_policy(_fields(size) | changes, tokenizer, seed=0).model.hf


def _fields(size: str) -> dict[str, Any]:
    quiet_transformers()
    shape = SIZES[size]
    return {
        "model_type": "qwen3",
        "intermediate_size": 3 * shape["hidden_size"],
        "num_attention_heads": shape["hidden_size"] // 64,
        "num_key_value_heads": max(1, shape["hidden_size"] // 128),
        "head_dim": 64,
        "max_position_embeddings": 8192,
        **shape,
    }


def interleave(variants: Mapping[str, Callable[[int], object]], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each variant in each round; a variant is called with the number of the round."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(warmup + rounds):
        for name, call in variants.items():
            start = time.perf_counter()
            call(number)
            if number >= warmup:
                seconds[name].append(time.perf_counter() - start)
        sys.stderr.write(f"\rround {number + 1} of {warmup + rounds} ")
    sys.stderr.write("\n")
    return seconds


def median_ratio(base: Sequence[float], other: Sequence[float]) -> float:
    """How many times faster `other` is than `base`: the median over rounds of the ratio within a round."""
    return statistics.median(b / o for b, o in zip(base, other, strict=True))


@contextmanager
def activation_bytes(model: nn.Module) -> Iterator[Callable[[], int]]:
    """Counts what is kept for the backward pass, each storage once and the model's parameters not at all."""
    storages: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield lambda: sum(storages.values())
