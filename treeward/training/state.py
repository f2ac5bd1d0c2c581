"""What a checkpoint holds beside the model, and how it is put back: optimiser, schedule, random numbers, `RunState`.

    save_state(folder, RunState(step, ...), optimizer, scheduler, model)
    state = load_state(folder, optimizer, scheduler, model)

Tensors are safetensors and the rest is JSON: nothing that is loaded can be code, and Python's floats survive JSON
exactly.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from treeward.errors import CheckpointError

__all__ = ["RunState", "check_identity", "load_state", "read_state", "save_state", "stored_metric"]

logger = logging.getLogger(__name__)

_STATE, _TENSORS = "training_state.json", "optimizer.safetensors"
_RNG = "rng/"
_ABSENT = "nothing"
_MOST_DIFFERENCES, _LONGEST_VALUE = 8, 80


@dataclass(slots=True)
class RunState:
    """Where a run stands after `step` steps.

    `identity`: what must not change between a run and its resumption, by the name that a person knows it by.
    `validation`: the metrics of the latest validation, which was after `validation_step` steps, by their logged names.
    `run`: the state that only the kind of run knows, as JSON. `ranked`: whether the undisturbed run saves this step
    too; a checkpoint that only a failure, a signal or a deadline has made is never the best one.
    """

    step: int
    identity: dict[str, str]
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
    optimizer: torch.optim.Optimizer | None,
    scheduler: LRScheduler,
    model: nn.Module,
) -> None:
    """Write a state into a folder. Without an optimiser the run cannot be resumed."""
    names = _names(model)
    tensors = {f"{_RNG}cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors[f"{_RNG}cuda"] = torch.cuda.get_rng_state()
    document: dict[str, Any] = {**asdict(state), "scheduler": scheduler.state_dict(), "optimizer": None}
    if optimizer is not None:
        scalars: dict[str, dict[str, Any]] = {}
        for parameter, values in optimizer.state.items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    # Cloned, for safetensors refuses tensors that share memory, as some optimisers' views do.
                    tensors[f"{names[parameter]}/{key}"] = value.detach().cpu().contiguous().clone()
                else:
                    scalars.setdefault(names[parameter], {})[key] = value
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        document["optimizer"] = {"groups": groups, "scalars": scalars}
    save_file(tensors, folder / _TENSORS)
    (folder / _STATE).write_text(_as_json(document) + "\n", encoding="utf-8")


def load_state(folder: Path, optimizer: torch.optim.Optimizer, scheduler: LRScheduler, model: nn.Module) -> RunState:
    """Put a saved state back. Raises `CheckpointError` if the optimiser was not saved."""
    document = _read(folder)
    saved = document.pop("optimizer")
    if saved is None:
        raise CheckpointError(
            "this checkpoint was saved without its optimiser and cannot be resumed from",
            where=str(folder),
            fix="start anew in another checkpointing.checkpoint_dir, with checkpointing.save_optimizer=true",
        )
    tensors = load_file(folder / _TENSORS)
    scheduler.load_state_dict(_as_in(scheduler.state_dict(), document.pop("scheduler")))
    _load_optimizer(optimizer, saved, tensors, _names(model))
    if isinstance(scheduler, LambdaLR):
        # In a run that was made longer the next step has its place in the longer schedule; else nothing changes.
        for group, base, factor in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            before, group["lr"] = float(group["lr"]), base * factor(scheduler.last_epoch)
            if not math.isclose(before, group["lr"], rel_tol=1e-6, abs_tol=1e-15):
                logger.warning(
                    "The learning rate goes on at %.3g instead of %.3g: the schedule spans the whole run, and the run "
                    "has another length than before (max_num_epochs, max_num_steps).", group["lr"], before,
                )  # fmt: skip
    torch.set_rng_state(tensors[f"{_RNG}cpu"])
    if torch.cuda.is_available() and f"{_RNG}cuda" in tensors:
        torch.cuda.set_rng_state(tensors[f"{_RNG}cuda"])
    return RunState(**document)


def read_state(folder: Path) -> RunState:
    """The saved state alone, without putting anything back."""
    document = _read(folder)
    del document["optimizer"], document["scheduler"]
    return RunState(**document)


def stored_metric(folder: Path, name: str) -> float | None:
    """The metric that ranks a checkpoint; None if it is not `ranked`, not measured, not finite, or cannot be read."""
    try:
        state = read_state(folder)
    except CheckpointError:
        return None  # it only ranks last; a checkpoint is verified before it is used
    metric = state.own_validation.get(name) if state.ranked else None
    return metric if metric is not None and math.isfinite(metric) else None


def check_identity(folder: Path, identity: Mapping[str, str]) -> None:
    """Raise `CheckpointError` if a run of `identity` would not continue the run that saved this checkpoint.

    A text of the identity that is a JSON object is compared value by value: only those that differ are shown.
    """
    saved = read_state(folder).identity
    changed = [key for key in {**saved, **identity} if saved.get(key) != identity.get(key)]
    if not changed:
        return
    differences = [
        line
        for key in changed
        for line in _differences(key, _value(identity.get(key, _ABSENT)), _value(saved.get(key, _ABSENT)))
    ]
    shown = differences[:_MOST_DIFFERENCES]
    if more := len(differences) - len(shown):
        shown.append(f"and {more} more")
    raise CheckpointError(
        "\n  ".join([f"this checkpoint is of another run: {', '.join(changed)} changed", *shown]),
        where=str(folder),
        fix=f"set {'it' if len(differences) == 1 else 'them'} back, or begin the new run in another "
        "checkpointing.checkpoint_dir",
    )


def _value(text: Any) -> Any:
    """A text of an identity, parsed if it is a JSON object."""
    try:
        value = json.loads(text)
    except (TypeError, ValueError):
        return text
    return value if isinstance(value, dict) else text


def _differences(name: str, got: Any, need: Any) -> Iterator[str]:
    """A line for each value that differs, by its dotted name."""
    if isinstance(got, dict) and isinstance(need, dict):
        for key in {**need, **got}:
            yield from _differences(f"{name}.{key}", got.get(key, _ABSENT), need.get(key, _ABSENT))
    elif isinstance(got, list) and isinstance(need, list) and len(got) == len(need):
        for i, (one, other) in enumerate(zip(got, need, strict=True)):
            yield from _differences(f"{name}[{i}]", one, other)
    elif got != need:
        yield f"{name}: got {_excerpt(got, need)}, need {_excerpt(need, got)}"


def _excerpt(value: Any, other: Any) -> str:
    """A value in one line; of a long text the part where it begins to differ from the other."""
    text, other_text = (
        one if isinstance(one, str) and one.strip() and "\n" not in one else json.dumps(one, ensure_ascii=False)
        for one in (value, other)
    )
    start = max(0, len(os.path.commonprefix([text, other_text])) - _LONGEST_VALUE // 4)
    start = start if max(len(text), len(other_text)) > _LONGEST_VALUE else 0
    end = start + _LONGEST_VALUE
    return f"{'...' if start else ''}{text[start:end]}{'...' if end < len(text) else ''}"


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _load_optimizer(
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    names: Mapping[Tensor, str],
) -> None:
    """By its own `load_state_dict`, which knows the device of each value (the step of a fused Adam: the GPU)."""
    of_parameter: dict[str, dict[str, Any]] = {name: dict(values) for name, values in saved["scalars"].items()}
    for key, tensor in tensors.items():
        if not key.startswith(_RNG):
            name, _, part = key.rpartition("/")
            of_parameter.setdefault(name, {})[part] = tensor
    fresh = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    groups = [
        {**_as_in(group, loaded), "params": group["params"]}
        for group, loaded in zip(fresh["param_groups"], saved["groups"], strict=True)
    ]
    state = {i: of_parameter[names[p]] for i, p in enumerate(parameters) if names[p] in of_parameter}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _as_in(fresh: Any, loaded: Any) -> Any:
    """`loaded` with the types of a fresh object's state: JSON has neither tuples nor keys that are numbers."""
    if isinstance(fresh, tuple):
        return tuple(loaded)
    if isinstance(fresh, dict):
        keys = {str(key): key for key in fresh}
        return type(fresh)({keys.get(k, k): _as_in(fresh.get(keys.get(k, k)), v) for k, v in loaded.items()})
    if isinstance(fresh, list) and len(fresh) == len(loaded):
        return [_as_in(a, b) for a, b in zip(fresh, loaded, strict=True)]
    return loaded


def _read(folder: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "the training state cannot be read", where=str(folder / _STATE), got=str(error), fix=f"remove {folder}"
        ) from error
    return document


def _as_json(document: Mapping[str, Any]) -> str:
    for part, where in (
        ("optimizer", "policy.optimizer.name"),
        ("scheduler", "policy.scheduler"),
        ("run", "env: the state_dict() of an environment"),
    ):
        try:
            json.dumps(document[part])
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                "the state of the run cannot be saved",
                where=where,
                got=str(error),
                need="tensors of parameters, numbers, texts, and lists and mappings of these",
                fix="use another class, or for an optimiser set checkpointing.save_optimizer=false",
            ) from error
    return json.dumps(document, indent=2)
