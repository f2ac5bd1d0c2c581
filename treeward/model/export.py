"""The folder of a reward model: weights, tokenizer, template and card, loadable with plain transformers.

    export_model(model, tokenizer, Path("results/rm/final"), rendering=renderer.settings, card=text)
    AutoModelForSequenceClassification.from_pretrained("results/rm/final")    # gives the same scores

`treeward.scoring.golden.sign_folder` then writes the scoring contract into the folder: everything that a score depends
on and plain transformers has no place for. It holds scores, so the model must be run for it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from transformers import PreTrainedTokenizerBase

from treeward.errors import ModelError
from treeward.model.reward_model import RewardModel, head_name

__all__ = ["HTTP_ERROR", "export_model", "push_folder"]

HTTP_ERROR: type[Exception] = HfHubHTTPError.__mro__[1]
"""Base error of the hub's HTTP client, raised if there is no connection."""


def export_model(
    model: RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    rendering: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    card: str | None = None,
) -> None:
    """Write a model folder; the caller makes it atomic.

    `rendering`: the settings of the `Renderer` that was used; its template becomes the tokenizer's. `dtype`: of the
    backbone's weights; the head's are float32 always. `card`: the text of README.md.
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
    # transformers has written the dtype of the trained weights.
    config = copy.deepcopy(model.hf.config)
    config.dtype = dtype
    # Otherwise pipelines of transformers, and servers like them, apply a sigmoid to a single label.
    config.problem_type = "regression"
    config.save_pretrained(folder)
    tokenizer.chat_template = rendering["chat_template"]
    tokenizer.save_pretrained(folder)
    if card is not None:
        (folder / "README.md").write_text(card, encoding="utf-8")


def push_folder(folder: Path, repo_id: str, *, private: bool) -> None:
    """Upload a model folder to the hub. Raises `ModelError` if the hub refuses; the folder stays."""
    api = HfApi()
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload reward model")
    except (OSError, ValueError, HTTP_ERROR) as error:
        raise ModelError(
            "the model cannot be uploaded",
            where=f"hub.repo_id: {repo_id}",
            got=str(error).splitlines()[0] if str(error) else type(error).__name__,
            need="a login that may write to this repository, and a network",
            fix=f"hf auth login, then hf upload {repo_id} {folder}",
        ) from error
