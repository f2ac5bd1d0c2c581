"""`ClusterConfig`: how many processes train. One is all that is supported yet, with or without a GPU.

A run of GRPO counts the machines of all its models (`GRPOClusterConfig`), and so may have more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import NonNegativeInt, PositiveInt, model_validator

from treeward.config.base import Strict
from treeward.errors import ConfigError

__all__ = ["ClusterConfig", "GRPOClusterConfig", "MachinesConfig"]


class MachinesConfig(Strict):
    """The machines."""

    ignored_keys: ClassVar[Mapping[str, str]] = {
        "master_port_range": "one process opens no ports",
        "segment_size": "one node needs no placement",
    }

    gpus_per_node: NonNegativeInt = 1
    """Processes on each node, each with its GPU where the machine has any; 0 and 1 both mean one process."""
    num_nodes: PositiveInt = 1
    """Nodes."""

    @property
    def num_processes(self) -> int:
        """Processes in all."""
        return max(self.gpus_per_node, 1) * self.num_nodes


class ClusterConfig(MachinesConfig):
    """The machines."""

    @model_validator(mode="after")
    def _one_process(self) -> ClusterConfig:
        if self.num_processes > 1:
            key = "num_nodes" if self.num_nodes > 1 else "gpus_per_node"
            raise ConfigError(
                "training on more than one process is not supported yet",
                field=key,
                got=f"{self.num_nodes} x {self.gpus_per_node} processes",
                need="one process",
                fix="set cluster.num_nodes=1 cluster.gpus_per_node=1",
            )
        return self


class GRPOClusterConfig(MachinesConfig):
    """The machines of the policy, of the generator and of the environments together."""

    gpus_per_node: NonNegativeInt = 1
    """GPUs of each node that the run may use; 0 for the CPU. The policy runs in one process whatever it says; the
    resources of generation and of a reward model are checked against it."""
