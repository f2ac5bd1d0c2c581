"""`ClusterConfig`: the machines of a run. One process is all that is supported yet, with or without a GPU."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from treeward.config.base import Strict

__all__ = ["ClusterConfig"]


class ClusterConfig(Strict):
    """The machines of the run."""

    gpus_per_node: NonNegativeInt = 1
    """Processes on each node, each with its GPU where the machine has any. Must be 0 or 1: one process trains."""
    num_nodes: PositiveInt = 1
    """Nodes. Must be 1."""

    def check(self) -> None:
        keys = "num_nodes gpus_per_node" if self.num_nodes > 1 else "gpus_per_node num_nodes"
        is_more, fix = self.gpus_per_node > 1 or self.num_nodes > 1, "set cluster.num_nodes=1 cluster.gpus_per_node=1"
        self.refuse(is_more, "training on more than one process is not supported yet", keys, need="one", fix=fix)
