"""Rows that survive a kill: each is made once, whatever moment a run ended at, and rows of two runs
never mix."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeward.errors import CheckpointError, DataError
from treeward.resumable import resumable_rows

IDENTITY = {"model": "a" * 64, "truncation": "drop", "seed": 0}


def number(row: Any, where: str) -> int:
    return int(row["number"])


def run(path: Path, total: int = 20, identity: dict[str, Any] = IDENTITY) -> list[int]:
    """Which numbers this run had to make."""
    with resumable_rows(path, identity, number) as rows:
        made = [n for n in range(total) if n not in rows.kept]
        for n in made:
            rows.add({"number": n, "text": "é\n"})
    return made


@given(cut=st.integers(0, 700))
def test_a_run_cut_off_at_any_byte_goes_on_and_makes_nothing_twice(cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "new", "rows.jsonl")
        run(path)
        whole = path.read_bytes()
        path.write_bytes(whole[:cut])
        num_kept = whole[:cut].count(b"\n")
        assert run(path) == list(range(num_kept, 20))
        assert path.read_bytes() == whole and run(path) == []


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"truncation": "truncate_left"}, "truncation drop -> truncate_left"),
        ({"model": "b" * 64, "seed": 1}, "another model, seed 0 -> 1"),
        ({"new": "x"}, "new null -> x"),
    ],
)
def test_rows_of_another_identity_are_refused_and_left_alone(
    change: dict[str, Any], got: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    run(path, 3)
    before = path.read_bytes()
    with pytest.raises(CheckpointError) as raised:
        run(path, 3, IDENTITY | change)
    assert raised.value.got == got and path.read_bytes() == before
    without_seed = {name: value for name, value in IDENTITY.items() if name != "seed"}
    with pytest.raises(CheckpointError) as raised:
        run(path, 3, without_seed)
    assert raised.value.got == "seed 0 -> null" and path.read_bytes() == before
    (tmp_path / "rows.identity.json").unlink()
    with pytest.raises(CheckpointError, match="missing or damaged"):
        run(path, 3)


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    run(path, 3)
    lines = path.read_text().splitlines()
    lines[1] = '{"number": '
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match="the row is damaged") as raised:
        run(path, 3)
    assert raised.value.where == f"{path}:2"


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with resumable_rows(path, IDENTITY, number):
        with pytest.raises(CheckpointError, match="another process") as raised:
            run(path)
        assert "--output" in str(raised.value.fix)
        assert run(tmp_path / "others.jsonl") == list(range(20))
    assert run(path) == list(range(20))
