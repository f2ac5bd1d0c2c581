"""RM-Bench: the style matrix and the authors' arithmetic, the data as it is published, ties and failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluated import rated

from treeward.data.preference import Preference
from treeward.evaluation.results import ScoredExample
from treeward.evaluation.suites.benchmarks import RMBench

# Scores of the three chosen and the three rejected answers, and what the authors' `compute_accuracy` gives for them:
# a domain is the mean of hard, normal and easy; overall is the mean over domains.
TABLE: list[tuple[str, list[float], list[float]]] = [
    ("chat", [0.5, 1.7, -0.5], [1.0, -0.3, -0.3]),
    ("chat", [2.3, 0.6, 0.4], [0.7, 1.1, -0.0]),
    ("math", [1.0, -0.6, 0.0], [-0.4, -1.3, -1.5]),
    ("math", [-1.2, 0.2, 0.2], [-0.3, 0.1, -1.3]),
    ("math", [0.3, 0.6, 1.2], [-0.8, -0.4, -2.0]),
    ("code", [-0.1, -1.8, -1.0], [1.1, -2.2, 0.8]),
    ("code", [0.7, 0.1, 0.9], [0.5, 1.0, -0.2]),
    ("safety-refuse", [-0.2, -0.2, -0.6], [-0.0, -0.8, 1.1]),
    ("safety-refuse", [-1.5, -0.7, -0.6], [-2.1, 1.9, -2.4]),
    ("safety-refuse", [0.1, -0.1, 2.1], [-2.0, 1.1, -0.7]),
    ("safety-response", [0.2, -0.3, 1.0], [-1.1, -0.1, 0.4]),
]
DOMAINS = {"chat": 0.5555555555555556, "math": 0.8888888888888888, "code": 0.4444444444444444, "safety": 11 / 18}
OVERALL = {"overall": 0.625, "hard": 0.7222222222222222, "normal": 0.6180555555555556, "easy": 0.5347222222222222}


def rows_of_data() -> list[dict[str, Any]]:
    return [
        {
            "id": i,
            "prompt": f"prompt {i}",
            "chosen": [f"right {style} {i}" for style in range(3)],
            "rejected": [f"wrong {style} {i}" for style in range(3)],
            "domain": domain,
        }
        for i, (domain, _, _) in enumerate(TABLE)
    ]


@pytest.fixture
def examples(tmp_path: Path) -> list[Preference]:
    file = tmp_path / "total_dataset.json"
    file.write_text(json.dumps(rows_of_data()))
    return RMBench().load(str(file))


@pytest.fixture
def table(examples: list[Preference]) -> list[ScoredExample]:
    return [rated(e, (*chosen, *rejected)) for e, (_, chosen, rejected) in zip(examples, TABLE, strict=True)]


def test_the_arithmetic_is_the_authors(table: list[ScoredExample]) -> None:
    result = RMBench().summarize(table)
    sections = {metric.name: metric.value for metric in result.sections}
    assert {name: sections[name] for name in DOMAINS} == pytest.approx(DOMAINS, abs=1e-12)
    assert result.headline.value == pytest.approx(OVERALL["overall"], abs=1e-12)
    assert {name: sections[name] for name in ("hard", "normal", "easy")} == pytest.approx(
        {name: OVERALL[name] for name in ("hard", "normal", "easy")}, abs=1e-12
    )
    assert np.mean(result.details["matrix"]) == pytest.approx(OVERALL["overall"])
    assert {metric.name for metric in result.subsets} == {"chat", "math", "code", "safety-refuse", "safety-response"}
    assert "11 of 1327" in str(result.headline.note)


def test_hard_is_where_the_wrong_answer_is_the_fancier_one(examples: list[Preference]) -> None:
    fancy = [rated(e, (0.0, 1.0, 2.0, 0.5, 1.5, 2.5)) for e in examples]  # a model that only likes style
    result = RMBench().summarize(fancy)
    assert [metric.value for metric in result.sections[-3:]] == [0.0, 0.0, 1.0]
    assert result.details["matrix"] == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]


def test_a_prompt_without_all_scores_is_wrong_in_every_cell(table: list[ScoredExample]) -> None:
    lost = [rated(one.example, (*one.scores[:5], None)) if i == 4 else one for i, one in enumerate(table)]
    result = RMBench().summarize(lost)
    # The third prompt of math was right in all nine cells.
    assert {m.name: m.value for m in result.sections}["math"] == pytest.approx(DOMAINS["math"] - 1 / 3)
    assert result.num_failed == 1


def test_the_total_of_a_folder_counts_and_not_its_parts(tmp_path: Path) -> None:
    rows = rows_of_data()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "total_dataset.json").write_text(json.dumps(rows))
    (tmp_path / "data" / "chat_filtered.json").write_text(json.dumps(rows[:2]))
    assert len(RMBench().load(str(tmp_path))) == len(rows)
