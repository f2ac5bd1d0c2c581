"""An optimiser's state by the names of its parameters, in parts, for any number of processes.

    tensors, rest = pack(optimizer, with_weights=False)
    tensors                 # {"hf.score.weight.exp_avg": ...}: sharded as the parameters are
    rest                    # settings, numbers, and what lies where: small, the same on every process
    unpack(optimizer, rest, folder)     # in another layout, from the folder of the tensors

Float32 weights are states too where the model is saved in bfloat16: masters (`training/masters.py`) in one process, the
sharded weights in several, under the same names. Of quantised states (torchao's) each process saves those of its own
parts of the weights, and goes on only with the same parts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from treeward import processes
from treeward.errors import CheckpointError
from treeward.model.shards import read_tensors, stored_tensors, whole
from treeward.training.masters import MasterWeights

_WEIGHT = "float32_weight"


def pack(optimizer: torch.optim.Optimizer, *, with_weights: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of the state by name, not copied, and the rest, which `torch.load` reads without executing anything.

    `with_weights`: the float32 weights too; masters always.
    """
    saved, tensors = optimizer.state_dict(), dict[str, Tensor]()
    names = list(_named(optimizer))
    kept: dict[str, dict[str, Any]] = {name: {} for name in names}
    for number, values in saved["state"].items():
        name = names[number]
        for key, value in values.items():
            local: Any = value.to_local() if isinstance(value, DTensor) else value
            if hasattr(local, "__tensor_flatten__"):
                parts, context = local.__tensor_flatten__()
                tensors |= {_own(name, key, part): getattr(local, part) for part in parts}
                kept[name][key] = (type(local), parts, context)
            elif isinstance(value, Tensor) and value.dim():
                tensors[f"{name}.{key}"], kept[name][key] = value, None
            else:
                kept[name][key] = whole(value) if isinstance(value, Tensor) else value
    if with_weights or isinstance(optimizer, MasterWeights):
        tensors |= {f"{name}.{_WEIGHT}": weight.detach() for name, weight in _float32_weights(optimizer).items()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in saved["param_groups"]]
    return tensors, {"state": kept, "param_groups": groups}


def unpack(optimizer: torch.optim.Optimizer, settings: dict[str, Any], folder: Path) -> None:
    """Put a state back, and the float32 weights where it has them; every process calls it.

    Raises `CheckpointError` for the state of another optimiser, and for quantised states of other parts.
    """
    named, weights = _named(optimizer), _float32_weights(optimizer)
    saved, own_groups = settings["state"], optimizer.state_dict()["param_groups"]
    if list(saved) != list(named) or len(settings["param_groups"]) != len(own_groups):
        got, need = (f"{len(names)} parameters, the first {next(iter(names), '')}" for names in (saved, named))
        summary, fix = "the saved optimiser is of other weights", "set the model and its adapters as they were"
        raise CheckpointError(summary, where=str(folder), got=got, need=need, fix=fix)
    stored = stored_tensors(folder)
    state: dict[int, dict[str, Any]] = {}
    targets = {full: weights[name].detach() for name in weights if (full := f"{name}.{_WEIGHT}") in stored}
    for number, (name, parameter) in enumerate(named.items()):
        for key, value in saved[name].items():
            of_parameter = state.setdefault(number, {})
            if value is None:
                full = f"{name}.{key}"
                of_parameter[key] = targets[full] = _empty_like(parameter, *stored[full])
            elif isinstance(value, tuple):
                of_parameter[key], parts = _quantised(parameter, value, name, key, stored)
                targets |= parts
            else:
                of_parameter[key] = value
    read_tensors(folder, targets)
    groups = [
        {**group, "params": mine["params"]} for group, mine in zip(settings["param_groups"], own_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _named(optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The parameters, in the order in which `state_dict` numbers them, by their names; by these numbers without any."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = [name for group in optimizer.param_groups for name in group.get("param_names") or ()]
    return dict(zip(names or map(str, range(len(parameters))), parameters, strict=True))


def _float32_weights(optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    return {name: one for name, one in _named(optimizer).items() if one.dtype == torch.float32 and one.dim()}


def _empty_like(parameter: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """Memory for a state of a parameter: sharded like it, or whole on every process where it has another shape."""
    if size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    state = torch.empty(size, dtype=dtype, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return state
    return DTensor.from_local(state, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim, run_check=False)


def _own(name: str, key: str, part: str) -> str:
    return f"{name}.{key}/{part} of rank {processes.rank()} of {processes.size()}"


def _quantised(
    parameter: Tensor, value: tuple[Any, list[str], Any], name: str, key: str, stored: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """A quantised state of this process's part of a parameter, and the tensors, still empty, that it consists of."""
    kind, parts, context = value
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    entries = {part: stored.get(_own(name, key, part)) for part in parts}
    held = {
        part: torch.empty(one[0], dtype=one[1], device=local.device) for part, one in entries.items() if one is not None
    }
    state = kind.__tensor_unflatten__(held, context) if len(held) == len(parts) else None
    if state is None or state.shape != local.shape:
        raise CheckpointError(
            "this optimiser's quantised states cannot be read by another number of processes, or in another layout",
            got=f"no part of {name} for rank {processes.rank()} of {processes.size()}",
            need="the processes and policy.dtensor_cfg that the checkpoint was saved with",
        )
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        size, stride = parameter.shape, parameter.stride()
        state = DTensor.from_local(state, mesh, placements, run_check=False, shape=size, stride=stride)
    return state, {_own(name, key, part): tensor for part, tensor in held.items()}
