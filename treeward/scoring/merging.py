"""`merge_models`: the weights of several reward models averaged into one, with a scoring contract of its own.

    merge_models(["results/a/final", "results/b/final"], "results/merged")

    theta = sum_i w_i theta_i,  w_i >= 0,  sum_i w_i = 1        (WARM: Rame et al. 2024, arXiv 2401.12187)

The members must come from one initialisation, which files cannot prove. Checked is what they can show: configuration,
tensors, tokenizer, template and scoring contract are the same; and a warning names weights that point in unlike
directions. Calibration and reward shaping hold for the members' scores only.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from treeward.errors import ConfigError, ModelError
from treeward.model.contract import CONTRACT_FILE, read_contract
from treeward.model.pretrained import check_local, load_tokenizer, read_config
from treeward.model.reward_model import HEAD_NAMES
from treeward.model.stored import StoredModel, dtype_of
from treeward.scoring.golden import sign_folder, tokenizer_sha256
from treeward.tables import markdown_table

logger = logging.getLogger(__name__)

_NOT_COPIED = {"config.json", "README.md", CONTRACT_FILE, "trainer_state.json"}
_MAY_DIFFER = {"transformers_version", "dtype", "torch_dtype", "use_cache", "initializer_range"}
_UNLIKE = 0.5

_CARD = """---
library_name: transformers
tags: [reward-model, treeward, merge]
---

The weighted average of the weights of these reward models (WARM, arXiv 2401.12187), made with treeward.

"""


def merge_models(
    folders: Sequence[str | Path],
    output: str | Path,
    *,
    weights: Sequence[float] | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Average the members in `folders` into a new folder `output`, with the first member's tokenizer and configuration.

    `weights`: each member's share; None: equal shares. The folder appears whole or not at all; its path is returned.
    Raises `ConfigError` for wrong shares and an `output` that exists, `ModelError` for members that cannot be averaged.
    """

    output = Path(output).expanduser()
    if output.exists():
        raise ConfigError("the output exists already", where=str(output), need="a new folder")
    shares = _shares(weights, len(folders))
    members = [Path(folder).expanduser() for folder in folders]
    for member in members:
        check_local(str(member))
    first = _identity(members[0], trust_remote_code)
    for member in members[1:]:
        other = _identity(member, trust_remote_code)
        for name in dict.fromkeys([*first, *other]):
            need, got = first.get(name), other.get(name)
            is_optional = name in {"rendering", "read", "heads"} and None in (need, got)  # one has no contract
            if need != got and not is_optional:
                summary, need = "the models differ, and cannot be averaged", f"{need}, as in {members[0]}"
                raise ModelError(summary, where=str(member), field=name, got=got, need=need)
    partial = output.parent / f".{output.name}.{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        cosines = _write_weights(members, shares, partial)
        _write_settings(members, shares, partial)
        contract = read_contract(members[0])
        like = contract and contract.model_copy(update={"reward_shaping": None})
        sign_folder(partial, like=like, trust_remote_code=trust_remote_code)
        os.rename(partial, output)
    except (OSError, SafetensorError) as error:  # safetensors has its own for a full disk
        raise ModelError("the merged model cannot be written", where=str(output), got=str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for member, share, cosine in zip(members, shares, cosines, strict=True):
        logger.info("%.4g of %s", share, member)
        if cosine < _UNLIKE:
            logger.warning(
                "The weights of %s and %s point in unlike directions (cosine %.2f): averaging is for models trained "
                "from one initialisation, others lose what they have learnt. An ensemble of them works.",
                members[0],
                member,
                cosine,
            )
    return output


def _shares(weights: Sequence[float] | None, num_members: int) -> list[float]:
    if num_members < 2:
        raise ConfigError("there is nothing to merge", got=f"{num_members} models", need="two or more")
    shares = [1 / num_members] * num_members if weights is None else [float(weight) for weight in weights]
    if len(shares) != num_members or not all(share >= 0 for share in shares) or abs(math.fsum(shares) - 1) > 1e-6:
        raise ConfigError(
            "the weights are not shares of these models",
            field="weights",
            got=", ".join(f"{share:g}" for share in shares) + f" for {num_members} models",
            need="numbers with the sum 1",
        )
    return [share / math.fsum(shares) for share in shares]


def _identity(folder: Path, trust_remote_code: bool) -> dict[str, Any]:
    """What members must have in common."""
    config = read_config(str(folder), trust_remote_code).to_dict()
    tokenizer = load_tokenizer(str(folder), trust_remote_code=trust_remote_code)
    contract = read_contract(folder)
    return {
        **{
            f"config.{name}": value
            for name, value in config.items()
            if not (name in _MAY_DIFFER or name.startswith("_") or "drop" in name)
        },
        "chat_template": tokenizer.chat_template,
        "tokenizer": tokenizer_sha256(tokenizer),
        **{tensor.name: list(tensor.shape) for tensor in StoredModel(folder).tensors},
        **({} if contract is None else contract.model_dump(include={"rendering", "read", "heads"})),
    }


def _write_weights(members: Sequence[Path], shares: Sequence[float], partial: Path) -> list[float]:
    """Write the average of each tensor into the file that it has in the first member.

    Returns each member's cosine with the first one, of the matrices of the backbone or of the head, the lower of both:
    near 1 for models trained from one initialisation, near 0 for others.
    """
    stored = [{tensor.name: tensor for tensor in StoredModel(member).tensors} for member in members]
    files: defaultdict[str, list[str]] = defaultdict(list)
    for name, tensor in stored[0].items():
        files[tensor.file.name].append(name)
    products = torch.zeros(2, len(members), 3, dtype=torch.float64)
    for file, names in files.items():
        averaged: dict[str, Tensor] = {}
        for name in names:
            values = [member[name].read() for member in stored]
            averaged[name] = _average(name, values, shares, members)
            if values[0].is_floating_point() and values[0].dim() > 1:
                first, *others = (value.double().flatten() for value in values)
                rows = [[first @ other, first @ first, other @ other] for other in (first, *others)]
                products[int(name.split(".")[0] in HEAD_NAMES)] += torch.tensor(rows, dtype=torch.float64)
        save_file(averaged, partial / file, metadata={"format": "pt"})
        (partial / file).chmod(partial.stat().st_mode & 0o666)  # safetensors writes for the owner alone
    cosines = products[..., 0] / (products[..., 1] * products[..., 2]).sqrt()
    lowest: list[float] = cosines.nan_to_num(1.0).amin(dim=0).tolist()
    return lowest


def _average(name: str, values: Sequence[Tensor], shares: Sequence[float], members: Sequence[Path]) -> Tensor:
    """In float64; whole numbers must be equal."""
    for value, member in zip(values, members, strict=True):
        if not value.isfinite().all():
            raise ModelError("the weights hold NaN or infinity", where=str(member), field=name)
        if not (value.is_floating_point() and values[0].is_floating_point()) and not torch.equal(value, values[0]):
            raise ModelError("a tensor of whole numbers differs: it has no average", where=str(member), field=name)
    if not values[0].is_floating_point():
        return values[0]
    terms = [share * value.double() for value, share in zip(values, shares, strict=True)]
    return torch.stack(terms).sum(0).to(values[0].dtype)


def _write_settings(members: Sequence[Path], shares: Sequence[float], partial: Path) -> None:
    """The first member's other files, its configuration, and a card."""
    for entry in members[0].iterdir():
        if entry.is_file() and entry.suffix != ".safetensors" and entry.name not in _NOT_COPIED:
            shutil.copyfile(entry, partial / entry.name)
    backbone, _ = StoredModel(partial).split(HEAD_NAMES)
    config = StoredModel(members[0]).config | {"dtype": dtype_of(backbone)}
    config = {name: value for name, value in config.items() if name not in ("_name_or_path", "torch_dtype")}
    (partial / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    rows = [
        {"model": "/".join(folder.parts[-2:]), "weight": share} for folder, share in zip(members, shares, strict=True)
    ]
    (partial / "README.md").write_text(_CARD + markdown_table(rows, ["model", "weight"]) + "\n", encoding="utf-8")
