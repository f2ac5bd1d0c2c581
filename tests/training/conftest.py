"""What tests of training share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def read_weights() -> Callable[[Path], dict[str, Any]]:
    from safetensors.torch import load_file

    return lambda folder: load_file(folder / "model.safetensors")
