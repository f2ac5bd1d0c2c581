"""`shard`: a model over the processes of a mesh, by PyTorch's FSDP2.

    shard(model, make_mesh(config.policy.dtensor_cfg), dtype=torch.bfloat16)
    scores_S = model(batch)             # every process calls it, as often as the others

Gradients are summed over all processes: the loss is divided, once, by a count of all the data. A
process without data computes a dummy (`training.prefetch`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from treeward import processes
from treeward.model.filling import restore_buffers, without_weights
from treeward.model.heads import HEAD_NAMES
from treeward.model.lora import has_adapters, is_quantized, plain_weights
from treeward.model.policy_model import PolicyModel
from treeward.model.reward_model import RewardModel
from treeward.model.shards import own_part, put, whole
from treeward.model.wrapped import WrappedModel
from treeward.parallel.mesh import REPLICATE, SHARD, Mesh
from treeward.parallel.tensor import cut

_T = TypeVar("_T")
_Model = TypeVar("_Model", bound=WrappedModel)
_CALLED = ("heads", "features", "log_probs", "plain_logits", "within")
"""Methods of models that compute, beside `forward`."""


def shard(
    model: WrappedModel, mesh: Mesh, *, dtype: torch.dtype, cpu_offload: bool = False
) -> None:
    """Shard the weights of a model, which may be on the CPU; does nothing in a run of one process.

    `dtype`: of the computation. Trained weights, the sums of their gradients and the score head are
    float32; frozen weights beside adapters keep their dtype, and four-bit weights stay whole.
    `cpu_offload`: weights, gradients and states are in the host's memory.
    """
    if mesh.devices is None:
        return
    model.compute_device = processes.device()
    model.compute_dtype = dtype
    has_copies = mesh.devices[REPLICATE].size() > 1
    offload_policy = OffloadPolicy()
    if cpu_offload:
        offload_policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    devices = mesh.devices[SHARD]
    if has_copies:
        devices = mesh.devices[REPLICATE, SHARD]
    four_bit_weights = {module.weight for module in model.hf.modules() if is_quantized(module)}
    options: dict[str, Any] = {
        "mesh": devices,
        # Of the whole model too: what a validation gathers would else be used in the next step,
        # which a resumed run would not have.
        "reshard_after_forward": True,
        "offload_policy": offload_policy,
        "ignored_params": four_bit_weights,
    }
    head_policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if has_adapters(model):  # which compute in float32
        layer_policy = head_policy
    else:
        # Inputs are not cast: a residual stream in float32, as Mamba's, stays so between layers.
        layer_policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    if isinstance(model, RewardModel):
        head: Any = model.head
        fully_shard(head, mp_policy=head_policy, **options)
        if model.layout != "encoder":  # which calls its head; here its weights are read
            head.values_of = model.head_values
            register_fsdp_forward_method(head, "values_of")
            model.head_values = head.values_of  # type: ignore[method-assign]
    for layer in reversed(model.layers):  # one within another comes first
        fully_shard(layer, mp_policy=layer_policy, **options)
    fully_shard(model, mp_policy=layer_policy, **options)
    # FSDP gathers weights around `forward` alone, unless it is told of other methods.
    for name in _CALLED:
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Sums, and no means: the loss was divided once, by a count of all the data.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
            # experts that no token of this process has come to
            module.set_reduce_scatter_unused_params(True)


@torch.no_grad()
def plain_copy(
    model: _Model,
    mesh: Mesh,
    *,
    saved: torch.dtype,
    computed: torch.dtype,
    device: torch.device | None,
) -> _Model:
    """A copy of `model` as an export in the dtype `saved` has it, without adapters, which computes
    in `computed`. Every process calls it. With several processes the copy is sharded like the
    model; else it is on `device`."""
    config = copy.deepcopy(model.hf.config)
    vars(config).pop("quantization_config", None)
    made = type(model)(without_weights(type(model.hf), config), layout=model.layout)
    if isinstance(model, RewardModel) and isinstance(made, RewardModel):
        made.num_known_tokens = model.num_known_tokens
        made.padding_token = model.padding_token
    if mesh.devices is None:
        made.cast(computed)
    else:
        made.cast(saved)  # FSDP casts to `computed` at each call
    cut(made, mesh)
    # The copy lies where the model's weights lie, which `device` of a model is not.
    offloaded = next(model.parameters()).device.type != model.device.type
    shard(made, mesh, dtype=computed, cpu_offload=offloaded)
    if offloaded:
        made.to_empty(device="cpu")
    else:
        made.to_empty(device=device or made.device)
    # `to_empty` leaves buffers such as rotary frequencies without values.
    restore_buffers(made)
    weights = made.hf.state_dict(keep_vars=True)
    for name, _, plain in plain_weights(model):
        dtype = saved
        if name.split(".")[0] in HEAD_NAMES:
            dtype = torch.float32  # a head is float32 in an export of any dtype
        put(weights[name], whole(plain(dtype)))
    return made


def sum_over_copies(model: nn.Module, now: bool) -> None:
    """Set whether the next backward passes sum gradients over the copies of a model too, which one
    pass of each step must do, or only within each copy."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(now)


def on_whole(policy: PolicyModel, work: Callable[[], _T]) -> _T:
    """Call `work` with the whole policy (or this process's part, with tensor parallelism) in
    memory. FSDP exchanges nothing then, so processes may compute different amounts. Every process
    calls it."""
    sharded = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        # FSDP prefetches in the order of forward passes, and processes decode different numbers of
        # tokens. One call of `within` is one forward pass to it, whatever happens inside.
        return policy.within(work)
    finally:
        for module in sharded:
            module.set_reshard_after_forward(True, recurse=False)
            module.reshard()


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float | None) -> float:
    """Scale gradients down to `max_norm` (None: never), and return their norm before; the same on
    every process. Gradients may be sharded, each in its own way."""
    most = math.inf if max_norm is None else max_norm
    parameters = list(parameters)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # torch's norm of several DTensors wants them sharded alike.
    kinds: dict[Any, list[Tensor]] = {}
    for grad in grads:
        kind = None
        if isinstance(grad, DTensor):
            kind = (grad.device_mesh, grad.placements)
        kinds.setdefault(kind, []).append(grad)
    if not kinds.keys() - {None}:
        return float(nn.utils.clip_grad_norm_(parameters, most))
    norms = [float(whole(nn.utils.get_total_norm(same_kind))) for same_kind in kinds.values()]
    norm = math.hypot(*norms)
    # 1e-6 is what torch's clip_grad_norm_ adds, so that the scale is the same in every layout.
    if norm > most:
        torch._foreach_mul_([own_part(grad)[0] for grad in grads], most / (norm + 1e-6))
    return norm
