"""What tests of the command line share: a function that writes rows."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from treeward.cli.main import main


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[[str, Iterable[Any]], Path]:
    """Write rows as JSON lines; a row that is text is written as it is."""

    def write(name: str, rows: Iterable[Any]) -> Path:
        path = tmp_path / name
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return write


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
