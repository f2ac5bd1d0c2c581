"""NeMo RL's own tests of its preference sets, in our words: the assertions of `test_preference_dataset.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from messages import assistant, user

from treeward.compat.nemo_rl import BinaryPreferenceDataset, PreferenceDataset, load_preference_dataset
from treeward.errors import ConfigError

PAIRS = [("What is 2+2?", "It is 4.", "I don't know."), ("The capital of France?", "Paris.", "London.")]
FIRST = [{"completion": [assistant("It is 4.")], "rank": 0}, {"completion": [assistant("I don't know.")], "rank": 1}]


def check(dataset: Any) -> None:
    first = dataset.dataset[0]
    assert first.keys() == {"context", "completions", "task_name"} and len(dataset.dataset) == 2
    assert first["context"] == [user("What is 2+2?")] and first["completions"] == FIRST
    assert first["task_name"] == dataset.task_name == dataset.task_spec.task_name


@pytest.mark.parametrize("keys", [("prompt", "chosen", "rejected"), ("question", "answer1", "answer2")])
def test_binary_preferences(keys: tuple[str, str, str], tmp_path: Path) -> None:
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps([dict(zip(keys, pair, strict=True)) for pair in PAIRS]), encoding="utf-8")
    names = dict(zip(("prompt_key", "chosen_key", "rejected_key"), keys, strict=True))
    section = {"dataset_name": "BinaryPreferenceDataset", "data_path": str(path), **names}
    for dataset in (load_preference_dataset(section), BinaryPreferenceDataset(data_path=str(path), **names)):
        assert (dataset.prompt_key, dataset.chosen_key, dataset.rejected_key) == keys
        check(dataset)


def test_ranked_preferences(tmp_path: Path) -> None:
    path = tmp_path / "ranked.json"
    rows = [
        {"context": [user(ask)], "completions": [{"rank": i, "completion": [assistant(x)]} for i, x in enumerate(ends)]}
        for ask, *ends in PAIRS
    ]
    path.write_text(json.dumps(rows), encoding="utf-8")
    check(load_preference_dataset({"dataset_name": "PreferenceDataset", "data_path": str(path)}))
    check(PreferenceDataset(data_path=str(path), split="train"))
    check(PreferenceDataset(str(path)))
    with pytest.raises(ConfigError, match="data_pth"):
        PreferenceDataset(data_pth=str(path))
    with pytest.raises(ConfigError, match="did you mean PreferenceDataset"):
        load_preference_dataset({"dataset_name": "PreferenceDatset", "data_path": str(path)})
