"""What tests of training share: the trajectory of a run and its weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def trajectory() -> Callable[[Path], list[str]]:
    """The lines of a `metrics.jsonl` but for times, as text, so that NaN equals NaN."""

    def read(log_dir: Path) -> list[str]:
        lines = (log_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [
            repr({key: value for key, value in json.loads(line).items() if key != "time" and "timing/" not in key})
            for line in lines
        ]

    return read


@pytest.fixture(scope="session")
def read_weights() -> Callable[[Path], dict[str, Any]]:
    from safetensors.torch import load_file

    return lambda folder: load_file(folder / "model.safetensors")
