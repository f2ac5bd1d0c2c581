"""Runs an example script as the documents do, in this process."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent.parent


@pytest.fixture
def uv_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`uv run SCRIPT WORDS...` in the repository, without uv and its environment; checkpoints go to
    `tmp_path`."""

    def run(script: str, *words: str) -> int:
        folders = [
            f"checkpointing.checkpoint_dir={tmp_path}/checkpoints",
            f"logger.log_dir={tmp_path}/logs",
        ]
        monkeypatch.setattr(sys, "argv", [script, *words, *folders])
        monkeypatch.chdir(REPOSITORY)
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(script, run_name="__main__")
        return int(caught.value.code or 0)

    return run
