"""What sampling holds: by hand, and against the tensors of a policy that samples."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from families import HYBRIDS, causal_model, config_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from treeward.config.grpo_run import GRPORunConfig
from treeward.config.load import load_file
from treeward.config.policy import LoraConfig
from treeward.model.lora import add_adapters
from treeward.model.policy_model import PolicyModel
from treeward.planning.memory import find_mixers, layer_shapes
from treeward.planning.recurrent_memory import (
    GatedDeltaShape,
    Mamba1Shape,
    Mamba2Shape,
    ShortConvolutionShape,
)
from treeward.planning.sampling_memory import SamplingShape, sampling_memory
from treeward.rl.sampling import DECODE_SETTINGS, SampledRow, _RowDecoder, _TreeDecoder
from treeward.tree.batch import TreeBatch

UNKNOWN = {"kimi_linear", "bailing_hybrid", "zamba", "zamba2"}
KNOWN = [family for family in HYBRIDS if family not in UNKNOWN]
# Three prompts of 17 tokens, with two completions of 5 tokens each.
SHAPE = SamplingShape(rows=6, prompts=3, prompt_tokens=17, new_tokens=5, longest_prompt=17)


def rows() -> list[SampledRow]:
    made = []
    for s in range(SHAPE.rows):
        prompt = (3 + s // 2,) * SHAPE.prompt_tokens
        made.append(SampledRow(prompt, SHAPE.new_tokens, np.zeros(SHAPE.new_tokens)))
    return made


def policy_of(family: str, dtype: torch.dtype, layout: Any) -> PolicyModel:
    policy = PolicyModel(causal_model(family), layout=layout).eval()
    policy.cast(dtype)
    return policy


def num_bytes(tensors: list[Tensor | None]) -> int:
    """None: transformers' cache of a layer without such a tensor."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@torch.no_grad()
def held_on_trees(policy: PolicyModel) -> tuple[int, int]:
    """Bytes of keys and values at the last token, and of states."""
    decoder = _TreeDecoder(policy, rows(), DECODE_SETTINGS["cpu"])
    decoder.start()
    for _ in range(SHAPE.new_tokens - 1):
        decoder(torch.full((SHAPE.rows,), 9))
    keys_and_values: list[Tensor | None] = []
    for layer in decoder.decoding.layers:
        assert layer.own is not None
        keys_and_values += [*layer.prompt, *layer.own]
    return num_bytes(keys_and_values), num_bytes([*decoder.decoding.states])


@torch.no_grad()
def held_as_rows(policy: PolicyModel) -> tuple[int, int]:
    decoder = _RowDecoder(policy, rows(), DECODE_SETTINGS["cpu"])
    decoder.start()
    for _ in range(SHAPE.new_tokens):
        decoder(torch.full((SHAPE.rows,), 9))
    keys_and_values: list[Tensor | None] = []
    states: list[Tensor | None] = []
    for layer in decoder.cache.layers:
        for name, value in vars(layer).items():
            if name in ("keys", "values"):
                keys_and_values.append(value)
            elif name in ("conv_states", "recurrent_states"):
                states += value.values()
    return num_bytes(keys_and_values), num_bytes(states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", *KNOWN])
def test_sampling_on_trees_holds_what_the_formula_says(family: str, dtype: torch.dtype) -> None:
    policy = policy_of(family, dtype, "tree")
    memory = sampling_memory(policy, SHAPE, itemsize=dtype.itemsize, on_cpu=True)
    assert (memory.keys_and_values, memory.states) == held_on_trees(policy)
    # A pass before a CUDA graph is recorded changes the states, so a copy is put back.
    on_gpu = sampling_memory(policy, SHAPE, itemsize=dtype.itemsize, on_cpu=False)
    assert on_gpu.states == 2 * memory.states
    assert on_gpu.keys_and_values == memory.keys_and_values


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "nemotron_h", "mamba", "lfm2", "falcon_h1"])
def test_sampling_as_rows_holds_what_the_formula_says(family: str) -> None:
    policy = policy_of(family, torch.bfloat16, "rows")
    memory = sampling_memory(policy, SHAPE, itemsize=2, on_cpu=True)
    assert (memory.keys_and_values, memory.states) == held_as_rows(policy)
    on_gpu = sampling_memory(policy, SHAPE, itemsize=2, on_cpu=False)
    assert on_gpu.states == memory.states  # no graph is recorded


def test_a_qwen3_5_by_hand() -> None:
    """Three layers of the gated delta rule and one of attention, in bfloat16: j = 16, q = 128, h =
    32, v = 128; g = 4, e = 256; K = 4."""
    config = config_of(
        "qwen3_5",
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_key_head_dim=128,
        linear_num_value_heads=32,
        linear_value_head_dim=128,
    )
    with torch.device("meta"):
        policy = PolicyModel(AutoModelForCausalLM.from_config(config), layout="tree")
    shape = SamplingShape(
        rows=64, prompts=8, prompt_tokens=1024, new_tokens=512, longest_prompt=1500
    )
    memory = sampling_memory(policy, shape, itemsize=2, on_cpu=False)
    of_token = 2 * 2 * 4 * 256
    assert memory.keys_and_values == of_token * (64 * 512 + 8 * 1024)
    of_state = 3 * (2 * 3 * (2 * 16 * 128 + 32 * 128) + 4 * 32 * 128 * 128)
    assert memory.states == 2 * 64 * of_state
    # 8192 tokens of prompts are read at a time; what all prompts keep is there beside them.
    assert memory.prompts > of_token * 8 * 1500 + 8 * of_state
    few = SamplingShape(rows=64, prompts=1, prompt_tokens=9, new_tokens=512, longest_prompt=9)
    # Of short prompts the most is when completions get copies of what is kept of them.
    copying = 2 * of_token * 9 + (1 + 64) * of_state
    assert sampling_memory(policy, few, itemsize=2, on_cpu=False).prompts == copying


def test_every_kind_of_state_has_a_family() -> None:
    kinds = set()
    for family in KNOWN:
        policy = PolicyModel(causal_model(family), layout="tree")
        kinds |= {type(mixer.shape) for mixer in find_mixers(policy, on_cpu=True) if mixer}
    assert kinds == {GatedDeltaShape, Mamba1Shape, Mamba2Shape, ShortConvolutionShape}


class LiveBytes(TorchDispatchMode):
    """The bytes of the tensors that operations have made and that are there, and the most of them
    at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = {
            self._key(value) for value in tree_leaves((args, kwargs)) if torch.is_tensor(value)
        }
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if not torch.is_tensor(value):
                continue
            key = self._key(value)
            if key in before or key in self._known:  # a view, or written in place
                continue
            storage = value.untyped_storage()
            size = storage.nbytes()
            self._known.add(key)
            self.live += size
            self.most = max(self.most, self.live)
            weakref.finalize(storage, self._free, key, size)
        return result

    @staticmethod
    def _key(value: Tensor) -> int:
        return value.untyped_storage()._cdata

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


# No two widths of a layer are the same.
_WIDE = {"hidden_size": 192, "intermediate_size": 320}
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _WIDE),
    "llama, much attention": ("llama", _WIDE | {"head_dim": 96, "intermediate_size": 64}),
    "mixtral": ("mixtral", _WIDE),
    "qwen3_5": ("qwen3_5", _WIDE | {"linear_key_head_dim": 40, "linear_value_head_dim": 56}),
    "qwen3_5, long keys": ("qwen3_5", {"linear_key_head_dim": 72, "linear_value_head_dim": 24}),
    "nemotron_h": ("nemotron_h", _WIDE | {"mamba_head_dim": 36, "ssm_state_size": 44}),
    "nemotron_h, long states": ("nemotron_h", {"mamba_head_dim": 16, "ssm_state_size": 96}),
    "falcon_h1": ("falcon_h1", _WIDE | {"mamba_d_state": 40}),
    "mamba": ("mamba", {"state_size": 24, "hidden_size": 96}),
    "jamba": ("jamba", _WIDE | {"mamba_d_state": 16}),
    "lfm2": ("lfm2", _WIDE),
}


@torch.no_grad()
@pytest.mark.parametrize("adapted", [False, True], ids=["", "adapters"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", LAYERS)
def test_reading_prompts_holds_what_the_formula_says(
    case: str, dtype: torch.dtype, adapted: bool
) -> None:
    family, changes = LAYERS[case]
    policy = PolicyModel(causal_model(family, **changes), layout="tree").eval()
    policy.cast(dtype)
    for name, buffer in policy.hf.named_buffers():
        if name.endswith("mup_vector"):  # as in a model that was loaded in this dtype
            buffer.data = buffer.to(dtype)
    if adapted:
        add_adapters(policy, LoraConfig(enabled=True, dim=4), seed=0)
    prompts = [[3 + p] * 256 for p in range(4)]
    batch = TreeBatch.from_groups([[ids] for ids in prompts], keep=[(p, 0, 256) for p in range(4)])
    live = LiveBytes()
    held: list[int] = []

    def enter(*_: Any) -> None:
        live.most = live.live
        held.append(live.live)

    def leave(*_: Any) -> None:
        held[-1] = live.most - held[-1]

    for layer in policy.layers:
        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)
    with live:
        policy.tree_hidden(batch, batch.reads.places_N)
    of_layers = []
    for layer in layer_shapes(policy, on_cpu=True):
        of_layers.append(layer.bytes_without_gradients(dtype.itemsize, 1, on_cpu=True))
    # The largest layer counts.
    assert 0.9 <= max(of_layers) * 4 * 256 / max(held) <= (1.5 if adapted else 1.3)


def shape_of(**grpo: Any) -> SamplingShape:
    """Of a run that samples 64 completions at once, with a validation set if it has `val`."""
    data = {"train_data_path": "train.jsonl"}
    if grpo.pop("val", False):
        data["val_data_path"] = "val.jsonl"
    values = {
        "policy": {"model_name": "org/model", "generation": {"batch_size": 64}},
        "data": data,
        "env": {"math": {}},
        "grpo": grpo,
    }
    return SamplingShape.of(load_file(GRPORunConfig, None, values=values))


@pytest.mark.parametrize("size", [2, 7, 16, 24, 64, 100])
def test_a_batch_that_parts_groups_has_the_prompts_of_all_of_them(size: int) -> None:
    batches = range(0, 64 * size, 64)
    most = max(len({row // size for row in range(start, start + 64)}) for start in batches)
    assert shape_of(num_generations_per_prompt=size).prompts == most


def test_a_validation_has_more_prompts_at_once_than_a_step() -> None:
    """One completion of each: 64 prompts have their keys and values there, and not 4."""
    assert shape_of(num_generations_per_prompt=16).prompts == 4
    assert shape_of(num_generations_per_prompt=16, val=True).prompts == 64
    assert shape_of(num_generations_per_prompt=16, val=True, num_val_generations=8).prompts == 8
    assert shape_of(num_generations_per_prompt=16, val=True, max_val_samples=10).prompts == 10
    assert shape_of(num_generations_per_prompt=16, val=True, max_val_samples=None).prompts == 64
