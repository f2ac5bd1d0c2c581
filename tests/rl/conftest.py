"""What tests of policy optimisation share: runs that are set up, and what a run came to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
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
    from treeward.rl.setup import GRPOSetup, set_up

    runs: list[GRPOSetup] = []

    def make(*options: str) -> GRPOSetup:
        runs.append(set_up(tiny_grpo("checkpointing.enabled=false", *options)))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


@pytest.fixture(scope="session")
def result_of() -> Callable[[Path], dict[str, Any]]:
    """What a run came to: what it logged but for times, its alarms, and the weights that it exported."""

    def lines(path: Path) -> list[str]:
        """As text, so that NaN equals NaN."""
        return [
            repr({key: value for key, value in json.loads(line).items() if key != "time" and "timing/" not in key})
            for line in path.read_text(encoding="utf-8").splitlines()
        ]

    def read(folder: Path) -> dict[str, Any]:
        logs, checkpoints = folder / "logs", folder / "checkpoints"
        return {
            "metrics": lines(logs / "metrics.jsonl"),
            "samples": lines(logs / "samples.jsonl"),
            "alarms": (logs / "alarms.json").read_text(encoding="utf-8"),
            "weights": {
                str(path.relative_to(checkpoints)): path.read_bytes()
                for path in (checkpoints / "final" / "model.safetensors", *checkpoints.glob("*/adapter/*.safetensors"))
            },
        }

    return read
