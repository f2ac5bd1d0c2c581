"""What the processes of a run tell each other, and who computes which data."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from treeward import processes
from treeward.config.policy import ShardingConfig
from treeward.errors import ConfigError, LostProcessError
from treeward.parallel.mesh import make_mesh


def tell() -> list[Any]:
    rank = processes.rank()
    total = processes.summed(torch.tensor([1.0, float(rank)]))
    gathered, broadcast = processes.gather({"rank": rank}), processes.broadcast(f"from {rank}")
    return [processes.size(), processes.is_main(), gathered, broadcast, total.tolist()]


def share() -> dict[str, Any]:
    """Of a mesh of 4 processes: who computes which data, and the sum of their ranks over the data group."""
    found = {}
    for name, config in (("plain", {}), ("replicated", {"dp_replicate_size": 2})):
        mesh = make_mesh(ShardingConfig(**config))
        total = processes.summed(torch.tensor(float(processes.rank())), mesh.data_group)
        found[name] = [mesh.data_rank, mesh.data_size, mesh.tensor_size, float(total)]
    with pytest.raises(ConfigError, match="3 of 4 processes"):
        make_mesh(ShardingConfig(dp_replicate_size=3))
    return found


def test_alone() -> None:
    assert tell() == [1, True, [{"rank": 0}], "from 0", [1.0, 0.0]]
    mesh = make_mesh(ShardingConfig())
    assert (mesh.data_rank, mesh.data_size, mesh.tensor_size, mesh.data_group) == (0, 1, 1, None)


def everything() -> list[Any]:
    return [tell(), share()]


@pytest.mark.slow
def test_together(run_processes: Callable[..., list[Any]]) -> None:
    for rank, (told, shares) in enumerate(run_processes("test_processes:everything", 4)):
        assert told == [4, rank == 0, [{"rank": number} for number in range(4)], "from 0", [4.0, 6.0]]
        assert shares == {"plain": [rank, 4, 1, 6.0], "replicated": [rank, 4, 1, 6.0]}


@pytest.mark.slow
def test_processes_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(LostProcessError, match="rank 0 has not found the other processes"),
        processes.joined(timeout=timedelta(seconds=1)),
    ):
        pytest.fail("it is alone")
