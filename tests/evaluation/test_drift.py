"""Drift: planted shifts and scales are found, and the exported model is found among its checkpoints."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_sample import BestOf, by_length, perfect, scored

from treeward.evaluation.drift import find_drift, order_agreement
from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.summary import Summary, summarize
from treeward.evaluation.writing import report_blocks, write_results

Scoring = Callable[[int, str], float | None]

STEPS: dict[str, Scoring] = {
    "step_12": lambda n, text: -perfect(n, text) / 10,
    "step_24": perfect,  # another order, and ten times the spread
    "step_36": lambda n, text: perfect(n, text) + 50,  # a shift alone
}


def run(**scorings: Scoring) -> list[Summary]:
    """Checkpoints on two suites, models in order."""
    return [
        summarize(suite, tuple(scored(scoring, 30)), model)
        for model, scoring in scorings.items()
        for suite in (BestOf(), Other())
    ]


class Other(BestOf):
    name = "other"
    title = "Other"


def test_the_headline_is_the_change_of_the_order_not_a_common_shift() -> None:
    (first, _) = find_drift(run(**STEPS))
    text = first.blocks()[0]["markdown"]
    assert "The order changed most from **step_12** to **step_24**: 0.0% (0.0% to " in text
    assert first.final_is is None and "final" not in text


@pytest.mark.slow
def test_final_is_compared_with_the_checkpoint_that_it_is(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.INFO):
        summaries = run(**STEPS, final=perfect)
        found = find_drift(summaries)
    assert [one.final_is for one in found] == ["step_24", "step_24"]
    export = found[0].checkpoints[-1].numbers
    assert export["order_agreement"].value == 1
    assert "final is step_24: all their scores are equal." in caplog.text
    text, *_, checkpoints = found[0].blocks()
    assert "**final is step_24**" in text["markdown"] and "step_12** to **step_24**" in text["markdown"]
    assert [row["name"] for row in checkpoints["rows"]] == ["step_12", "step_24", "step_36", "final (is step_24)"]
    assert [row["before"] for row in checkpoints["rows"]] == [None, "step_12", "step_24", "step_24"]
    assert report_blocks(summaries, found)[0]["markdown"].endswith(
        "- **final is step_24**: all their scores are equal."
    )
    write_results(tmp_path, summaries, drift=found)
    assert [one["final_is"] for one in json.loads((tmp_path / "results.json").read_text())["drift"]] == ["step_24"] * 2


def test_final_that_differs_anywhere_is_none_of_the_checkpoints() -> None:
    def nearly(n: int, text: str) -> float:
        return perfect(n, text) + (1e-7 if n == 29 and "right" in text else 0.0)

    (found, _) = find_drift(run(**STEPS, final=nearly))
    assert found.final_is is None and found.checkpoints[-1].before == "step_36"
    assert "none of these checkpoints has its scores" in found.blocks()[0]["markdown"]
    nothing: Scoring = lambda n, text: None  # noqa: E731
    (unknown, _) = find_drift(run(step_1=nothing, step_2=by_length, final=nothing))
    assert unknown.final_is is None  # no score at all is no likeness


def test_order_agreement_is_of_pairs_that_both_have_scored(normal_scores: list[ScoredExample], rescored: Any) -> None:
    moved = rescored(normal_scores, lambda score: 3 * score + 10)
    assert order_agreement(normal_scores, moved[::-1]).value == 1
    assert order_agreement(normal_scores, rescored(normal_scores, lambda score: -score)).value == 0
    mixed = [*moved[:30], *rescored(normal_scores[30:40], lambda score: -score), replace(moved[40], scores=(None, 1.0))]
    found = order_agreement(normal_scores, mixed)
    assert (found.value, found.count) == (0.75, 40) and found.low is not None and found.low < 0.75
    assert order_agreement(normal_scores, []).value is None
