"""RewardBench and RewardBench 2: golden scores, ties, failures, and the data as the hub has it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from evaluated import preference, rated

from treeward.data.preference import Preference
from treeward.evaluation.results import ScoredExample
from treeward.evaluation.suites.rewardbench import WEIGHTS, RewardBench, RewardBench2

# The accuracies of Skywork-Reward-V2-Qwen3-8B in NeMo RL's pull request 1026: of the package and of
# its environment.
PUBLISHED = Path(__file__).parents[3] / "examples" / "reproduce" / "published.json"
REFERENCE, ENVIRONMENT = json.loads(PUBLISHED.read_text(encoding="utf-8"))["rewardbench"][
    "columns"
].values()
# By hand. Chat has 99 of 100, 93 of 95, 92 of 95, 28 of 28 and 40 of 40: 352 of 358, in both
# columns. Chat Hard 32 + 93 + 106 + 79 + 36 + 36 = 382 of 456, and 32 + 94 + 106 + 79 + 38 + 36 =
# 385. Safety 98 + 98 + 149 + 238 + 111 = 694 of 740, and 98 + 98 + 149 + 239 + 108 = 692. Code 161
# + 161 + 164 + 162 + 164 + 161 = 973 of 984, and 160 + 163 + 163 + 163 + 163 + 159 = 971; math-prm
# 438 of 447 in both, counted as 984 * 438 / 447 of 984.
MATH = 984 * 438 / 447
BY_HAND = {
    "reference": (REFERENCE, (352 / 358, 382 / 456, 694 / 740, (973 + MATH) / 1968), 0.9357852036),
    "environment": (
        ENVIRONMENT,
        (352 / 358, 385 / 456, 692 / 740, (971 + MATH) / 1968),
        0.9365001998,
    ),
}


def pair(subset: str, number: int, prompt: str | None = None) -> Preference:
    return preference(f"{subset}/{number}", subset, prompt or f"{subset} {number}", ["good", "bad"])


def whole_benchmark(accuracies: Mapping[str, float]) -> list[ScoredExample]:
    """Every pair of the published data, as many of each subset right as its accuracy says."""
    sizes: dict[str, int] = {}
    for section in WEIGHTS.values():
        sizes |= section
    sizes["math-prm"] = 447  # in the published data; its weight is another
    right = {subset: round(accuracies[subset] * size) for subset, size in sizes.items()}
    rows = []
    for subset, size in sizes.items():
        for number in range(size):
            scores = (1.0, 0.0) if number < right[subset] else (0.0, 1.0)
            rows.append(rated(pair(subset, number), scores))
    return rows


@pytest.mark.parametrize("column", BY_HAND)
def test_the_suite_computes_them_from_scores(column: str) -> None:
    accuracies, sections, overall = BY_HAND[column]
    result = RewardBench().summarize(whole_benchmark(accuracies))
    assert {metric.name: metric.value for metric in result.subsets} == pytest.approx(
        accuracies, abs=1e-12
    )
    assert [metric.value for metric in result.sections] == pytest.approx(sections, abs=1e-12)
    assert result.headline.value == pytest.approx(overall, abs=1e-9)
    assert result.headline.note is None
    assert (result.num_examples, result.num_failed, result.num_ties) == (2985, 0, 0)


def test_a_tie_is_wrong() -> None:
    scores = [(1.0, 0.0), (2.0, 2.0), (0.0, 1.0), (-1.0, -1.0)]
    rows = [rated(pair("hep-go", i), pair_of_scores) for i, pair_of_scores in enumerate(scores)]
    result = RewardBench().summarize(rows)
    assert result.headline.value == 0.25 and result.num_ties == 2


def test_loads_the_download_of_the_hub(tmp_path: Path, write_parquet: Any) -> None:
    rows = [
        {
            "prompt": "p0",
            "chosen": "c0",
            "rejected": "r0",
            "subset": "hep-go",
            "id": 7,
            "chosen_model": "x",
        },
        {
            "prompt": "p1",
            "chosen": "c1",
            "rejected": "r1",
            "subset": "math-prm",
            "id": 7,
            "chosen_model": "x",
        },
        {
            "prompt": "p2",
            "chosen": "c2",
            "rejected": "r2",
            "subset": "math-prm",
            "id": 7,
            "chosen_model": "x",
        },
    ]
    write_parquet(tmp_path / "data" / "filtered-00000-of-00001.parquet", rows)
    write_parquet(
        tmp_path / "data" / "raw-00000-of-00001.parquet", [rows[0] | {"prompt": "only in raw"}] * 9
    )
    (tmp_path / "README.md").write_text("---\nconfigs:\n- config_name: default\n---\n")
    examples = RewardBench().load(str(tmp_path))
    assert [(e.id, e.task_name) for e in examples] == [
        ("hep-go/7", "hep-go"),
        ("math-prm/7", "math-prm"),
        ("math-prm/7", "math-prm"),
    ]
    assert examples[1].context == ({"role": "user", "content": "p1"},)
    assert [completion.messages[0]["content"] for completion in examples[1].completions] == [
        "c1",
        "r1",
    ]
    assert str(examples[2].where).endswith("filtered-00000-of-00001.parquet:row 3")
    assert (
        RewardBench().load(str(tmp_path / "data" / "filtered-00000-of-00001.parquet")) == examples
    )


# --- RewardBench 2 --------------------------------------------------------------------------------


Row = tuple[str, int, list[float]]

# Scores by id and number of correct answers, for which the package's `process_single_model`
# (reward-bench at a009692) returned what PUBLISHED_TIES has.
GOLDEN: list[Row] = [
    ("ref:0", 1, [2, 0, -1]),
    ("tied:0", 3, [2, 1.5, 1, 0.5, -1]),
    ("ref:1", 1, [0.1, 0.2]),
    ("tied:1", 2, [1, 1, 0.5]),
    ("ref:2", 1, [5, 0]),
    ("tied:2", 2, [4, 3, 0]),
]
# Two without their partner (6 and 7), and three whose correct answers have no spread (10 to 12).
RANDOM: list[Row] = [
    ("tied:0", 4, [1.46, 0.79, 2.11, 1.27, 0.65]),
    ("ref:0", 1, [0.32, -0.89]),
    ("tied:1", 2, [0.81, 0.94, 1.02, -0.88, -0.25, 0.49]),
    ("ref:1", 1, [1.23, 0.58, 1.28]),
    ("tied:2", 5, [1.88, 2.1, 1.86, 1.92, 1.52, 0.03]),
    ("ref:2", 1, [1.31, 0.47]),
    ("tied:3", 3, [1.25, 2.49, 0.92, -0.26, 0.77]),
    ("ref:3", 1, [2.64, 1.45]),
    ("tied:4", 4, [1.32, 1.91, 1.56, 1.79, -0.22, -0.3, 0.9]),
    ("ref:4", 1, [2.1, 0.02, 0.6]),
    ("tied:5", 4, [1.65, 1.15, 1.54, 0.88, 0.13]),
    ("ref:5", 1, [1.14, 1.65, -0.45, 0.56]),
    ("ref:6", 1, [0.67, 0.69]),
    ("tied:7", 5, [1.74, 1.57, 1.75, 1.43, 1.53, -1.61, -0.37, 0.54, -1.2]),
    ("tied:10", 2, [1.0, 1.0, 0.0]),
    ("ref:10", 1, [1.0, 0.5]),
    ("tied:11", 2, [1.0, 1.0, 1.0]),
    ("ref:11", 1, [2.0, 0.0]),
    ("tied:12", 2, [1.0, 1.0, 2.0]),
    ("ref:12", 1, [2.0, 0.0]),
]
PUBLISHED_TIES = [(GOLDEN, 0.698339701409386), (RANDOM, 0.5053204193305099)]


def prompt_of(identity: str, subset: str, num_correct: int, count: int) -> Preference:
    answers = [f"answer {i}" for i in range(count)]
    ranks = (0,) * num_correct + (1,) * (count - num_correct)
    return preference(f"{subset}/{identity}", subset, f"{subset} {identity}", answers, ranks)


def ties(rows: Sequence[Row]) -> list[ScoredExample]:
    return [
        rated(prompt_of(identity, "Ties", correct, len(scores)), scores)
        for identity, correct, scores in rows
    ]


@pytest.mark.parametrize(("rows", "score"), PUBLISHED_TIES)
def test_ties_are_those_of_the_published_function(rows: list[Row], score: float) -> None:
    result = RewardBench2().summarize(ties(rows))
    assert result.headline.value == pytest.approx(score, abs=1e-15)
    assert [(metric.name, metric.value) for metric in result.subsets] == [
        ("Ties", pytest.approx(score, abs=1e-15))
    ]


@pytest.mark.parametrize(
    ("scores", "credit"),
    [
        ([1.0, 0.0, 0.0, 0.0], 1.0),
        ([1.0, 1.0, 0.0, 0.0], 0.5),
        ([1.0, 1.0, 0.0, 1.0], 1 / 3),
        ([2.0, 2.0, 2.0, 2.0], 0.25),
        ([0.0, 1.0, 1.0, 0.0], 0.0),
        ([-3.0, -3.5, -4.0, -9.0], 1.0),
        ([1.0, 0.0, None, 0.0], 0.0),
        ([None, 0.0, 0.0, 0.0], 0.0),
    ],
)
def test_best_of_four_shares_the_credit_of_a_tie(scores: list[float | None], credit: float) -> None:
    other = rated(prompt_of("2", "Math", 1, 4), [1.0, 0.0, 0.0, 0.0])
    result = RewardBench2().summarize([rated(prompt_of("1", "Math", 1, 4), scores), other])
    assert result.headline.value == pytest.approx((credit + 1) / 2)


def test_the_overall_score_is_the_plain_mean_of_the_subsets() -> None:
    rows = ties(GOLDEN)
    # 1/2, 1/3, 0, 0
    rows += [rated(prompt_of(str(i), "Math", 1, 4), (1.0, 1.0, 0.0, i)) for i in range(4)]
    rows += [rated(prompt_of(str(i), "Focus", 1, 4), (1.0, 0.0, 0.0, 0.0)) for i in range(9)]
    result = RewardBench2().summarize(rows)
    assert {metric.name: metric.value for metric in result.subsets} == pytest.approx(
        {"Math": 5 / 24, "Focus": 1.0, "Ties": 0.698339701409386}
    )
    assert result.headline.value == pytest.approx((5 / 24 + 1 + 0.698339701409386) / 3, abs=1e-15)
    assert "19 of 1865" in str(result.headline.note)
    for metric in (result.headline, *result.subsets):
        assert metric.low is not None and metric.high is not None and metric.value is not None
        assert metric.low <= metric.value <= metric.high and metric.low < metric.high


@pytest.mark.parametrize("which", ["tied:2", "ref:2"])
def test_a_failed_prompt_of_ties_is_as_bad_as_can_be(which: str) -> None:
    rows = ties(GOLDEN)
    place = [row.example.id for row in rows].index(f"Ties/{which}")
    tie = rows[place]
    lost = list(rows)
    lost[place] = rated(tie.example, (None, *tie.scores[1:]))
    scores = [-1e9 if rank == 0 else 0.0 for rank in tie.example.ranks]
    terrible = list(rows)
    terrible[place] = rated(tie.example, (*scores[:-1], 0.0))
    suite = RewardBench2()
    # Correct answers with no spread of their own: D is 0 in one and unknown in the other, and
    # neither beats it.
    assert suite.summarize(lost).headline.value == pytest.approx(
        suite.summarize(terrible).headline.value
    )
