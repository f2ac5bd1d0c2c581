"""What the benchmarks share: models, real comparisons, timing in turns, operations and memory, a
profile.

Variants are timed in turns within one process, so that whatever else the machine does falls on all
of them alike, and only ratios are compared between runs. On a GPU the time is that between two CUDA
events around the call, which begins when the device is idle, so that a step that the host cannot
feed fast enough is as slow as it is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from treeward.cli.main import keep_freed_memory
from treeward.config.data import DatasetConfig
from treeward.config.load import load_config
from treeward.data.datasets import open_dataset
from treeward.data.rendering import Renderer
from treeward.data.tokenizers import texts_of, train_tokenizer
from treeward.model.loading import classifier_class, ensure_pad_token, initialise_head
from treeward.model.pretrained import choose_device, quiet_transformers
from treeward.model.reward_model import RewardModel
from treeward.tables import Column, results_table
from treeward.training.train import TrainingOutcome, train

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2},  # to see that a benchmark runs
    "xs": {"hidden_size": 256, "num_hidden_layers": 6},
    "s": {"hidden_size": 384, "num_hidden_layers": 6},
    "m": {"hidden_size": 512, "num_hidden_layers": 8},
    "l": {"hidden_size": 768, "num_hidden_layers": 8},
    "0.5b": {  # the config.json of Qwen2.5-0.5B
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
    "1b": {  # of Llama-3.2-1B, without the scaling of its rotary encoding
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
        "tie_word_embeddings": True, "max_position_embeddings": 131072,
    },
    "8b": {  # of Llama-3.1-8B, likewise
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
}  # fmt: skip
"""The first ones are Qwen3 with the vocabulary of their tokenizer."""

LAPTOP = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        **LAPTOP,
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    # Its mixers and its MLPs are layers of their own.
    "nemotron_h": {
        **LAPTOP,
        "model_type": "nemotron_h",
        "layers_block_type": ["mamba", "mlp"] * 3 + ["attention", "mlp"],
        "num_hidden_layers": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "n_groups": 2,
        "ssm_state_size": 64,
        "chunk_size": 128,
        "mlp_hidden_act": "relu2",
        "expand": 2,
    },
    "lfm2": {
        **LAPTOP,
        "model_type": "lfm2",
        "layer_types": ["conv"] * 3 + ["full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
}
"""The layers of families in the size of a laptop: three recurrent ones and one of attention."""
SIZES |= HYBRIDS

VOCAB_SIZE = 8192

_QUICKSTART = Path(__file__).parents[1] / "examples" / "configs" / "quickstart.yaml"

TRL_PENALTY: dict[str, Any] = {
    "reference_policy_kl_type": "k3_unweighted",
    "kl_input_clamp_value": None,
    "kl_output_clamp_value": None,
}
"""Keys of `loss_fn` that make the penalty that of TRL. By default it is NeMo RL's, with another
gradient."""

PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}
"""Operations a second on dense bfloat16 matrices with sums in float32, by a part of the device's
name, the first that fits. From NVIDIA's data sheets, and for the RTX 4090 its Ada white paper; half
of what is given "with sparsity".
"""

Ids = list[int]


def shared_data() -> Path | None:
    """The folder of real data, if it is here: TREEWARD_SHARED_DATA, or shared/data beside the
    repository."""
    folder = Path(
        os.environ.get(
            "TREEWARD_SHARED_DATA", Path(__file__).parent.parent.parent / "shared" / "data"
        )
    )
    return folder if folder.is_dir() else None


def hh_harmless(model: str | None) -> Path | None:
    """The folder of hh_harmless for a benchmark with heads on a model; None, after a line that says
    so, without the data or the model."""
    data = shared_data()
    if data is None or model is None:
        print("\nhh_harmless is left out: it needs the shared data, and --model.")
        return None
    return data / "hh_harmless"


def train_quickstart(
    folder: Path, *, seed: int, steps: int, overrides: Sequence[str]
) -> TrainingOutcome:
    """Train the quickstart's model from scratch; it validates and is saved at its end alone."""
    config = load_config(
        _QUICKSTART,
        [
            f"rm.seed={seed}",
            f"rm.max_num_steps={steps}",
            "rm.val_period=null",
            f"checkpointing.checkpoint_dir={folder}",
            "checkpointing.metric_name=null",
            "checkpointing.save_period=null",
            f"logger.log_dir={folder}/logs",
            *overrides,
        ],
    )
    return train(config, show_progress=False)


def real_data(size: str) -> Path | None:
    """The folder of real data for random weights of a size, which do without, or for a model in a
    folder.

    A pretrained model is not measured on the bundled data: its figures would pass for those of real
    comparisons.
    """
    folder = shared_data()
    if folder is None and size not in SIZES:
        raise SystemExit(
            "--model is measured on real data, which is not here\n"
            f"  got:   --model {size}, and no folder "
            f"{os.environ.get('TREEWARD_SHARED_DATA', 'shared/data')}\n"
            "  need:  a folder with hh_harmless/train.jsonl.gz and alpaca_eval/train.jsonl.gz\n"
            "  fix:   name it as TREEWARD_SHARED_DATA, or take random weights with --size"
        )
    return folder


def load_pairs(
    longest: int, size: str = "xs"
) -> tuple[str, PreTrainedTokenizerBase, list[tuple[Ids, Ids]]]:
    """(name of the data, tokenizer, (chosen, rejected) token ids) of HH harmless, or of the bundled
    data without it."""
    folder = real_data(size)
    if folder is None:
        config = DatasetConfig(dataset_name="Bundled")
    else:
        config = DatasetConfig(
            dataset_name="HHTranscripts", data_path=str(folder / "hh_harmless" / "train.jsonl.gz")
        )
    tokenizer = tokenizer_of(size, texts_of([open_dataset(config)]))
    renderer = Renderer(tokenizer)
    pairs = []
    for preference, _ in open_dataset(config):
        ranked = sorted(preference.completions, key=lambda completion: completion.rank)
        chosen, rejected = renderer.encode_many(
            [[*preference.context, *c.messages] for c in (ranked[0], ranked[-1])]
        )
        if max(len(chosen), len(rejected)) <= longest and chosen != rejected:
            pairs.append((chosen, rejected))
    return ("bundled data" if folder is None else "HH harmless"), tokenizer, pairs


def tokenizer_of(
    size: str, texts: Iterable[str], vocab_size: int = VOCAB_SIZE
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, or one that is trained on these texts."""
    if size in SIZES:
        return train_tokenizer(texts, vocab_size=vocab_size)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(size)
    tokenizer.chat_template = Renderer(tokenizer).chat_template  # a base model has none of its own
    return tokenizer


def model_name(size: str) -> str:
    """For a heading."""
    if size not in SIZES:
        return Path(size).name
    return str(SIZES[size].get("model_type", f"Qwen3 {size}"))


def add_model(parser: argparse.ArgumentParser, *, few: str | None = None) -> None:
    """`--size`, or `--model` with a folder; and with `few` an option that leaves variants out."""
    parser.add_argument(
        "--size", default="xs", choices=tuple(SIZES), help="random weights of this size"
    )
    parser.add_argument(
        "--model", dest="size", help="a Hugging Face folder instead, with its tokenizer"
    )
    if few is not None:
        parser.add_argument("--float32", action="store_true", help=few)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every benchmark takes."""
    parser.add_argument("--device", default="auto", help="a GPU where there is one, else the CPU")
    parser.add_argument(
        "--profile", action="store_true", help="the operations of treeward's side that take longest"
    )


def use_device(name: str) -> torch.device:
    keep_freed_memory()  # as `treeward` does; the peers share the process, and gain as much
    device = choose_device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def describe(device: torch.device) -> str:
    """For a heading."""
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{torch.get_num_threads()} threads"
    )


def build(
    size: str,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> RewardModel:
    """A sequence classifier with random weights, the same for the same size and device, or those of
    a folder; and a float32 head."""
    config = _config(size, tokenizer, num_labels=1)
    hf = _model(classifier_class(config, False), size, config, device, dtype)
    initialise_head(hf, seed=0)
    ensure_pad_token(hf, tokenizer)
    return RewardModel(hf)


def build_causal(
    size: str,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """The same as a causal language model."""
    config = _config(size, tokenizer)
    causal_class = AutoModelForCausalLM._model_mapping[type(config)]
    hf = _model(causal_class, size, config, device, dtype)
    embeddings = hf.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding)
    embeddings.padding_idx = None
    hf.eval()
    return hf


def _config(size: str, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> PreTrainedConfig:
    if size not in SIZES:
        config: PreTrainedConfig = AutoConfig.from_pretrained(size, **settings)
        config.pad_token_id = tokenizer.pad_token_id
        return config
    special = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")
    }
    fields = {"vocab_size": len(tokenizer), **special, **_fields(size), **settings}
    return AutoConfig.for_model(**fields)


def _model(
    kind: Any,
    size: str,
    config: PreTrainedConfig,
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> PreTrainedModel:
    quiet_transformers()
    settings: dict[str, Any] = {"dtype": dtype or torch.float32, "attn_implementation": "sdpa"}
    if size not in SIZES:
        hf: PreTrainedModel = kind.from_pretrained(size, config=config, **settings)
        hf.to(device)  # type: ignore[arg-type]
        return hf
    device = torch.device(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        hf = kind._from_config(config, **settings)
    return hf


def _fields(size: str) -> dict[str, Any]:
    shape = SIZES[size]
    if "model_type" in shape:
        return shape
    return {
        "model_type": "qwen3",
        "intermediate_size": 3 * shape["hidden_size"],
        "num_attention_heads": shape["hidden_size"] // 64,
        "num_key_value_heads": max(1, shape["hidden_size"] // 128),
        "head_dim": 64,
        "max_position_embeddings": 8192,
        **shape,
    }


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Of one call; on a GPU from an idle device until it is idle again."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1000


def interleave(
    variants: Mapping[str, Callable[[int], object]],
    rounds: int,
    warmup: int = 1,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> dict[str, list[float]]:
    """Seconds of each variant in each round; a variant is called with the number of the round."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(warmup + rounds):
        for name, call in variants.items():
            taken = seconds_of(partial(call, number), device)
            if number >= warmup:
                seconds[name].append(taken)
        sys.stderr.write(f"\rround {number + 1} of {warmup + rounds} ")
    sys.stderr.write("\n")
    return seconds


def median_ratio(base: Sequence[float], other: Sequence[float]) -> float:
    """How many times faster `other` is than `base`: the median over rounds of the ratio within a
    round."""
    return statistics.median(b / o for b, o in zip(base, other, strict=True))


def flops(
    model: PreTrainedModel,
    tokens: int,
    pairs: int,
    predicted: int = 0,
    passes: tuple[float, float, float] = (3, 3, 3),
) -> float:
    """Of so many tokens, pairs of a query and a key that it sees, and predicted tokens.

    `passes`: how often a forward pass' worth of backbone, attention and head is computed; a
    backward pass is two.
    """
    layers = model.base_model.get_submodule("layers")
    config = model.config
    backbone = sum(parameter.numel() for parameter in layers.parameters())
    outputs = (
        sum(parameter.numel() for parameter in model.get_output_embeddings().parameters())
        if predicted
        else 0
    )
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 2 * config.num_attention_heads * width * config.num_hidden_layers
    total: float = (
        passes[0] * backbone * tokens
        + passes[1] * attention * pairs
        + passes[2] * outputs * predicted
    )
    return 2 * total


def utilisation(
    operations: float, seconds: float, device: torch.device, dtype: torch.dtype
) -> float | None:
    """Model FLOP utilisation: of the operations that the device can do, those that the tokens need.

    Padding does not count, and neither does what is computed again. None on a CPU, for other
    numbers than bfloat16, and for a GPU that is not in `PEAK_FLOPS`.
    """
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    peak = next((value for part, value in PEAK_FLOPS.items() if part in name), None)
    return None if peak is None else operations / seconds / peak


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Most memory of the GPU that was allocated at once during the call, what was there before
    included.

    None on a CPU.
    """
    if device.type != "cuda":
        call()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(device)


def print_profile(
    what: str, call: Callable[[], object], device: torch.device, shown: int = 15
) -> None:
    """Where the time of a call goes: the operations that take longest, without those that they
    call."""
    on_gpu = device.type == "cuda"
    activities = [
        torch.profiler.ProfilerActivity.CPU,
        *([torch.profiler.ProfilerActivity.CUDA] if on_gpu else []),
    ]
    call()
    with torch.profiler.profile(activities=activities) as profiler:
        seconds_of(call, device)
    own = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, own))
    took = [getattr(event, own) / 1000 for event in events]
    rows = [
        {"name": event.key[:70], "ms": ms, "share": ms / sum(took), "n": event.count}
        for event, ms in zip(events[:shown], took, strict=False)
    ]
    columns = [
        Column("name", title="operation"),
        Column("ms", title="own ms", format=".1f"),
        Column("share", format=".1%"),
        Column("n", title="calls"),
    ]
    where = "the GPU" if on_gpu else "the CPU"
    print(
        f"\nWhere the {sum(took):.0f} ms on {where} of {what} "
        f"go\n\n{results_table(rows, columns)}\n"
    )


@contextmanager
def activation_bytes(model: nn.Module) -> Iterator[Callable[[], int]]:
    """Counts what is kept for the backward pass, each storage once and the model's parameters not
    at all."""
    storages: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield lambda: sum(storages.values())
