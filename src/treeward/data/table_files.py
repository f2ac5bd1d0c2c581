"""Tables: CSV, Arrow's files, and those of the library `datasets`, saved or from the hub.

csv_rows(iter(["prompt;chosen\\n", "Hi;Hello\\n"]), "pairs.csv", ",", raised)
# ({"prompt": "Hi", "chosen": "Hello"}, "pairs.csv:2")
arrow_rows("pairs.parquet", is_parquet=True)
"""

from __future__ import annotations

import csv
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from treeward.data.conversation import without_nulls
from treeward.errors import DataError, nearest_path

_FIX_DATASET = (
    "check path, subset, split and network; offline, give a local copy instead of the name; a "
    "private or gated dataset needs HF_TOKEN"
)
_ROWS_PER_BATCH = 1024  # of a parquet file in memory
_LONGEST_CELL_CHARACTERS = 2**31 - 1  # the most that csv takes on every system


def csv_rows(
    texts: Iterator[str],
    path: str,
    separator: str,
    broken: Callable[[DataError], object],
) -> Iterator[tuple[dict[str, Any], str]]:
    """The rows of the lines of a CSV file. `broken` receives the error of a row that does not fit
    the header."""
    # The limit of a cell is the process's, and its default is less than one long conversation.
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL_CHARACTERS))
    # Up to the header, whose cells show the separator. Empty lines before it count as lines.
    beginning = [next(texts, "")]
    while beginning[-1] and not beginning[-1].strip("\r\n"):
        beginning.append(next(texts, ""))
    # A spreadsheet of a country with decimal commas writes semicolons.
    num_cells = {}
    for mark in (separator, ";", "\t"):
        cells = next(csv.reader(beginning[-1:], delimiter=mark), [])
        num_cells[mark] = len(cells)
    if num_cells[separator] == 1:
        separator = max(num_cells, key=lambda mark: num_cells[mark])
    reader = csv.reader(itertools.chain(beginning, texts), delimiter=separator, strict=True)
    header: list[str] = []
    end = 0  # a row may have several lines, and is named by its first
    try:
        for cells in reader:
            where = f"{path}:{end + 1}"
            end = reader.line_num
            # An empty line before the header is none.
            if not header:
                header = cells
                if len(set(header)) < len(header):
                    summary = "columns have the same name"
                    need = "different names: one of them would be lost"
                    raise DataError(summary, where=where, got=", ".join(header), need=need)
            elif cells and len(cells) != len(header):
                error = DataError(
                    "the row does not fit the header",
                    where=where,
                    got=cells,
                    need=f"a cell for each of {', '.join(header)}",
                    fix="put cells that hold the separator in quotes",
                )
                broken(error)
            elif cells:
                yield dict(zip(header, cells, strict=True)), where
    except csv.Error as error:
        summary = f"the row is not valid CSV: {error}"
        need = 'double quotes around cells with a line break, and "" for a quote'
        raise DataError(summary, where=f"{path}:{end + 1}", need=need) from error


def arrow_rows(path: str, *, is_parquet: bool) -> Iterator[tuple[dict[str, Any], str]]:
    """The rows of a parquet file, or of an Arrow file or stream."""
    import pyarrow as pa
    from pyarrow import ipc, parquet

    number = 0
    try:
        # Mapped, so that only the batch that is read takes memory.
        source = pa.memory_map(path)
        if is_parquet:
            batches = parquet.ParquetFile(source).iter_batches(batch_size=_ROWS_PER_BATCH)
        else:
            # The mark that begins Arrow's files; a stream, as `datasets` caches it, has none.
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            reader = ipc.open_file(source) if is_file else ipc.open_stream(source)
            batches = reader.read_all().to_batches(max_chunksize=_ROWS_PER_BATCH)
        for batch in batches:
            for values in batch.to_pylist():
                number += 1
                yield without_nested_nulls(values), f"{path}:row {number}"
    except (pa.ArrowException, OSError) as error:
        where = f"{path}:row {number + 1}"
        got = f"{type(error).__name__}: {error}"
        need = "a complete file"
        raise DataError("the file cannot be read", where=where, got=got, need=need) from error


def without_nested_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a table without the nulls that Arrow has put into its objects; the columns
    themselves stay."""
    return {name: without_nulls(value) for name, value in values.items()}


class UnchosenSplitError(DataError):
    """A data set has several splits and none is chosen; `got` lists them. A verb adds how it is
    told which one."""

    @property
    def choice(self) -> str:
        """The split that was probably meant."""
        names = str(self.got).split(", ")
        return "train" if "train" in names else names[0]


def dataset_table(path: str, split: str | None, subset: str | None) -> tuple[Any, str]:
    """A `datasets.Dataset`, saved or of the hub, and its name for errors."""
    import datasets

    is_saved = os.path.isdir(path)
    try:
        if is_saved:
            loaded: Any = datasets.load_from_disk(path)
        else:
            loaded = datasets.load_dataset(path, subset, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        # Arrow's errors are ValueErrors, a script in Python is a RuntimeError.
        near = None if is_saved else nearest_path(path)
        raise DataError(
            "the dataset cannot be read",
            where=path,
            got=f"{type(error).__name__}: {error}",
            need="a folder that save_to_disk wrote, or a hub dataset",
            fix=f"did you mean {near}?" if near else _FIX_DATASET,
        ) from error
    if isinstance(loaded, Mapping):
        table, name = chosen_split(loaded, path, split)
        return table, f"{path}[{name}]"
    # One saved table is a lone split, as a file is. This raises for any other name.
    if is_saved and split not in (None, "train"):
        chosen_split({str(loaded.split or "train"): loaded}, path, split)
    return loaded, path if is_saved else f"{path}[{split}]"


def chosen_split(splits: Mapping[str, Any], path: str, split: str | None) -> tuple[Any, str]:
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
        raise DataError.unknown(
            f"there is no split {split!r}",
            chosen,
            names,
            where=path,
            field="split",
        )
    return splits[chosen], chosen
