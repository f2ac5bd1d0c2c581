"""Saving and loading a checkpoint's state beside the model: optimiser, schedule, random numbers,
`RunState`.

    save_state(folder, RunState(step, ...), optimizer, scheduler)  # the last file of a checkpoint
    check_files(folder)                                    # nothing is loaded from a damaged one
    state = load_state(folder, optimizer, scheduler)

The state is JSON, and has the digests of all files of the checkpoint. The optimiser's tensors are
safetensors in parts, by the names of the parameters (`hf.score.weight.exp_avg`), so that any number
of processes can load them. So are float32 weights if the model is saved in bfloat16. The rest,
torchao's quantised states included, is loaded by torch's `weights_only`.
"""

from __future__ import annotations

import io
import json
import logging
import math
import pickle
from collections.abc import Collection, Mapping, Sequence
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

_OPTIMIZER = "optimizer.pt"
_TENSORS = "optimizer"
_FLOAT32_WEIGHT = "float32_weight"


@dataclass(slots=True)
class RunState:
    """The state of a run after `step` steps. `identity`: values that must not change when a run
    resumes, by readable names. `validation`: the logged metrics of the latest validation, after
    `validation_step` steps. `run`: `Run.state()`. `ranked`: whether the uninterrupted run saves
    this step too; checkpoints of a signal are never the best."""

    step: int
    identity: dict[str, Any]
    validation_step: int | None = None
    validation: dict[str, float] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    ranked: bool = True

    @property
    def own_validation(self) -> dict[str, float]:
        """The metrics of this step's own model; empty if it was not validated."""
        if self.validation_step != self.step:
            return {}
        return self.validation


def save_state(
    folder: Path,
    state: RunState,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    *,
    with_weights: bool = False,
) -> None:
    """Write the state into a folder, with the digests of all that it holds by then; every process
    calls it. `with_weights`: the float32 weights too."""
    tensors, settings = _pack(optimizer, with_weights=with_weights)
    # For optimisers that round at random, as torchao's: data and samples follow from the step.
    rng = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    contents = {"optimizer": settings, "scheduler": scheduler.state_dict(), "rng": rng}
    # Into memory and looked at: a class that cannot be loaded again, by `torch.load` with
    # `weights_only`, is refused at the first save, and not when the run resumes.
    stream = io.BytesIO()
    try:
        torch.save(contents, stream)
        stream.seek(0)
        refused = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(stream))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        refused = str(error)
    if refused:
        raise CheckpointError(
            "the state of the run cannot be saved",
            where="policy.optimizer or policy.scheduler: its state_dict()",
            got=refused,
            need="tensors, numbers, texts, and lists and mappings of these: nothing else would be "
            "loaded again",
            fix="use another class",
        )
    write_tensors(folder / _TENSORS, tensors)
    processes.on_main(lambda: (folder / _OPTIMIZER).write_bytes(stream.getbuffer()))
    digests = _digests(folder)
    processes.on_main(lambda: write_seal(folder, asdict(state), digests))


def _digests(folder: Path) -> dict[str, str]:
    """The digests of all files by their names; each process reads its share of the files."""

    def list_files() -> list[str]:
        paths = [path for path in folder.rglob("*") if path.is_file()]
        return sorted(str(path.relative_to(folder)) for path in paths)

    # Of the main process: the folder of a network may show less to another.
    names = processes.on_main(list_files)

    def read_share() -> dict[str, str]:
        return {name: file_digest(folder / name) for name in _own_share(names)}

    digests: dict[str, str] = {}
    for digests_of_rank in processes.gather(processes.together(read_share)):
        digests |= digests_of_rank
    return digests


def _own_share(names: Sequence[str]) -> Sequence[str]:
    return names[processes.rank() :: processes.size()]


def check_files(folder: Path, within: str = "") -> None:
    """Raise `CheckpointError` naming a file of a checkpoint that is not as it was saved; every
    process calls it, and reads its share of the files. `within`: a folder in it, as "model", whose
    files alone are read."""

    def check_share() -> None:
        _, digests = _read(folder)
        names = [name for name in sorted(digests) if name.startswith(within)]
        share = {name: digests[name] for name in _own_share(names)}
        damaged = damaged_file(folder, share)
        if damaged is not None:
            path, got = damaged
            raise _damaged(folder, path, got)

    processes.together(check_share)


def write_state(folder: Path, state: RunState) -> None:
    """Write the state alone, also into a finished checkpoint: a kill leaves the old one or the new
    one."""
    _, digests = _read(folder)
    write_seal(folder, asdict(state), digests)


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
    # A function of the step, unlike torch's other schedules, which go on from the saved rate.
    if isinstance(scheduler, LambdaLR):
        _set_learning_rates(optimizer, scheduler)
    torch.set_rng_state(contents["rng"]["cpu"])
    if torch.cuda.is_available() and "cuda" in contents["rng"]:
        torch.cuda.set_rng_state(contents["rng"]["cuda"])
    return state


def _set_learning_rates(optimizer: torch.optim.Optimizer, scheduler: LambdaLR) -> None:
    """Give the next step its place in the schedule of this run, which may be longer than the one
    that was saved; else nothing changes."""
    groups = zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    for group, base_rate, factor in groups:
        saved_rate = float(group["lr"])
        rate = float(base_rate * factor(scheduler.last_epoch))
        if isinstance(group["lr"], Tensor):  # in torchao
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
        if not math.isclose(saved_rate, rate, rel_tol=1e-6, abs_tol=1e-15):
            logger.warning(
                "The learning rate goes on at %.3g instead of %.3g: the schedule spans the whole "
                "run, and the run has another length than before (max_num_epochs, "
                "max_num_steps).",
                rate,
                saved_rate,
            )


def read_state(folder: Path) -> RunState:
    """The saved state alone, without putting anything back. Raises `CheckpointError` if it cannot
    be read."""
    state, _ = _read(folder)
    return state


def _read(folder: Path) -> tuple[RunState, dict[str, str]]:
    """The saved state, and the digests of the files beside it."""
    try:
        values, digests = read_seal(folder)
        return RunState(**values), digests
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _unreadable(folder, folder / SEAL_FILE, error) from error


def stored_metric(folder: Path, name: str) -> float | None:
    """The metric that ranks a checkpoint; None if it is not `ranked`, not measured, not finite, or
    cannot be read."""
    try:
        state = read_state(folder)
    except CheckpointError:
        return None  # it only ranks last
    metric = state.own_validation.get(name)
    if metric is None or not state.ranked or not math.isfinite(metric):
        return None
    return metric


def check_identity(folder: Path, identity: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if a run of `identity` would not continue the run that saved this
    checkpoint. Sections are compared value by value: only the values that differ are shown."""
    saved = dict(flattened(read_state(folder).identity))
    # Through JSON, as the saved one was: a tuple is a list then.
    now = dict(flattened(json.loads(json.dumps(identity, default=str))))
    differences: list[str] = []
    for name in {**saved, **now}:
        if saved.get(name) != now.get(name):
            differences.append(f"{name}: got {_text(now, name)}, need {_text(saved, name)}")
    if differences:
        raise CheckpointError(
            "\n  ".join(["the checkpoint belongs to a run with other settings", *differences]),
            where=str(folder),
            fix="set them back, or begin the new run in another checkpointing.checkpoint_dir",
        )


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name, "nothing")
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False)
    return shown(value)


def _pack(
    optimizer: torch.optim.Optimizer, *, with_weights: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of the state by name, not copied, and the other values, which `torch.load` reads
    with `weights_only`. `with_weights`: the float32 weights too; masters always."""
    # torch numbers the states in the order of the groups' parameters; names outlast that order.
    saved = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    names = list(_named(optimizer))
    kept: dict[str, dict[str, Any]] = {name: {} for name in names}
    for number, values in saved["state"].items():
        name = names[number]
        for key, value in values.items():
            # A quantised state, which one process has whole, is a class of its own.
            is_plain = isinstance(value, DTensor) or type(value) is Tensor
            if is_plain and value.dim() > 0:
                tensors[f"{name}.{key}"] = value
                kept[name][key] = None
            elif isinstance(value, Tensor):
                kept[name][key] = whole(value)
            else:
                kept[name][key] = value
    if with_weights or isinstance(optimizer, MasterWeights):
        for name, weight in _float32_weights(optimizer).items():
            tensors[f"{name}.{_FLOAT32_WEIGHT}"] = weight.detach()
    groups = []
    for group in saved["param_groups"]:
        groups.append({key: value for key, value in group.items() if key != "params"})
    return tensors, {"state": kept, "param_groups": groups}


def _unpack(optimizer: torch.optim.Optimizer, settings: dict[str, Any], folder: Path) -> None:
    """Restore a state, with the float32 weights if it has them; every process calls it. Raises
    `CheckpointError` for the state of another optimiser."""
    # The order counts too: torch loads states by the numbers of parameters.
    parameters = _named(optimizer)
    saved = settings["state"]
    saved_groups = settings["param_groups"]
    current_groups = optimizer.state_dict()["param_groups"]
    if list(saved) != list(parameters) or len(saved_groups) != len(current_groups):
        raise CheckpointError(
            "the saved optimiser is of other weights",
            where=str(folder),
            got=_counted(saved),
            need=_counted(parameters),
            fix="set the model and its adapters as they were",
        )
    stored = stored_tensors(folder)
    # The memory that the files are read into.
    targets: dict[str, Tensor] = {}
    for name, weight in _float32_weights(optimizer).items():
        file_name = f"{name}.{_FLOAT32_WEIGHT}"
        if file_name in stored:
            targets[file_name] = weight.detach()
    state: dict[int, dict[str, Any]] = {}
    for number, (name, parameter) in enumerate(parameters.items()):
        # A parameter that was never stepped has no state, and gets none.
        if not saved[name]:
            continue
        state[number] = {}
        for key, value in saved[name].items():
            file_name = f"{name}.{key}"
            # None stands for a tensor of the files, or is what an optimiser had there itself.
            if value is None and file_name in stored:
                value = _empty_like(parameter, *stored[file_name])
                targets[file_name] = value
            state[number][key] = value
    read_tensors(folder, targets)
    groups = []
    for saved_group, current_group in zip(saved_groups, current_groups, strict=True):
        groups.append({**saved_group, "params": current_group["params"]})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _counted(names: Collection[str]) -> str:
    return f"{len(names)} parameters, the first {next(iter(names), '')}"


def _named(optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The parameters in the order of `state_dict`, by their names, or without names by their
    numbers."""
    parameters: list[nn.Parameter] = []
    names: list[str] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
        names += group.get("param_names") or ()
    if not names:
        names = [str(number) for number in range(len(parameters))]
    return dict(zip(names, parameters, strict=True))


def _float32_weights(optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    weights: dict[str, nn.Parameter] = {}
    for name, parameter in _named(optimizer).items():
        if parameter.dtype == torch.float32 and parameter.dim() > 0:
            weights[name] = parameter
    return weights


def _empty_like(parameter: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """Memory for a state of a parameter: sharded like it, or whole on every process if it has
    another shape."""
    if size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    state = torch.empty(size, dtype=dtype, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return state
    # A DTensor all the same, because torch's optimisers do not mix both kinds.
    mesh = parameter.device_mesh
    return DTensor.from_local(state, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _unreadable(folder: Path, file: Path, error: Exception) -> CheckpointError:
    first_line = str(error).strip().split("\n")[0]
    return _damaged(folder, file, first_line or type(error).__name__)


def _damaged(folder: Path, file: Path, got: str) -> CheckpointError:
    return CheckpointError(
        "the checkpoint is damaged",
        where=str(file),
        got=got,
        need="the files as the run has saved them",
        fix=f"remove {folder}: the run resumes from the checkpoint before it, or begins anew "
        "without one",
    )
