"""Rows from one local file, and where each of them stands.

    for row in read_file("train.jsonl.gz"):
        row.values, row.where        # {"prompt": ..., "chosen": ...}, "train.jsonl.gz:17"

A row is an object with string keys; its place is the line of a text file, else the number of the row, both from 1.
What is read, by suffix, each also with `.gz`:

    .jsonl .ndjson    an object per line; blank lines are skipped and still counted
    .json             a list of objects, or an object with that list under "data" or "rows", or lines as above
    .csv .tsv         a header line, then cells; every cell stays a string
    .parquet          one row group after another
    .arrow .feather   Arrow IPC, the file format as well as the stream that `datasets` writes

Text is UTF-8. Memory does not grow with the file, with two exceptions: a `.json` file that is one list or one object
is parsed whole, and a gzipped `.parquet` or `.arrow` file, which must be read out of order, is first unpacked to a
temporary file (in memory up to 64 MiB, on disk beyond).
"""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from treeward.errors import DataError

__all__ = ["KINDS", "Row", "file_suffix", "parse_json_line", "read_file", "read_jsonl_stream"]

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
_LIST_KEYS = ("data", "rows")
_CHUNK_BYTES = 1 << 20
_UNPACK_IN_MEMORY_BYTES = 64 << 20
_ROWS_PER_BATCH = 1024
_LONGEST_CELL_CHARACTERS = 2**31 - 1
_GZIP_ERRORS = (EOFError, zlib.error, gzip.BadGzipFile)


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its `values` by column, and `where` it stands, as `train.jsonl:17` or `rows.parquet:row 17`."""

    values: dict[str, Any]
    where: str


def read_file(path: str) -> Iterator[Row]:
    """The rows of one existing file whose `file_suffix` is in `KINDS`, in order; none if it holds none.

    Raises `DataError` naming the file and line for text that is not UTF-8, malformed JSON, CSV or Arrow data, a
    truncated gzip, and rows that are not objects.
    """
    match KINDS[file_suffix(path)]:
        case "jsonl":
            return read_jsonl_stream(_lines(path), path)
        case "json":
            return _json_rows(path)
        case "csv":
            return _csv_rows(path, "excel")
        case "tsv":
            return _csv_rows(path, "excel-tab")
        case "parquet":
            return _batch_rows(path, _parquet_batches)
        case _:
            return _batch_rows(path, _arrow_batches)


def file_suffix(path: str) -> str:
    """The lower-case suffix that says the kind of a file, a key of `KINDS` if that is known; `.gz` is passed over."""
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]


def parse_json_line(text: str, where: str) -> dict[str, Any]:
    """The object that one line of JSON holds. NaN and Infinity become floats.

    Raises `DataError` for malformed JSON, for anything but an object, and for half a surrogate pair, which no
    tokenizer can encode.
    """
    try:
        value = json.loads(text.strip())
    except json.JSONDecodeError as error:
        raise DataError(
            f"the line is not JSON: {error.msg} at column {error.colno}",
            where=where,
            got=text.strip(),
            need="one complete JSON object",
            fix="mend or remove the line; a file with one value over many lines should be called .json",
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets thousands deep
        raise DataError("the line is not usable JSON", where=where, got=str(error), need="one JSON object") from error
    return _check_object(value, where, may_be_half=_may_hold_half_a_pair(text))


def read_jsonl_stream(lines: Iterable[bytes | str], name: str) -> Iterator[Row]:
    """Rows of JSON lines that come from anywhere (a pipe, an open file); `name` stands for the file in `where`.

    Blank lines are skipped, a byte order mark is ignored. An empty stream gives no rows.
    """
    for number, line in enumerate(lines, 1):
        where = f"{name}:{number}"
        text = _decode(line, where) if isinstance(line, bytes) else line
        text = text.removeprefix("\ufeff")
        if text.strip():
            yield Row(parse_json_line(text, where), where)


def _open(path: str) -> IO[bytes]:
    return gzip.open(path, "rb") if path.lower().endswith(".gz") else open(path, "rb")  # type: ignore[return-value]


def _gzip_error(error: Exception, where: str) -> DataError:
    is_cut = isinstance(error, EOFError)
    return DataError(
        "the gzip file ends too early" if is_cut else "the file is not valid gzip",
        where=where,
        got=str(error),
        need="a complete gzip file",
        fix="copy or download it again" if is_cut else "copy it again, or remove .gz from its name",
    )


def _lines(path: str) -> Iterator[bytes]:
    number = 0
    with _open(path) as handle:
        try:
            for line in handle:
                number += 1
                yield line
        except _GZIP_ERRORS as error:
            raise _gzip_error(error, f"{path}:{number + 1}") from error


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if raw.startswith(b"\x1f\x8b"):
            found, fix = "gzip data", "add .gz to the name of the file"
        elif raw.startswith((b"\xff\xfe", b"\xfe\xff")):
            found, fix = "UTF-16", "save the file as UTF-8"
        else:
            found = f"byte 0x{raw[error.start]:02x} at position {error.start + 1} of the line"
            fix = "save the file as UTF-8, or mend the line"
        raise DataError("the text is not UTF-8", where=where, got=found, need="UTF-8", fix=fix) from error


def _check_object(value: Any, where: str, *, may_be_half: bool) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(
            "a row is not an object",
            where=where,
            got=value,
            need='{"key": value, ...}',
            fix="a file that is one list should be called .json" if isinstance(value, list) else None,
        )
    if may_be_half and not _can_encode(value):
        raise DataError(
            "a text holds half of a surrogate pair, which is not a character",
            where=where,
            field=next(key for key, item in value.items() if not _can_encode({key: item})),
            need="text that can be written as UTF-8",
            fix="replace the lone \\ud800 ... \\udfff escape",
        )
    return value


def _may_hold_half_a_pair(text: str) -> bool:
    """Cheap and never wrong when it says no: in valid UTF-8 only an escape can make half a surrogate pair."""
    return "\\ud" in text or "\\uD" in text


def _can_encode(value: dict[str, Any]) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _json_rows(path: str) -> Iterator[Row]:
    if _is_json_lines(path):
        yield from read_jsonl_stream(_lines(path), path)
        return
    text = "".join(_decode(line, f"{path}:{number}") for number, line in enumerate(_lines(path), 1))
    try:
        value = json.loads(text.removeprefix("\ufeff")) if text.strip() else []
    except json.JSONDecodeError as error:
        raise DataError(
            f"the file is not JSON: {error.msg} at column {error.colno}",
            where=f"{path}:{error.lineno}",
            need="a list of objects, or an object per line",
            fix="mend the file at that place",
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError("the file is not usable JSON", where=path, got=str(error), need="a list of objects") from error
    may_be_half = _may_hold_half_a_pair(text)
    for number, item in enumerate(_list_of_rows(value, path), 1):
        where = f"{path}:row {number}"
        yield Row(_check_object(item, where, may_be_half=may_be_half), where)


def _is_json_lines(path: str) -> bool:
    """Whether a .json file holds an object per line: its first line is a complete object and not the wrapping one."""
    lines = ((number, line) for number, line in enumerate(_lines(path), 1) if line.strip(b" \t\r\n\xef\xbb\xbf"))
    number, first = next(lines, (1, b""))
    if not first.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return False
    text = _decode(first, f"{path}:{number}").removeprefix("\ufeff")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return _wrapped_list(value) is None or next(lines, None) is not None


def _wrapped_list(value: dict[str, Any]) -> list[Any] | None:
    lists = [value[key] for key in _LIST_KEYS if isinstance(value.get(key), list)]
    return lists[0] if len(lists) == 1 else None


def _list_of_rows(value: Any, path: str) -> list[Any]:
    if isinstance(value, list):
        return value
    rows = _wrapped_list(value) if isinstance(value, dict) else None
    if rows is None:
        raise DataError(
            "the file holds no list of rows",
            where=path,
            got=f"an object with keys {sorted(value)}" if isinstance(value, dict) else value,
            need='a list of objects, {"data": [...]}, {"rows": [...]}, or an object per line',
        )
    return rows


def _csv_rows(path: str, dialect: str) -> Iterator[Row]:
    # The limit of a cell is the process's, and its default is less than one long conversation.
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL_CHARACTERS))
    text = (_decode(line, f"{path}:{number}") for number, line in enumerate(_lines(path), 1))
    lines = (line.removeprefix("\ufeff") if number == 0 else line for number, line in enumerate(text))
    reader = csv.reader(lines, dialect, strict=True)
    header: list[str] | None = None
    while True:
        where = f"{path}:{reader.line_num + 1}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(
                f"the row is not valid CSV: {error}",
                where=where,
                need='cells with a comma, a quote or a line break in double quotes, and "" for a quote',
                fix="mend the row that begins there",
            ) from error
        if not cells:
            continue
        if header is None:
            header = _check_header(cells, where)
        elif len(cells) != len(header):
            raise DataError(
                f"the row has too {'many' if len(cells) > len(header) else 'few'} cells",
                where=where,
                got=f"{len(cells)} cells",
                need=f"{len(header)}: {', '.join(header)}",
                fix="put cells that hold the separator or a line break in double quotes",
            )
        else:
            yield Row(dict(zip(header, cells, strict=True)), where)


def _check_header(names: list[str], where: str) -> list[str]:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(
            "two columns have the same name", where=where, got=", ".join(twice), need="a name for each column"
        )
    return names


def _batch_rows(path: str, batches: Callable[[IO[bytes]], Iterator[Any]]) -> Iterator[Row]:
    arrow = importlib.import_module("pyarrow")
    number = 0
    with _seekable(path) as handle:
        batch_iterator = batches(handle)
        while True:
            try:
                batch = next(batch_iterator, None)
                rows = batch.to_pylist() if batch is not None else None
            except (arrow.ArrowException, OSError) as error:
                raise DataError(
                    "the file cannot be read",
                    where=f"{path}:row {number + 1}",
                    got=f"{type(error).__name__}: {error}",
                    need=f"a complete {KINDS[file_suffix(path)]} file",
                    fix="copy or write it again",
                ) from error
            if rows is None:
                return
            for values in rows:
                number += 1
                yield Row(values, f"{path}:row {number}")


@contextmanager
def _seekable(path: str) -> Iterator[IO[bytes]]:
    """The file, unpacked first if it is gzipped: Parquet and Arrow files are read from the end."""
    if not path.lower().endswith(".gz"):
        with open(path, "rb") as handle:
            yield handle
        return
    with tempfile.SpooledTemporaryFile(_UNPACK_IN_MEMORY_BYTES) as unpacked:
        try:
            with _open(path) as packed:
                shutil.copyfileobj(packed, unpacked, _CHUNK_BYTES)
        except _GZIP_ERRORS as error:
            raise _gzip_error(error, path) from error
        unpacked.seek(0)
        yield unpacked


def _parquet_batches(handle: IO[bytes]) -> Iterator[Any]:
    parquet = importlib.import_module("pyarrow.parquet")
    yield from parquet.ParquetFile(handle).iter_batches(batch_size=_ROWS_PER_BATCH)


def _arrow_batches(handle: IO[bytes]) -> Iterator[Any]:
    ipc = importlib.import_module("pyarrow.ipc")
    magic = handle.read(6)
    handle.seek(0)
    # A whole file may be one batch, so it is mapped rather than read; an empty one cannot be mapped.
    is_plain_file = isinstance(handle, io.BufferedReader) and magic
    source = importlib.import_module("pyarrow").memory_map(handle.name) if is_plain_file else handle
    if magic == b"ARROW1":
        reader = ipc.open_file(source)
        batches: Iterator[Any] = map(reader.get_batch, range(reader.num_record_batches))
    else:
        batches = iter(ipc.open_stream(source))
    for batch in batches:
        # For the same reason rows become Python objects a slice at a time.
        for start in range(0, batch.num_rows, _ROWS_PER_BATCH):
            yield batch.slice(start, _ROWS_PER_BATCH)
