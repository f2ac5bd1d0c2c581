"""`DividedScorer`: what each of its processes holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from messages import chat

from treeward import processes
from treeward.config.scoring import ScoringConfig
from treeward.scoring.divided import ModelPart
from treeward.scoring.scorer import Scorer


def scores_of_parts(folder: str) -> list[float | None]:
    """Scores by the members of an ensemble that names its model twice, each in two parts."""
    config = ScoringConfig(
        models=(folder, folder),
        ensemble={"method": "mean", "standardize": False},  # type: ignore[arg-type]
    )
    part = ModelPart(processes.rank(), processes.size(), "cpu")
    # The group is there already: no address is needed.
    part.load(config, "", 0, {"batch_tokens": 1024})
    [score] = part.score(part.scorer.prepare([chat("2 + 2?", "4.")]), "raise")
    return [score.score, *score.members]


@pytest.mark.slow
def test_a_model_that_is_named_twice_is_cut_once(
    run_processes: Callable[..., list[Any]], model_folder: Path
) -> None:
    want = Scorer.load(model_folder).score([chat("2 + 2?", "4.")])[0].score
    for scores in run_processes("test_divided:scores_of_parts", 2, str(model_folder)):
        assert scores == pytest.approx([want] * 3, abs=1e-5)
