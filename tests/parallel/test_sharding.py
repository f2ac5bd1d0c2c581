"""A sharded model gives the values and the gradients of the whole one, whoever computes which data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sharded_models import KINDS


@pytest.mark.slow
def test_sharded_models_equal_whole_ones(run_processes: Callable[..., list[Any]]) -> None:
    for found in run_processes("sharded_models:everything", 2):
        assert found["float32"].keys() == {*KINDS, "offloaded"}
        for kind, errors in found["float32"].items():
            assert max(errors.values()) < 1e-5, (kind, errors)
        of_bfloat16 = found["bfloat16"]
        assert of_bfloat16["held"] == of_bfloat16["gradients"] == ["torch.float32"]
        dtype, off = of_bfloat16["scores"]
        assert dtype == "torch.float32" and off < 1e-2 and of_bfloat16["off"] < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("replicate", [1, 2])
def test_over_four_processes_and_in_copies(run_processes: Callable[..., list[Any]], replicate: int) -> None:
    kinds = ["reward model", "tied policy", "adapted policy"]
    for found in run_processes("sharded_models:compare", 4, kinds, replicate):
        for kind in kinds:
            assert max(found[kind].values()) < 1e-5, (kind, found[kind])
