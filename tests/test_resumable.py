"""Rows that survive a kill: each is made once, whatever moment a run ended at, and rows of two runs never mix."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeward.errors import CheckpointError, DataError
from treeward.resumable import resumable_rows
from treeward.storage import write_text

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
def test_rows_of_another_identity_are_refused_and_left_alone(change: dict[str, Any], got: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    run(path, 3)
    before = path.read_bytes()
    with pytest.raises(CheckpointError) as raised:
        run(path, 3, IDENTITY | change)
    assert raised.value.got == got and path.read_bytes() == before
    (tmp_path / "rows.identity.json").unlink()
    with pytest.raises(CheckpointError, match="missing or damaged"):
        run(path, 3)


def test_a_lone_surrogate_is_written_as_json_escapes_it(tmp_path: Path) -> None:
    """A row of data may have one, whose example `eval` keeps without a score."""
    texts: list[str] = []
    for _ in range(2):
        with resumable_rows(tmp_path / "rows.jsonl", IDENTITY, lambda row, where: str(row["text"])) as rows:
            texts += rows.kept
            rows.add({"text": "one \ud800 half"})
    write_text(tmp_path / "whole.json", json.dumps(texts, ensure_ascii=False))
    assert texts == json.loads((tmp_path / "whole.json").read_text(encoding="utf-8")) == ["one \ud800 half"]


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with resumable_rows(path, IDENTITY, number):
        with pytest.raises(CheckpointError, match="another process") as raised:
            run(path)
        assert "--output" in str(raised.value.fix)
        assert run(tmp_path / "others.jsonl") == list(range(20))
    assert run(path) == list(range(20))


def test_a_finished_file_has_its_own_name_and_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl.partial"
    with resumable_rows(path, IDENTITY, number) as rows:
        rows.add({"number": 1})
        rows.finish(tmp_path / "scores.jsonl")
    assert [file.name for file in tmp_path.iterdir()] == ["scores.jsonl"]
    assert json.loads((tmp_path / "scores.jsonl").read_text()) == {"number": 1}


def test_a_damaged_row_and_a_place_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    run(path, 2)
    path.write_text('{"number": 0}\n{"number": \n')
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the row is damaged"):
        run(path)
    with pytest.raises(DataError, match="cannot be written"):
        run(path / "below.jsonl")
    with resumable_rows(None, IDENTITY, number) as nowhere:
        nowhere.add({"number": 1})
    assert nowhere.kept == []
