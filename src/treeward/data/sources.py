"""Rows of a file, a folder, a glob, a saved `datasets` folder, or the Hugging Face hub; and what a config adds to them.

    for row in read_rows("train.jsonl.gz"):
        row.values, row.where        # {"prompt": ..., "chosen": ...}, "train.jsonl.gz:17"

A row is an object with string keys; its place is the line of a text file, else the number of the row, both from 1. The
kind of a file follows from its suffix (`KINDS`; text also `.gz`). A `.json` file is a list of objects, such a list
under "data" or "rows", or an object per line. Local files are read here, because Arrow tables of `datasets` have no
line numbers and no columns of mixed types; only `.json` files are read whole.
"""

from __future__ import annotations

import csv
import glob
import gzip
import hashlib
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeward.config.data import SetConfig
from treeward.config.dataset_table import KnownDataset
from treeward.data.bundled import bundled_path
from treeward.data.conversation import Message, last_text, without_nulls
from treeward.errors import ConfigError, DataError, nearest_path

PROMPT_FILES = ("prompt_file", "system_prompt_file")
KINDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather")
"""The suffixes of the files that are read."""

MOST_LINE_BYTES = 2**28
"""Bytes of a line, unpacked. A longer one is no row, and would fill the memory before anything could look at it."""
_ROWS_PER_BATCH = 1024
_LONGEST_CELL_CHARACTERS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its `values` by column, and its place `where`, as `train.jsonl:17` or `rows.parquet:row 17`."""

    values: dict[str, Any]
    where: str


def raised(error: DataError) -> None:
    """Raise the error: the default for invalid rows."""
    raise error


class UnchosenSplitError(DataError):
    """A data set has several splits and none is chosen; `got` lists them. A verb adds how it is told which one."""

    @property
    def choice(self) -> str:
        """The split that was probably meant."""
        names = str(self.got).split(", ")
        return "train" if "train" in names else names[0]


Broken = Callable[[DataError], object]
"""Receives the error of an invalid row; unless it raises, reading goes on with the next row."""


def read_rows(
    path: str, *, split: str | None = None, subset: str | None = None, broken: Broken = raised
) -> Iterator[Row]:
    """The rows of a file, a folder, a glob, a saved dataset or a hub dataset (`org/name`), in order.

    A file is a single split: `split` may be None, "train", "validation" if the file's name does not contain "train", or
    a part of its name. In a folder `split` selects files by name. `subset`: the configuration name of a hub dataset.
    The path is resolved at once, rows are read lazily. Raises `DataError` naming the file and line for data that cannot
    be read; `broken` receives the error of a single line or row.
    """
    files, table, label = _locate(path, split, subset)
    if twice := [file for file in files if f"{file}.gz" in files]:
        got, fix = f"{twice[0]} and {twice[0]}.gz", "remove one of them, or choose with a pattern"
        raise DataError("a file is there twice", where=twice[0], got=got, need="each row once", fix=fix)
    if files:
        return _at_least_one(itertools.chain.from_iterable(read_file(file, broken) for file in files), path)
    # A dataset may have been saved with a torch or numpy format; rows are plain Python values.
    rows = (
        Row(_without_nested_nulls(values), f"{label}:row {i}") for i, values in enumerate(table.with_format(None), 1)
    )
    return _at_least_one(rows, path)


def read_file(path: str, broken: Broken = raised) -> Iterator[Row]:
    """The rows of one existing file, in order, perhaps none. Raises `DataError` as `read_rows` does."""
    match file_suffix(path):
        case ".jsonl" | ".ndjson":
            return read_jsonl_stream(_lines(path), path, broken)
        case ".json":
            return _json_rows(path, broken)
        case ".csv" | ".tsv" as suffix:
            return _csv_rows(path, "," if suffix == ".csv" else "\t", broken)
        case ".parquet" | ".arrow" | ".feather" as suffix:
            return _arrow_rows(path, is_parquet=suffix == ".parquet")
    need = f"one of {', '.join(KINDS)}; those of text also .gz"
    raise DataError("the kind of file is not known", where=path, got=f"the suffix {file_suffix(path)!r}", need=need)


def file_suffix(path: str) -> str:
    """The lower-case suffix without `.gz`; one of `KINDS` if the kind is known."""
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]


def fingerprint(path: str, *, split: str | None = None, subset: str | None = None) -> str:
    """A hex digest (128 bits) of the content: bytes and, of several files, names; for saved datasets and the hub, of
    name, split, subset and the fingerprint in `datasets`. Raises `DataError` as `read_rows` does."""
    digest = hashlib.blake2b(digest_size=16)
    files, table, label = _locate(path, split, subset)
    for file in files:
        # A single file may be moved or renamed; the names of several give their order.
        name = None if len(files) == 1 else os.path.relpath(file, path)
        digest.update(json.dumps([name, os.path.getsize(file)]).encode())
        with open(file, "rb") as stream:
            while part := stream.read(1 << 20):
                digest.update(part)
    if not files:
        digest.update(json.dumps([label, subset, table._fingerprint]).encode())
    return digest.hexdigest()


def _at_least_one(rows: Iterator[Row], path: str) -> Iterator[Row]:
    first = next(rows, None)
    if first is None:
        raise DataError("there are no rows", where=path, got="empty data", need="at least one row")
    yield first
    yield from rows


def _locate(path: str, split: str | None, subset: str | None) -> tuple[list[str], Any, str]:
    """The files of the path; or none, and a `datasets.Dataset` with its name for errors."""
    files = [path] if os.path.exists(path) else sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    is_hub_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path) and file_suffix(path) not in KINDS
    if os.path.isdir(path):
        is_saved = any(os.path.exists(os.path.join(path, name)) for name in ("dataset_dict.json", "state.json"))
        if is_saved and subset is None:
            return [], *_table(path, split, subset)
        chosen, _ = _chosen_split(_files_of_splits(path, subset), path, split)
        return sorted(chosen), None, path
    if not files and is_hub_name:
        return [], *_table(path, split, subset)
    if not files:
        raise _missing(path)
    if subset is not None:
        fix = "remove subset"
        raise DataError("a file has no subset", where=path, field="subset", got=subset, need="null", fix=fix)
    names = [os.path.basename(file) for file in files]
    is_role = split in (None, "train") or (split == "validation" and not any("train" in name for name in names))
    if not is_role and not all(str(split) in name for name in names):
        need = "no split, or the one of its name: a file is one split, whatever it is for"
        raise DataError(f"a file has no split {split!r}", where=path, field="split", got=split, need=need)
    return files, None, path


def _files_of_splits(folder: str, subset: str | None) -> dict[str, list[str]]:
    """The files of a folder by split, as `datasets` reads their names, or a README as on the hub. Raises `DataError`
    for files that it would ignore, unless the README has `configs`."""
    import datasets

    try:
        splits = dict(datasets.load_dataset_builder(folder, subset).config.data_files or {})
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        # A RuntimeError is a script in Python, which datasets no longer runs.
        summary, need = "the folder holds no data that can be read", f"files that end in {', '.join(KINDS)}"
        got = f"{type(error).__name__}: {error}"
        fix = "check path and subset, and move scripts (.py) out of the folder"
        raise DataError(summary, where=folder, got=got, need=need, fix=fix) from error
    split_files = {os.path.basename(file) for files in splits.values() for file in files}
    names = [n for n in os.listdir(folder) if file_suffix(n) in KINDS and not n.startswith((".", "_", "dataset_info"))]
    unread, card = sorted({*names} - split_files - {"config.json"}), os.path.join(folder, "README.md")
    if unread and not (os.path.exists(card) and "configs:" in "".join(_texts(card))):
        got = f"{', '.join(unread)} beside {', '.join(sorted(split_files))}"
        need, fix = "files of one kind, with a split in each name", f"move them, or choose as *{file_suffix(unread[0])}"
        raise DataError("files of the folder are in no split", where=folder, got=got, need=need, fix=fix)
    return splits


def _table(path: str, split: str | None, subset: str | None) -> tuple[Any, str]:
    """A `datasets.Dataset`, saved or of the hub, and its name for errors."""
    import datasets

    is_saved = os.path.isdir(path)
    try:
        loaded = datasets.load_from_disk(path) if is_saved else datasets.load_dataset(path, subset, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        # Arrow's errors are ValueErrors, a script in Python is a RuntimeError.
        need = "a folder that save_to_disk wrote, or a hub dataset"
        fix = "check path, subset, split and network; offline, give a local copy instead of the name; a private or "
        fix += "gated dataset needs HF_TOKEN"
        fix = f"did you mean {near}?" if not is_saved and (near := nearest_path(path)) else fix
        got = f"{type(error).__name__}: {error}"
        raise DataError("the dataset cannot be read", where=path, got=got, need=need, fix=fix) from error
    if isinstance(loaded, Mapping):
        table, name = _chosen_split(loaded, path, split)
        return table, f"{path}[{name}]"
    if is_saved and split not in (None, "train"):  # one saved table is a lone split, as a file is
        _chosen_split({str(loaded.split or "train"): loaded}, path, split)
    return loaded, path if is_saved else f"{path}[{split}]"


def _chosen_split(splits: Mapping[str, Any], path: str, split: str | None) -> tuple[Any, str]:
    """The split called `split`, or the only one, and its name."""
    names = [str(name) for name in splits]
    if split is None and len(names) > 1:
        raise UnchosenSplitError(
            "there are several splits and none is chosen",
            where=path,
            field="split",
            got=", ".join(names),
            need="one of them",
            fix="name it as the split, or give the path of its data alone",
        )
    chosen = names[0] if split is None else split
    if chosen not in names:
        raise DataError.unknown(f"there is no split {split!r}", chosen, names, where=path, field="split")
    return splits[chosen], chosen


def _missing(path: str) -> DataError:
    folder = os.path.dirname(path) or "."
    near = nearest_path(path)
    fix = f"did you mean {near}?" if near else "check the path"
    if glob.has_magic(path) or not os.path.isdir(folder):
        summary = "no file fits the pattern" if glob.has_magic(path) else "there is no such file, and no such folder"
        return DataError(summary, where=path, got=folder, fix="check the path" if glob.has_magic(path) else fix)
    need = "a file, a folder, a pattern such as data/*.jsonl, or a hub name such as org/name"
    return DataError("there is no such file", where=path, need=need, fix=fix)


def read_jsonl_stream(lines: Iterable[bytes | str], name: str, broken: Broken = raised) -> Iterator[Row]:
    """Rows of JSON lines from a pipe or an open file; `name` stands for the file in `where`. Blank lines are skipped, a
    byte order mark is ignored. An empty stream gives no rows."""
    for number, line in enumerate(lines, 1):
        try:
            row = _jsonl_row(line, f"{name}:{number}")
        except DataError as error:
            broken(error)
            continue
        if row is not None:
            yield row


def _jsonl_row(line: bytes | str, where: str) -> Row | None:
    text = (_decode(line, where) if isinstance(line, bytes) else line).removeprefix("\ufeff").strip()
    if not text:
        return None
    try:
        # NaN and Infinity become floats, which the formats refuse.
        value = json.loads(text, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, brackets too deep
        need, fix = "one complete JSON object", "mend or remove the line"
        raise DataError(f"the line is not JSON: {error}", where=where, got=text, need=need, fix=fix) from error
    return _row(value, where)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object. Raises `ValueError` for a repeated key, of which `json` would silently keep the last value."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {max(names, key=names.count)!r} is there twice")
    return values


def _lines(path: str) -> Iterator[bytes]:
    """The lines of a text file, gzipped or not."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.lower().endswith(".gz") else open(path, "rb") as stream:
            while line := stream.readline(MOST_LINE_BYTES + 1):
                number += 1
                if len(line) > MOST_LINE_BYTES:
                    need = f"lines of at most {MOST_LINE_BYTES:,} bytes"
                    fix = "write one row to a line, or a list of rows over several lines"
                    got = f"more than {len(line) - 1:,} bytes"
                    raise DataError("a line is too long", where=f"{path}:{number}", got=got, need=need, fix=fix)
                yield line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        where, fix = f"{path}:{number + 1}", "copy the file again, or remove .gz from its name"
        raise DataError("the gzip file is damaged", where=where, got=str(error), need="gzip data", fix=fix) from error


def _texts(path: str) -> Iterator[str]:
    for number, line in enumerate(_lines(path), 1):
        yield _decode(line, f"{path}:{number}").removeprefix("\ufeff")


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        got = f"byte 0x{raw[error.start]:02x} at position {error.start + 1} of the line"
        fix = "save the file as UTF-8, or mend the line; a gzip file ends in .gz"
        raise DataError("the text is not UTF-8", where=where, got=got, need="UTF-8", fix=fix) from error


def _json_rows(path: str, broken: Broken) -> Iterator[Row]:
    text = "".join(_texts(path))
    try:
        value = json.loads(text, object_pairs_hook=_distinct) if text.strip() else []
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":  # an object per line
            yield from read_jsonl_stream(_lines(path), path, broken)
            return
        where = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else path
        raise DataError(f"the file is not JSON: {error}", where=where, need="a list of objects") from error
    if isinstance(value, dict):
        lists = [value[key] for key in ("data", "rows") if isinstance(value.get(key), list)]
        is_row = not lists and "\n" not in text.strip()
        value = lists[0] if len(lists) == 1 else [value] if is_row else value
    if not isinstance(value, list):
        got = f"an object with keys {sorted(value)}" if isinstance(value, dict) else value
        need = 'a list of objects, {"data": [...]}, {"rows": [...]}, or an object per line'
        raise DataError("the file holds no list of rows", where=path, got=got, need=need)
    for number, item in enumerate(value, 1):
        try:
            yield _row(item, f"{path}:row {number}")
        except DataError as error:
            broken(error)


def _row(value: Any, where: str) -> Row:
    if isinstance(value, dict):
        return Row(value, where)
    fix = "a file that is one list should be called .json" if isinstance(value, list) else None
    raise DataError("a row is not an object", where=where, got=value, need='{"key": value, ...}', fix=fix)


def _csv_rows(path: str, separator: str, broken: Broken) -> Iterator[Row]:
    # The limit of a cell is the process's, and its default is less than one long conversation.
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL_CHARACTERS))
    texts = _texts(path)
    first = next(texts, "")
    # A spreadsheet of a country with decimal commas writes semicolons.
    header_cells = {mark: len(next(csv.reader([first], delimiter=mark), [])) for mark in (separator, ";", "\t")}
    if header_cells[separator] == 1:
        separator = max(header_cells, key=lambda mark: header_cells[mark])
    reader = csv.reader(itertools.chain([first], texts), delimiter=separator, strict=True)
    header: list[str] = []
    end = 0  # a row may have several lines, and is named by its first
    try:
        for cells in reader:
            where, end = f"{path}:{end + 1}", reader.line_num
            if not header:
                header = cells
                if len(set(header)) < len(header):
                    need = "different names: one of them would be lost"
                    raise DataError("columns have the same name", where=where, got=", ".join(header), need=need)
            elif cells and len(cells) != len(header):
                need, fix = f"a cell for each of {', '.join(header)}", "put cells that hold the separator in quotes"
                broken(DataError("the row does not fit the header", where=where, got=cells, need=need, fix=fix))
            elif cells:
                yield Row(dict(zip(header, cells, strict=True)), where)
    except csv.Error as error:
        need = 'double quotes around cells with a line break, and "" for a quote'
        raise DataError(f"the row is not valid CSV: {error}", where=f"{path}:{end + 1}", need=need) from error


def _arrow_rows(path: str, *, is_parquet: bool) -> Iterator[Row]:
    import pyarrow as pa
    from pyarrow import ipc, parquet

    number = 0
    try:
        source = pa.memory_map(path)
        if is_parquet:
            batches = parquet.ParquetFile(source).iter_batches(batch_size=_ROWS_PER_BATCH)
        else:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            reader = ipc.open_file(source) if is_file else ipc.open_stream(source)
            batches = reader.read_all().to_batches(max_chunksize=_ROWS_PER_BATCH)
        for batch in batches:
            for values in batch.to_pylist():
                number += 1
                yield Row(_without_nested_nulls(values), f"{path}:row {number}")
    except (pa.ArrowException, OSError) as error:
        where, got = f"{path}:row {number + 1}", f"{type(error).__name__}: {error}"
        raise DataError("the file cannot be read", where=where, got=got, need="a complete file") from error


def _without_nested_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a table without the nulls that Arrow has put into its objects; the columns themselves stay."""
    return {name: without_nulls(value) for name, value in values.items()}


@dataclass(frozen=True)
class PromptFiles:
    """The texts that a config adds to every conversation of a dataset: `template` has one `{}` for the last user
    message; `system` is a system message for contexts that have none."""

    template: str | None = None
    system: str | None = None

    @classmethod
    def load(cls, prompt_file: str | None, system_prompt_file: str | None) -> PromptFiles:
        """Read the files. Raises `ConfigError` for an unreadable file and for a template without exactly one `{}`."""
        texts = []
        for field, path in zip(PROMPT_FILES, (prompt_file, system_prompt_file), strict=True):
            try:
                texts.append(None if path is None else Path(path).read_text("utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                got = f"{path}: {error}"
                raise ConfigError(f"{field} cannot be read", field=field, got=got, need="a text in UTF-8") from error
        template, system = texts
        try:
            is_template = template is None or template.format("\0").count("\0") == 1
        except (ValueError, LookupError, AttributeError):
            is_template = False
        if not is_template:
            need = "exactly one {}, where the last user message goes; {{ and }} are braces of the text"
            raise ConfigError("prompt_file is not a template", where=prompt_file, field="prompt_file", need=need)
        return cls(template, system)

    def complete(self, messages: tuple[Message, ...], where: str | None) -> tuple[Message, ...]:
        """The messages of a prompt with both texts. Raises `DataError` if there is no user message for a template."""
        if self.template is not None:
            last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
            if last is None:
                got = f"roles {[message['role'] for message in messages]}"
                summary, need = "the context has no user message for prompt_file", "a user message, or no prompt_file"
                raise DataError(summary, where=where, field="context", got=got, need=need)
            filled = messages[last] | {"content": _filled(messages[last]["content"], self.template)}
            messages = (*messages[:last], filled, *messages[last + 1 :])
        if self.system is not None and not any(message["role"] == "system" for message in messages):
            messages = ({"role": "system", "content": self.system}, *messages)
        return messages


class RowSource:
    """The rows of a file, a folder or a hub dataset, as a config names them; `hub_path` is read without a `data_path`.
    `name`: path and split, for messages. `files`: its prompt files. `broken` receives the error of an invalid row; by
    default it raises it. `known`: the set's entry of the table, which says where its own data is."""

    hub_path: str | None = None
    hub_subset: str | None = None
    hub_split: str | None = "train"
    known: KnownDataset | None = None
    broken: Broken = staticmethod(raised)

    left_out: Sequence[str] = ()
    """The places of the completions that the last pass has left out for a fault of the published data."""
    left_out_because: str = ""
    """The fault of the completions in `left_out`, for a sentence: "2 completions have ..."."""

    def __init__(self, config: SetConfig, known: KnownDataset | None = None) -> None:
        self.config: Any = config
        self.files = PromptFiles.load(config.prompt_file, config.system_prompt_file)
        self.split = config.split
        self.subset = config.subset
        if known is not None:
            self.known = known
            self.hub_path = known.hub_path
            self.hub_subset = known.hub_subset
            self.hub_split = known.train_split
        is_bundled = known is not None and known.is_bundled
        path = config.data_path or self.hub_path
        if is_bundled:
            path = "Bundled"
        if path is None:
            summary = f"{config.dataset_name} needs a path"
            need = "a file, a folder or a hub name"
            raise ConfigError(summary, field="data_path", need=need)
        if config.data_path is None:
            if config.name is not None and config.split is None and config.part is None:
                summary = f"a named set of {config.dataset_name} does not say its split"
                need = "a split of the dataset"
                raise ConfigError(summary, field="split", got="null", need=need)
            self.split = config.split or self.hub_split
            self.subset = config.subset or self.hub_subset
        elif is_bundled:
            raise ConfigError(
                "the bundled data has its own path",
                field="data_path",
                got=config.data_path,
                need="none",
                fix="set data.dataset_name=auto to read other data",
            )
        self.name = path if self.split is None else f"{path}[{self.split}]"
        if is_bundled:
            path = str(bundled_path(self.split or "train"))
            self.split = None  # the file is one split
        self.path: str = path

    def rows(self) -> Iterator[Row]:
        """The rows, from the beginning."""
        return read_rows(self.path, split=self.split, subset=self.subset, broken=self.broken)

    def leave_out(self, where: str, because: str) -> None:
        """Count a completion at `where` in `left_out`."""
        self.left_out = [*self.left_out, where]
        self.left_out_because = because

    def is_of_part(self, prompt: Sequence[Message]) -> bool:
        """Whether the config's `part` has a prompt. The prompt and the seed alone decide, so that no prompt is in both
        parts, and none moves when the data grows."""
        share: float = self.config.split_validation_size
        text = json.dumps([self.config.seed, prompt], sort_keys=True, default=repr)
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        is_held_out = int.from_bytes(digest) < share * 2**64
        return share == 0 or is_held_out == (self.config.part == "validation")

    def content(self) -> str:
        """A digest of the rows."""
        return fingerprint(self.path, split=self.split, subset=self.subset)


def _filled(content: Any, template: str) -> Any:
    if isinstance(content, str):
        return template.format(content)
    if all(isinstance(part, str) or part.get("type") == "text" for part in content):
        return template.format(last_text([{"content": content}]))
    return [{**part, "text": template.format(part["text"])} if part.get("type") == "text" else part for part in content]
