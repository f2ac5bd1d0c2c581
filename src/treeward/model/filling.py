"""Filling a model that was made without weights and sharded: the main process loads it, and sends
the others theirs.

    model = load_reward_model(name, on_meta=True, ...).model    # no weight has memory
    shard(model, mesh, ...)
    model.fill(device)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from treeward import processes
from treeward.model.lora import plain_weights
from treeward.model.shards import put
from treeward.model.wrapped import WrappedModel


def without_weights(model_class: Any, config: PreTrainedConfig, **settings: Any) -> PreTrainedModel:
    """A float32 model on the meta device. `settings`: `trust_remote_code`, for an automatic class
    of transformers."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    with torch.device("meta"):
        if hasattr(model_class, "from_config"):  # an automatic class
            hf = model_class.from_config(config, **options, **settings)
        else:
            hf = model_class._from_config(config, **options)
    return hf.eval()  # type: ignore[no-any-return]


@torch.no_grad()
def fill(model: WrappedModel, load_whole: Callable[[], PreTrainedModel]) -> None:
    """Fill a model that has memory; every process calls it. `load_whole`: loads it as a single
    process does."""
    restore_buffers(model)
    weights = {name: weight for name, weight, _ in plain_weights(model)}
    state: dict[str, Tensor] = {}  # stays empty on the others

    def load() -> None:
        state.update(load_whole().state_dict())
        assert weights.keys() <= state.keys(), weights.keys() - state.keys()

    with processes.patience() as group:
        processes.on_main(load, group)
    for name, weight in weights.items():
        # Taken out one by one: the main process frees what it has sent.
        put(weight, processes.broadcast_tensor(state.pop(name, None), weight))


def restore_buffers(model: WrappedModel) -> None:
    """Compute the buffers that no checkpoint has (rotary frequencies), on the computing device, and
    tie weights, as transformers does when it loads."""
    hf = model.hf
    hf.tie_weights()
    # `initialize_weights` leaves alone whatever has the mark. All that a checkpoint has gets it, so
    # that no weight is drawn again; modules lose it, so that their other buffers are computed.
    for tensor in hf.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    for module in hf.modules():
        vars(module).pop("_is_hf_initialized", None)
    hf.initialize_weights()
    for module in hf.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(model.device)
