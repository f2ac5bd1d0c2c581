"""JudgeBench: votes in both orders, the headline of GPT-4o's pairs, the data as it is published."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from evaluated import rated

from treeward.data.preference import Preference
from treeward.evaluation.suites.benchmarks import JudgeBench

SOURCES = ("mmlu-pro-computer science", "livebench-reasoning", "livebench-math", "livecodebench")


def rows_of(writer: str, count: int) -> list[dict[str, Any]]:
    model = {"gpt": "gpt-4o-2024-05-13", "claude": "claude-3-5-sonnet-20240620"}[writer]
    return [
        {
            "pair_id": f"{writer}-{i}",
            "original_id": str(i),
            "source": SOURCES[i % 4],
            "question": f"question {i}",
            "response_model": model,
            "response_A": f"a {i}",
            "response_B": f"b {i}",
            "label": "A>B" if i % 3 else "B>A",
        }
        for i in range(count)
    ]


def write(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def examples(tmp_path: Path) -> list[Preference]:
    write(tmp_path / "data" / "gpt-00000-of-00001.jsonl", rows_of("gpt", 8))
    write(tmp_path / "data" / "claude-00000-of-00001.jsonl", rows_of("claude", 6))
    return JudgeBench().load(str(tmp_path))


def test_both_splits_of_the_download(examples: list[Preference]) -> None:
    assert len(examples) == 14 and examples[0].id == "Knowledge (gpt)/gpt-0"
    assert [e.task_name for e in examples[6:10]] == [
        "Math (gpt)",
        "Coding (gpt)",
        "Knowledge (claude)",
        "Reasoning (claude)",
    ]
    assert [e.ranks for e in examples[:3]] == [(1, 0), (0, 1), (0, 1)]
    assert examples[1].context == ({"role": "user", "content": "question 1"},)
    assert [c.messages[0]["content"] for c in examples[1].completions] == ["a 1", "b 1"]


def test_the_headline_is_of_the_pairs_of_gpt(examples: list[Preference]) -> None:
    rows = [rated(e, (1.0, 0.0)) for e in examples]  # the first completion always: right where the label is A>B
    result = JudgeBench().summarize(rows)
    assert result.headline.value == 5 / 8 and result.headline.count == 8
    assert {m.name: m.value for m in result.sections} == {
        "Knowledge": 0.5,
        "Reasoning": 1.0,
        "Math": 0.5,
        "Coding": 0.5,
    }
    assert len(result.subsets) == 8 and result.num_examples == 14
    assert "8 of 350" in str(result.headline.note)
    claude = JudgeBench().summarize([one for one in rows if "claude" in one.example.task_name])
    assert claude.headline.value == 4 / 6 and claude.headline.count == 6


def test_a_folder_of_one_writer(tmp_path: Path) -> None:
    write(tmp_path / "claude.jsonl", rows_of("claude", 2))
    write(tmp_path / "other.jsonl", rows_of("gpt", 1))
    assert len(JudgeBench().load(str(tmp_path))) == 2
