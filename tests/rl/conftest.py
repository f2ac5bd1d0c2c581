"""What tests of policy optimisation share: runs that are set up, and what a run came to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def policy() -> Any:
    """A small policy, shared: copy it before a change."""
    from sampled import policy_of

    return policy_of("qwen3")


@pytest.fixture
def opened(tiny_grpo: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Sets up runs of the tiny configuration, with overrides, and closes them at the end."""
    from treeward.rl.setup import GRPOSetup, set_up_grpo

    runs: list[GRPOSetup] = []

    def make(*options: str) -> GRPOSetup:
        runs.append(set_up_grpo(tiny_grpo("checkpointing.enabled=false", *options)))
        return runs[-1]

    yield make
    for run in runs:
        run.close()
