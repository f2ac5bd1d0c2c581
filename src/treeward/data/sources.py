"""Rows of a file, a folder, a glob, a saved `datasets` folder, or the Hugging Face hub; and what a
config adds to them.

    for row in read_rows("train.jsonl.gz"):
        row.values, row.where        # {"prompt": ..., "chosen": ...}, "train.jsonl.gz:17"

A row is an object with string keys; its place is the line of a text file, else the number of the
row, both from 1. The kind of a file follows from its suffix (`KINDS`; text also `.gz`). A `.json`
file is a list of objects, such a list under "data" or "rows", or an object per line. Local files
are read here, because Arrow tables of `datasets` have no line numbers and no columns of mixed
types; only `.json` files are read whole.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeward.config.data import SetConfig
from treeward.config.dataset_table import KnownDataset
from treeward.data.bundled import bundled_path
from treeward.data.conversation import SYSTEM_ROLES, Message, last_text
from treeward.data.table_files import (
    arrow_rows,
    chosen_split,
    csv_rows,
    dataset_table,
    without_nested_nulls,
)
from treeward.errors import ConfigError, DataError, nearest_path

PROMPT_FILES = ("prompt_file", "system_prompt_file")
KINDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather")
"""The suffixes of the files that are read."""

MOST_LINE_BYTES = 2**28
"""Bytes of a line, unpacked. A longer one is no row, and would fill the memory before anything
could look at it."""
_NEED_PLACE = "exactly one {}, where the last user message goes; {{ and }} are braces of the text"


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its `values` by column, and its place `where`, as `train.jsonl:17` or
    `rows.parquet:row 17`."""

    values: dict[str, Any]
    where: str


def raised(error: DataError) -> None:
    """Raise the error: the default for invalid rows."""
    raise error


Broken = Callable[[DataError], object]
"""Receives the error of an invalid row; unless it raises, reading goes on with the next row."""


def read_rows(
    path: str,
    *,
    split: str | None = None,
    subset: str | None = None,
    broken: Broken = raised,
) -> Iterator[Row]:
    """The rows of a file, a folder, a glob, a saved dataset or a hub dataset (`org/name`), in
    order.

    A file is a single split: `split` may be None, "train", "validation" if the file's name does not
    contain "train", or a part of its name. In a folder `split` selects files by name. `subset`: the
    configuration name of a hub dataset. The path is resolved at once, rows are read lazily. Raises
    `DataError` naming the file and line for data that cannot be read; `broken` receives the error
    of a single line or row.
    """
    files, table, label = _locate(path, split, subset)
    for file in files:
        if f"{file}.gz" in files:
            raise DataError(
                "the folder has a file twice, once compressed",
                where=file,
                got=f"{file} and {file}.gz",
                need="each row once",
                fix="remove one of them, or choose with a pattern",
            )
    return _at_least_one(_rows_of_all(files, table, label, broken), path)


def _rows_of_all(files: Sequence[str], table: Any, label: str, broken: Broken) -> Iterator[Row]:
    """The rows of the files, or of the table where there are none; see `_locate`."""
    # A file is opened when the one before it is at its end.
    for file in files:
        yield from read_file(file, broken)
    if not files:
        # A dataset may have been saved with a torch or numpy format; rows are plain Python values.
        for number, values in enumerate(table.with_format(None), 1):
            yield Row(without_nested_nulls(values), f"{label}:row {number}")


def read_file(path: str, broken: Broken = raised) -> Iterator[Row]:
    """The rows of one existing file, in order, perhaps none. Raises `DataError` as `read_rows`
    does."""
    match file_suffix(path):
        case ".jsonl" | ".ndjson":
            return read_jsonl_stream(_lines(path), path, broken)
        case ".json":
            return _json_rows(path, broken)
        case ".csv" | ".tsv" as suffix:
            separator = "," if suffix == ".csv" else "\t"
            return _rows(csv_rows(_texts(path), path, separator, broken))
        case ".parquet" | ".arrow" | ".feather" as suffix:
            return _rows(arrow_rows(path, is_parquet=suffix == ".parquet"))
    got = f"the suffix {file_suffix(path)!r}"
    need = f"one of {', '.join(KINDS)}; those of text also .gz"
    raise DataError("the kind of file is not known", where=path, got=got, need=need)


def _rows(places: Iterator[tuple[dict[str, Any], str]]) -> Iterator[Row]:
    for values, where in places:
        yield Row(values, where)


def file_suffix(path: str) -> str:
    """The lower-case suffix without `.gz`; one of `KINDS` if the kind is known."""
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]


def fingerprint(path: str, *, split: str | None = None, subset: str | None = None) -> str:
    """A hex digest (128 bits) of the content: bytes and, of several files, names; for saved
    datasets and the hub, of name, split, subset and the fingerprint in `datasets`. Raises
    `DataError` as `read_rows` does."""
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
    """The rows. Raises `DataError` if there are none."""
    first = next(rows, None)
    if first is None:
        raise DataError("there are no rows", where=path, got="empty data", need="at least one row")
    yield first
    yield from rows


def _locate(path: str, split: str | None, subset: str | None) -> tuple[list[str], Any, str]:
    """The files of the path; or none, and a `datasets.Dataset` with its name for errors."""
    if os.path.isdir(path):
        # The files of `save_to_disk`, of several splits and of one.
        marks = ("dataset_dict.json", "state.json")
        is_saved = any(os.path.exists(os.path.join(path, mark)) for mark in marks)
        if subset is None and is_saved:
            return [], *dataset_table(path, split, subset)
        chosen, _ = chosen_split(_files_of_splits(path, subset), path, split)
        return sorted(chosen), None, path
    # A name with the characters of a pattern may also be that of an existing file.
    files = [path]
    if not os.path.exists(path):
        matches = glob.glob(path, recursive=True)
        files = sorted(match for match in matches if os.path.isfile(match))
    # `org/name`; data/train.jsonl has this form too, and is a file.
    is_pair = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path) is not None
    if not files and is_pair and file_suffix(path) not in KINDS:
        return [], *dataset_table(path, split, subset)
    if not files:
        raise missing_file(path)
    if subset is not None:
        summary = "a file has no subset"
        fix = "remove subset"
        raise DataError(summary, where=path, field="subset", got=subset, need="null", fix=fix)
    if split is not None and not _is_split(split, [os.path.basename(file) for file in files]):
        summary = f"a file has no split {split!r}"
        need = "no split, or the one of its name: a file is one split, whatever it is for"
        raise DataError(summary, where=path, field="split", got=split, need=need)
    return files, None, path


def _is_split(split: str, names: Sequence[str]) -> bool:
    """Whether files of these names can be the split."""
    if all(split in name for name in names):
        return True
    # NeMo RL's rm.yaml names both splits, and users replace its paths alone. Any file can be the
    # validation data, unless its name says that it is for training.
    if split == "validation":
        return not any("train" in name for name in names)
    return split == "train"


def _files_of_splits(folder: str, subset: str | None) -> dict[str, list[str]]:
    """The files of a folder by split, as `datasets` reads their names, or a README as on the hub.
    Raises `DataError` for files that it would ignore, unless the README has `configs`."""
    import datasets

    try:
        splits = dict(datasets.load_dataset_builder(folder, subset).config.data_files or {})
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        # A RuntimeError is a script in Python, which datasets no longer runs.
        raise DataError(
            "the folder holds no data that can be read",
            where=folder,
            got=f"{type(error).__name__}: {error}",
            need=f"files that end in {', '.join(KINDS)}",
            fix="check path and subset, and move scripts (.py) out of the folder",
        ) from error
    names_in_splits: set[str] = set()
    for files in splits.values():
        for file in files:
            names_in_splits.add(os.path.basename(file))
    unread = []
    for name in sorted(os.listdir(folder)):
        # Hidden files, those of `datasets`, and that of a model are no data.
        is_data = file_suffix(name) in KINDS and not name.startswith((".", "_", "dataset_info"))
        if is_data and name != "config.json" and name not in names_in_splits:
            unread.append(name)
    # A dataset's card may say which files are data.
    card = os.path.join(folder, "README.md")
    has_configs = os.path.exists(card) and "configs:" in "".join(_texts(card))
    # Rows that nobody reads would be lost without a word.
    if unread and not has_configs:
        raise DataError(
            "files of the folder are in no split",
            where=folder,
            got=f"{', '.join(unread)} beside {', '.join(sorted(names_in_splits))}",
            need="files of one kind, with a split in each name",
            fix=f"move them, or choose as *{file_suffix(unread[0])}",
        )
    return splits


def missing_file(path: str) -> DataError:
    """The error of a file, or of files by a pattern, that are not there, with the nearest name."""
    folder = os.path.dirname(path) or "."
    if glob.has_magic(path):
        return DataError("no file fits the pattern", where=path, got=folder, fix="check the path")
    near = nearest_path(path)
    fix = f"did you mean {near}?" if near else "check the path"
    if not os.path.isdir(folder):
        summary = "there is no such file, and no such folder"
        return DataError(summary, where=path, got=folder, fix=fix)
    need = "a file, a folder, a pattern such as data/*.jsonl, or a hub name such as org/name"
    return DataError("there is no such file", where=path, need=need, fix=fix)


def read_jsonl_stream(
    lines: Iterable[bytes | str],
    name: str,
    broken: Broken = raised,
) -> Iterator[Row]:
    """Rows of JSON lines from a pipe or an open file; `name` stands for the file in `where`. Blank
    lines are skipped, a byte order mark is ignored. An empty stream gives no rows."""
    for number, line in enumerate(lines, 1):
        try:
            row = _jsonl_row(line, f"{name}:{number}")
        except DataError as error:
            broken(error)
            continue
        if row is not None:
            yield row


def _jsonl_row(line: bytes | str, where: str) -> Row | None:
    """The row of a line; None for a blank one."""
    text = _decode(line, where) if isinstance(line, bytes) else line
    text = text.removeprefix("\ufeff").strip()
    if not text:
        return None
    try:
        # NaN and Infinity become floats, which the formats refuse.
        value = json.loads(text, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        # Also a number of thousands of digits, and brackets that are nested too deep.
        raise DataError(
            f"the line is not JSON: {error}",
            where=where,
            got=text,
            need="one complete JSON object",
            fix="fix or remove the line",
        ) from error
    return _row(value, where)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object. Raises `ValueError` for a repeated key, of which `json` would silently keep the
    last value."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {max(names, key=names.count)!r} occurs twice")
    return values


def _lines(path: str) -> Iterator[bytes]:
    """The lines of a text file, gzipped or not."""
    number = 0
    opened = gzip.open if path.lower().endswith(".gz") else open
    try:
        with opened(path, "rb") as stream:
            while line := stream.readline(MOST_LINE_BYTES + 1):
                number += 1
                if len(line) > MOST_LINE_BYTES:
                    raise DataError(
                        "a line is too long",
                        where=f"{path}:{number}",
                        got=f"more than {len(line) - 1:,} bytes",
                        need=f"lines of at most {MOST_LINE_BYTES:,} bytes",
                        fix="write one row to a line, or a list of rows over several lines",
                    )
                yield line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            "the gzip file is damaged",
            where=f"{path}:{number + 1}",
            got=str(error),
            need="gzip data",
            fix="copy the file again, or remove .gz from its name",
        ) from error


def _texts(path: str) -> Iterator[str]:
    for number, line in enumerate(_lines(path), 1):
        yield _decode(line, f"{path}:{number}").removeprefix("\ufeff")


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        got = f"byte 0x{raw[error.start]:02x} at position {error.start + 1} of the line"
        fix = "save the file as UTF-8, or fix the line; a gzip file ends in .gz"
        summary = "the text is not UTF-8"
        raise DataError(summary, where=where, got=got, need="UTF-8", fix=fix) from error


def _json_rows(path: str, broken: Broken) -> Iterator[Row]:
    """The rows of a `.json` file, which is read whole."""
    text = "".join(_texts(path))
    if not text.strip():
        return
    try:
        value = json.loads(text, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        where = path
        if isinstance(error, json.JSONDecodeError):
            # Many .json files of the hub have an object per line.
            if error.msg == "Extra data":
                yield from read_jsonl_stream(_lines(path), path, broken)
                return
            where = f"{path}:{error.lineno}"
        summary = f"the file is not JSON: {error}"
        raise DataError(summary, where=where, need="a list of objects") from error
    if isinstance(value, dict):
        lists = [value[key] for key in ("data", "rows") if isinstance(value.get(key), list)]
        is_one_line = "\n" not in text.strip()
        # With two lists nothing says which one has the rows.
        if len(lists) == 1:
            value = lists[0]
        elif not lists and is_one_line:
            value = [value]  # a file of JSON lines that has one
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
    fix = None
    if isinstance(value, list):
        fix = "a file that is one list should be called .json"
    need = '{"key": value, ...}'
    raise DataError("a row is not an object", where=where, got=value, need=need, fix=fix)


@dataclass(frozen=True)
class PromptFiles:
    """The texts that a config adds to every conversation of a dataset: `template` has one `{}` for
    the last user message; `system` is a system message for contexts that have none."""

    template: str | None = None
    system: str | None = None

    @classmethod
    def load(cls, prompt_file: str | None, system_prompt_file: str | None) -> PromptFiles:
        """Read the files. Raises `ConfigError` for an unreadable file and for a template without
        exactly one `{}`."""
        template = _text_of(prompt_file, "prompt_file")
        system = _text_of(system_prompt_file, "system_prompt_file")
        num_places = 1
        if template is not None:
            # Filled with a mark, because only `format` knows which braces are places.
            try:
                num_places = template.format("\0").count("\0")
            except (ValueError, LookupError, AttributeError):  # braces of another kind
                num_places = 0
        if num_places != 1:
            summary = "prompt_file is not a template"
            raise ConfigError(summary, where=prompt_file, field="prompt_file", need=_NEED_PLACE)
        return cls(template, system)

    def complete(self, messages: tuple[Message, ...], where: str | None) -> tuple[Message, ...]:
        """The messages of a prompt with both texts. Raises `DataError` if there is no user message
        for a template."""
        if self.template is not None:
            roles = [message["role"] for message in messages]
            if "user" not in roles:
                summary = "the context has no user message for prompt_file"
                need = "a user message, or no prompt_file"
                raise DataError(
                    summary,
                    where=where,
                    field="context",
                    got=f"roles {roles}",
                    need=need,
                )
            last = len(roles) - 1 - roles[::-1].index("user")  # the first from the end
            content = _filled(messages[last]["content"], self.template)
            filled = messages[last] | {"content": content}
            messages = (*messages[:last], filled, *messages[last + 1 :])
        has_system = any(message["role"] in SYSTEM_ROLES for message in messages)
        if self.system is not None and not has_system:
            messages = ({"role": "system", "content": self.system}, *messages)
        return messages


class RowSource:
    """The rows of a file, a folder or a hub dataset, as a config names them; `hub_path` is read
    without a `data_path`. `name`: path and split, for messages. `files`: its prompt files. `broken`
    receives the error of an invalid row; by default it raises it. `known`: the set's entry of the
    table, which says where its own data is."""

    hub_path: str | None = None
    hub_subset: str | None = None
    hub_split: str | None = "train"
    known: KnownDataset | None = None
    # `staticmethod`, because a function of a class would be called with the object before the
    # error.
    broken: Broken = staticmethod(raised)

    left_out: Sequence[str] = ()
    """The places of the completions that the last pass has left out for a fault of the published
    data."""
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
        # A named set is for validation: without its split it would be the training data once more.
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
        # The bundled data is called by its name: its path would be that of the installation.
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
        """Whether the config's `part` has a prompt. The prompt and the seed alone decide, so that
        no prompt is in both parts, and none moves when the data grows."""
        share: float = self.config.split_validation_size
        text = json.dumps([self.config.seed, prompt], sort_keys=True, default=repr)
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        # A number of 64 bits, spread evenly: a share of them lies below that share of the range.
        is_held_out = int.from_bytes(digest) < share * 2**64
        return share == 0 or is_held_out == (self.config.part == "validation")

    def content(self) -> str:
        """A digest of the rows."""
        return fingerprint(self.path, split=self.split, subset=self.subset)


def _text_of(path: str | None, field: str) -> str | None:
    """The text of a prompt file; None without one."""
    if path is None:
        return None
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        summary = f"{field} cannot be read"
        got = f"{path}: {error}"
        raise ConfigError(summary, field=field, got=got, need="a text in UTF-8") from error


def _filled(content: Any, template: str) -> Any:
    """The content of a message with the template around its text. Beside images, around each of its
    texts."""
    if isinstance(content, str):
        return template.format(content)
    if all(isinstance(part, str) or part.get("type") == "text" for part in content):
        return template.format(last_text([{"content": content}]))
    filled = []
    for part in content:
        if isinstance(part, str):
            part = template.format(part)
        elif part.get("type") == "text":
            part = {**part, "text": template.format(last_text([{"content": [part]}]))}
        filled.append(part)
    return filled
