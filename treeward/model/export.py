"""The folder of a reward model: weights, tokenizer, template and card, loadable with plain transformers.

    export_model(model, tokenizer, Path("results/rm/final"), rendering=renderer.settings, card=text)
    AutoModelForSequenceClassification.from_pretrained("results/rm/final", dtype="float32")    # gives the same scores

`treeward.scoring.golden.sign_folder` then writes the scoring contract into the folder: everything that a score depends
on and plain transformers has no place for. It holds scores, so the model must be run for it.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, split_torch_state_dict_into_shards
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import save_file
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from treeward import processes
from treeward.errors import ModelError
from treeward.model.lora import plain_state, plain_weights
from treeward.model.policy_model import PolicyModel
from treeward.model.reward_model import RewardModel, head_name
from treeward.model.shards import whole
from treeward.model.wrapped import WrappedModel

FILE_BYTES = 5 * 1000**3
"""The size of a file of weights."""

DeferredWrite = Callable[[ProcessGroup | None], None]
"""Writes weights that are staged; its argument is the group of processes that only its thread uses."""

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
    staged: bool = False,
) -> DeferredWrite | None:
    """Write a model folder; the caller makes it atomic. Adapters are merged into the weights.

    Every process of a run calls it, and the main one writes. `rendering`: the settings of the `Renderer` that was used;
    its template becomes the tokenizer's. `dtype`: of the backbone's weights, None for their own; the head's are float32
    always. `card`: the text of README.md. `staged`: the weights are copied to the host's memory, and a function is
    returned that writes them, in any thread.
    """
    head, dtype = head_name(model.hf), dtype or model.compute_dtype or model.hf.dtype
    # Otherwise pipelines of transformers, and servers like them, apply a sigmoid to a single label.
    changes = {"dtype": dtype, "problem_type": "regression"}
    template = rendering["chat_template"]
    write = _write(model, tokenizer, folder, dtype, head, changes=changes, chat_template=template, staged=staged)
    if card is not None:
        processes.on_main(lambda: (folder / "README.md").write_text(card, encoding="utf-8"))
    return write


def _write(
    model: WrappedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype | None,
    head: str | None,
    *,
    changes: Mapping[str, Any],
    chat_template: str,
    staged: bool,
) -> DeferredWrite | None:
    """Write the weights, the configuration with `changes`, and the tokenizer with the template.

    Model and tokenizer stay as they are.
    """
    processes.on_main(lambda: _write_settings(model.hf, tokenizer, folder, changes, chat_template))
    state = plain_state(model, dtype, float32=head, copied=staged)

    def write(group: ProcessGroup | None) -> None:
        processes.on_main(lambda: _write_weights(model.hf, folder, state), group)

    if staged:
        return write
    write(None)
    return None


def _write_weights(hf: PreTrainedModel, folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Write the weights under the names that they have in checkpoints; those that are tied or ignored are left out."""
    left_out = {*(getattr(hf, "all_tied_weights_keys", None) or ()), *(hf._keys_to_ignore_on_save or ())}
    kept = {name: weight for name, weight in state.items() if name not in left_out}
    weights = {name: weight.contiguous() for name, weight in revert_weight_conversion(hf, kept).items()}
    split = split_torch_state_dict_into_shards(
        weights, filename_pattern="model{suffix}.safetensors", max_shard_size=FILE_BYTES
    )
    for file, names in split.filename_to_tensors.items():
        save_file({name: weights[name] for name in names}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _write_settings(
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    changes: Mapping[str, Any],
    chat_template: str,
) -> None:
    """Write all that is not weights."""
    folder.mkdir(parents=True, exist_ok=True)
    own_dtype, own_template = hf.config.dtype, tokenizer.chat_template
    quantizer = vars(hf).pop("hf_quantizer", None)  # it would write its own weights instead
    try:
        hf.save_pretrained(folder, state_dict={})
        (folder / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)  # an empty one
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
    staged: bool = False,
) -> DeferredWrite | None:
    """Write a folder that plain transformers loads; the caller makes it atomic. Adapters are merged into the weights.

    `dtype`: None for the weights'. The policy stays as it is. `staged`: as `export_model` has it.
    """
    dtype = dtype or policy.compute_dtype
    changes = {"dtype": dtype or policy.hf.dtype}
    return _write(policy, tokenizer, folder, dtype, None, changes=changes, chat_template=chat_template, staged=staged)


def export_configuration(
    policy: PolicyModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, chat_template: str, dtype: torch.dtype
) -> None:
    """What `export_policy` writes but for the weights: an engine that is given these later starts from it."""
    changes = {"dtype": dtype, "architectures": [type(policy.hf).__name__]}
    _write_settings(policy.hf, tokenizer, folder, changes, chat_template)


@torch.no_grad()
def exported_weights(model: WrappedModel, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of the folder, by their names in it, on the model's device; what is tied comes once.

    Of a sharded model every process iterates, with one decoder layer whole in memory at a time.
    """

    def layer(weight: tuple[str, torch.Tensor, Any]) -> str:
        match = re.match(r".*?\.\d+\.", weight[0])
        return match.group() if match else weight[0]

    tied = getattr(model.hf, "all_tied_weights_keys", None) or {}
    for _, weights in itertools.groupby(plain_weights(model), key=layer):
        of_layer = {name: whole(plain(dtype)) for name, _, plain in weights if name not in tied}
        yield from revert_weight_conversion(model.hf, of_layer).items()


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
