"""Rows from where data lies: a file, a folder of files, a glob, a saved `datasets` folder, or the Hugging Face hub.

    for row in read_rows("train.jsonl.gz"):
        row.values, row.where        # {"prompt": ..., "chosen": ...}, "train.jsonl.gz:17"

A row is an object with string keys; its place is the line of a text file, else the number of the row, both from 1.
Kinds of files, by suffix, each also with `.gz`:

    .jsonl .ndjson    an object per line; blank lines are skipped and still counted
    .json             a list of objects, or an object with that list under "data" or "rows", or lines as above
    .csv .tsv         a header line, then cells; every cell stays a string
    .parquet          one row group after another
    .arrow .feather   Arrow IPC, the file format as well as the stream that `datasets` writes

Text is UTF-8. Text files are read by line here and not by `datasets`, whose Arrow tables hold neither line numbers nor
`content` that is text in one row and a list in the next. Memory does not grow with the file, but `.json` files and
gzipped `.parquet` and `.arrow` files are read whole.

A folder is one that `save_to_disk` wrote, or files of one kind (read in the order of their names; names such as
`validation.jsonl` say their split), or a copy of a dataset on the hub. `datasets.load_dataset` reads the hub
(`org/name`) and such copies; code from the hub is never run.
"""

from __future__ import annotations

import csv
import difflib
import glob
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeward.errors import DataError

__all__ = ["KINDS", "Row", "file_suffix", "fingerprint", "read_file", "read_jsonl_stream", "read_rows"]

# Suffix -> what the file holds.
KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
# Files that `datasets` and the hub keep beside the data under a data suffix.
_NOT_DATA = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
# The words by which file names say their split; the same that `datasets` looks for.
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_ROWS_PER_BATCH = 1024
_LONGEST_CELL_CHARACTERS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its `values` by column, and `where` it stands, as `train.jsonl:17` or `rows.parquet:row 17`."""

    values: dict[str, Any]
    where: str


def read_rows(path: str, *, split: str | None = None, subset: str | None = None) -> Iterator[Row]:
    """The rows of a file, a folder, a glob, a saved dataset or a hub dataset (`org/name`), in order.

    A file is a single split: `split` may be None, "train" (what `datasets` calls any lone file) or the split that the
    file's own name says, as in `validation.jsonl`. In a folder `split` selects the files so named. `subset` is the
    configuration name of a hub dataset. The path is looked up at once, the rows are read as they are asked for.

    Raises `DataError` naming the file and line for a missing or empty file, an ambiguous or unknown split, text that
    is not UTF-8, malformed JSON, CSV or Arrow data, a truncated gzip, and rows that are not objects.
    """
    files = _plain_files(path, split, subset)
    if files is not None:
        return _at_least_one((row for file in files for row in read_file(file)), path)
    table, label = _load_table(path, split, subset)
    # A dataset may have been saved with a torch or numpy format; rows are plain Python values.
    rows = (Row(values, f"{label}:row {i}") for i, values in enumerate(table.with_format(None), 1))
    return _at_least_one(rows, path)


def read_file(path: str) -> Iterator[Row]:
    """The rows of one existing file whose `file_suffix` is in `KINDS`, in order; none if it holds none.

    Raises `DataError` as `read_rows` does.
    """
    kind = KINDS[file_suffix(path)]
    if kind == "jsonl":
        return read_jsonl_stream(_lines(path), path)
    if kind == "json":
        return _json_rows(path)
    return _csv_rows(path, kind) if kind in ("csv", "tsv") else _arrow_rows(path, kind)


def file_suffix(path: str) -> str:
    """The lower-case suffix that says the kind of a file, a key of `KINDS` if that is known; `.gz` is passed over."""
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]


def fingerprint(path: str, *, split: str | None = None, subset: str | None = None) -> str:
    """A hex digest (128 bits) that changes when the content does.

    Local data: of the bytes of its files, and in a folder of their names; the hub: of the name, the split, the subset
    and the fingerprint that `datasets` gives the table. Raises `DataError` as `read_rows` does.
    """
    digest = hashlib.blake2b(digest_size=16)
    files = _plain_files(path, split, subset)
    if files is None and os.path.isdir(path):
        files = tuple(sorted(str(file) for file in Path(path).rglob("[!.]*") if file.is_file()))
        digest.update(json.dumps([split, subset]).encode())
    elif files is None:
        table, label = _load_table(path, split, subset)
        digest.update(json.dumps([label, subset, table._fingerprint]).encode())
    for file in files or ():
        # A file that is moved or renamed alone is the same data; in a folder names say order and split.
        name = None if file == path else os.path.relpath(file, path if os.path.isdir(path) else os.path.dirname(path))
        digest.update(json.dumps([name, os.path.getsize(file)]).encode())
        with open(file, "rb") as stream:
            while part := stream.read(1 << 20):
                digest.update(part)
    return digest.hexdigest()


def _at_least_one(rows: Iterator[Row], path: str) -> Iterator[Row]:
    is_empty = True
    for row in rows:
        is_empty = False
        yield row
    if is_empty:
        raise DataError("there are no rows", where=path, got="empty data", need="at least one row")


# --- from a path to files or a table ---------------------------------------------------------------------------------


def _plain_files(path: str, split: str | None, subset: str | None) -> tuple[str, ...] | None:
    """The files of one kind that the path means; None where `datasets` must read it."""
    if os.path.isdir(path):
        return _files_of_folder(path, split, subset)
    files: tuple[str, ...] = (path,) if os.path.exists(path) else ()
    if not files and glob.has_magic(path):
        files = tuple(sorted(file for file in glob.glob(path, recursive=True) if os.path.isfile(file)))
    if not files and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path) and file_suffix(path) not in KINDS:
        return None
    if not files:
        raise _missing(path)
    _check_kinds(files, path)
    if subset is not None:
        raise DataError(
            "a file has no subset", where=path, field="subset", got=subset, need="null", fix="remove subset"
        )
    if split not in (None, "train") and {_split_in_name(file) for file in files} != {split}:
        need = "no split: a file is one split, whatever it is for"
        raise DataError(f"a file has no split {split!r}", where=path, field="split", got=split, need=need)
    return files


def _files_of_folder(folder: str, split: str | None, subset: str | None) -> tuple[str, ...] | None:
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file())
    files = [os.path.join(folder, name) for name in names if _is_data(name)]
    nested = not files and any(_is_data(name) for _, _, names in os.walk(folder) for name in names)
    if subset is not None or nested or _is_saved(folder) or _has_hub_card(folder):
        return None
    if not files:
        got, need = ", ".join(names) or "no file", f"files that end in {', '.join(KINDS)}, or a folder of save_to_disk"
        raise DataError("the folder holds no data", where=folder, got=got, need=need)
    _check_kinds(files, folder)
    splits = {file: _split_in_name(file) for file in files}
    named = sorted({name for name in splits.values() if name is not None})
    if split is None and len(named) > 1:
        raise _ambiguous(folder, named)
    if split is None or (split == "train" and not named):
        return tuple(files)
    if split not in named:
        raise _no_such_split(folder, split, named or ["train"])
    return tuple(file for file in files if splits[file] == split)


def _is_data(name: str) -> bool:
    return file_suffix(name) in KINDS and name not in _NOT_DATA and not name.startswith((".", "_"))


def _is_saved(folder: str) -> bool:
    """Whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote the folder."""
    names = set(os.listdir(folder))
    return "dataset_dict.json" in names or {"state.json", "dataset_info.json"} <= names


def _has_hub_card(folder: str) -> bool:
    """Whether a README like those on the hub says which files belong to which split."""
    card = Path(folder, "README.md")
    text = card.read_text("utf-8", errors="replace") if card.is_file() else ""
    return text.startswith("---") and re.search(r"^configs:", text.split("\n---", 1)[0], re.MULTILINE) is not None


def _split_in_name(file: str) -> str | None:
    words = re.split(r"[^a-z]+", os.path.basename(file).lower())
    return next((split for split, names in _SPLIT_WORDS.items() if set(names) & set(words)), None)


def _check_kinds(files: Sequence[str], where: str) -> None:
    unknown = next((file for file in files if file_suffix(file) not in KINDS), None)
    if unknown is not None:
        got, need = f"the suffix {os.path.splitext(unknown)[1] or 'is missing'}", f"{', '.join(KINDS)}, each also .gz"
        raise DataError("the kind of file is not known", where=unknown, got=got, need=need)
    kinds = {KINDS[file_suffix(file)]: os.path.basename(file) for file in files}
    twice = None if len(kinds) > 1 else next((file for file in files if f"{file}.gz" in files), None)
    if twice is not None or len(kinds) > 1:
        raise DataError(
            "a file is there twice, packed and unpacked" if twice else "the files are of several kinds",
            where=where,
            got=f"{twice} and {twice}.gz" if twice else ", ".join(kinds.values()),
            need="files of one kind, and each row once",
            fix=f"remove one of them, or choose with a pattern, as *{file_suffix(files[0])}",
        )


def _missing(path: str) -> DataError:
    folder = os.path.dirname(path) or "."
    if glob.has_magic(path):
        return DataError("no file fits the pattern", where=path, need="at least one file", fix="check the path")
    if not os.path.isdir(folder):
        return DataError("there is no such file, and no such folder", where=path, got=folder, fix="check the path")
    near = difflib.get_close_matches(os.path.basename(path), os.listdir(folder), n=3)
    near = [os.path.join(os.path.dirname(path), name) for name in near]
    need = "a file, a folder, a pattern such as data/*.jsonl, or a hub name such as org/name"
    fix = f"did you mean {' or '.join(near)}?" if near else "check the path"
    return DataError("there is no such file", where=path, need=need, fix=fix)


def _ambiguous(path: str, splits: Sequence[str]) -> DataError:
    got, fix = ", ".join(splits), f"add split: {'train' if 'train' in splits else splits[0]}"
    summary = "there are several splits and none is chosen"
    return DataError(summary, where=path, field="split", got=got, need="one of them", fix=fix)


def _no_such_split(path: str, split: str, splits: Sequence[str]) -> DataError:
    near, need = difflib.get_close_matches(split, splits, n=1), f"one of {', '.join(splits)}"
    fix = f"did you mean {near[0]}?" if near else None
    return DataError(f"there is no split {split!r}", where=path, field="split", got=split, need=need, fix=fix)


def _load_table(path: str, split: str | None, subset: str | None) -> tuple[Any, str]:
    """A `datasets.Dataset`, and its name in errors."""
    import datasets

    is_local, is_saved = os.path.isdir(path), os.path.isdir(path) and _is_saved(path)
    if is_saved and subset is not None:
        raise DataError("a saved dataset has no subset", where=path, field="subset", got=subset, fix="remove subset")
    try:
        loaded = (
            datasets.load_from_disk(path)
            if is_saved
            else datasets.load_dataset(path, subset, split=split, streaming=False)
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:  # Arrow's errors are ValueErrors
        summary, need = "the folder cannot be read as a dataset", "a folder that the datasets library can read"
        fix = "check path, subset and split; write a saved dataset again with save_to_disk"
        if not is_local:
            summary, need = "no such file, and the hub does not give it", "a local path, or a hub dataset"
            fix = "check name, subset, split and network; offline, give a local copy instead of the name; "
            fix += "a private or gated dataset needs HF_TOKEN"
        raise DataError(summary, where=path, got=f"{type(error).__name__}: {error}", need=need, fix=fix) from error
    if isinstance(loaded, Mapping):
        if split is None and len(loaded) > 1:
            raise _ambiguous(path, list(loaded))
        chosen = next(iter(loaded)) if split is None else split
        if chosen not in loaded:
            raise _no_such_split(path, chosen, list(loaded))
        return loaded[chosen], f"{path}[{chosen}]"
    if is_saved:
        own = str(loaded.split or "train")
        if split not in (None, "train", own):
            raise _no_such_split(path, str(split), [own])
        return loaded, path
    return loaded, f"{path}[{split}]"


# --- text, line by line ----------------------------------------------------------------------------------------------


def read_jsonl_stream(lines: Iterable[bytes | str], name: str) -> Iterator[Row]:
    """Rows of JSON lines that come from anywhere (a pipe, an open file); `name` stands for the file in `where`.

    Blank lines are skipped, a byte order mark is ignored. An empty stream gives no rows.
    """
    for number, line in enumerate(lines, 1):
        where = f"{name}:{number}"
        text = (_decode(line, where) if isinstance(line, bytes) else line).removeprefix("\ufeff").strip()
        if text:
            try:
                value = json.loads(text)  # NaN and Infinity become floats, which the formats refuse
            except (ValueError, RecursionError) as error:
                raise _json_error(error, where, "one complete JSON object", text) from error
            yield Row(_as_object(value, where), where)


def _lines(path: str) -> Iterator[bytes]:
    """The lines of a text file, gzipped or not."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.lower().endswith(".gz") else open(path, "rb") as stream:
            for line in stream:
                number += 1
                yield line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        is_cut = isinstance(error, EOFError)
        summary = "the gzip file ends too early" if is_cut else "the file is not valid gzip"
        fix = "copy it again" if is_cut else "copy it again, or remove .gz from its name"
        where = f"{path}:{number + 1}"
        raise DataError(summary, where=where, got=str(error), need="a complete gzip file", fix=fix) from error


def _texts(path: str) -> Iterator[str]:
    for number, line in enumerate(_lines(path), 1):
        yield _decode(line, f"{path}:{number}").removeprefix("\ufeff")


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{raw[error.start]:02x} at position {error.start + 1} of the line"
        fix = "save the file as UTF-8, or mend the line"
        if raw.startswith(b"\x1f\x8b"):
            found, fix = "gzip data", "add .gz to the name of the file"
        elif raw.startswith((b"\xff\xfe", b"\xfe\xff")):
            found, fix = "UTF-16", "save the file as UTF-8"
        raise DataError("the text is not UTF-8", where=where, got=found, need="UTF-8", fix=fix) from error


def _json_rows(path: str) -> Iterator[Row]:
    text = "".join(_texts(path))
    try:
        value = json.loads(text) if text.strip() else []
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":  # an object per line
            yield from read_jsonl_stream(_lines(path), path)
            return
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        raise _json_error(error, f"{path}:{line}", "a list of objects, or an object per line") from error
    if isinstance(value, dict):
        lists = [value[key] for key in ("data", "rows") if isinstance(value.get(key), list)]
        is_row = not lists and "\n" not in text.strip()
        value = lists[0] if len(lists) == 1 else [value] if is_row else value
    if not isinstance(value, list):
        got = f"an object with keys {sorted(value)}" if isinstance(value, dict) else value
        need = 'a list of objects, {"data": [...]}, {"rows": [...]}, or an object per line'
        raise DataError("the file holds no list of rows", where=path, got=got, need=need)
    for number, item in enumerate(value, 1):
        where = f"{path}:row {number}"
        yield Row(_as_object(item, where), where)


def _json_error(error: Exception, where: str, need: str, text: str | None = None) -> DataError:
    summary = "not usable JSON"  # a number of thousands of digits, or brackets thousands deep
    if isinstance(error, json.JSONDecodeError):
        summary = f"not JSON: {error.msg} at column {error.colno}"
    got = text if text is not None and "not JSON" in summary else str(error)
    fix = "mend or remove the line; a file with one value over many lines should be called .json"
    return DataError(summary, where=where, got=got, need=need, fix=fix)


def _as_object(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    fix = "a file that is one list should be called .json" if isinstance(value, list) else None
    raise DataError("a row is not an object", where=where, got=value, need='{"key": value, ...}', fix=fix)


def _csv_rows(path: str, kind: str) -> Iterator[Row]:
    # The limit of a cell is the process's, and its default is less than one long conversation.
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL_CHARACTERS))
    reader = csv.reader(_texts(path), "excel" if kind == "csv" else "excel-tab", strict=True)
    header: list[str] = []
    while True:
        where = f"{path}:{reader.line_num + 1}"  # a row may have several lines
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            need = 'cells with a comma, a quote or a line break in double quotes, and "" for a quote'
            raise DataError(f"the row is not valid CSV: {error}", where=where, need=need) from error
        if cells and not header:
            header = cells
            if twice := sorted({name for name in header if header.count(name) > 1}):
                raise DataError("two columns have the same name", where=where, got=", ".join(twice))
        elif cells and len(cells) != len(header):
            summary = f"the row has too {'many' if len(cells) > len(header) else 'few'} cells"
            got, need = f"{len(cells)} cells", f"{len(header)}: {', '.join(header)}"
            fix = "put cells that hold the separator or a line break in double quotes"
            raise DataError(summary, where=where, got=got, need=need, fix=fix)
        elif cells:
            yield Row(dict(zip(header, cells, strict=True)), where)


# --- Arrow and Parquet -----------------------------------------------------------------------------------------------


def _arrow_rows(path: str, kind: str) -> Iterator[Row]:
    import pyarrow as arrow

    number = 0
    try:
        # These files are read from the end, so a gzipped one is unpacked first.
        is_packed = path.lower().endswith(".gz")
        source = arrow.BufferReader(b"".join(_lines(path))) if is_packed else arrow.memory_map(path)
        for batch in _parquet_batches(source) if kind == "parquet" else _ipc_batches(source):
            # A whole file may be one batch: rows become Python objects a slice at a time.
            for start in range(0, batch.num_rows, _ROWS_PER_BATCH):
                for values in batch.slice(start, _ROWS_PER_BATCH).to_pylist():
                    number += 1
                    yield Row(values, f"{path}:row {number}")
    except (arrow.ArrowException, OSError) as error:
        where, got = f"{path}:row {number + 1}", f"{type(error).__name__}: {error}"
        raise DataError("the file cannot be read", where=where, got=got, need=f"a complete {kind} file") from error


def _parquet_batches(source: Any) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile

    return iter(ParquetFile(source).iter_batches(batch_size=_ROWS_PER_BATCH))


def _ipc_batches(source: Any) -> Iterator[Any]:
    from pyarrow import ipc

    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    if not is_file:
        return iter(ipc.open_stream(source))
    reader = ipc.open_file(source)
    return (reader.get_batch(i) for i in range(reader.num_record_batches))
