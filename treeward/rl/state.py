"""What a checkpoint of policy optimisation holds: the policy, what training saves, and where the rollouts stand.

    save_checkpoint(folder, run, state)
    state = load_checkpoint(folder, run)         # optimiser, schedule, statistics of rewards and the watch put back

The policy is a Hugging Face folder `model` in it; one with adapters is merged there, and they lie in `adapter` as peft
writes them. The reference is not saved: it is the policy that the run began with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeward.config.load import save_config
from treeward.errors import CheckpointError
from treeward.model.lora import has_adapters, save_adapters
from treeward.training.state import TrainingState, load_state, read_state, save_state

if TYPE_CHECKING:
    from treeward.rl.setup import GRPORun

__all__ = ["ADAPTER_FOLDER", "RLState", "load_checkpoint", "save_checkpoint", "stored_metric"]

ADAPTER_FOLDER = "adapter"
_FILE = "rollout_state.json"


@dataclass(frozen=True, slots=True)
class RLState:
    """Where a run stands after `step` steps, in which `prompts_drawn` prompts were drawn and the weights changed
    `version` times. `validation`: the latest metrics, of `validation_step`. `since_validation`: sums over the steps
    since then. `stopped_by`: the alarm that ended the run.
    """

    step: int
    identity: dict[str, str]
    prompts_drawn: int = 0
    version: int = 0
    validation_step: int | None = None
    validation: dict[str, float] = field(default_factory=dict)
    since_validation: dict[str, float] = field(default_factory=dict)
    stopped_by: str | None = None


def save_checkpoint(folder: Path, run: GRPORun, state: RLState) -> None:
    """Fill a folder; the caller makes it atomic."""
    run.save_model(folder / "model")
    if has_adapters(run.policy):
        save_adapters(run.policy, folder / ADAPTER_FOLDER)
    training = TrainingState(state.step, state.identity, state.validation_step, {"": state.validation})
    optimizer = run.updater.optimizer if run.config.checkpointing.save_optimizer else None
    save_state(folder, training, optimizer, run.scheduler, run.parameter_names)
    document = {
        "prompts_drawn": state.prompts_drawn,
        "version": state.version,
        "since_validation": state.since_validation,
        "stopped_by": state.stopped_by,
        "rewards": run.rewards.state_dict(),
        "watch": run.watch.state_dict(),
    }
    (folder / _FILE).write_text(_as_json(document) + "\n", encoding="utf-8")
    save_config(run.config, folder / "config.yaml")


def load_checkpoint(folder: Path, run: GRPORun) -> RLState:
    """Put back everything but the policy, which `set_up` has loaded from `folder`."""
    training = load_state(folder, run.updater.optimizer, run.scheduler, run.parameter_names)
    document = _read(folder / _FILE)
    run.rewards.load_state_dict(document.pop("rewards"))
    run.watch.load_state_dict(document.pop("watch"))
    state = RLState(training.step, training.identity, **document)
    return replace(state, validation_step=training.validation_step, validation=training.validation.get("", {}))


def stored_metric(folder: Path, metric: str) -> float | None:
    """What the validation of a checkpoint measured, by the name of `GRPO_METRICS`; None if it was not validated."""
    try:
        state = read_state(folder)
    except CheckpointError:
        return None  # it only ranks last; where it is to be used, it is verified
    return state.validation.get("", {}).get(f"validation/{metric}") if state.validation_step == state.step else None


def _as_json(document: Mapping[str, Any]) -> str:
    try:
        return json.dumps(document, indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            "the state of an environment cannot be saved",
            where="env",
            got=str(error),
            need="what JSON holds, from its state_dict(): texts, finite numbers, lists and mappings",
            fix="change the environment's state_dict(); the last checkpoint stands",
        ) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        document: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return dict(document)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "the state of the rollouts cannot be read",
            where=str(path),
            got=str(error),
            fix=f"remove {path.parent}",
        ) from error
