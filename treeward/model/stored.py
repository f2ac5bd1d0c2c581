"""The safetensors and the config.json of a model folder as they are on disk, without loading a model.

    tensors = read_stored(Path("results/rm/final"))
    dtype_of(of_head(tensors, "score")), num_parameters(tensors)
    sha256_of(tensors)                  # of the bytes on disk: about a second per GB

Loading casts weights and repairs settings, so changes on disk show only here.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from treeward.errors import ModelError
from treeward.model.lora import ADAPTER_CONFIG, merging_line

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_NOT_ARCHITECTURE = {
    *("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "problem_type"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "id2label", "label2id"),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file. `dtype`: by torch's name where torch has it."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        with safe_open(self.file, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(self.name)
        return tensor


def read_stored(folder: Path) -> list[StoredTensor]:
    """All tensors of a model folder, by name. Raises `ModelError` naming the first file that is missing or damaged."""
    tensors: list[StoredTensor] = []
    path = folder / SAFE_WEIGHTS_INDEX_NAME
    try:
        names = [SAFE_WEIGHTS_NAME]
        if path.is_file() and not (folder / SAFE_WEIGHTS_NAME).is_file():
            names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
        for name in names:
            path = folder / name
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (it is no mapping)
                    part = file.get_slice(key)
                    dtype = part.get_dtype()
                    tensors.append(StoredTensor(key, path, _DTYPES.get(dtype, dtype), tuple(part.get_shape())))
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError) as error:
        if (folder / ADAPTER_CONFIG).is_file():
            summary, need = "this is a folder of adapters", "a model folder with weights and tokenizer of its own"
            raise ModelError(
                summary, where=str(folder), need=need, fix=f"merge them: {merging_line(folder)}"
            ) from error
        state = "missing" if isinstance(error, FileNotFoundError) else "damaged"
        raise ModelError(f"a file of weights is {state}", where=str(path), got=str(error)) from error
    return sorted(tensors, key=lambda tensor: tensor.name)


def of_head(tensors: Sequence[StoredTensor], *heads: str) -> list[StoredTensor]:
    """The tensors of the modules `heads`."""
    return [tensor for tensor in tensors if tensor.name.split(".")[0] in heads]


def num_parameters(tensors: Iterable[StoredTensor]) -> int:
    """Numbers in all tensors."""
    return sum(math.prod(tensor.shape) for tensor in tensors)


def shapes_sha256(tensors: Iterable[StoredTensor]) -> str:
    """SHA-256 of every name and shape."""
    return hashlib.sha256(json.dumps([[tensor.name, tensor.shape] for tensor in tensors]).encode()).hexdigest()


def sha256_of(tensors: Iterable[StoredTensor]) -> str:
    """SHA-256 of the names, formats, shapes and bytes of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(json.dumps([tensor.name, tensor.dtype, tensor.shape]).encode())
        digest.update(tensor.read().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def dtype_of(tensors: Iterable[StoredTensor]) -> str:
    """The number format of most floating-point numbers; "none" without any."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in _DTYPES.values():
            sizes[tensor.dtype] += math.prod(tensor.shape)
    return sizes.most_common(1)[0][0] if sizes else "none"


def raw_config(folder: Path) -> dict[str, Any]:
    """`config.json` as it is on disk; loading repairs it in memory. Raises `ModelError`."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError("config.json is missing or damaged", where=str(folder), got=str(error)) from error
    if not isinstance(content, dict):
        raise ModelError("config.json is no JSON object", where=str(folder), got=content)
    return content


def config_dtype(config: Mapping[str, Any]) -> str | None:
    """The number format in which transformers loads the weights: `dtype` of `config.json`, once `torch_dtype`."""
    value = config.get("dtype") or config.get("torch_dtype")
    return None if value is None else str(value).removeprefix("torch.")


def architecture_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `config.json` that decide about a forward pass in given weights and a given number format.

    Configurations inside it, as `text_config`, are cut down likewise.
    """
    return {
        key: architecture_of(value) if key.endswith("_config") and isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _NOT_ARCHITECTURE
    }


def raw_pad_token_id(config: Mapping[str, Any]) -> int | None:
    """The padding token that transformers looks for; a model with a text model inside has that model's."""
    pad = (config.get("text_config") or config).get("pad_token_id")
    return None if pad is None else int(pad)
