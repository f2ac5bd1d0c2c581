"""What holds for every suite: names, policies, nothing to summarize, the hub out of reach, intervals of sections."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from pydantic import BaseModel, Field

from treeward.config.data import DatasetConfig
from treeward.data.sources import Row
from treeward.errors import ConfigError, DataError
from treeward.evaluation.examples import EvalExample, ScoredExample
from treeward.evaluation.parts import Part, combined
from treeward.evaluation.statistics import weighted_mean_metric
from treeward.evaluation.suites import SUITES, PreferenceSuite, get_suite
from treeward.evaluation.suites.rewardbench2 import SIZES
from treeward.evaluation.suites.rows import OneOf, Prompt, data_files, read_as, repository_rows, with_distinct_ids


def test_names() -> None:
    assert list(SUITES) == ["rewardbench", "rewardbench2", "rmbench", "judgebench", "llmbar"]
    for name, cls in SUITES.items():
        suite = get_suite(name)
        assert type(suite) is cls and suite.name == name and suite.title and suite.tie_policy == "strict"
    assert get_suite("RM-Bench", tie_policy="half").tie_policy == "half"


def test_the_nearest_name_is_suggested() -> None:
    with pytest.raises(ConfigError, match="did you mean judgebench"):
        get_suite("jugdebench")


@pytest.mark.parametrize("name", list(SUITES))
def test_nothing_to_summarize_is_no_number(name: str) -> None:
    result = get_suite(name).summarize([])
    assert result.headline.value is None and result.headline.low is None
    assert json.loads(json.dumps(result.details)) == result.details


@pytest.mark.parametrize("name", list(SUITES))
def test_a_hub_out_of_reach_is_an_error_that_says_what_to_do(name: str) -> None:
    if os.environ.get("HF_HUB_OFFLINE") != "1":
        pytest.skip("the hub may be in reach")
    with pytest.raises(DataError, match="local copy") as caught:
        get_suite(name).load()
    assert caught.value.where == get_suite(name).hub_path


@pytest.mark.parametrize("name", list(SUITES))
def test_a_missing_folder_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        get_suite(name).load(str(tmp_path / "nowhere" / "at all.jsonl"))


@pytest.mark.parametrize("name", list(SUITES))
def test_the_data_of_another_suite_is_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text(json.dumps({"question": "?", "answer": "!"}))
    with pytest.raises(DataError, match="the row has no") as caught:
        get_suite(name).load(str(file))
    assert caught.value.where == f"{file}:1"


def test_ids_become_distinct() -> None:
    def example(identity: str) -> EvalExample:
        return EvalExample(identity, "s", (), ((),), (0,))

    ids = [e.id for e in with_distinct_ids([example(i) for i in ("a", "a#2", "a", "b", "a")])]
    assert ids == ["a", "a#2", "a#3", "b", "a#4"]


def test_shards_are_read_in_order_and_only_of_the_split(tmp_path: Path, write_parquet: Any) -> None:
    for shard in (1, 0):
        write_parquet(tmp_path / "data" / f"test-0000{shard}-of-00002.parquet", [{"a": shard}])
    write_parquet(tmp_path / "data" / "testing-00000-of-00001.parquet", [{"a": 7}])
    rows = list(repository_rows(str(tmp_path), "org/name", split="test"))
    assert [row.values["a"] for row in rows] == [0, 1]


def test_a_saved_dataset_and_a_pattern(tmp_path: Path) -> None:
    import datasets  # type: ignore[import-untyped]

    table = datasets.Dataset.from_list([{"a": 3}])
    datasets.DatasetDict({"filtered": table, "raw": datasets.Dataset.from_list([{"a": 4}])}).save_to_disk(
        tmp_path / "d"
    )
    assert [row.values["a"] for row in repository_rows(str(tmp_path / "d"), "org/name", split="filtered")] == [3]
    (tmp_path / "x.jsonl").write_text('{"a": 5}\n')
    assert [r.values["a"] for r in repository_rows(str(tmp_path / "*.jsonl"), "org/name", split="filtered")] == [5]


def test_data_files_are_those_of_the_data(tmp_path: Path) -> None:
    for name in ("b/z.json", "a.jsonl", ".cache/c.json", "dataset_info.json", "README.md", "b/.hidden.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert [os.path.relpath(file, tmp_path) for file in data_files(str(tmp_path))] == ["a.jsonl", "b/z.json"]


class Pair(BaseModel):
    prompt: Prompt
    texts: Annotated[list[str], Field(min_length=2)]
    subset: Annotated[str, OneOf(("Precise IF", "Math"), "subset")]


def test_a_row_is_read_as_its_schema_says() -> None:
    values = {"prompt": "Hi", "texts": ["a", "b"], "subset": "PRECISE if", "more": 1}
    pair = read_as(Pair, Row(values, "x:1"))
    assert pair.prompt == ({"role": "user", "content": "Hi"},) and pair.subset == "Precise IF"
    for change, field, words in (
        ({"texts": ["a", 2]}, "texts[1]", "string"),
        ({"texts": ["a"]}, "texts", "at least 2"),
        ({"texts": None}, "texts", "the row has no texts"),
        ({"subset": "Maths"}, "subset", "did you mean Math"),
        ({"prompt": [{"content": "Hi"}]}, "prompt[0].role", "role"),
    ):
        with pytest.raises(DataError, match=words) as caught:
            read_as(Pair, Row(values | change, "x:1"))
        assert (caught.value.where, caught.value.field) == ("x:1", field)


# --- parts -----------------------------------------------------------------------------------------------------------


def test_the_interval_of_parts_with_shared_prompts_covers_the_truth() -> None:
    rng = np.random.default_rng(3)
    covered = {"combined": 0, "independent": 0}
    num_runs, num_prompts = 200, 80
    for _ in range(num_runs):
        ease = rng.beta(0.5, 0.5, num_prompts)  # of each prompt, with mean 0.5; most are easy or hard for all
        prompts = [str(i) for i in range(num_prompts)]
        parts = [Part.of(name, (rng.random(num_prompts) < ease).astype(float).tolist(), prompts) for name in "abc"]
        weights = [3.0, 1.0, 2.0]
        for name, metric in (
            ("combined", combined("c", parts, weights)),
            ("independent", weighted_mean_metric([part.metric for part in parts], weights, "c")),
        ):
            assert metric.low is not None and metric.high is not None
            covered[name] += metric.low <= 0.5 <= metric.high
    assert covered["combined"] / num_runs > 0.91
    assert covered["independent"] / num_runs < 0.88, "the test would not see an interval that is too narrow"


def test_chance_is_that_of_the_suite() -> None:
    suites = {name: get_suite(name) for name in SUITES}
    best_of = suites.pop("rewardbench2")
    for suite in (*suites.values(), PreferenceSuite("mine", DatasetConfig(data_path="mine.jsonl"))):
        assert suite.chance() == 0.5 and suite.chance("any part of it") == 0.5
    assert {part: best_of.chance(part) for part in ("Factuality", "Precise IF", "Math", "Safety", "Focus")} == {
        part: 0.25 for part in SIZES if part != "Ties"
    }
    assert best_of.chance("Ties") is None and best_of.chance() is None


def test_chance_is_what_random_scores_come_to() -> None:
    draw = np.random.default_rng(3)
    suite, replies = get_suite("rewardbench2"), (({"role": "assistant", "content": "x"},),) * 4
    scored = [
        ScoredExample(
            EvalExample(str(n), "Math", (), replies, (0, 1, 1, 1)), tuple(draw.normal(size=4)), (1,) * 4, (1,) * 4
        )
        for n in range(4000)
    ]
    (metric,) = suite.summarize(scored).subsets
    assert metric.low < suite.chance("Math") < metric.high
