"""What Ray reserves for each of several equal processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from treeward.errors import ConfigError
from treeward.parallel.ray_cluster import equal_shares, start_ray

GPUS = [{"CPU": 32.0, "GPU": 4.0}]


@pytest.mark.parametrize(
    ("number", "num_gpus", "required", "nodes", "want"),
    [
        (2, 1, False, [{"CPU": 8.0}], {"num_cpus": 4}),
        (3, 1, False, [{"CPU": 8.0}, {"CPU": 16.0}, {"memory": 9.0}], {"num_cpus": 8}),
        (4, 1, False, GPUS, {"num_gpus": 1}),
        (8, 0.5, True, GPUS, {"num_gpus": 0.5}),
        (3, 2, False, GPUS, None),
        (1, 1, True, [{"CPU": 8.0}], None),
    ],
)
def test_a_gpu_or_an_equal_part_of_the_cores(
    number: int,
    num_gpus: float,
    required: bool,
    nodes: Any,
    want: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray = SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": one} for one in nodes])

    def shares() -> dict[str, float]:
        return equal_shares(ray, number, num_gpus=num_gpus, required=required, where="--workers")

    if want is not None:
        assert shares() == want
        return
    with pytest.raises(ConfigError, match="too few GPUs"):
        shares()
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")  # it may grow
    assert shares() == {"num_gpus": num_gpus}


def test_a_ray_that_does_not_start_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def fail(*arguments: Any, **options: Any) -> None:
        raise Exception("The current node timed out during startup. This could happen because...")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(ConfigError, match="timed out during startup") as caught:
        start_ray()
    assert "ray stop" in str(caught.value)
