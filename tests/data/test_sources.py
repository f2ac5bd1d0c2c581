from __future__ import annotations

import csv
import gzip
import io
import json
import os
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treeward.data import sources
from treeward.data.sources import fingerprint, read_file, read_rows
from treeward.errors import DataError

ROWS = [
    {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
    {"prompt": "Ça?", "chosen": "Oui\n\u2028☃", "rejected": ""},
]
KINDS = ["jsonl", "ndjson", "json", "csv", "tsv", "parquet", "arrow", "feather"]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as the suffix says; `.arrow` is the IPC stream format, `.feather` the file
    format."""
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    table = pa.Table.from_pylist(rows)
    binary = io.BytesIO()
    text = io.StringIO(newline="")
    if kind in ("jsonl", "ndjson"):
        text.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    elif kind == "json":
        text.write(json.dumps(rows, indent=1))
    elif kind in ("csv", "tsv"):
        writer = csv.DictWriter(
            text,
            list(rows[0]),
            dialect="excel" if kind == "csv" else "excel-tab",
        )
        writer.writeheader()
        writer.writerows(rows)
    elif kind == "parquet":
        pyarrow.parquet.write_table(table, binary, row_group_size=2)
    else:
        make = pyarrow.ipc.new_stream if kind == "arrow" else pyarrow.ipc.new_file
        with make(binary, table.schema) as sink:
            sink.write_table(table, max_chunksize=2)
    raw = binary.getvalue() or text.getvalue().encode("utf-8")
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def values(path: Path | str, **kwargs: Any) -> list[dict[str, Any]]:
    return [row.values for row in read_rows(str(path), **kwargs)]


def refused(path: Path | str, **kwargs: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        list(read_rows(str(path), **kwargs))
    return caught.value


_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_name = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=6)


FILES = [*KINDS, *(f"{kind}.gz" for kind in KINDS if kind not in ("parquet", "arrow", "feather"))]


@pytest.mark.parametrize("kind", FILES)
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.lists(_name, min_size=1, max_size=3, unique=True), data=st.data())
def test_round_trip(tmp_path: Path, kind: str, names: list[str], data: st.DataObject) -> None:
    rows = data.draw(
        st.lists(st.fixed_dictionaries({name: _text for name in names}), min_size=1, max_size=5),
    )
    path = write(tmp_path / f"rows.{kind}", rows)
    assert values(path) == values(path, split="train") == rows


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow", "feather"])
def test_nested_values_and_places(tmp_path: Path, kind: str) -> None:
    rows = [{"context": [{"role": "user", "content": str(i)}], "margin": i / 2} for i in range(5)]
    path = write(tmp_path / f"rows.{kind}", rows)
    place = f"{path}:" if kind == "jsonl" else f"{path}:row "
    read = [(row.values, row.where) for row in read_rows(str(path))]
    assert read == [(row, f"{place}{number}") for number, row in enumerate(rows, 1)]


@pytest.mark.parametrize(
    ("name", "raw", "where", "words"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', ":2", ["not JSON", "column"]),
        ("a.jsonl", b'{"a": 1}\n\n[{"a": 1}]\n', ":3", ["not an object", ".json"]),
        ("a.jsonl", b'{"a": 1}\n{"a": 1, "b": 2, "a": 3}\n', ":2", ["the key 'a' occurs twice"]),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', ":2", ["UTF-8", "0xff at position 8"]),
        ("a.jsonl", gzip.compress(b'{"a": 1}', mtime=0), ":1", ["ends in .gz"]),
        (
            "a.jsonl.gz",
            gzip.compress(os.urandom(3000).hex().encode())[:-100],
            ":1",
            ["gzip file is damaged"],
        ),
        ("a.json", b'[{"a": 1},\n {"a": }]', ":2", ["not JSON"]),
        (
            "a.json",
            b'{"data": [{"a": 1}],\n "rows": [{"a": 2}]}',
            "",
            ["no list of rows"],
        ),  # none is left out silently
        (
            "a.csv",
            b'\na,b\n1,"2\n2"\n3,4,"5\n6"\n',
            ":5",
            ["does not fit", "a, b"],
        ),  # where the row begins
        # The separator is that of the header.
        ("a.csv", b"\n\r\na;b\n1;2\n3;4;5\n", ":5", ["does not fit", "a, b"]),
        ("a.csv", b"a,b,a\n1,2,3\n", ":1", ["the same name", "a, b, a"]),
        ("a.csv", b'a,b\n1,2\n"open,2\n3,4\n', ":3", ["not valid CSV"]),
        ("a.parquet", b"PAR1nonsense", ":row 1", ["cannot be read"]),
        ("a.txt", b"x", "", ["kind of file", ".parquet"]),
    ],
)
def test_bad_files(tmp_path: Path, name: str, raw: bytes, where: str, words: list[str]) -> None:
    path = tmp_path / name
    path.write_bytes(raw)
    error = refused(path)
    assert error.where == f"{path}{where}"
    for word in words:
        assert word in str(error)


def test_folder_whose_names_say_splits(tmp_path: Path) -> None:
    write(tmp_path / "train-00000-of-00002.parquet", ROWS[:1])
    write(tmp_path / "train-00001-of-00002.parquet", ROWS[1:])
    assert values(tmp_path) == ROWS
    write(tmp_path / "validation.parquet", ROWS[:1])
    assert values(tmp_path, split="train") == ROWS
    assert values(tmp_path, split="validation") == ROWS[:1]
    error = refused(tmp_path)
    assert error.got == "train, validation" and "the path of its data alone" in str(error.fix)
    assert "one of train, validation" in str(refused(tmp_path, split="test"))


def test_folders_and_patterns(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", ROWS[1:])
    write(tmp_path / "a.jsonl.gz", ROWS[:1])
    (tmp_path / "LICENSE").write_text("x")
    (tmp_path / ".hidden.jsonl").write_text("broken")
    assert (
        values(tmp_path) == values(tmp_path, split="train") == values(tmp_path / "*.jsonl*") == ROWS
    )
    assert values(tmp_path / "**" / "b.*") == ROWS[1:]
    write(tmp_path / "b.jsonl.gz", ROWS[1:])
    for path in (tmp_path, tmp_path / "b.*"):
        assert f"{tmp_path / 'b.jsonl'} and {tmp_path / 'b.jsonl.gz'}" in str(refused(path))
    (tmp_path / "b.jsonl.gz").unlink()
    (tmp_path / "README.md").write_text("Files of mine.")  # says nothing of splits
    write(tmp_path / "train.jsonl", ROWS)
    assert "a.jsonl.gz, b.jsonl beside train.jsonl" in str(refused(tmp_path))
    assert str(tmp_path / "train.jsonl") in str(refused(tmp_path / "trian.jsonl").fix)
    assert "no such folder" in str(refused(tmp_path / "nowhere" / "train.jsonl"))
    assert "no file fits" in str(refused(tmp_path / "*.parquet"))
    (tmp_path / "empty").mkdir()
    assert "no data" in str(refused(tmp_path / "empty"))


def test_the_split_of_a_file_may_say_what_it_is_for(tmp_path: Path) -> None:
    """As in NeMo RL's rm.yaml, whose paths alone are replaced; the training data is no validation
    set."""
    for name in ("mine.jsonl", "train.jsonl"):
        write(tmp_path / name, ROWS)
    assert (
        values(tmp_path / "mine.jsonl", split="train")
        == values(tmp_path / "mine.jsonl", split="validation")
        == ROWS
    )
    assert "no split 'validation'" in str(refused(tmp_path / "train.jsonl", split="validation"))
    assert "no split 'test'" in str(refused(tmp_path / "mine.jsonl", split="test"))


def test_saved_dataset_dict(tmp_path: Path) -> None:
    parts = {
        "train": datasets.Dataset.from_list(ROWS),
        "validation": datasets.Dataset.from_list(ROWS[:1]),
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path)
    assert values(tmp_path, split="train") == ROWS
    assert [row.where for row in read_rows(str(tmp_path), split="validation")] == [
        f"{tmp_path}[validation]:row 1",
    ]
    assert refused(tmp_path).got == "train, validation"
    assert refused(tmp_path, split="valid").fix == "did you mean validation?"
    next((tmp_path / "train").glob("*.arrow")).write_bytes(b"")
    assert "cannot be read" in str(refused(tmp_path, split="train"))


@pytest.fixture
def hub_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder laid out like a dataset on the hub, with a card that maps subsets and splits to
    files."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "copy"
    (folder / "data").mkdir(parents=True)
    write(folder / "data" / "train.jsonl", ROWS)
    write(folder / "data" / "held.jsonl", ROWS[:1])
    files = "[{split: train, path: data/train.jsonl}, {split: held, path: data/held.jsonl}]"
    configs = f"- {{config_name: default, data_files: {files}}}\n- {{config_name: b, data_files: data/held.jsonl}}"
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}\n---\n")
    return folder


def test_local_copy_of_a_hub_dataset(hub_copy: Path) -> None:
    assert values(hub_copy, split="train") == ROWS
    assert values(hub_copy, split="held") == ROWS[:1]
    assert values(hub_copy, subset="b") == ROWS[:1]
    assert refused(hub_copy).got == "train, held"
    before = fingerprint(str(hub_copy), split="train")
    os.utime(hub_copy / "data" / "train.jsonl", (0, 0))
    assert fingerprint(str(hub_copy), split="train") == before and len(before) == 32
    write(hub_copy / "data" / "train.jsonl", ROWS[:1])
    assert fingerprint(str(hub_copy), split="train") != before


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.json", "rows.csv"])
def test_a_line_without_an_end_is_refused_before_it_is_read(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sources, "MOST_LINE_BYTES", 1000)
    row = b'{"a": "b"}\n' if "json" in name else b"a\nb\n"
    content = row * 2 + b" " * 10_000
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(DataError, match=r"a line is too long") as caught:
        list(read_file(str(path)))
    assert f"{path}:" in str(caught.value)


def test_a_folder_with_a_script_of_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "rows.py").write_text("x = 1")
    (folder / "a.jsonl").write_text('{"a": "b"}\n')
    with pytest.raises(DataError, match="script"):
        list(read_rows(str(folder)))
