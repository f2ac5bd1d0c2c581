"""Processes of a run that do not find each other."""

from __future__ import annotations

from datetime import timedelta

import pytest

from treeward import processes
from treeward.errors import LostProcessError


@pytest.mark.slow
def test_processes_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(LostProcessError, match="rank 0 has not found the other processes"),
        processes.joined(timeout=timedelta(seconds=1)),
    ):
        pytest.fail("it is alone")
