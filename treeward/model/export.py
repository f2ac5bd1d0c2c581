"""The folder of a reward model: weights, tokenizer, template and card, loadable with plain transformers.

    export_model(model, tokenizer, Path("results/rm/final"), rendering=renderer.settings, card=text)
    AutoModelForSequenceClassification.from_pretrained("results/rm/final")    # gives the same scores

`reward_contract.json` beside the weights holds what plain transformers has no place for, and what a score depends on.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from transformers import PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from treeward.errors import ModelError
from treeward.model.reward_model import RewardModel, head_name

__all__ = ["CONTRACT_FILE", "export_model", "push_folder", "read_contract"]

CONTRACT_FILE = "reward_contract.json"
_CONTRACT_VERSION = 1
# The HTTP client's own base error: the hub's library lets it through where there is no connection.
_HTTP_ERROR: type[Exception] = HfHubHTTPError.__mro__[1]


def export_model(
    model: RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    rendering: Mapping[str, Any],
    read_token: str | None = None,
    dtype: torch.dtype = torch.float32,
    card: str | None = None,
) -> None:
    """Write a model folder; the caller makes it atomic.

    `rendering`: the settings of the `Renderer` that was used; its template becomes the tokenizer's. `read_token`: what
    it ends conversations with, so that whoever scores can check it. `dtype`: of the backbone's weights; the head's are
    float32 always. `card`: the text of README.md.
    """
    folder.mkdir(parents=True, exist_ok=True)
    head = head_name(model.hf)
    state = {
        name: tensor.detach().to("cpu", torch.float32 if name.split(".")[0] == head else dtype)
        for name, tensor in model.hf.state_dict().items()
        if tensor.is_floating_point()
    } | {name: tensor for name, tensor in model.hf.state_dict().items() if not tensor.is_floating_point()}
    before = model.hf.config.dtype
    model.hf.save_pretrained(folder, state_dict=state)
    model.hf.config.dtype = before
    # transformers has written the dtype that the weights are trained in.
    config = copy.deepcopy(model.hf.config)
    config.dtype = dtype
    config.save_pretrained(folder)
    others = dict(rendering)
    tokenizer.chat_template = others.pop("chat_template")
    tokenizer.save_pretrained(folder)
    contract = {
        "version": _CONTRACT_VERSION,
        "read_position": "last token",
        "read_token": read_token,
        "rendering": others,
    }
    (folder / CONTRACT_FILE).write_text(json.dumps(contract, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if card is not None:
        (folder / "README.md").write_text(card, encoding="utf-8")


def push_folder(folder: Path, repo_id: str, *, private: bool) -> None:
    """Upload a model folder to the hub. Raises `ModelError` where the hub refuses; the folder stays."""
    api = HfApi()
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload reward model")
    except (OSError, ValueError, _HTTP_ERROR) as error:
        raise ModelError(
            "the model cannot be uploaded",
            where=f"hub.repo_id: {repo_id}",
            got=str(error).splitlines()[0] if str(error) else type(error).__name__,
            need="a login that may write to this repository, and a network",
            fix=f"hf auth login, then hf upload {repo_id} {folder}",
        ) from error


def read_contract(folder: str | Path) -> dict[str, Any] | None:
    """The contract of a model in a folder or on the hub, or None for a model that treeward has not written."""
    path = Path(folder) / CONTRACT_FILE
    if not Path(folder).is_dir():
        found = cached_file(str(folder), CONTRACT_FILE, _raise_exceptions_for_missing_entries=False)
        if found is None:
            return None
        path = Path(found)
    if not path.is_file():
        return None
    try:
        contract: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError("the scoring contract is damaged", where=str(path), got=str(error)) from error
    if contract.get("version") != _CONTRACT_VERSION:
        raise ModelError(
            "the scoring contract is of another version",
            where=str(path),
            got=contract.get("version"),
            need=str(_CONTRACT_VERSION),
            fix="use the treeward version that wrote the model",
        )
    return contract
