"""What two processes send in a step that was planned."""

from __future__ import annotations

from treeward.config.load import load_run
from treeward.parallel.mesh import make_mesh
from treeward.planning.runs import Filling, planned_run
from treeward.planning.tracker import Tracker


def sent(file: str, overrides: list[str], budget: int, mean_tokens: int) -> int:
    """Bytes that this process sends in one step."""
    config = load_run(file, overrides)
    mesh = make_mesh(config.policy.dtensor_cfg)
    run = planned_run(config, mesh, Filling.of(budget, 2, mean_tokens))  # type: ignore[arg-type]
    run.step()
    with (tracker := Tracker(devices_per_node=2)):
        run.step()
    return sum(tracker.sent.values())
