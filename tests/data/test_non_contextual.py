"""Answers to other prompts: worse than all others, never of the same prompt, the same in every pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from treeward.config.data import DatasetConfig
from treeward.data import non_contextual
from treeward.data.datasets import open_dataset
from treeward.data.preference import Preference


def row(prompt: str, answers: list[str]) -> dict[str, Any]:
    completions = [
        {"rank": rank, "completion": [{"role": "assistant", "content": answer}]} for rank, answer in enumerate(answers)
    ]
    return {"context": [{"role": "user", "content": prompt}], "completions": completions}


def opened(tmp_path: Path, rows: list[dict[str, Any]], num_answers: int) -> list[Preference]:
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    stream = open_dataset(DatasetConfig(data_path=str(file), non_contextual_answers=num_answers))
    found = list(stream)
    assert found == list(stream), "another pass is another draw"
    assert [where for _, where in found] == [where for _, where in open_dataset(DatasetConfig(data_path=str(file)))]
    return [preference for preference, _ in found]


def texts(preference: Preference) -> list[str]:
    return [str(completion.messages[-1]["content"]) for completion in preference.completions]


@pytest.mark.parametrize("window", [5, 4096])
def test_good_answers_of_other_prompts_are_the_worst(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(non_contextual, "_WINDOW", window)
    rows = [row(f"question {n // 2}", [f"good {n}", f"fair {n}", f"bad {n}"]) for n in range(40)]
    found = opened(tmp_path, rows, 2)
    drawn = []
    for n, preference in enumerate(found):
        own, added = texts(preference)[:3], texts(preference)[3:]
        assert own == [f"good {n}", f"fair {n}", f"bad {n}"] and len(set(added)) == 2
        assert [completion.rank for completion in preference.completions] == [0, 1, 2, 3, 3]
        assert all(text.startswith("good ") and int(text.split()[1]) // 2 != n // 2 for text in added)
        if window == 5 and n >= 5:
            assert all(n - 5 < int(text.split()[1]) < n for text in added)
        drawn += added
    assert len(set(drawn)) > 15


def test_what_has_nothing_to_give(tmp_path: Path) -> None:
    same_prompt = [row("one question", [f"good {n}", f"bad {n}"]) for n in range(5)]
    assert [len(preference.completions) for preference in opened(tmp_path, same_prompt, 1)] == [2] * 5
    same_answer = [row(f"question {n}", ["yes", "no"]) for n in range(5)]
    assert [texts(preference) for preference in opened(tmp_path, same_answer, 1)] == [["yes", "no"]] * 5


def test_it_changes_the_fingerprint() -> None:
    streams = [open_dataset(DatasetConfig(dataset_name="Bundled", non_contextual_answers=n)) for n in (0, 1, 2)]
    assert len({stream.fingerprint for stream in streams}) == 3 and len({stream.name for stream in streams}) == 1
