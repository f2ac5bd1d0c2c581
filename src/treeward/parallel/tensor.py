"""Tensor parallelism: the processes of the mesh's dimension `tensor` compute each layer together.

    cut(model, mesh)        # in every process, before FSDP shards the model

Each process has some heads of every attention and some columns of every MLP (Shoeybi et al. 2019,
arXiv 1909.08053, section 3), by PyTorch's DTensor and transformers' own plan of the model
(`base_model_tp_plan`). A policy's head and embedding are cut by the vocabulary; a reward model's
head is whole. Whole parameters that see only a process's heads are DTensors with partial gradients.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from treeward.errors import ConfigError
from treeward.model.lora import has_adapters, is_quantized
from treeward.model.policy_model import PolicyModel, VocabularyShard
from treeward.model.wrapped import WrappedModel
from treeward.parallel.mesh import TENSOR, Mesh

_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
    # The norm of a head: each process has some heads, where PyTorch's style expects some tokens.
    "replicated_with_grad_allreduce": partial(
        SequenceParallel, sequence_dim=2, use_local_output=True
    ),
}
"""PyTorch's styles by transformers' names (`transformers.distributed.tensor_parallel`)."""


def cut(model: WrappedModel, mesh: Mesh) -> None:
    """Keep this process's part of the model, whose weights must be the same in all processes; sends
    nothing. Raises `ConfigError` for a model without a plan, with adapters or four-bit layers, or
    with sizes that cannot be divided."""
    if mesh.tensor_size == 1:
        return
    assert mesh.devices is not None
    devices = mesh.devices[TENSOR]
    # All styles are found, and refused, before the first layer is cut.
    styles = _styles_of_layers(model, mesh.tensor_size)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    for layer, styles_of_layer in styles.items():
        _cut_layer(layer, styles_of_layer, devices)
    _cut_vocabulary(model, devices)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)  # SequenceParallel has set it


def check_cut(model: WrappedModel, size: int) -> None:
    """Raise the `ConfigError` of `cut` for a model that `size` processes cannot compute
    together."""
    if size > 1:
        _styles_of_layers(model, size)


def _styles_of_layers(model: WrappedModel, size: int) -> dict[nn.Module, dict[str, str]]:
    """transformers' style for each module of each layer, by its name in the layer."""
    styles: dict[nn.Module, dict[str, str]] = {}
    for name, module in model.backbone.named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            styles[module] = _styles(model, name, module, size)
    if not styles:
        raise _refused(
            "this model's layers are not known",
            type(model.hf).__name__,
            "a decoder of transformers",
        )
    return styles


def _refused(summary: str, got: object, need: str) -> ConfigError:
    field = "policy.dtensor_cfg.tensor_parallel_size"
    return ConfigError(
        summary, field=field, got=got, need=need, fix=f"set {field}=1: FSDP alone shards any model"
    )


def _styles(model: WrappedModel, name: str, layer: nn.Module, size: int) -> dict[str, str]:
    """transformers' style for each module of a layer that has one, by its name in the layer."""
    family = type(model.hf).__name__
    if any(map(is_quantized, layer.modules())):
        raise _refused(
            "layers of 4 bits cannot be cut", "load_in_4bit: true", "load_in_4bit: false"
        )
    if has_adapters(model):
        raise _refused(
            "adapters cannot be cut", "lora_cfg.enabled: true", "lora_cfg.enabled: false"
        )
    plan: dict[str, str] = getattr(model.backbone.config, "base_model_tp_plan", None) or {}
    # Plans name modules, and in mixtures of experts parameters.
    parts = dict(layer.named_modules()) | dict(layer.named_parameters())
    styles = {}
    for part in parts:
        # the plan writes `layers.*.mlp` for every layer
        name_in_plan = re.sub(r"\.\d+(?=\.|$)", ".*", f"{name}.{part}")
        if name_in_plan in plan:
            styles[part] = plan[name_in_plan]
    if not styles:
        raise _refused(
            "transformers has no plan to cut this model", family, "a family with base_model_tp_plan"
        )
    blocks = set()
    cut_blocks = set()
    for part, style in styles.items():
        block = part.partition(".")[0]
        blocks.add(block)
        if style in ("colwise", "rowwise"):
            cut_blocks.add(block)
    for part, module in layer.named_modules():
        # modules that would get a DTensor, or see a part, and are not in the plan
        among = blocks if isinstance(module, nn.Linear) else cut_blocks
        has_weights = next(module.parameters(recurse=False), None) is not None
        if has_weights and part.partition(".")[0] in among:
            styles.setdefault(part, "none")
    for part, style in styles.items():
        if style not in _STYLES:
            raise _refused(
                f"{family} cannot be cut", f"{part}: {style}", f"a plan of {', '.join(_STYLES)}"
            )
        module = parts[part]
        width = {"colwise": "out_features", "rowwise": "in_features"}.get(style, "")
        # Other styles have no width that has to be divided: `size` itself stands for it.
        if getattr(module, width, size) % size:
            raise _refused(
                "the size does not divide a layer",
                f"{size} for {part} of {module}",
                f"a divisor of {width}",
            )
    # A divisor of the columns may still cut a head in two.
    cuts_attention = any(style == "colwise" and "att" in part for part, style in styles.items())
    if cuts_attention:
        config = model.hf.config.get_text_config()
        for key in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, key, None)
            if heads is not None and heads % size:
                raise _refused(
                    "the size does not divide the heads",
                    f"{size} for {key}={heads}",
                    f"a divisor of {heads}",
                )
    return styles


def _cut_layer(layer: nn.Module, styles: dict[str, str], devices: DeviceMesh) -> None:
    for part, style in styles.items():
        parallelize_module(layer.get_submodule(part), devices, _STYLES[style](), src_data_rank=None)

    def as_dtensor(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """The hidden states, the first argument or that name, as a DTensor: the gradients of the
        projections are added up before they are summed over the processes."""
        hidden = args[0] if args else kwargs["hidden_states"]
        whole = DTensor.from_local(hidden, devices, [Replicate()], run_check=False)
        if args:
            return (whole, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": whole}

    for name, child in layer.named_children():
        if any(part.startswith(f"{name}.") for part in styles):
            child.register_forward_pre_hook(as_dtensor, with_kwargs=True)


def _cut_vocabulary(model: WrappedModel, devices: DeviceMesh) -> None:
    """The embedding and the head of a policy, which may be one tensor; the embedding of a reward
    model by columns, as the row of its padding token has no gradient."""
    embedding: Any = model.hf.get_input_embeddings()
    if not isinstance(model, PolicyModel):
        parallelize_module(
            embedding, devices, ColwiseParallel(output_layouts=Replicate()), src_data_rank=None
        )
        return
    head = model.head
    if type(head) is not nn.Linear:
        raise _refused("this head cannot be cut", type(head).__name__, "a linear layer")
    # Asked before the cut, which makes a parameter of its own for each of the two.
    is_tied = head.weight is embedding.weight
    num_tokens = len(head.weight)
    parallelize_module(
        embedding, devices, RowwiseParallel(input_layouts=Replicate()), src_data_rank=None
    )
    parallelize_module(
        head, devices, ColwiseParallel(output_layouts=Replicate()), src_data_rank=None
    )
    if is_tied:
        head.weight = embedding.weight
    # DTensor gives each process the same number of rows, rounded up, and the last ones fewer.
    first = math.ceil(num_tokens / devices.size()) * devices.get_local_rank()
    model.vocabulary = VocabularyShard(first, devices.get_group())
