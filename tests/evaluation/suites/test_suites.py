"""What holds for every suite: names, policies, nothing to summarize, the hub out of reach, intervals of sections."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treeward.errors import ConfigError, DataError
from treeward.evaluation.results import Metric
from treeward.evaluation.statistics import combined, wilson
from treeward.evaluation.suites import SUITES, get_suite
from treeward.evaluation.suites.interface import suite_rows


def test_names() -> None:
    assert list(SUITES) == ["rewardbench", "rewardbench2", "rmbench", "judgebench", "llmbar"]
    for name, cls in SUITES.items():
        suite = get_suite(name)
        assert type(suite) is cls and suite.name == name and suite.title and suite.tie_policy == "strict"
        assert suite.chance() == (None if name == "rewardbench2" else 0.5)
    assert get_suite("RM-Bench", tie_policy="half").tie_policy == "half"
    assert (get_suite("rewardbench2").chance("Ties"), get_suite("rewardbench2").chance("Math")) == (None, 0.25)
    with pytest.raises(ConfigError, match="did you mean judgebench"):
        get_suite("jugdebench")


@pytest.mark.parametrize("name", list(SUITES))
def test_nothing_to_summarize_is_no_number(name: str) -> None:
    result = get_suite(name).summarize([])
    assert result.headline.value is None and result.headline.low is None
    assert json.loads(json.dumps(result.details)) == result.details


@pytest.mark.parametrize("name", list(SUITES))
def test_the_data_of_another_suite_and_no_data_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        get_suite(name).load(str(tmp_path / "nowhere" / "at all.jsonl"))
    file = tmp_path / "other.jsonl"
    file.write_text(json.dumps({"question": "?", "answer": "!"}))
    with pytest.raises(DataError, match="does not fit the suite") as caught:
        get_suite(name).load(str(file))
    assert caught.value.where == f"{file}:1"


def test_shards_are_read_in_order_and_only_of_the_split(tmp_path: Path, write_parquet: Any) -> None:
    for shard in (1, 0):
        write_parquet(tmp_path / "data" / f"test-0000{shard}-of-00002.parquet", [{"a": shard}])
    write_parquet(tmp_path / "data" / "testing-00000-of-00001.parquet", [{"a": 7}])
    rows = list(suite_rows(str(tmp_path), "org/name", split="test"))
    assert [row.values["a"] for row in rows] == [0, 1]


def test_a_file_with_the_name_of_the_split(tmp_path: Path) -> None:
    (tmp_path / "filtered.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "raw.jsonl").write_text('{"a": 2}\n')
    assert [row.values["a"] for row in suite_rows(str(tmp_path), "org/name", split="filtered")] == [1]


def test_a_saved_dataset_and_a_pattern(tmp_path: Path) -> None:
    import datasets  # type: ignore[import-untyped]

    table = datasets.Dataset.from_list([{"a": 3}])
    datasets.DatasetDict({"filtered": table, "raw": datasets.Dataset.from_list([{"a": 4}])}).save_to_disk(
        tmp_path / "d"
    )
    assert [row.values["a"] for row in suite_rows(str(tmp_path / "d"), "org/name", split="filtered")] == [3]
    (tmp_path / "x.jsonl").write_text('{"a": 5}\n')
    assert [r.values["a"] for r in suite_rows(str(tmp_path / "*.jsonl"), "org/name", split="filtered")] == [5]


# --- parts -----------------------------------------------------------------------------------------------------------


def test_the_interval_of_parts_by_hand() -> None:
    parts = [Metric("a", 0.5, 0.25, 0.75, 4), Metric("c", 1.0, 0.5, 1.0, 2)]
    found = combined("headline", parts, [1, 3])
    assert "fewer than 5 examples" in str(found.note)
    assert (found.value, found.count) == (0.875, 6) and combined("headline", []).value is None
    assert found.low == pytest.approx(0.875 - math.hypot(0.25 * 0.25, 0.75 * 0.5))
    assert found.high == pytest.approx(0.875 + 0.25 * 0.25)


@pytest.mark.parametrize("accuracy", [0.95, 0.99])
def test_the_interval_of_many_parts_that_are_nearly_all_right_covers(accuracy: float) -> None:
    """A part that is all right reaches nowhere above itself, so the sum of 23 of them reached too low."""
    rng, held = np.random.default_rng(14), 0
    for _ in range(400):
        counts = rng.binomial(100, accuracy, size=23)
        found = combined("c", [Metric("p", k / 100, *wilson(int(k), 100), 100) for k in counts])
        assert found.low is not None and found.high is not None and found.high <= 1.0
        held += found.low <= accuracy <= found.high
    assert held / 400 > 0.935
