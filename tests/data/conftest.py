"""What tests of datasets share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treeward.config.data import DatasetConfig
from treeward.data.datasets import open_dataset
from treeward.data.preference import Preference


@pytest.fixture
def parse(write_rows: Callable[..., Path]) -> Callable[..., Preference]:
    """`parse("HelpSteer3", row, **keys)`: what a dataset of this name makes of a file with one
    row."""

    def parse(dataset_name: str, row: Any, **keys: Any) -> Preference:
        path = str(write_rows("rows.jsonl", [row]))
        ((preference, where),) = open_dataset(
            DatasetConfig(dataset_name=dataset_name, data_path=path, **keys),
        )
        assert where == f"{path}:1"
        return preference

    return parse
