"""The folder of a model: weights, tokenizer and template, loadable with plain transformers.

export_model(model, tokenizer, Path("results/model"), chat_template=renderer.chat_template)
# It gives the same scores:
AutoModelForSequenceClassification.from_pretrained("results/model", dtype="float32")
"""

from __future__ import annotations

import copy
import itertools
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from treeward import processes
from treeward.errors import ModelError
from treeward.model.heads import head_name
from treeward.model.lora import plain_weights
from treeward.model.policy_model import PolicyModel
from treeward.model.shards import whole
from treeward.model.wrapped import WrappedModel

FILE_BYTES = 5 * 1000**3
"""The size of a file of weights."""

HTTP_ERROR: type[Exception] = HfHubHTTPError.__mro__[1]
"""Base error of the hub's HTTP client, raised if there is no connection."""


def export_model(
    model: WrappedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    chat_template: str,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model folder, adapters merged into the weights; the caller makes it atomic. Every
    process of a run calls it. Leaves model and tokenizer unchanged.

    `chat_template` becomes the tokenizer's. `dtype`: of the weights, None keeps theirs; a score
    head's are float32.
    """
    dtype = dtype or model.compute_dtype
    head = None
    changes: dict[str, Any] = {"dtype": dtype or model.hf.dtype}
    if not isinstance(model, PolicyModel):
        dtype = dtype or model.hf.dtype
        head = head_name(model.hf)
        if getattr(model, "step_token", None) is None:
            # Else pipelines of transformers, and servers like them, apply a sigmoid to a single
            # label. Of a classifier of tokens they apply a softmax, which gives the probabilities.
            changes["problem_type"] = "regression"
    processes.on_main(lambda: write_settings(model.hf, tokenizer, folder, changes, chat_template))
    _write_weights(folder, exported_weights(model, dtype, float32=head))


def _write_weights(folder: Path, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write weights as files of `FILE_BYTES`, one of them in memory at a time, with the index of
    transformers. Every process calls it, with the same names, and the main one writes."""
    pending: dict[str, torch.Tensor] = {}
    pending_bytes = 0
    file_numbers: dict[str, int] = {}
    total_bytes = 0
    number = 1
    # Only the main process writes, so the others hold no bytes; but each takes part in gathering a
    # sharded weight.
    device = "meta"
    if processes.is_main():
        device = "cpu"

    def write_file() -> None:
        path = folder / f"model-{number}.safetensors"
        processes.on_main(lambda: save_file(pending, path, metadata={"format": "pt"}))

    # Sizes are of the whole weights on every process, so all write, and rename, the same files.
    for name, weight in weights:
        if pending and pending_bytes + weight.nbytes > FILE_BYTES:
            write_file()
            pending = {}
            pending_bytes = 0
            number += 1
        pending[name] = weight.to(device).contiguous()
        pending_bytes += weight.nbytes
        file_numbers[name] = number
        total_bytes += weight.nbytes
    write_file()

    def name_files() -> None:
        # Only now: the names hold how many files there are.
        names = {1: SAFE_WEIGHTS_NAME}
        if number > 1:
            names = {n: f"model-{n:05d}-of-{number:05d}.safetensors" for n in range(1, number + 1)}
        for n, file in names.items():
            (folder / f"model-{n}.safetensors").rename(folder / file)
        if number > 1:
            weight_map = {key: names[n] for key, n in file_numbers.items()}
            index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
            text = json.dumps(index, indent=2)
            (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")

    processes.on_main(name_files)


def write_settings(
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    changes: Mapping[str, Any],
    chat_template: str,
) -> None:
    """Write all files but the weights. `changes`: of the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    own_dtype = hf.config.dtype
    own_template = tokenizer.chat_template
    quantizer = vars(hf).pop("hf_quantizer", None)  # it would write its own weights instead
    try:
        hf.save_pretrained(folder, state_dict={})
        (folder / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)  # an empty one
        config = copy.deepcopy(hf.config)
        vars(config).pop("quantization_config", None)  # the files have whole weights
        for name, value in changes.items():
            setattr(config, name, value)
        config.save_pretrained(folder)
        tokenizer.chat_template = chat_template
        tokenizer.save_pretrained(folder)
    finally:
        hf.config.dtype = own_dtype  # `save_pretrained` sets that of the weights
        tokenizer.chat_template = own_template
        if quantizer is not None:
            hf.hf_quantizer = quantizer


@torch.no_grad()
def exported_weights(
    model: WrappedModel, dtype: torch.dtype | None, *, float32: str | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of an export, by their names in it, on the model's device, merged and
    dequantized; tied ones come once. Every process of a sharded model iterates, with one whole
    decoder layer in memory at a time. `dtype`: None keeps theirs. `float32`: a module whose weights
    are float32."""

    def layer(weight: tuple[str, torch.Tensor, Any]) -> str:
        # `model.layers.3.` of `model.layers.3.mlp.up_proj.weight`; else a group of its own.
        match = re.match(r".*?\.\d+\.", weight[0])
        if match is None:
            return weight[0]
        return match.group()

    hf = model.hf
    left_out = {
        *(getattr(hf, "all_tied_weights_keys", None) or ()),
        *(hf._keys_to_ignore_on_save or ()),
    }
    # By layers, because a conversion of transformers joins tensors of one layer (the experts of a
    # mixture), and because one layer is what fits into memory.
    for _, weights in itertools.groupby(plain_weights(model), key=layer):
        whole_weights = {}
        for name, _, plain in weights:
            if name in left_out:
                continue
            weight_dtype = dtype
            if name.split(".")[0] == float32:
                weight_dtype = torch.float32
            whole_weights[name] = whole(plain(weight_dtype))
        # transformers saves some weights as other tensors than it loads.
        yield from revert_weight_conversion(hf, whole_weights).items()


def push_folder(folder: Path, repo_id: str, *, private: bool) -> str:
    """Upload a model folder to the hub, and return its page there. `repo_id`: without an
    organisation, in the account that is logged in. Raises `ModelError` if the hub refuses."""
    api = HfApi()
    try:
        page = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=page.repo_id, folder_path=folder, commit_message="Upload reward model"
        )
        return str(page)
    except (OSError, ValueError, HTTP_ERROR) as error:
        upload = f"hf upload {repo_id} {shlex.quote(str(folder))}"
        if private:
            upload += " --private"
        raise ModelError(
            "the model cannot be uploaded",
            where=f"hub.repo_id: {repo_id}",
            got=str(error).partition("\n")[0],
            fix=f"hf auth login, then {upload}",
        ) from error
