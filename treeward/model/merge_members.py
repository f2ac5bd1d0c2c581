"""The members of a merge: model folders read tensor by tensor, and what must be the same in all of them.

    first, other = (read_member(Path(folder), trust_remote_code=False) for folder in folders)
    with first.open() as tensors, other.open() as others:
        check_alike(first, tensors, other, others)         # raises, naming the first difference
        check_renderings([first, other], trust_remote_code=False)

No weights are loaded into a model for that: names and shapes stand in the files' headers.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase

from treeward.errors import ModelError
from treeward.model.contract import read_contract
from treeward.model.pretrained import load_tokenizer

__all__ = [
    "INDEX_FILE",
    "WEIGHTS_FILE",
    "Member",
    "Tensors",
    "check_alike",
    "check_renderings",
    "is_head",
    "read_member",
]

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_HEADS = ("score", "classifier", "classification_head", "vqa_classifier", "sequence_summary")
# What may differ between members without changing what a scored conversation becomes.
_NO_MATTER = re.compile(
    "_name_or_path|transformers_version|(torch_)?dtype|use_cache|initializer_range|_commit_hash|_attn_implementation.*"
    "|output_(attentions|hidden_states)|return_dict|problem_type|.*drop.*|.*jitter.*"
)
_LONG_TEXT = 80


class Tensors:
    """The tensors of a member by name, read when asked for."""

    def __init__(self, path: Path, files: Mapping[str, str], handles: Mapping[str, Any]) -> None:
        self._path, self._files, self._handles = path, files, handles

    def shape(self, name: str) -> list[int]:
        with _safely(self._path / self._files[name]):
            shape: list[int] = self._handles[self._files[name]].get_slice(name).get_shape()
        return shape

    def __getitem__(self, name: str) -> Tensor:
        with _safely(self._path / self._files[name]):
            tensor: Tensor = self._handles[self._files[name]].get_tensor(name)
        return tensor


@dataclass(frozen=True, slots=True)
class Member:
    """A model folder: its configuration with all defaults, and the file of each tensor."""

    path: Path
    config: dict[str, Any]
    files: dict[str, str]

    @contextlib.contextmanager
    def open(self) -> Iterator[Tensors]:
        """The tensors, as long as it lasts."""
        with contextlib.ExitStack() as stack:
            handles = {}
            for file in dict.fromkeys(self.files.values()):
                with _safely(self.path / file) as path:
                    handles[file] = stack.enter_context(safe_open(path, framework="pt"))
            yield Tensors(self.path, self.files, handles)


def read_member(path: Path, *, trust_remote_code: bool) -> Member:
    """A member from its folder. Raises `ModelError` where it holds no weights that can be averaged."""
    if not path.is_dir():
        raise ModelError(
            "there is no such folder",
            where=str(path),
            need="a folder that holds a reward model",
            fix="for a model on the hub: hf download NAME --local-dir FOLDER",
        )
    if (path / "model" / "config.json").is_file():
        raise ModelError(
            "this folder is a checkpoint; the model is inside it", where=str(path), fix=f"use {path}/model"
        )
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).to_dict()
    except (OSError, ValueError, StrictDataclassError) as error:
        raise ModelError(
            "the model's configuration cannot be read",
            where=str(path),
            got=str(error).strip().split("\n")[0],
            need="a folder with config.json",
        ) from error
    if config.get("quantization_config"):
        raise ModelError(
            "quantised weights cannot be averaged",
            where=str(path),
            field="quantization_config",
            got=config["quantization_config"],
            need="weights in float32, bfloat16 or float16",
        )
    return Member(path, config, _tensor_files(path))


def _tensor_files(path: Path) -> dict[str, str]:
    """The file of each tensor, in the order of the files."""
    if (path / WEIGHTS_FILE).is_file():
        with _safely(path / WEIGHTS_FILE) as file, safe_open(file, framework="pt") as tensors:
            return dict.fromkeys(tensors.keys(), WEIGHTS_FILE)
    if not (path / INDEX_FILE).is_file():
        raise ModelError(
            "the folder has no weights that can be merged",
            where=str(path),
            got=", ".join(sorted(entry.name for entry in path.iterdir())) or "an empty folder",
            need=f"{WEIGHTS_FILE}, or {INDEX_FILE} and its files",
            fix="merge the adapter into its model and save that"
            if (path / "adapter_config.json").is_file()
            else "save the model as safetensors",
        )
    try:
        files = dict(json.loads((path / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"])
        if odd := [file for file in files.values() if Path(file).name != file]:
            raise ValueError(f"a file outside of the folder, {odd[0]}")  # the merged one would be written there too
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError("the index of the weights is damaged", where=str(path / INDEX_FILE), got=str(error)) from error
    return files


def check_alike(first: Member, tensors: Tensors, member: Member, of_it: Tensors) -> None:
    """Raise `ModelError` where configuration, tensor names or shapes differ; `tensors` and `of_it`: of both, opened."""
    _check_configs(first, member)
    _check_tensors(first, tensors, member, of_it)


def _check_configs(first: Member, member: Member) -> None:
    found = _first_difference(first.config, member.config, "")
    if found is not None:
        key, one, other = found
        raise ModelError(
            "the models have different configurations",
            where=str(member.path / "config.json"),
            field=key,
            got=other,
            need=f"{one}, as in {first.path}",
            fix="merge models that were trained from one initialisation",
        )


def _first_difference(one: Any, other: Any, key: str) -> tuple[str, Any, Any] | None:
    """The key of the first value that is not the same in both, and the two values; long texts from there on."""
    if one == other:
        return None
    if isinstance(one, list) and isinstance(other, list):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if isinstance(one, str) and isinstance(other, str) and max(len(one), len(other)) > _LONG_TEXT:
        same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        start = max(0, same - _LONG_TEXT // 4)
        one, other = (repr(text[start : start + _LONG_TEXT]) for text in (one, other))
        key = f"{key}, character {same}"
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return key, one, other
    for name in dict.fromkeys([*one, *other]):
        if not _NO_MATTER.fullmatch(str(name)):
            found = _first_difference(one.get(name), other.get(name), f"{key}.{name}".lstrip("."))
            if found is not None:
                return found
    return None


def _check_tensors(first: Member, tensors: Tensors, member: Member, of_it: Tensors) -> None:
    if odd := sorted(first.files.keys() ^ member.files.keys()):
        has, lacks = (first, member) if odd[0] in first.files else (member, first)
        raise ModelError(
            "the models have different tensors",
            where=str(member.path),
            field=odd[0],
            got=f"in {has.path}, not in {lacks.path}",
            need="the same names in all members",
        )
    for name in first.files:
        if tensors.shape(name) != of_it.shape(name):
            raise ModelError(
                "the models have tensors of different shapes",
                where=str(member.path),
                field=name,
                got=of_it.shape(name),
                need=f"{tensors.shape(name)}, as in {first.path}",
            )
    if not any(is_head(name) for name in first.files):
        raise ModelError(
            "there is no reward head among the tensors",
            where=str(first.path),
            got=f"{len(first.files)} tensors, as {next(iter(first.files), 'none')}",
            need="reward models: " + " or ".join(f"{head}.weight" for head in _HEADS[:2]),
        )


def check_renderings(members: Sequence[Member], *, trust_remote_code: bool) -> None:
    """Raise `ModelError` unless all make the same tokens of the same messages."""
    first, *others = members
    tokenizer = load_tokenizer(str(first.path), trust_remote_code=trust_remote_code)
    contract = read_contract(first.path)
    for member in others:
        other = load_tokenizer(str(member.path), trust_remote_code=trust_remote_code)
        found = _tokenizer_difference(tokenizer, other)
        its_contract = read_contract(member.path)
        if found is None and contract is not None and its_contract is not None:
            parts = {"rendering", "read", "heads"}
            found = _first_difference(contract.model_dump(include=parts), its_contract.model_dump(include=parts), "")
        if found is not None:
            field, one, its = found
            raise ModelError(
                "the models do not read conversations alike",
                where=str(member.path),
                field=field,
                got=its,
                need=f"{one}, as in {first.path}",
                fix="merge models that were exported with one tokenizer, chat template and length limit",
            )


def _tokenizer_difference(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> tuple[str, Any, Any] | None:
    vocabularies = one.get_vocab(), other.get_vocab()
    if vocabularies[0] != vocabularies[1]:
        odd = {token for token, _ in vocabularies[0].items() ^ vocabularies[1].items()}
        token = min(odd, key=lambda t: min(v[t] for v in vocabularies if t in v))
        ids = [vocabulary.get(token) for vocabulary in vocabularies]
        return "vocabulary", f"id {ids[0]} for the token {token!r}", f"id {ids[1]} for the token {token!r}"
    parts = _tokenizer_parts(one), _tokenizer_parts(other)
    return _first_difference(*parts, "tokenizer") or _first_difference(
        {"chat_template": one.chat_template}, {"chat_template": other.chat_template}, ""
    )


def _tokenizer_parts(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    parts: dict[str, Any] = {"special_tokens": dict(tokenizer.special_tokens_map)}
    if tokenizer.is_fast:
        # Padding and truncation are leftovers of the last call; "dropout" is the one field of the rest that may differ.
        parts |= {**json.loads(tokenizer.backend_tokenizer.to_str()), "padding": None, "truncation": None}
    return parts


def is_head(name: str) -> bool:
    """Whether a tensor of this name belongs to the score head."""
    return name.split(".")[0] in _HEADS


@contextlib.contextmanager
def _safely(path: Path) -> Iterator[Path]:
    try:
        yield path
    except (OSError, SafetensorError) as error:
        raise ModelError("the weights cannot be read", where=str(path), got=str(error).split("\n")[0]) from error
