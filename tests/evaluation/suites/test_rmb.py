"""RMB and IF-RewardBench, as their repositories have them; and the suites that cards report."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from evaluated import rated

from treeward.errors import DataError
from treeward.evaluation.suites import PUBLISHED, published_suites
from treeward.evaluation.suites.rmb import RMB, IFRewardBench


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows), encoding="utf-8")


# --- RMB ------------------------------------------------------------------------------------------


def answer(text: str) -> dict[str, str]:
    return {"llm_name": "m", "answer": text}


@pytest.fixture
def rmb(tmp_path: Path) -> Path:
    """A copy of the repository with one file of each part."""
    data = tmp_path / "RMB" / "RMB_dataset"
    asked = [{"role": "user", "content": "Hello?"}]
    pair = {
        "pair_uid": "p",
        "conversation_input": asked,
        "chosen": answer("good"),
        "reject": answer("bad"),
        "category_path": "Brainstorming/Idea",
    }
    best = {
        "bon_uid": "b",
        "conversation_input": asked,
        "bon_best": answer("good"),
        "loser_list": [answer("bad"), answer("worse")],
        "category_path": "Brainstorming/Idea",
    }
    write(data / "Pairwise_set" / "Helpfulness" / "Brainstorming" / "Idea.json", [pair, pair])
    write(data / "Pairwise_set" / "Harmlessness" / "S1.json", [pair])
    write(data / "BoN_set" / "Helpfulness" / "Brainstorming" / "Idea.json", [best])
    write(data / "BoN_set" / "Harmlessness" / "S1.json", [best])
    write(tmp_path / "RMB" / "eval" / "results.json", [{"other": 1}])
    return tmp_path / "RMB"


def test_the_best_answer_must_beat_all_others(rmb: Path) -> None:
    suite = RMB()
    examples = suite.load(str(rmb))
    assert len(examples) == 5
    scored = []
    for example in examples:
        scores = [1.0, 0.0]
        if len(example.completions) == 3:
            # In harmlessness one of two others scores higher.
            last = 2.0 if example.task_name.startswith("Harm") else -1.0
            scores = [1.0, 0.0, last]
        scored.append(rated(example, scores))
    result = suite.summarize(scored)
    assert {part.name: part.value for part in result.sections} == {
        "Helpfulness, pairs": 1.0,
        "Helpfulness, best of n": 1.0,
        "Harmlessness, pairs": 1.0,
        "Harmlessness, best of n": 0.0,
    }
    # The mean of the parts, not of the five examples.
    assert result.headline.value == 0.75


@pytest.mark.parametrize("source", [".", "S1.json"])
def test_a_part_of_a_copy_keeps_its_name(
    source: str, rmb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rmb / "RMB_dataset" / "BoN_set" / "Harmlessness")
    [example] = RMB().load(source)
    assert example.task_name == "Harmlessness, best of n"


def test_a_file_whose_folders_do_not_name_its_part_is_refused(rmb: Path, tmp_path: Path) -> None:
    moved = tmp_path / "S1.json"
    (rmb / "RMB_dataset" / "BoN_set" / "Harmlessness" / "S1.json").rename(moved)
    with pytest.raises(DataError, match="of which part of RMB"):
        RMB().load(str(moved))


def test_without_a_copy_the_error_says_how_to_get_one() -> None:
    with pytest.raises(DataError, match="git clone https://github.com/Zhou-Zoey") as raised:
        RMB().load(None)
    assert "--suite rmb=FOLDER" in str(raised.value)


# --- IF-RewardBench -------------------------------------------------------------------------------


def instruction(id: str, type: str, edges: list[tuple[str, str]]) -> dict[str, Any]:
    graph = []
    for better, worse in edges:
        graph.append({"chosen": {"response_id": better}, "rejected": {"response_id": worse}})
    return {
        "id": id,
        "response_generation_model": "m",
        "instruction_type": type,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": id}],
        "checklist": [],
        "responses": [{"response_id": name, "response": f"text {name}"} for name in "abc"],
        "preference_graph": graph,
    }


def test_accuracy_and_tau_are_of_the_edges_of_each_instruction(tmp_path: Path) -> None:
    rows = [
        instruction("1", "Single_Turn", [("a", "b"), ("a", "c"), ("b", "c")]),
        instruction("2", "Multi_Turn", [("c", "a")]),
    ]
    write(tmp_path / "data" / "if_rewardbench.json", rows)
    suite = IFRewardBench()
    first, second = suite.load(str(tmp_path))
    assert first.ranks == (0, 1, 2)
    assert second.ranks == (1, 0, 0)
    # a > b right; a = c a tie; b > c turned round. And c > a right.
    result = suite.summarize([rated(first, [2.0, 1.0, 2.0]), rated(second, [0.0, 5.0, 1.0])])
    assert [part.value for part in result.sections] == [pytest.approx(1 / 3), 1.0]
    assert result.headline.value == pytest.approx(2 / 3)
    # C = 1, D = 1, T = 1; and C = 1 alone.
    assert result.details["tau"] == {"Single_Turn": 0.0, "Multi_Turn": 1.0}
    both = suite.summarize([rated(first, [2.0, 1.0, 1.0])])
    # C = 2, D = 0, T = 1: 2 / sqrt(2 * 3).
    assert both.details["tau"]["Single_Turn"] == pytest.approx(2 / math.sqrt(6))


@pytest.mark.parametrize(
    ("edges", "message"),
    [([("a", "x")], "that the row lacks"), ([("a", "b"), ("b", "a")], "circle")],
    ids=["unknown", "circle"],
)
def test_a_graph_that_cannot_be_is_refused(
    edges: list[tuple[str, str]], message: str, tmp_path: Path
) -> None:
    write(tmp_path / "if_rewardbench.json", [instruction("1", "Single_Turn", edges)])
    with pytest.raises(DataError, match=message):
        IFRewardBench().load(str(tmp_path))


# --- all that cards report ------------------------------------------------------------------------


def test_published_runs_what_a_folder_has(
    rmb: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "copies"
    folder.mkdir()
    rmb.rename(folder / "RMB-Reward-Model-Benchmark")
    write(folder / "reward-bench.json", [])
    with caplog.at_level(logging.WARNING):
        found = published_suites(str(folder))
    assert [suite.name for suite, _ in found] == ["rewardbench", "rmb"]
    assert all(str(source).startswith(str(folder)) for _, source in found)
    assert "Left out" in caplog.text and "judgebench" in caplog.text


def test_published_on_the_hub_lacks_only_what_is_not_there() -> None:
    found = published_suites(None)
    assert [suite.name for suite, _ in found] == [
        kind.name for kind in PUBLISHED if kind is not RMB
    ]


def test_a_folder_without_a_suite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no copy of a published suite"):
        published_suites(str(tmp_path))
