"""`StoredModel`: the safetensors and the config.json of a model folder as they are on disk, without
loading a model.

    stored = StoredModel(Path("results/rm/final"))
    stored.num_parameters, stored.config_dtype, stored.pad_token_id
    sha256_of(stored.tensors)           # of the bytes on disk: about a second per GB

Loading casts weights and repairs settings, so changes on disk show only here.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from treeward.errors import ModelError
from treeward.model.lora import ADAPTER_CONFIG, merging_line

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

# Versions, formats, special tokens and labels: keys that say nothing about the architecture.
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


class StoredModel:
    """The files of a model folder, read lazily. Raises `ModelError` for a missing or damaged
    file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def config(self) -> dict[str, Any]:
        """`config.json` as it is on disk; loading repairs it in memory."""
        try:
            text = (self.folder / "config.json").read_text(encoding="utf-8")
            content: dict[str, Any] = json.loads(text)
        except (OSError, ValueError) as error:
            raise ModelError(
                "config.json is missing or damaged", where=str(self.folder), got=str(error)
            ) from error
        return content

    @cached_property
    def tensors(self) -> list[StoredTensor]:
        """All tensors, by name."""
        tensors: list[StoredTensor] = []
        path = self.folder / SAFE_WEIGHTS_INDEX_NAME
        try:
            # As transformers chooses: one file wins over an index of several.
            names = {SAFE_WEIGHTS_NAME}
            if path.is_file() and not (self.folder / SAFE_WEIGHTS_NAME).is_file():
                index = json.loads(path.read_text(encoding="utf-8"))
                names = set(index["weight_map"].values())
            for name in sorted(names):
                path = self.folder / name
                with safe_open(path, framework="pt") as file:
                    for key in file.keys():  # noqa: SIM118 (it is no mapping)
                        part = file.get_slice(key)  # reads the head of the file alone
                        dtype = part.get_dtype()
                        dtype = _DTYPES.get(dtype, dtype)
                        tensors.append(StoredTensor(key, path, dtype, tuple(part.get_shape())))
        # The last three are of an index of another form, as a list.
        except (
            OSError,
            SafetensorError,
            ValueError,
            KeyError,
            AttributeError,
            TypeError,
        ) as error:
            if (self.folder / ADAPTER_CONFIG).is_file():
                raise ModelError(
                    "this is a folder of adapters",
                    where=str(self.folder),
                    need="a model folder with weights and tokenizer of its own",
                    fix=f"merge them: {merging_line(self.folder)}",
                ) from error
            state = "damaged"
            if isinstance(error, FileNotFoundError):
                state = "missing"
            raise ModelError(
                f"a file of weights is {state}", where=str(path), got=str(error)
            ) from error
        return sorted(tensors, key=lambda tensor: tensor.name)

    def split(self, heads: Sequence[str]) -> tuple[list[StoredTensor], list[StoredTensor]]:
        """The tensors of the backbone, and those of the modules `heads`."""
        # By the outermost module: a backbone may have a `score` somewhere inside.
        head = [tensor for tensor in self.tensors if tensor.name.split(".")[0] in heads]
        return [tensor for tensor in self.tensors if tensor not in head], head

    @property
    def num_parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def shapes_sha256(self) -> str:
        """SHA-256 of every name and shape."""
        shapes = [[tensor.name, tensor.shape] for tensor in self.tensors]
        return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()

    @property
    def config_dtype(self) -> str | None:
        """The number format in which transformers loads the weights: `dtype`, formerly
        `torch_dtype`."""
        value = self.config.get("dtype") or self.config.get("torch_dtype")
        if value is None:
            return None
        return str(value).removeprefix("torch.")

    @property
    def pad_token_id(self) -> int | None:
        """The padding token for transformers, of the text model if there is one inside."""
        pad: int | None = (self.config.get("text_config") or self.config).get("pad_token_id")
        return pad


def sha256_of(tensors: Iterable[StoredTensor]) -> str:
    """SHA-256 of the names, formats, shapes and bytes of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        # Equal bytes of another shape or dtype are other weights.
        digest.update(json.dumps([tensor.name, tensor.dtype, tensor.shape]).encode())
        digest.update(tensor.read().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def dtype_of(tensors: Iterable[StoredTensor]) -> str:
    """The number format of most floating-point numbers; "none" without any."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in _DTYPES.values():
            sizes[tensor.dtype] += math.prod(tensor.shape)
    if not sizes:
        return "none"
    return sizes.most_common(1)[0][0]


def architecture_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `config.json` that a forward pass depends on, besides weights and number format;
    also of inner configurations, as `text_config`."""
    kept = {}
    for key, value in config.items():
        if key in _NOT_ARCHITECTURE:
            continue
        if key.endswith("_config") and isinstance(value, dict):
            value = architecture_of(value)
        kept[key] = value
    return kept
