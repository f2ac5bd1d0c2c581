"""Examples for the tests of an evaluation: the bundled data, and pairs made of numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from evaluated import rated

from treeward.config.data import DatasetConfig
from treeward.data.datasets import open_dataset
from treeward.data.preference import Preference
from treeward.evaluation.results import ScoredExample


@pytest.fixture(scope="session")
def bundled() -> Callable[[str], list[Preference]]:
    """The examples of a split of the bundled data."""

    def load(split: str) -> list[Preference]:
        stream = open_dataset(DatasetConfig(dataset_name="Bundled", split=split))
        return [
            replace(preference, id=str(i), task_name=split)
            for i, (preference, _) in enumerate(stream)
        ]

    return load


@pytest.fixture(scope="session")
def score_with() -> Callable[..., list[ScoredExample]]:
    """Examples scored by a function of the context's messages and the completion's text; None is a
    failure."""

    def score(
        examples: Sequence[Preference], function: Callable[[Sequence[Any], str], float | None]
    ) -> list[ScoredExample]:
        scored = []
        for example in examples:
            texts = [completion.messages[-1]["content"] for completion in example.completions]
            scored.append(rated(example, [function(example.context, text) for text in texts]))
        return scored

    return score
