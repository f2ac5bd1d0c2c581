"""The folder of a reward model: weights, tokenizer, template and card, loadable with plain transformers.

    export_model(model, tokenizer, Path("results/rm/final"), rendering=renderer.settings, card=text)
    AutoModelForSequenceClassification.from_pretrained("results/rm/final", dtype="float32")    # gives the same scores

`treeward.scoring.golden.sign_folder` then writes the scoring contract into the folder: everything that a score depends
on and plain transformers has no place for. It holds scores, so the model must be run for it.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from treeward.errors import ModelError
from treeward.model.lora import plain_state
from treeward.model.policy_model import PolicyModel
from treeward.model.reward_model import RewardModel, head_name

HTTP_ERROR: type[Exception] = HfHubHTTPError.__mro__[1]
"""Base error of the hub's HTTP client, raised if there is no connection."""


def export_model(
    model: RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    rendering: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    card: str | None = None,
) -> None:
    """Write a model folder; the caller makes it atomic. Adapters are merged into the weights.

    `rendering`: the settings of the `Renderer` that was used; its template becomes the tokenizer's. `dtype`: of the
    backbone's weights, None for what it is; the head's are float32 always. `card`: the text of README.md.
    """
    head, dtype = head_name(model.hf), dtype or model.hf.dtype
    state = plain_state(model, dtype)
    for name, tensor in model.hf.state_dict().items():
        if name.split(".")[0] == head and tensor.is_floating_point():
            state[name] = tensor.detach().to("cpu", torch.float32)
    # Otherwise pipelines of transformers, and servers like them, apply a sigmoid to a single label.
    changes = {"dtype": dtype, "problem_type": "regression"}
    _write(model.hf, tokenizer, folder, state=state, changes=changes, chat_template=rendering["chat_template"])
    if card is not None:
        (folder / "README.md").write_text(card, encoding="utf-8")


def _write(
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    state: dict[str, torch.Tensor],
    changes: Mapping[str, Any],
    chat_template: str,
) -> None:
    """Write `state` as the weights of `hf`, its configuration with `changes`, and the tokenizer with the template.

    Model and tokenizer stay as they are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own_dtype, own_template = hf.config.dtype, tokenizer.chat_template
    quantizer = vars(hf).pop("hf_quantizer", None)  # it would write its own weights instead
    try:
        hf.save_pretrained(folder, state_dict=state)
        config = copy.deepcopy(hf.config)
        vars(config).pop("quantization_config", None)  # `state` has whole weights
        for name, value in changes.items():
            setattr(config, name, value)
        config.save_pretrained(folder)
        tokenizer.chat_template = chat_template
        tokenizer.save_pretrained(folder)
    finally:
        hf.config.dtype, tokenizer.chat_template = own_dtype, own_template  # saving sets the dtype of the weights
        if quantizer is not None:
            hf.hf_quantizer = quantizer


def export_policy(
    policy: PolicyModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    chat_template: str,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a folder that plain transformers loads; the caller makes it atomic. Adapters are merged into the weights.

    `dtype`: None for the weights'. The policy stays as it is.
    """
    changes = {"dtype": dtype or policy.hf.dtype}
    state = plain_state(policy, dtype)
    _write(policy.hf, tokenizer, folder, state=state, changes=changes, chat_template=chat_template)


def push_folder(folder: Path, repo_id: str, *, private: bool) -> str:
    """Upload a model folder to the hub, and return its page there.

    `repo_id`: without an organisation it is in the account that is logged in. Raises `ModelError` if the hub refuses;
    the folder stays.
    """
    api = HfApi()
    try:
        page = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=page.repo_id, folder_path=folder, commit_message="Upload reward model")
        return str(page)
    except (OSError, ValueError, HTTP_ERROR) as error:
        raise ModelError(
            "the model cannot be uploaded",
            where=f"hub.repo_id: {repo_id}",
            got=str(error).partition("\n")[0],
            fix=f"hf auth login, then hf upload {repo_id} {shlex.quote(str(folder))}{' --private' if private else ''}",
        ) from error
