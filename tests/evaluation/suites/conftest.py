"""Data written as the download of the hub has it, for the tests of the suites."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


@pytest.fixture
def write_parquet() -> Callable[[Path, Sequence[Mapping[str, Any]]], Path]:
    def write(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(list(rows)), file)
        return file

    return write
