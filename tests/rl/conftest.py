"""What tests of the loop share: what a run came to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def result_of() -> Callable[[Path], dict[str, Any]]:
    """What a run came to: what it logged but for times, its alarms, and the weights that it exported."""
    from safetensors.torch import load_file

    def lines(path: Path) -> list[str]:
        """As text, so that NaN equals NaN."""
        return [
            repr({key: value for key, value in json.loads(line).items() if key != "time" and "timing/" not in key})
            for line in path.read_text(encoding="utf-8").splitlines()
        ]

    def read(folder: Path) -> dict[str, Any]:
        final = folder / "checkpoints" / "final" / "model.safetensors"
        weights = {name: tensor.numpy().tobytes() for name, tensor in load_file(final).items()}
        logs = folder / "logs"
        alarms = logs / "alarms.json"
        return {
            "metrics": lines(logs / "metrics.jsonl"),
            "samples": lines(logs / "samples.jsonl"),
            "alarms": alarms.read_text(encoding="utf-8"),
            "weights": weights,
        }

    return read
