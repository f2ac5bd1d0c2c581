"""What is read from the last hidden states beside the values of the head: the spread of a score.

    reader = read_spread("results/rm/final", contract, model)
    model.beside = reader                                   # `read_tokens` has one column more
    write_spread(reader, Path("results/rm/final"))          # the name of its file, and a SHA-256

The spread of a score is |A (h - mu)|: h is what the head reads, mu the mean of it over the
completions that the head was trained on, and A' A the inverse Hessian of a Laplace approximation
(`scoring/laplace.py`). Bradley-Terry fixes only differences of scores, so it is the standard
deviation of the difference to the average completion. Of the difference of two completions it is
|A (h_1 - h_2)|.

Shapes: N places, D features.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from treeward.errors import ModelError
from treeward.model.contract import CONTRACT_FILE, ScoringContract, file_of_model
from treeward.model.heads import HiddenReader
from treeward.model.reward_model import RewardModel
from treeward.storage import atomic_file

SPREAD_FOLDER = "spread"
"""Within a model's folder. Not beside the weights: other programs, as vLLM, load every file of
safetensors that lies there as weights."""
_NAME_DIGITS = 12
_WHITENING = "whitening"
_MEAN = "mean"


class SpreadReader(HiddenReader):
    """The spread of each score, (N, 1). `whitening_DD`: A; `mean_D`: mu; both float32."""

    num_values = 1
    whitening_DD: Tensor
    mean_D: Tensor

    def __init__(self, whitening_DD: Tensor, mean_D: Tensor) -> None:
        super().__init__()
        # Not in a state dict: they are no weights of the model.
        self.register_buffer("whitening_DD", whitening_DD, persistent=False)
        self.register_buffer("mean_D", mean_D, persistent=False)

    def forward(self, hidden_ND: Tensor) -> Tensor:
        features_ND = hidden_ND.float()
        whitened_ND = self.whitened(features_ND - self.mean_D.to(features_ND.device))
        spread_N1: Tensor = torch.linalg.vector_norm(whitened_ND, dim=1, keepdim=True)
        return spread_N1

    def whitened(self, features_ND: Tensor) -> Tensor:
        """A f of each row, (N, D)."""
        if not len(features_ND):
            return features_ND
        # Row by row, and not a matrix product: that may round two rows differently, and identical
        # completions must tie exactly.
        device = features_ND.device
        whitening_DD = self.whitening_DD.to(device)  # a sharded model is elsewhere than its parts
        with torch.autocast(device.type, enabled=False):
            rows = [torch.mv(whitening_DD, feature_D) for feature_D in features_ND]
        return torch.stack(rows)


def write_spread(reader: SpreadReader, folder: Path) -> tuple[str, str]:
    """Write the file of a spread into a model folder; returns its name there, and its SHA-256.

    The name is of the content: what an older contract names stays whole until it is replaced.
    """
    tensors = {_WHITENING: reader.whitening_DD, _MEAN: reader.mean_D}
    content = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
    sha256 = hashlib.sha256(content).hexdigest()
    name = f"{SPREAD_FOLDER}/{sha256[:_NAME_DIGITS]}.safetensors"
    (folder / SPREAD_FOLDER).mkdir(exist_ok=True)
    with atomic_file(folder / name, "wb") as stream:
        stream.write(content)
    return name, sha256


def remove_other_spreads(folder: Path, kept: str) -> None:
    """Remove the files of earlier spreads; `kept` is the one that the contract names."""
    for path in (folder / SPREAD_FOLDER).glob("*.safetensors"):
        if path != folder / kept:
            path.unlink()


def read_spread(name: str | Path, contract: ScoringContract, model: RewardModel) -> SpreadReader:
    """The spread of a model in a folder or on the hub, whose contract has one.

    Raises `ModelError` for a file that is missing, damaged, or of another head.
    """
    spread = contract.spread
    assert spread is not None
    path = file_of_model(name, spread.file)
    where = str(Path(name) / spread.file)
    fix = f"restore it from the folder that was calibrated, or fit it again: {refit(name)}"
    if spread.head_sha256 != contract.weights.head_sha256:
        raise ModelError(
            "the spread was fitted to another head",
            where=str(Path(name) / CONTRACT_FILE),
            field="spread.head_sha256",
            got=spread.head_sha256[:_NAME_DIGITS],
            need=f"{contract.weights.head_sha256[:_NAME_DIGITS]}, the head of the contract",
            fix=f"fit it again: {refit(name)}",
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(
            "the file of the model's spread is missing", where=where, got=str(error), fix=fix
        ) from error
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != spread.sha256:
        raise ModelError(
            "the file of the model's spread is damaged, or another one",
            where=where,
            got=f"SHA-256 {sha256[:_NAME_DIGITS]}",
            need=f"{spread.sha256[:_NAME_DIGITS]}, as {CONTRACT_FILE} says",
            fix=fix,
        )
    try:
        tensors = load(content)
    except (SafetensorError, ValueError) as error:
        raise ModelError(
            "the file of the model's spread cannot be read", where=where, got=str(error)
        ) from error
    _, num_features = model.feature_shape
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    need = {_WHITENING: (num_features, num_features), _MEAN: (num_features,)}
    if shapes != need:
        raise ModelError(
            "the spread is of a head with other features", where=where, got=shapes, need=str(need)
        )
    return SpreadReader(tensors[_WHITENING].float(), tensors[_MEAN].float())


def refit(name: str | Path) -> str:
    """The command that fits a spread."""
    return f"treeward calibrate {name} --data HELD_OUT --trained-on TRAIN"
