"""What tests of the command line share."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from verbs import Command, Ended

from treeward.cli.main import main


@pytest.fixture
def treeward(capsys: pytest.CaptureFixture[str]) -> Command:
    """A command as on a terminal: `treeward("verify", folder, "--json").out`."""

    def run(*words: object) -> Ended:
        capsys.readouterr()
        code = main([str(word) for word in words])
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture
def own_model(model_folder: Path, tmp_path: Path) -> Path:
    """A copy of the signed reward model for one test, to write into."""
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    ours = logging.getLogger("treeward")
    before = root.handlers[:], root.level, ours.level
    yield
    logging.captureWarnings(False)
    root.handlers[:] = before[0]
    root.level = before[1]
    ours.level = before[2]
