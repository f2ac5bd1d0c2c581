"""RewardBench: golden section scores, the data as the hub has it, failures and ties."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from evaluated import preference, rated

from treeward.data.preference import Preference
from treeward.errors import DataError
from treeward.evaluation.results import ScoredExample
from treeward.evaluation.suites.rewardbench import WEIGHTS, RewardBench

# The accuracies of Skywork-Reward-V2-Qwen3-8B in NeMo RL's pull request 1026: of the package and of its environment.
PUBLISHED = Path(__file__).parents[3] / "examples" / "reproduce" / "published.json"
REFERENCE, ENVIRONMENT = json.loads(PUBLISHED.read_text(encoding="utf-8"))["rewardbench"]["columns"].values()
# By hand. Chat has 99 of 100, 93 of 95, 92 of 95, 28 of 28 and 40 of 40: 352 of 358, in both columns. Chat Hard
# 32 + 93 + 106 + 79 + 36 + 36 = 382 of 456, and 32 + 94 + 106 + 79 + 38 + 36 = 385. Safety 98 + 98 + 149 + 238 + 111
# = 694 of 740, and 98 + 98 + 149 + 239 + 108 = 692. Code 161 + 161 + 164 + 162 + 164 + 161 = 973 of 984, and
# 160 + 163 + 163 + 163 + 163 + 159 = 971; math-prm 438 of 447 in both, counted as 984 * 438 / 447 of 984.
MATH = 984 * 438 / 447
BY_HAND = {
    "reference": (REFERENCE, (352 / 358, 382 / 456, 694 / 740, (973 + MATH) / 1968), 0.9357852036),
    "environment": (ENVIRONMENT, (352 / 358, 385 / 456, 692 / 740, (971 + MATH) / 1968), 0.9365001998),
}


def pair(subset: str, number: int, prompt: str | None = None) -> Preference:
    return preference(f"{subset}/{number}", subset, prompt or f"{subset} {number}", ["good", "bad"])


def whole_benchmark(accuracies: Mapping[str, float]) -> list[ScoredExample]:
    """Every pair of the published data, as many of each subset right as its accuracy says."""
    sizes = {subset: weight for section in WEIGHTS.values() for subset, weight in section.items()} | {"math-prm": 447}
    right = {subset: round(accuracies[subset] * size) for subset, size in sizes.items()}
    return [
        rated(pair(subset, number), (1.0, 0.0) if number < right[subset] else (0.0, 1.0))
        for subset, size in sizes.items()
        for number in range(size)
    ]


@pytest.mark.parametrize("column", BY_HAND)
def test_the_suite_computes_them_from_scores(column: str) -> None:
    accuracies, sections, overall = BY_HAND[column]
    result = RewardBench().summarize(whole_benchmark(accuracies))
    assert {metric.name: metric.value for metric in result.subsets} == pytest.approx(accuracies, abs=1e-12)
    assert [metric.value for metric in result.sections] == pytest.approx(sections, abs=1e-12)
    assert result.headline.value == pytest.approx(overall, abs=1e-9)
    assert result.headline.note is None
    assert (result.num_examples, result.num_failed, result.num_ties) == (2985, 0, 0)


@pytest.mark.parametrize(("policy", "value"), [("strict", 0.25), ("half", 0.5)])
def test_a_tie_counts_by_the_policy(policy: Any, value: float) -> None:
    scores = [(1.0, 0.0), (2.0, 2.0), (0.0, 1.0), (-1.0, -1.0)]
    rows = [rated(pair("hep-go", i), pair_of_scores) for i, pair_of_scores in enumerate(scores)]
    result = RewardBench(tie_policy=policy).summarize(rows)
    assert result.headline.value == value and result.num_ties == 2
    assert result.details["tie_policy"] == policy


def test_an_example_without_a_score_counts_as_wrong_and_is_reported() -> None:
    rows = [rated(pair("hep-go", i), (1.0, 0.0)) for i in range(3)] + [rated(pair("hep-go", 3), (5.0, None))]
    result = RewardBench().summarize(rows)
    assert result.headline.value == 0.75 and result.num_failed == 1
    assert result.scored == "3 of 4 scored"


def test_loads_the_download_of_the_hub(tmp_path: Path, write_parquet: Any) -> None:
    rows = [
        {"prompt": "p0", "chosen": "c0", "rejected": "r0", "subset": "hep-go", "id": 7, "chosen_model": "x"},
        {"prompt": "p1", "chosen": "c1", "rejected": "r1", "subset": "math-prm", "id": 7, "chosen_model": "x"},
        {"prompt": "p2", "chosen": "c2", "rejected": "r2", "subset": "math-prm", "id": 7, "chosen_model": "x"},
    ]
    write_parquet(tmp_path / "data" / "filtered-00000-of-00001.parquet", rows)
    write_parquet(tmp_path / "data" / "raw-00000-of-00001.parquet", [rows[0] | {"prompt": "only in raw"}] * 9)
    (tmp_path / "README.md").write_text("---\nconfigs:\n- config_name: default\n---\n")
    examples = RewardBench().load(str(tmp_path))
    assert [(e.id, e.task_name) for e in examples] == [
        ("hep-go/7", "hep-go"),
        ("math-prm/7", "math-prm"),
        ("math-prm/7", "math-prm"),
    ]
    assert examples[1].context == ({"role": "user", "content": "p1"},)
    assert [completion.messages[0]["content"] for completion in examples[1].completions] == ["c1", "r1"]
    assert str(examples[2].where).endswith("filtered-00000-of-00001.parquet:row 3")
    assert RewardBench().load(str(tmp_path / "data" / "filtered-00000-of-00001.parquet")) == examples


@pytest.mark.parametrize(
    ("change", "field", "text"),
    [
        ({"subset": "hep-c++"}, "subset", "hep-cpp"),
        ({"chosen": None}, "chosen", "chosen does not fit"),
        ({"rejected": 3}, "rejected", "does not fit"),
        ({"prompt": [{"content": "no role"}]}, "prompt", "no role"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, change: dict[str, Any], field: str, text: str) -> None:
    row = {"prompt": "p", "chosen": "c", "rejected": "r", "subset": "hep-go", "id": 1}
    file = tmp_path / "filtered.jsonl"
    file.write_text(json.dumps(row) + "\n" + json.dumps(row | change) + "\n")
    with pytest.raises(DataError, match=text) as caught:
        RewardBench().load(str(file))
    assert caught.value.where == f"{file}:2" and caught.value.field == field
