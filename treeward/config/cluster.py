"""`ClusterConfig`: the processes of a run, and what happens when one of them is lost.

cluster: {num_nodes: 2, gpus_per_node: 8, max_restarts: 3}
"""

from __future__ import annotations

from typing import Self

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from treeward.config.base import Strict
from treeward.errors import ConfigError


class ClusterConfig(Strict):
    """The processes of the run, which share the model and the data of each step."""

    gpus_per_node: NonNegativeInt = 1
    """Processes on each node, each with its GPU where the machines have any; 0: one process, on the CPU. Where it
    is more than one, the GPUs that reward models and engines have of their own are among them."""
    num_nodes: PositiveInt = 1
    """Nodes; more than one need a Ray cluster (`RAY_ADDRESS`). torchrun decides both numbers itself."""
    max_restarts: NonNegativeInt = 3
    """Restarts from the last checkpoint when a process or a node is lost. torchrun has `--max-restarts` instead."""
    timeout_minutes: PositiveFloat = 30.0
    """Longest that a process waits for the others, before the run ends with an error."""

    @property
    def num_processes(self) -> int:
        return self.num_nodes * max(self.gpus_per_node, 1)

    def without(self, num_gpus: int) -> Self:
        """The processes that train where other models have `num_gpus`; one process stays one.

        Raises `ConfigError` where none is left.
        """
        if num_gpus == 0 or self.num_processes == 1:
            return self
        per_node, num_left = max(self.gpus_per_node, 1), self.num_processes - num_gpus
        if num_left < 1:
            got = f"{self.num_processes}, of which reward models and engines have {num_gpus}"
            fix = f"set cluster.num_nodes={num_gpus // per_node + 1}, or fewer resources of those"
            raise ConfigError("no GPU is left to train on", field="cluster", got=got, need="one or more", fix=fix)
        num_nodes = next(n for n in range(-(-num_left // per_node), num_left + 1) if num_left % n == 0)
        return self.model_copy(update={"num_nodes": num_nodes, "gpus_per_node": num_left // num_nodes})
