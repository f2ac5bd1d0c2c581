"""What tests of the command line share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from treeward.cli.main import main


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """`treeward verify`: the exit code, and what it wrote on standard output or error."""

    def run(*words: object) -> tuple[int, str]:
        capsys.readouterr()
        code = main(["verify", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out or captured.err

    return run


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("treeward")
    before = root.handlers[:], root.level, ours.level
    yield
    logging.captureWarnings(False)
    root.handlers[:], root.level, ours.level = before[0], before[1], before[2]
