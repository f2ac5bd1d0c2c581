"""Filling a model that was made without weights and sharded: each process reads only its parts.

    model = load_reward_model(name, on_meta=True, ...).model    # on the meta device: no weight has memory
    shard(model, mesh, ...)
    model.fill(device)

Weights that need a conversion, adapters beside a base, and a checkpoint that lacks more than a score head are loaded
whole by the main process, which sends the others their parts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from treeward import processes
from treeward.errors import ModelError
from treeward.model.lora import plain_weights
from treeward.model.pretrained import base_of_adapters, check_used
from treeward.model.reward_model import is_of_head
from treeward.model.shards import own_part, put
from treeward.model.wrapped import WrappedModel

logger = logging.getLogger(__name__)


def without_weights(model_class: Any, config: PreTrainedConfig, **settings: Any) -> PreTrainedModel:
    """A float32 model on the meta device. `settings`: `trust_remote_code`, for an automatic class of transformers."""
    with torch.device("meta"):
        make = getattr(model_class, "from_config", None)
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        hf = make(config, **options, **settings) if make else model_class._from_config(config, **options)
    return hf.eval()  # type: ignore[no-any-return]


@torch.no_grad()
def fill(
    model: WrappedModel, name: str, load_whole: Callable[[], PreTrainedModel], draw_head: Callable[[], None] | None
) -> None:
    """Read the weights of `name` into a model that has memory; every process calls it. `load_whole`: loads the model as
    a single process does. `draw_head`: draws a head that the checkpoint lacks; None if it must have one."""
    restore_buffers(model)
    weights = {plain: weight for plain, weight, _ in plain_weights(model)}
    embeddings: Any = model.hf.get_input_embeddings()
    own_part(embeddings.weight)[0].zero_()  # a row for padding may be in no file
    sources = processes.together(lambda: _sources(model.hf, name, weights))
    read = {id(weights[target]) for target in sources}
    lacking = [plain for plain, weight in weights.items() if id(weight) not in read]
    lacks_head = bool(sources) and bool(lacking) and all(map(is_of_head, lacking))
    if lacking and not (lacks_head and draw_head is not None):
        logger.info("The main process loads the weights of %s whole, and sends the others their parts.", name)
        state: dict[str, Tensor] = {}  # stays empty on the others
        with processes.patience() as group:
            processes.on_main(lambda: state.update(load_whole().state_dict()), group)
        for plain, weight in weights.items():
            put(weight, processes.broadcast_tensor(state.pop(plain, None), weight))
        return
    processes.together(lambda: _read(sources, weights))
    if lacking and draw_head is not None:
        draw_head()
    broken = [plain for plain, weight in weights.items() if not bool(own_part(weight)[0].isfinite().all())]
    if names := sorted({plain for rank in processes.gather(broken) for plain in rank}):
        got = f"{len(names)} tensors, the first of them {names[0]}"
        raise ModelError("the weights hold NaN or infinity", where=name, got=got)


def restore_buffers(model: WrappedModel) -> None:
    """Compute the buffers that no checkpoint has (rotary frequencies), on the computing device, and tie weights, as
    transformers does when it loads."""
    hf = model.hf
    hf.tie_weights()
    for tensor in hf.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    for module in hf.modules():
        vars(module).pop("_is_hf_initialized", None)
    hf.initialize_weights()
    for module in hf.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(model.device)


def _sources(hf: PreTrainedModel, name: str, weights: Mapping[str, Tensor]) -> dict[str, tuple[str, str]]:
    """For each weight its file and its name there; empty if some need a conversion."""
    if base_of_adapters(name) is not None:
        return {}
    conversions = get_model_conversion_mapping(hf)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    sources, unused = dict[str, tuple[str, str]](), set[str]()
    try:
        file = cached_file(name, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
        files = [file] if file else get_checkpoint_shard_files(name, cached_file(name, SAFE_WEIGHTS_INDEX_NAME))[0]
        for path in files:
            with safe_open(path, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 (it is no mapping)
                    target, pattern = rename_source_key(key, renamings, converters, hf.base_model_prefix, dict(weights))
                    if target not in weights and key in weights:
                        target, pattern = key, None
                    if pattern is not None:
                        return {}  # other tensors than the model's, as the experts of some mixtures
                    if target not in weights:
                        unused.add(target)
                        continue
                    shape, needed = opened.get_slice(key).get_shape(), list(weights[target].shape)
                    # an embedding in the file may lack the row that was added for padding
                    may_lack_row = not is_of_head(target) and len(needed) == 2
                    if shape != needed and not (may_lack_row and shape == [needed[0] - 1, needed[1]]):
                        return {}
                    sources[target] = (str(path), key)
    except (OSError, SafetensorError) as error:
        raise ModelError("the model cannot be loaded", where=name, got=str(error)) from error
    check_used(hf, unused, name)
    return sources


def _read(sources: Mapping[str, tuple[str, str]], weights: Mapping[str, Tensor]) -> None:
    for path in dict.fromkeys(path for path, _ in sources.values()):
        with safe_open(path, framework="pt") as opened:
            for target, (target_path, key) in sources.items():
                if target_path == path:
                    part = opened.get_slice(key)
                    put(weights[target], part if part.get_shape() else opened.get_tensor(key))
