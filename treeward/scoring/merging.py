"""`merge_models`: the weights of several reward models averaged into one, with a scoring contract of its own.

    merge = merge_models(["results/a/final", "results/b/final"], "results/merged")
    AutoModelForSequenceClassification.from_pretrained("results/merged")       # as fast as one member

    theta = sum_i w_i theta_i,  w_i >= 0,  sum_i w_i = 1        (WARM: Rame et al. 2024, arXiv 2401.12187)

The members must come from one initialisation, the same pretrained weights and the same head, and differ in what came
after: data order, seed, learning rate. Files cannot prove that. Checked is what they can show: configuration, tensors,
tokenizer, template and scoring contract are the same; and a warning names weights that point in unlike directions.
Calibration and reward shaping hold for the members' scores only: `treeward calibrate` fits new ones.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from treeward.errors import ConfigError, ModelError
from treeward.model.contract import CONTRACT_FILE, read_contract
from treeward.model.pretrained import load_tokenizer, quiet_transformers, read_config
from treeward.scoring.golden import sign_folder

__all__ = ["Merge", "merge_models"]

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_NOT_COPIED = {"config.json", "README.md", _INDEX, CONTRACT_FILE, "trainer_state.json"}
_HEADS = ("score", "classifier", "classification_head", "vqa_classifier", "sequence_summary")
_MAY_DIFFER = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "initializer_range"}
_UNLIKE = 0.5


@dataclass(frozen=True, slots=True)
class Merge:
    """What was merged. `weights`: the share of each member.

    `similarities`: for each member after the first, the cosine between its backbone's matrices and the first's: near 1
    for models trained from one initialisation, near 0 for others; `head_similarities`: that of the heads. `dtype`: of
    most of the backbone on disk.
    """

    folder: Path
    members: tuple[Path, ...]
    weights: tuple[float, ...]
    similarities: tuple[float, ...]
    head_similarities: tuple[float, ...]
    dtype: torch.dtype
    num_parameters: int


def merge_models(
    folders: Sequence[str | Path],
    output: str | Path,
    *,
    weights: Sequence[float] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> Merge:
    """Average the members in `folders` into a new folder `output`, with the first member's tokenizer and configuration.

    `weights`: each member's share; None: equal shares. `dtype`: of the backbone on disk; None: each tensor keeps the
    members' own, or the wider of them. The head keeps its own in any case. `device`: where the golden conversations of
    the contract are scored. The folder appears whole or not at all.

    Raises `ConfigError` for wrong shares and an `output` that exists, `ModelError` for members that cannot be averaged;
    it names the first difference.
    """
    quiet_transformers()
    output = Path(output).expanduser()
    if output.exists():
        raise ConfigError(
            "the output exists already", where=str(output), need="a new folder", fix="remove it, or name another"
        )
    shares = _shares(weights, len(folders))
    members = [Path(folder).expanduser() for folder in folders]
    first = _identity(members[0], trust_remote_code)
    for member in members[1:]:
        _check_alike(first, _identity(member, trust_remote_code), members[0], member)
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(_open(member)) for member in members]
        for one, member in zip(opened[1:], members[1:], strict=True):
            shapes = [
                {name: str(file.get_slice(name).get_shape()) for name, file in x.items()} for x in (opened[0], one)
            ]
            _check_alike(shapes[0], shapes[1], members[0], member)
        if not any(_is_head(name) for name in opened[0]):
            raise ModelError(
                "there is no reward head among the tensors",
                where=str(members[0]),
                got=f"{len(opened[0])} tensors, the first of them {next(iter(opened[0]))}",
                need="reward models: score.weight or classifier.weight",
            )
        with _new_folder(output) as partial:
            merge = _write(members, opened, shares, dtype, partial, output)
            contract = read_contract(members[0])
            sign_folder(
                partial,
                like=contract and contract.model_copy(update={"reward_shaping": None}),
                device=device,
                trust_remote_code=trust_remote_code,
            )
    for name, similarity in zip(members[1:], map(min, merge.similarities, merge.head_similarities), strict=True):
        if similarity < _UNLIKE:
            logger.warning(
                "The weights of %s and %s point in unlike directions (cosine %.2f): averaging is for models trained "
                "from one initialisation, others lose what they have learnt. An ensemble of them works.",
                members[0],
                name,
                similarity,
            )
    return merge


def _shares(weights: Sequence[float] | None, num_members: int) -> tuple[float, ...]:
    if num_members < 2:
        raise ConfigError("there is nothing to merge", got=f"{num_members} models", need="two or more")
    shares = (1 / num_members,) * num_members if weights is None else tuple(float(weight) for weight in weights)
    if len(shares) != num_members or not all(share >= 0 for share in shares) or abs(math.fsum(shares) - 1) > 1e-6:
        raise ConfigError(
            "the weights are not shares of these models",
            field="weights",
            got=", ".join(f"{share:g}" for share in shares) + f" for {num_members} models",
            need="one number from 0 to 1 for each model, with the sum 1",
        )
    return tuple(share / math.fsum(shares) for share in shares)


def _identity(folder: Path, trust_remote_code: bool) -> dict[str, Any]:
    """What members must have in common, beside their tensors."""
    if not folder.is_dir():
        raise ModelError(
            "there is no such folder",
            where=str(folder),
            need="a folder that holds a reward model",
            fix="for a model on the hub: hf download NAME --local-dir FOLDER",
        )
    config = read_config(str(folder), trust_remote_code).to_dict()
    tokenizer = load_tokenizer(str(folder), trust_remote_code=trust_remote_code)
    contract = read_contract(folder)
    parts: dict[str, Any] = {
        f"config.{name}": value
        for name, value in config.items()
        if name not in _MAY_DIFFER and "drop" not in name and not name.startswith("_")
    }
    parts["chat_template"] = tokenizer.chat_template
    parts["special_tokens"] = dict(tokenizer.special_tokens_map)
    parts["vocabulary"] = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if tokenizer.is_fast:
        # Padding and truncation are leftovers of the tokenizer's last call.
        backend = {**json.loads(tokenizer.backend_tokenizer.to_str()), "padding": None, "truncation": None}
        parts |= {f"tokenizer.{name}": value for name, value in backend.items()}
    if contract is not None:
        parts |= contract.model_dump(include={"rendering", "read", "heads"})
    return parts


def _check_alike(first: dict[str, Any], other: dict[str, Any], first_folder: Path, folder: Path) -> None:
    for name in dict.fromkeys([*first, *other]):
        one, its = first.get(name), other.get(name)
        if one != its and not (name in {"rendering", "read", "heads"} and None in (one, its)):  # there is no contract
            if isinstance(one, list) and isinstance(its, list):
                one, its = next((pair for pair in zip(one, its, strict=False) if pair[0] != pair[1]), (one, its))
            raise ModelError(
                "the models differ, and cannot be averaged",
                where=str(folder),
                field=name,
                got=its,
                need=f"{one}, as in {first_folder}",
                fix="merge models that were trained from one initialisation and exported in one way",
            )


@contextlib.contextmanager
def _open(folder: Path) -> Iterator[dict[str, Any]]:
    """The open weights file of each tensor, by name."""
    files = sorted(folder.glob("*.safetensors"))
    if not files or (folder / "adapter_config.json").is_file():
        raise ModelError(
            "the folder has no weights that can be averaged",
            where=str(folder),
            got=", ".join(sorted(entry.name for entry in folder.iterdir())) or "an empty folder",
            need="safetensors of the whole model",
            fix="merge an adapter into its model first; of a checkpoint take the folder model inside it",
        )
    with contextlib.ExitStack() as stack:
        try:
            handles = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        except (OSError, SafetensorError) as error:
            raise ModelError("the weights cannot be read", where=str(folder), got=str(error)) from error
        yield {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118 (it is no mapping)


def _shapes(tensors: dict[str, Any]) -> dict[str, str]:
    return {name: str(file.get_slice(name).get_shape()) for name, file in tensors.items()}


def _write(
    members: Sequence[Path],
    opened: Sequence[dict[str, Any]],
    shares: tuple[float, ...],
    dtype: torch.dtype | None,
    partial: Path,
    output: Path,
) -> Merge:
    products = {of_head: torch.zeros(len(members), 3, dtype=torch.float64) for of_head in (False, True)}
    dtypes: Counter[torch.dtype] = Counter()
    file_of: dict[str, str] = {}
    num_bytes = num_parameters = 0
    for path in sorted(members[0].glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
        averaged: dict[str, Tensor] = {}
        for name in names:
            values = [tensors[name].get_tensor(name) for tensors in opened]
            averaged[name] = average = _average(name, values, shares, None if _is_head(name) else dtype, members)
            num_parameters, num_bytes = num_parameters + average.numel(), num_bytes + average.nbytes
            if average.is_floating_point() and average.dim() > 1:
                products[_is_head(name)] += torch.tensor([_dots(values[0], value) for value in values])
                dtypes[average.dtype] += 0 if _is_head(name) else average.numel()
        save_file(averaged, partial / path.name, metadata={"format": "pt"})
        file_of |= dict.fromkeys(names, path.name)
    if (members[0] / _INDEX).is_file():
        index = {"metadata": {"total_size": num_bytes}, "weight_map": file_of}
        (partial / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    cosines = {of_head: p[1:, 0] / (p[1:, 1] * p[1:, 2]).sqrt() for of_head, p in products.items()}
    merge = Merge(
        output,
        tuple(members),
        shares,
        tuple(cosines[False].nan_to_num(1.0).tolist()),
        tuple(cosines[True].nan_to_num(1.0).tolist()),
        dtypes.most_common(1)[0][0],
        num_parameters,
    )
    for entry in members[0].iterdir():
        if entry.is_file() and entry.suffix != ".safetensors" and entry.name not in _NOT_COPIED:
            shutil.copyfile(entry, partial / entry.name)
    config = json.loads((members[0] / "config.json").read_text(encoding="utf-8"))
    config = {name: value for name, value in config.items() if name not in ("_name_or_path", "torch_dtype")}
    config["dtype"] = str(merge.dtype).removeprefix("torch.")
    (partial / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (partial / "README.md").write_text(_card(merge), encoding="utf-8")
    return merge


def _average(
    name: str, values: Sequence[Tensor], shares: Sequence[float], dtype: torch.dtype | None, members: Sequence[Path]
) -> Tensor:
    """In float64; whole numbers must be equal."""
    if not values[0].is_floating_point():
        if not all(torch.equal(value, values[0]) for value in values):
            raise ModelError("a tensor of whole numbers differs, and has no average", where=str(members[0]), field=name)
        return values[0]
    total = torch.zeros(values[0].shape, dtype=torch.float64)
    widest = values[0].dtype
    for value, share, member in zip(values, shares, members, strict=True):
        if not bool(value.isfinite().all()):
            raise ModelError(
                "the weights hold a value that is not finite", where=str(member), field=name, need="finite numbers"
            )
        total += share * value.double()
        widest = torch.promote_types(widest, value.dtype)
    return total.to(dtype or widest)


def _dots(a: Tensor, b: Tensor) -> list[float]:
    a, b = a.double().flatten(), b.double().flatten()
    return [float(a @ b), float(a @ a), float(b @ b)]


def _is_head(name: str) -> bool:
    return name.split(".")[0] in _HEADS


@contextlib.contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """A hidden folder beside `output` that gets its name at the end, and is removed where something fails."""
    partial = output.parent / f".{output.name}.{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in partial.glob("*.safetensors"):
            path.chmod(partial.stat().st_mode & 0o666)  # safetensors writes for the owner alone
        os.rename(partial, output)
    except (OSError, SafetensorError) as error:  # safetensors has its own for a full disk
        raise ModelError("the merged model cannot be written", where=str(output), got=str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _card(merge: Merge) -> str:
    cosines = [
        "|",
        *(f"{a:.4f} | {b:.4f}" for a, b in zip(merge.similarities, merge.head_similarities, strict=True)),
    ]
    rows = "\n".join(
        f"| {'/'.join(member.parts[-2:])} | {weight:.4g} | {both} |"
        for member, weight, both in zip(merge.members, merge.weights, cosines, strict=True)
    )
    return f"""---
library_name: transformers
tags: [reward-model, treeward, merge]
---

# Reward model

The weighted average of the weights of these reward models (WARM, arXiv 2401.12187), made with treeward. The last two
columns are cosines between a model's weights and the first one's.

| model | weight | backbone | head |
|---|---|---|---|
{rows}

A higher score is better; only differences of scores of completions of one prompt have a meaning:
P(a is preferred to b) = sigmoid(score(a) - score(b)).

```bash
treeward score THIS_FOLDER --data conversations.jsonl --output scores.jsonl
```
"""
