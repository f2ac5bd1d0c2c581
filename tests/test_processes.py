"""What a process says of others that do not come. `tests/parallel` has those that do."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest

from treeward import processes
from treeward.errors import LostProcessError
from treeward.processes import joined


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> str:
    """Those of the first of two processes, as a shell may keep them; the address of the second."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return f"127.0.0.1:{port}"


def test_processes_that_do_not_come_are_told(variables: str) -> None:
    words = "rank 0 has not found the other processes"
    with (
        pytest.raises(LostProcessError, match=words) as caught,
        joined(timeout=timedelta(seconds=1)),
    ):
        pass
    assert caught.value.need == "2 processes within 0:00:01"
    assert f"each must reach {variables}" in str(caught.value) and "unset RANK WORLD_SIZE" in str(
        caught.value
    )


def test_a_process_that_waits_says_for_what_and_why(
    variables: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Long before it gives up, which is after half an hour."""
    monkeypatch.setattr(processes, "SILENT_SECONDS", 0.1)
    with pytest.raises(LostProcessError), joined(timeout=timedelta(seconds=1)):
        pass
    said = capsys.readouterr().err
    assert (
        f"Waiting for the other processes of this run at {variables} (RANK=0 WORLD_SIZE=2 " in said
    )
    assert "unset RANK WORLD_SIZE" in said


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR"])
def test_a_variable_that_is_missing_is_named(
    variables: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv(name)
    with (
        pytest.raises(LostProcessError, match=f"(?s)got: .*{name}"),
        joined(timeout=timedelta(seconds=1)),
    ):
        pass


def test_an_empty_variable_is_that_of_a_run_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `WORLD_SIZE= treeward train ...` leaves it; it was a traceback of `int`."""
    monkeypatch.setenv("WORLD_SIZE", "")
    with joined():
        assert processes.size() == 1
