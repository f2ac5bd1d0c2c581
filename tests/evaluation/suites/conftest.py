"""What the tests of the suites share: scored examples, and data written as the hub's download has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from treeward.data.preference import Preference
from treeward.evaluation.examples import ScoredExample


@pytest.fixture
def scored() -> Callable[[Preference, Sequence[float | None]], ScoredExample]:
    """A function that gives an example the scores; one of None has an error."""

    def make(example: Preference, scores: Sequence[float | None]) -> ScoredExample:
        assert len(scores) == len(example.completions)
        errors = tuple("too long" if score is None else None for score in scores)
        lengths = tuple(len(completion.messages[-1]["content"]) for completion in example.completions)
        return ScoredExample(example, tuple(scores), lengths, (1,) * len(scores), errors)

    return make


@pytest.fixture
def write_parquet() -> Callable[[Path, Sequence[Mapping[str, Any]]], Path]:
    def write(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(list(rows)), file)
        return file

    return write
