"""What a checkpoint holds beside the model, and how it is put back: optimiser, schedule, random numbers, `RunState`.

    save_state(folder, RunState(step, ...), optimizer, scheduler)
    state = load_state(folder, optimizer, scheduler)

The state is JSON, which holds Python's floats exactly. The optimiser's tensors are safetensors, by the names of the
parameters and in parts, so that any number of processes goes on from what any other has saved
(`training/optimizer_state.py`). Its settings, the schedule and random numbers are loaded by torch's `weights_only`,
which executes nothing.
"""

from __future__ import annotations

import io
import json
import logging
import math
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from treeward import processes
from treeward.errors import CheckpointError, shown
from treeward.model.export import DeferredWrite
from treeward.model.shards import write_tensors
from treeward.storage import write_text
from treeward.training.optimizer_state import pack, unpack
from treeward.training.step_file import flattened

logger = logging.getLogger(__name__)

_STATE, _OPTIMIZER, _TENSORS = "training_state.json", "optimizer.pt", "optimizer"


@dataclass(slots=True)
class RunState:
    """Where a run stands after `step` steps.

    `identity`: what must not change between a run and its resumption, as JSON, by the name that a person knows it by.
    `validation`: the metrics of the latest validation, which was after `validation_step` steps, by their logged names.
    `run`: the state that only the kind of run knows, as JSON. `ranked`: whether the undisturbed run saves this step
    too; a checkpoint that only a failure, a signal or a deadline has made is never the best one.
    """

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
    optimizer: torch.optim.Optimizer | None,
    scheduler: LRScheduler,
    *,
    with_weights: bool = False,
    staged: bool = False,
) -> DeferredWrite | None:
    """Write a state into a folder; every process calls it. Without an optimiser the run cannot be resumed.

    `with_weights`: the float32 weights too, as the folder's model is rounded. `staged`: the tensors are copied to the
    host, and what is returned writes them, in any thread.
    """
    tensors, settings = ({}, None) if optimizer is None else pack(optimizer, with_weights=with_weights)
    rng = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    contents = _dumped({"optimizer": settings, "scheduler": scheduler.state_dict(), "rng": rng})
    text = _as_json(state)
    if staged:
        tensors = BlockingAsyncStager().stage(tensors)

    def write(group: ProcessGroup | None) -> None:
        write_tensors(folder / _TENSORS, tensors, group=group)
        processes.on_main(lambda: (folder / _OPTIMIZER).write_bytes(contents), group)
        processes.on_main(lambda: write_text(folder / _STATE, text), group)

    if staged:
        return write
    write(None)
    return None


def _dumped(held: dict[str, Any]) -> bytes:
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
            fix="use another class, or for an optimiser set checkpointing.save_optimizer=false",
        )
    return stream.getvalue()


def write_state(folder: Path, state: RunState) -> None:
    """Write the state alone, also into a finished checkpoint: a kill leaves the old one or the new one."""
    write_text(folder / _STATE, _as_json(state))


def _as_json(state: RunState) -> str:
    try:
        return json.dumps(asdict(state), indent=2) + "\n"
    except (TypeError, ValueError) as error:
        summary, where = "the state of the run cannot be saved", "env: the state_dict() of an environment"
        need = "numbers, texts, and lists and mappings of these"
        raise CheckpointError(summary, where=where, got=str(error), need=need) from error


def load_state(folder: Path, optimizer: torch.optim.Optimizer, scheduler: LRScheduler) -> RunState:
    """Put a saved state back. Raises `CheckpointError` if the optimiser was not saved or cannot be read."""
    state = read_state(folder)
    try:
        contents = torch.load(folder / _OPTIMIZER, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise _unreadable(folder / _OPTIMIZER, error) from error
    if contents["optimizer"] is None:
        summary = "this checkpoint was saved without its optimiser and cannot be resumed from"
        raise CheckpointError(summary, where=str(folder), fix="start anew in another checkpointing.checkpoint_dir")
    scheduler.load_state_dict(contents["scheduler"])
    try:
        unpack(optimizer, contents["optimizer"], folder / _TENSORS)
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise _unreadable(folder / _TENSORS, error) from error
    if isinstance(scheduler, LambdaLR):
        # In a run that was made longer the next step has its place in the longer schedule; else nothing changes.
        for group, base, factor in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            before, rate = float(group["lr"]), float(base * factor(scheduler.last_epoch))
            if isinstance(group["lr"], torch.Tensor):  # in torchao
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
    try:
        return RunState(**json.loads((folder / _STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise _unreadable(folder / _STATE, error) from error


def stored_metric(folder: Path, name: str) -> float | None:
    """The metric that ranks a checkpoint; None if it is not `ranked`, not measured, not finite, or cannot be read."""
    try:
        state = read_state(folder)
    except CheckpointError:
        return None  # it only ranks last
    metric = state.own_validation.get(name) if state.ranked else None
    return metric if metric is not None and math.isfinite(metric) else None


def check_identity(folder: Path, identity: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if a run of `identity` would not continue the run that saved this checkpoint.

    Sections are compared value by value: only the values that differ are shown.
    """
    saved = dict(flattened(read_state(folder).identity))
    now = dict(flattened(json.loads(json.dumps(identity, default=str))))
    differences = [
        f"{name}: got {_text(now, name)}, need {_text(saved, name)}"
        for name in {**saved, **now}
        if saved.get(name) != now.get(name)
    ]
    if differences:
        raise CheckpointError(
            "\n  ".join(["this checkpoint is of another run", *differences]),
            where=str(folder),
            fix="set them back, or begin the new run in another checkpointing.checkpoint_dir",
        )


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name, "nothing")
    return shown(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _unreadable(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        "the checkpoint is damaged",
        where=str(file),
        got=str(error).strip().split("\n")[0] or type(error).__name__,
        fix=f"remove {file.parent}: the run resumes from the checkpoint before it, or begins anew without one",
    )
