"""The folder of a reward model: weights, tokenizer, template and card, loadable with plain transformers.

    export_model(model, tokenizer, Path("results/rm/final"), rendering=renderer.settings, card=text)
    AutoModelForSequenceClassification.from_pretrained("results/rm/final", dtype="float32")    # gives the same scores

`treeward.scoring.golden.sign_folder` then writes the scoring contract into the folder: everything that a score depends
on and plain transformers has no place for. It holds scores, so the model must be run for it.
"""

from __future__ import annotations

import copy
import itertools
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_NAME

from treeward import processes
from treeward.errors import ModelError
from treeward.model.lora import plain_state, plain_weights
from treeward.model.policy_model import PolicyModel
from treeward.model.reward_model import RewardModel, head_name
from treeward.model.shards import FILE_BYTES, files_by_size, whole, write_whole
from treeward.model.wrapped import WrappedModel

DeferredWrite = Callable[[ProcessGroup | None], None]
"""What remains to be written when all is staged; it is given the group of processes that only its thread uses."""

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

    Every process of a run calls it; of a sharded model each writes other files. `rendering`: the settings of the
    `Renderer` that was used; its template becomes the tokenizer's. `dtype`: of the backbone's weights, None for what it
    is; the head's are float32 always. `card`: the text of README.md. `staged`: the weights are copied to the host, and
    what is returned writes them, in any thread.
    """
    head, dtype = head_name(model.hf), dtype or model.compute_dtype or model.hf.dtype
    # Otherwise pipelines of transformers, and servers like them, apply a sigmoid to a single label.
    changes = {"dtype": dtype, "problem_type": "regression"}
    template = rendering["chat_template"]
    rest = _write(model, tokenizer, folder, dtype, head, changes=changes, chat_template=template, staged=staged)
    if card is not None:
        processes.on_main(lambda: (folder / "README.md").write_text(card, encoding="utf-8"))
    return rest


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
    file_of = _files(model, dtype)
    own = {name for name, number in file_of.items() if number % processes.size() == processes.rank()}
    state = plain_state(model, dtype, float32=head, wanted=own.__contains__, copied=staged)
    rest = partial(_write_files, model.hf, folder, state, file_of)
    if staged:
        return rest
    rest(None)
    return None


def _files(model: WrappedModel, dtype: torch.dtype | None) -> dict[str, int]:
    """The number of the file of each weight; those of a layer lie together, as transformers may save them as others."""
    layers: dict[str, int] = {}
    sizes = {name: weight.numel() * (dtype or weight.dtype).itemsize for name, weight, _ in plain_weights(model)}
    for name, size in sizes.items():
        layers[_layer(name)] = layers.get(_layer(name), 0) + size
    file_of = files_by_size(layers, FILE_BYTES)
    return {name: file_of[_layer(name)] for name in sizes}


def _layer(name: str) -> str:
    found = re.match(r".*?\.\d+\.", name)
    return found.group() if found else name


def _write_files(
    hf: PreTrainedModel,
    folder: Path,
    state: dict[str, torch.Tensor],
    file_of: Mapping[str, int],
    group: ProcessGroup | None,
) -> None:
    """Write this process's files of weights, under the names that they have in checkpoints; together with the others.

    `state`: its weights, whole. `group`: of the processes, for the thread that calls it.
    """
    tied, left_out = getattr(hf, "all_tied_weights_keys", None) or {}, hf._keys_to_ignore_on_save or ()
    own: dict[str, torch.Tensor] = {}
    numbers: dict[str, int] = {}
    for number in sorted({file_of[name] for name in state}):
        of_file = {
            name: tensor.contiguous()
            for name, tensor in state.items()
            if file_of[name] == number and name not in tied and name not in left_out
        }
        renamed = revert_weight_conversion(hf, of_file)
        own |= renamed
        numbers |= dict.fromkeys(renamed, number)
    all_numbers = {name: number for one in processes.gather(numbers, group) for name, number in one.items()}
    write_whole(folder, own, all_numbers, group=group)


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
    tied = getattr(model.hf, "all_tied_weights_keys", None) or {}
    for _, weights in itertools.groupby(plain_weights(model), key=lambda one: _layer(one[0])):
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
