"""Saving and loading a checkpoint's state beside the model: optimiser, schedule, random numbers, `RunState`.

    save_state(folder, RunState(step, ...), optimizer, scheduler)     # the last file of a checkpoint
    check_files(folder)                                               # nothing is loaded from a damaged one
    state = load_state(folder, optimizer, scheduler)

The state is JSON, and has the digests of all files of the checkpoint. The optimiser's tensors are safetensors in
parts, by the names of the parameters (`hf.score.weight.exp_avg`), so that any number of processes can load them. So are
float32 weights if the model is saved in bfloat16. The rest, torchao's quantised states included, is loaded by torch's
`weights_only`.
"""

from __future__ import annotations

import io
import json
import logging
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from treeward import processes
from treeward.digests import SEAL_FILE, damaged_file, file_digest, read_seal, write_seal
from treeward.errors import CheckpointError, shown
from treeward.model.shards import read_tensors, stored_tensors, whole, write_tensors
from treeward.training.masters import MasterWeights
from treeward.training.step_file import flattened

logger = logging.getLogger(__name__)

_OPTIMIZER, _TENSORS = "optimizer.pt", "optimizer"
_FLOAT32_WEIGHT = "float32_weight"


@dataclass(slots=True)
class RunState:
    """The state of a run after `step` steps. `identity`: values that must not change when a run resumes, by readable
    names. `validation`: the logged metrics of the latest validation, after `validation_step` steps. `run`:
    `Run.state()`. `ranked`: whether the uninterrupted run saves this step too; checkpoints of a signal are never the
    best."""

    step: int
    identity: dict[str, Any]
    validation_step: int | None = None
    validation: dict[str, float] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    ranked: bool = True

    @property
    def own_validation(self) -> dict[str, float]:
        """The metrics of this step's own model; empty if it was not validated."""
        return self.validation if self.validation_step == self.step else {}


def save_state(
    folder: Path,
    state: RunState,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    *,
    with_weights: bool = False,
) -> None:
    """Write the state into a folder, with the digests of all that it holds by then; every process calls it.
    `with_weights`: the float32 weights too."""
    tensors, settings = _pack(optimizer, with_weights=with_weights)
    rng = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    contents = _dumped({"optimizer": settings, "scheduler": scheduler.state_dict(), "rng": rng})
    write_tensors(folder / _TENSORS, tensors)
    processes.on_main(lambda: (folder / _OPTIMIZER).write_bytes(contents))
    digests = _digests(folder)
    processes.on_main(lambda: write_seal(folder, asdict(state), digests))


def _digests(folder: Path) -> dict[str, str]:
    """The digests of all files by their names; each process reads its share of the files."""
    names = processes.on_main(lambda: sorted(_file_names(folder)))
    digests: dict[str, str] = {}
    shares = processes.together(
        lambda: {name: file_digest(folder / name) for name in _own_share(names)}
    )
    for share in processes.gather(shares):
        digests |= share
    return digests


def _file_names(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def _own_share(names: Sequence[str]) -> Sequence[str]:
    return names[processes.rank() :: processes.size()]


def check_files(folder: Path, within: str = "") -> None:
    """Raise `CheckpointError` naming a file of a checkpoint that is not as it was saved; every process calls it, and
    reads its share of the files. `within`: a folder in it, as "model", whose files alone are read."""

    def check_share() -> None:
        digests = _read(folder)[1]
        names = [name for name in sorted(digests) if name.startswith(within)]
        damaged = damaged_file(folder, {name: digests[name] for name in _own_share(names)})
        if damaged is not None:
            path, got = damaged
            raise _damaged(folder, path, got)

    processes.together(check_share)


def _dumped(held: dict[str, Any]) -> memoryview:
    stream = io.BytesIO()
    try:
        torch.save(held, stream)
        stream.seek(0)
        refused = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(stream))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        refused = str(error)
    if refused:
        raise CheckpointError(
            "the state of the run cannot be saved",
            where="policy.optimizer or policy.scheduler: its state_dict()",
            got=refused,
            need="tensors, numbers, texts, and lists and mappings of these: nothing else would be loaded again",
            fix="use another class",
        )
    return stream.getbuffer()


def write_state(folder: Path, state: RunState) -> None:
    """Write the state alone, also into a finished checkpoint: a kill leaves the old one or the new one."""
    write_seal(folder, asdict(state), _read(folder)[1])


def load_state(folder: Path, optimizer: torch.optim.Optimizer, scheduler: LRScheduler) -> RunState:
    """Put a saved state back. Raises `CheckpointError` if it cannot be read."""
    state = read_state(folder)
    try:
        contents = torch.load(folder / _OPTIMIZER, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise _unreadable(folder, folder / _OPTIMIZER, error) from error
    scheduler.load_state_dict(contents["scheduler"])
    try:
        _unpack(optimizer, contents["optimizer"], folder / _TENSORS)
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise _unreadable(folder, folder / _TENSORS, error) from error
    if isinstance(scheduler, LambdaLR):
        # In a run that was made longer the next step has its place in the longer schedule; else nothing changes.
        for group, base, factor in zip(
            optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
        ):
            before, rate = float(group["lr"]), float(base * factor(scheduler.last_epoch))
            if isinstance(group["lr"], Tensor):  # in torchao
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
            if not math.isclose(before, rate, rel_tol=1e-6, abs_tol=1e-15):
                logger.warning(
                    "The learning rate goes on at %.3g instead of %.3g: the schedule spans the whole run, and the run "
                    "has another length than before (max_num_epochs, max_num_steps).", rate, before,
                )  # fmt: skip
    torch.set_rng_state(contents["rng"]["cpu"])
    if torch.cuda.is_available() and "cuda" in contents["rng"]:
        torch.cuda.set_rng_state(contents["rng"]["cuda"])
    return state


def read_state(folder: Path) -> RunState:
    """The saved state alone, without putting anything back. Raises `CheckpointError` if it cannot be read."""
    return _read(folder)[0]


def _read(folder: Path) -> tuple[RunState, dict[str, str]]:
    """The saved state, and the digests of the files beside it."""
    try:
        values, digests = read_seal(folder)
        return RunState(**values), digests
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _unreadable(folder, folder / SEAL_FILE, error) from error


def stored_metric(folder: Path, name: str) -> float | None:
    """The metric that ranks a checkpoint; None if it is not `ranked`, not measured, not finite, or cannot be read."""
    try:
        state = read_state(folder)
    except CheckpointError:
        return None  # it only ranks last
    metric = state.own_validation.get(name) if state.ranked else None
    return metric if metric is not None and math.isfinite(metric) else None


def check_identity(folder: Path, identity: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if a run of `identity` would not continue the run that saved this checkpoint. Sections
    are compared value by value: only the values that differ are shown."""
    saved = dict(flattened(read_state(folder).identity))
    now = dict(flattened(json.loads(json.dumps(identity, default=str))))
    differences = [
        f"{name}: got {_text(now, name)}, need {_text(saved, name)}"
        for name in {**saved, **now}
        if saved.get(name) != now.get(name)
    ]
    if differences:
        raise CheckpointError(
            "\n  ".join(["the checkpoint belongs to a run with other settings", *differences]),
            where=str(folder),
            fix="set them back, or begin the new run in another checkpointing.checkpoint_dir",
        )


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name, "nothing")
    return shown(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _pack(
    optimizer: torch.optim.Optimizer, *, with_weights: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of the state by name, not copied, and the other values, which `torch.load` reads with `weights_only`.
    `with_weights`: the float32 weights too; masters always."""
    saved, tensors = optimizer.state_dict(), dict[str, Tensor]()
    names = list(_named(optimizer))
    kept: dict[str, dict[str, Any]] = {name: {} for name in names}
    for number, values in saved["state"].items():
        name = names[number]
        for key, value in values.items():
            # not a quantised state, of one process
            is_plain = isinstance(value, DTensor) or type(value) is Tensor
            if is_plain and value.dim():
                tensors[f"{name}.{key}"], kept[name][key] = value, None
            else:
                kept[name][key] = whole(value) if isinstance(value, Tensor) else value
    if with_weights or isinstance(optimizer, MasterWeights):
        tensors |= {
            f"{name}.{_FLOAT32_WEIGHT}": weight.detach()
            for name, weight in _float32_weights(optimizer).items()
        }
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in saved["param_groups"]
    ]
    return tensors, {"state": kept, "param_groups": groups}


def _unpack(optimizer: torch.optim.Optimizer, settings: dict[str, Any], folder: Path) -> None:
    """Restore a state, with the float32 weights if it has them; every process calls it. Raises `CheckpointError` for
    the state of another optimiser."""
    named, weights = _named(optimizer), _float32_weights(optimizer)
    saved, current_groups = settings["state"], optimizer.state_dict()["param_groups"]
    if list(saved) != list(named) or len(settings["param_groups"]) != len(current_groups):
        got, need = (
            f"{len(names)} parameters, the first {next(iter(names), '')}"
            for names in (saved, named)
        )
        summary, fix = (
            "the saved optimiser is of other weights",
            "set the model and its adapters as they were",
        )
        raise CheckpointError(summary, where=str(folder), got=got, need=need, fix=fix)
    stored = stored_tensors(folder)
    state: dict[int, dict[str, Any]] = {}
    targets = {
        full: weights[name].detach()
        for name in weights
        if (full := f"{name}.{_FLOAT32_WEIGHT}") in stored
    }
    for number, (name, parameter) in enumerate(named.items()):
        for key, value in saved[name].items():
            parameter_state = state.setdefault(number, {})
            if value is None:
                full = f"{name}.{key}"
                parameter_state[key] = targets[full] = _empty_like(parameter, *stored[full])
            else:
                parameter_state[key] = value
    read_tensors(folder, targets)
    groups = [
        {**group, "params": new["params"]}
        for group, new in zip(settings["param_groups"], current_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _named(optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The parameters in the order of `state_dict`, by their names, or without names by their numbers."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = [name for group in optimizer.param_groups for name in group.get("param_names") or ()]
    return dict(zip(names or map(str, range(len(parameters))), parameters, strict=True))


def _float32_weights(optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    return {
        name: p for name, p in _named(optimizer).items() if p.dtype == torch.float32 and p.dim()
    }


def _empty_like(parameter: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """Memory for a state of a parameter: sharded like it, or whole on every process if it has another shape."""
    if size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    state = torch.empty(size, dtype=dtype, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return state
    return DTensor.from_local(
        state, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim, run_check=False
    )


def _unreadable(folder: Path, file: Path, error: Exception) -> CheckpointError:
    return _damaged(folder, file, str(error).strip().split("\n")[0] or type(error).__name__)


def _damaged(folder: Path, file: Path, got: str) -> CheckpointError:
    return CheckpointError(
        "the checkpoint is damaged",
        where=str(file),
        got=got,
        need="the files as the run has saved them",
        fix=f"remove {folder}: the run resumes from the checkpoint before it, or begins anew without one",
    )
