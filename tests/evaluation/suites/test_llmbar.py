"""LLMBar: the authors' folders, single files, RewardBench's copy, and the means of the sets."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from treeward.data.preference import Preference
from treeward.evaluation.results import ScoredExample
from treeward.evaluation.suites.benchmarks import SETS, LLMBar

Make = Callable[[Preference, Sequence[float | None]], ScoredExample]


def rows_of(name: str, count: int) -> list[dict[str, Any]]:
    return [
        {"input": f"{name} {i}", "output_1": f"one {i}", "output_2": f"two {i}", "label": 1 + i % 2}
        for i in range(count)
    ]


def write(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(list(rows)))
    return file


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The authors' folders with few pairs, their results, and sets that are not LLMBar's."""
    root = tmp_path / "LLMBar"
    for name in SETS:
        parent = "Natural" if name == "Natural" else f"Adversarial/{name}"
        write(root / "Dataset" / "LLMBar" / parent / "dataset.json", rows_of(name, 3))
        write(root / "Dataset" / "LLMBar" / parent / "evaluators" / "GPT-4" / "result.json", [{"winner": 1}])
    write(root / "Dataset" / "CaseStudy" / "Manual" / "dataset.json", rows_of("case study", 9))
    write(root / "Dataset" / "Processed" / "MT-Bench" / "dataset.json", rows_of("processed", 9))
    return root


@pytest.mark.parametrize("inside", ["", "Dataset", "Dataset/LLMBar"])
def test_the_authors_folders(repository: Path, inside: str) -> None:
    examples = LLMBar().load(str(repository / inside))
    assert [e.task_name for e in examples] == [name for name in SETS for _ in range(3)]
    assert examples[4].id == "Neighbor/2" and examples[4].context[0]["content"] == "Neighbor 1"
    assert [e.ranks for e in examples[:3]] == [(0, 1), (1, 0), (0, 1)]
    assert [c.messages[0]["content"] for c in examples[1].completions] == ["one 1", "two 1"]
    assert str(examples[1].where).endswith("Natural/dataset.json:row 2")


def test_a_file_is_the_set_that_it_names(tmp_path: Path) -> None:
    for file, name in (
        ("natural.jsonl.gz", "Natural"),
        ("Adversarial_GPTInst.jsonl.gz", "GPTInst"),
        ("a.jsonl.gz", "a"),
    ):
        with gzip.open(tmp_path / file, "wt") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in rows_of("x", 2))
        assert {e.task_name for e in LLMBar().load(str(tmp_path / file))} == {name}
    assert {e.task_name for e in LLMBar().load(str(tmp_path))} == {"Natural", "GPTInst"}


def test_rewardbench_has_the_same_pairs(tmp_path: Path, write_parquet: Any) -> None:
    row = {"prompt": "p", "chosen": "c", "rejected": "r"}
    subsets = ["llmbar-adver-neighbor", "hep-go", "llmbar-natural", "llmbar-adver-GPTInst", "llmbar-natural"]
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


def test_the_real_pairs(shared_data: Path) -> None:
    examples = LLMBar().load(str(shared_data / "llmbar"))
    assert len(examples) == 100 and {e.task_name for e in examples} == {"Natural"}
    first = examples[0]
    assert first.context[0]["content"].startswith("Summarize the following content.") and first.ranks == (0, 1)
    with gzip.open(shared_data / "llmbar" / "natural.jsonl.gz", "rt") as stream:
        labels = [json.loads(line)["label"] for line in stream]
    assert [1 + e.ranks.index(0) for e in examples] == labels
    assert examples == LLMBar().load(str(shared_data / "llmbar" / "natural.jsonl.gz"))
