"""Imports a benchmark as its command line does, from its own folder."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
NAMES = {path.stem for path in FOLDER.glob("*.py")}


@pytest.fixture(scope="module")
def benchmark(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The benchmark that the module of the test is named after."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        patch.setenv("TREEWARD_SHARED_DATA", "nowhere")
        for name in NAMES:
            patch.delitem(sys.modules, name, raising=False)
        yield importlib.import_module(request.module.__name__.rpartition("test_")[2])
        for name in NAMES:
            sys.modules.pop(name, None)
