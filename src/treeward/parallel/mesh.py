"""`Mesh`: which process holds which part of the model and of the data.

    mesh = make_mesh(config.policy.dtensor_cfg)
    mesh.data_rank, mesh.data_size      # the share of a step's comparisons that this process has

Three dimensions: `replicate` copies of the model, each sharded over `shard` processes (FSDP), each
shard cut by heads and columns over `tensor` processes. Processes that differ in `tensor` alone
compute the same data together.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from treeward import processes
from treeward.config.policy import ShardingConfig
from treeward.errors import ConfigError

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"


@dataclass(frozen=True, slots=True)
class Mesh:
    """`devices`: PyTorch's mesh of the three dimensions; None in a run of one process."""

    devices: DeviceMesh | None = None

    def __str__(self) -> str:
        if self.devices is None:
            return "one process"
        copies, parts, cuts = self.devices.shape
        layout = f"{copies} x {parts} x {cuts} (copies x shards x tensor parallel)"
        return f"{self.devices.size()} processes: {layout}"

    @property
    def data_size(self) -> int:
        """The number of shares of a step's data."""
        if self.devices is None:
            return 1
        return self.devices.size() // self.tensor_size

    @property
    def data_rank(self) -> int:
        """The index of this process's share."""
        if self.devices is None:
            return 0
        # `tensor` is the last dimension: processes that compute one share have neighbouring ranks
        return processes.rank() // self.tensor_size

    @property
    def tensor_size(self) -> int:
        if self.devices is None:
            return 1
        return self.devices[TENSOR].size()

    @property
    def data_group(self) -> ProcessGroup | None:
        """The processes with different shares of the data; None means all processes."""
        if self.devices is None or self.tensor_size == 1:
            return None
        # A mesh flattens once: from then on it gives the same group by this name.
        return self.devices[REPLICATE, SHARD]._flatten("data").get_group()


def make_mesh(config: ShardingConfig) -> Mesh:
    """The mesh of all processes. Raises `ConfigError` for a layout that does not divide them."""
    shape = mesh_shape(config, processes.size())
    if processes.size() == 1:
        return Mesh()
    return Mesh(
        init_device_mesh(processes.device().type, shape, mesh_dim_names=(REPLICATE, SHARD, TENSOR))
    )


def mesh_shape(config: ShardingConfig, num_processes: int) -> tuple[int, int, int]:
    """The sizes of the three dimensions. Raises `ConfigError` for a layout that does not divide the
    processes."""
    tensor = config.tensor_parallel_size
    replicate = config.dp_replicate_size
    if num_processes % (tensor * replicate):
        raise ConfigError(
            "this layout does not divide the processes",
            field="policy.dtensor_cfg.tensor_parallel_size policy.dtensor_cfg.dp_replicate_size",
            got=f"{tensor} x {replicate} of {num_processes} processes",
            need="tensor_parallel_size x dp_replicate_size that divides "
            "cluster.num_nodes x cluster.gpus_per_node",
        )
    return replicate, num_processes // (tensor * replicate), tensor
