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
        for key, number in (("num_nodes", self.num_nodes), ("gpus_per_node", self.gpus_per_node)):
            need = "1: training on more than one process is not supported yet"
            self.refuse(number > 1, key, need, fix=f"set cluster.{key}=1")
