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

import json
import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from treeward.errors import ConfigError, ModelError
from treeward.model.contract import CONTRACT_FILE, read_contract
from treeward.model.pretrained import load_tokenizer, quiet_transformers, read_config
from treeward.model.reward_model import HEAD_NAMES
from treeward.model.stored import StoredTensor, read_stored
from treeward.scoring.golden import sign_folder, tokenizer_sha256

logger = logging.getLogger(__name__)

_NOT_COPIED = {"config.json", "README.md", CONTRACT_FILE, "trainer_state.json"}
_MAY_DIFFER = {"transformers_version", "dtype", "torch_dtype", "use_cache", "initializer_range"}
_UNLIKE = 0.5

_Member = dict[str, StoredTensor]
"""The tensors of a member's folder, by name."""


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
    stored = [{tensor.name: tensor for tensor in read_stored(member).tensors} for member in members]
    first = _identity(members[0], stored[0], trust_remote_code)
    for member, tensors in zip(members[1:], stored[1:], strict=True):
        _check_alike(first, _identity(member, tensors, trust_remote_code), members[0], member)
    partial = output.parent / f".{output.name}.{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        merge = _write(members, stored, shares, dtype, partial, output)
        contract = read_contract(members[0])
        like = contract and contract.model_copy(update={"reward_shaping": None})
        sign_folder(partial, like=like, device=device, trust_remote_code=trust_remote_code)
        os.rename(partial, output)
    except (OSError, SafetensorError) as error:  # safetensors has its own for a full disk
        raise ModelError("the merged model cannot be written", where=str(output), got=str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
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


def _identity(folder: Path, tensors: _Member, trust_remote_code: bool) -> dict[str, Any]:
    """What members must have in common."""
    config = read_config(str(folder), trust_remote_code).to_dict()
    tokenizer = load_tokenizer(str(folder), trust_remote_code=trust_remote_code)
    contract = read_contract(folder)
    of_config = {name: value for name, value in config.items() if not (name.startswith("_") or "drop" in name)}
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {}
    return {
        **{f"config.{name}": value for name, value in of_config.items() if name not in _MAY_DIFFER},
        "chat_template": tokenizer.chat_template,
        "tokenizer": tokenizer_sha256(tokenizer),
        **{f"tokenizer.{name}": backend.get(name) for name in ("normalizer", "pre_tokenizer")},
        **{name: list(tensor.shape) for name, tensor in tensors.items()},
        **({} if contract is None else contract.model_dump(include={"rendering", "read", "heads"})),
    }


def _check_alike(first: dict[str, Any], other: dict[str, Any], first_folder: Path, folder: Path) -> None:
    for name in dict.fromkeys([*first, *other]):
        one, its = first.get(name), other.get(name)
        if one != its and not (name in {"rendering", "read", "heads"} and None in (one, its)):  # there is no contract
            raise ModelError(
                "the models differ, and cannot be averaged",
                where=str(folder),
                field=name,
                got=its,
                need=f"{one}, as in {first_folder}",
                fix="merge models that were trained from one initialisation and exported in one way",
            )


def _write(
    members: Sequence[Path],
    stored: Sequence[_Member],
    shares: tuple[float, ...],
    dtype: torch.dtype | None,
    partial: Path,
    output: Path,
) -> Merge:
    products = {of_head: torch.zeros(len(members), 3, dtype=torch.float64) for of_head in (False, True)}
    dtypes: Counter[torch.dtype] = Counter()
    for file, tensors in groupby(sorted(stored[0].values(), key=lambda one: one.file), lambda one: one.file):
        averaged: dict[str, Tensor] = {}
        for name in (tensor.name for tensor in tensors):
            values = [member[name].read() for member in stored]
            if broken := [str(m) for m, value in zip(members, values, strict=True) if not value.isfinite().all()]:
                raise ModelError("the weights hold NaN or infinity", where=broken[0], field=name)
            if not all(value.is_floating_point() for value in values):
                same = [value.dtype == values[0].dtype and value.equal(values[0]) for value in values]
                if other := [str(m) for m, is_same in zip(members, same, strict=True) if not is_same]:
                    raise ModelError("a tensor of whole numbers differs: it has no average", where=other[0], field=name)
            of_head = name.split(".")[0] in HEAD_NAMES
            averaged[name] = average = _average(values, shares, None if of_head else dtype)
            if average.is_floating_point() and average.dim() > 1:
                products[of_head] += torch.tensor([_dots(values[0], value) for value in values])
                dtypes[average.dtype] += 0 if of_head else average.numel()
        save_file(averaged, partial / file.name, metadata={"format": "pt"})
        (partial / file.name).chmod(partial.stat().st_mode & 0o666)  # safetensors writes for the owner alone
    for entry in members[0].iterdir():
        if entry.is_file() and entry.suffix != ".safetensors" and entry.name not in _NOT_COPIED:
            shutil.copyfile(entry, partial / entry.name)
    cosines = {of_head: p[1:, 0] / (p[1:, 1] * p[1:, 2]).sqrt() for of_head, p in products.items()}
    merge = Merge(
        output,
        tuple(members),
        shares,
        tuple(cosines[False].nan_to_num(1.0).tolist()),
        tuple(cosines[True].nan_to_num(1.0).tolist()),
        dtypes.most_common(1)[0][0],
        sum(math.prod(tensor.shape) for tensor in stored[0].values()),
    )
    config = json.loads((members[0] / "config.json").read_text(encoding="utf-8"))
    config = {name: value for name, value in config.items() if name not in ("_name_or_path", "torch_dtype")}
    config["dtype"] = str(merge.dtype).removeprefix("torch.")
    (partial / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (partial / "README.md").write_text(_card(merge), encoding="utf-8")
    return merge


def _average(values: Sequence[Tensor], shares: Sequence[float], dtype: torch.dtype | None) -> Tensor:
    """In float64; whole numbers are equal."""
    if not values[0].is_floating_point():
        return values[0]
    total, widest = torch.zeros(values[0].shape, dtype=torch.float64), values[0].dtype
    for value, share in zip(values, shares, strict=True):
        total += share * value.double()
        widest = torch.promote_types(widest, value.dtype)
    return total.to(dtype or widest)


def _dots(a: Tensor, b: Tensor) -> list[float]:
    a, b = a.double().flatten(), b.double().flatten()
    return [float(a @ b), float(a @ a), float(b @ b)]


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

A higher score is better; only differences of scores of completions of one prompt have a meaning. With the
Bradley-Terry loss, P(a is preferred to b) = sigmoid(score(a) - score(b)).

```bash
treeward score THIS_FOLDER --data conversations.jsonl --output scores.jsonl
```
"""
