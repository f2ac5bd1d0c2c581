"""`ClusterConfig`: the machines of a run. One process is all that is supported yet, with or without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import NonNegativeInt, PositiveInt

from treeward.config.base import Strict

__all__ = ["ClusterConfig"]


class ClusterConfig(Strict):
    """The machines of the run."""

    ignored_keys: ClassVar[Mapping[str, str]] = {
        "master_port_range": "one process opens no ports",
        "segment_size": "one node needs no placement",
    }

    gpus_per_node: NonNegativeInt = 1
    """Processes on each node, each with its GPU where the machine has any. Must be 0 or 1: one process trains."""
    num_nodes: PositiveInt = 1
    """Nodes. Must be 1."""

    def check(self) -> None:
        keys = ("num_nodes", "gpus_per_node") if self.num_nodes > 1 else ("gpus_per_node", "num_nodes")
        if self.gpus_per_node > 1 or self.num_nodes > 1:
            raise self.conflict(
                "training on more than one process is not supported yet",
                *keys,
                need="one process",
                fix="set cluster.num_nodes=1 cluster.gpus_per_node=1",
            )
