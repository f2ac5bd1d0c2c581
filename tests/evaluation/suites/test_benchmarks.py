"""RM-Bench, JudgeBench and LLMBar: the authors' arithmetic and headlines, and the data as it is
published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from evaluated import rated
from messages import write_jsonl

from treeward.data.preference import Preference
from treeward.evaluation.results import ScoredExample
from treeward.evaluation.suites.benchmarks import JudgeBench, LLMBar, RMBench

# --- RM-Bench -------------------------------------------------------------------------------------


# Scores of the three chosen and the three rejected answers, and what the authors'
# `compute_accuracy` gives for them: a domain is the mean of hard, normal and easy; overall, 0.625,
# is the mean over domains.
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
SECTIONS = {
    "chat": 0.5555555555555556,
    "math": 0.8888888888888888,
    "code": 0.4444444444444444,
    "safety": 11 / 18,
}
SECTIONS |= {"hard": 0.7222222222222222, "normal": 0.6180555555555556, "easy": 0.5347222222222222}


def rm_rows() -> list[dict[str, Any]]:
    rows = []
    for i, (domain, _, _) in enumerate(TABLE):
        row = {
            "id": i,
            "prompt": f"prompt {i}",
            "chosen": [f"right {style} {i}" for style in range(3)],
            "rejected": [f"wrong {style} {i}" for style in range(3)],
            "domain": domain,
        }
        rows.append(row)
    return rows


@pytest.fixture
def rm_examples(tmp_path: Path) -> list[Preference]:
    file = tmp_path / "total_dataset.json"
    file.write_text(json.dumps(rm_rows()))
    return RMBench().load(str(file))


@pytest.fixture
def table(rm_examples: list[Preference]) -> list[ScoredExample]:
    return [
        rated(e, (*chosen, *rejected))
        for e, (_, chosen, rejected) in zip(rm_examples, TABLE, strict=True)
    ]


def test_the_arithmetic_is_the_authors(table: list[ScoredExample]) -> None:
    result = RMBench().summarize(table)
    sections = {metric.name: metric.value for metric in result.sections}
    assert sections == pytest.approx(SECTIONS, abs=1e-12)
    assert result.headline.value == pytest.approx(0.625, abs=1e-12)
    assert {metric.name for metric in result.subsets} == {
        "chat",
        "math",
        "code",
        "safety-refuse",
        "safety-response",
    }
    assert "11 of 1327" in str(result.headline.note)


def test_hard_is_where_the_wrong_answer_is_the_fancier_one(rm_examples: list[Preference]) -> None:
    # a model that only likes style
    fancy = [rated(e, (0.0, 1.0, 2.0, 0.5, 1.5, 2.5)) for e in rm_examples]
    result = RMBench().summarize(fancy)
    assert [metric.value for metric in result.sections[-3:]] == [0.0, 0.0, 1.0]


def test_a_prompt_without_all_scores_is_wrong_in_every_cell(table: list[ScoredExample]) -> None:
    lost = list(table)
    lost[4] = rated(table[4].example, (*table[4].scores[:5], None))
    result = RMBench().summarize(lost)
    # The third prompt of math was right in all nine cells.
    assert {m.name: m.value for m in result.sections}["math"] == pytest.approx(
        SECTIONS["math"] - 1 / 3
    )
    assert result.num_failed == 1


def test_the_total_of_a_folder_counts_and_not_its_parts(tmp_path: Path) -> None:
    rows = rm_rows()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "total_dataset.json").write_text(json.dumps(rows))
    (tmp_path / "data" / "chat_filtered.json").write_text(json.dumps(rows[:2]))
    assert len(RMBench().load(str(tmp_path))) == len(rows)


# --- JudgeBench -----------------------------------------------------------------------------------


SOURCES = ("mmlu-pro-computer science", "livebench-reasoning", "livebench-math", "livecodebench")


def judged_rows(count: int) -> list[dict[str, Any]]:
    rows = []
    for i in range(count):
        row = {
            "pair_id": str(i),
            "original_id": str(i),
            "source": SOURCES[i % 4],
            "question": f"question {i}",
            "response_model": "gpt-4o-2024-05-13",
            "response_A": f"a {i}",
            "response_B": f"b {i}",
            "label": "A>B" if i % 3 else "B>A",
        }
        rows.append(row)
    return rows


@pytest.fixture
def judged(tmp_path: Path) -> list[Preference]:
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "gpt-00000-of-00001.jsonl", *judged_rows(8))
    write_jsonl(tmp_path / "data" / "claude-00000-of-00001.jsonl", *judged_rows(6))
    return JudgeBench().load(str(tmp_path))


def test_the_split_of_the_download(judged: list[Preference]) -> None:
    assert len(judged) == 8 and judged[0].id == "Knowledge/0"
    assert [e.task_name for e in judged[2:5]] == ["Math", "Coding", "Knowledge"]
    assert [e.ranks for e in judged[:3]] == [(1, 0), (0, 1), (0, 1)]
    assert judged[1].context == ({"role": "user", "content": "question 1"},)
    assert [c.messages[0]["content"] for c in judged[1].completions] == ["a 1", "b 1"]


def test_the_headline_and_the_categories(judged: list[Preference]) -> None:
    # the first completion always: right where the label is A>B
    rows = [rated(e, (1.0, 0.0)) for e in judged]
    result = JudgeBench().summarize(rows)
    assert result.headline.value == 5 / 8 and result.headline.count == 8
    assert {m.name: m.value for m in result.sections} == {
        "Knowledge": 0.5,
        "Reasoning": 1.0,
        "Math": 0.5,
        "Coding": 0.5,
        "Mean of the categories": 0.625,
    }
    assert "8 of 350" in str(result.headline.note)


# --- LLMBar ---------------------------------------------------------------------------------------


def test_rewardbench_has_the_same_pairs(tmp_path: Path, write_parquet: Any) -> None:
    row = {"prompt": "p", "chosen": "c", "rejected": "r"}
    subsets = [
        "llmbar-adver-neighbor",
        "hep-go",
        "llmbar-natural",
        "llmbar-adver-GPTInst",
        "llmbar-natural",
    ]
    rows = [row | {"subset": subset, "id": i} for i, subset in enumerate(subsets)]
    write_parquet(tmp_path / "data" / "filtered-00000-of-00001.parquet", rows)
    examples = LLMBar().load(str(tmp_path))
    assert [(e.task_name, e.id) for e in examples] == [
        ("Natural", "llmbar-natural/2"),
        ("Natural", "llmbar-natural/4"),
        ("Neighbor", "llmbar-adver-neighbor/0"),
        ("GPTInst", "llmbar-adver-GPTInst/3"),
    ]
    assert all(e.ranks == (0, 1) for e in examples)
