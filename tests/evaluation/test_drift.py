"""Drift: what matters is told first, and the exported model is found among its checkpoints."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from report_sample import BestOf, by_length, perfect, scored

from treeward.evaluation.drift import find_drift
from treeward.evaluation.running import ScoredSuite
from treeward.evaluation.summary import Summary, report_blocks, summarize, write_results

Scoring = Callable[[int, str], float | None]

STEPS: dict[str, Scoring] = {
    "step_12": lambda n, text: -perfect(n, text) / 10,
    "step_24": perfect,  # another order, and ten times the spread
    "step_36": lambda n, text: perfect(n, text) + 50,  # a shift alone
}


def run(**scorings: Scoring) -> list[Summary]:
    """Checkpoints on two suites, models in order."""
    return [
        summarize(ScoredSuite(model, suite, tuple(scored(scoring, 30)), None))
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
    assert "the spread of the scores is 10.00 times what it was" in text
    assert "That all scores move together changes nothing" in text and "from step_24 to step_36." in text
    assert first.final_is is None and "final" not in text


def test_final_is_compared_with_the_checkpoint_that_it_is(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.INFO):
        summaries = run(**STEPS, final=perfect)
        found = find_drift(summaries)
    assert [one.final_is for one in found] == ["step_24", "step_24"]
    assert [(step.before, step.after) for step in found[0].steps] == [
        ("step_12", "step_24"), ("step_24", "step_36"), ("step_24", "final")
    ]  # fmt: skip
    export = found[0].steps[-1].drift
    assert export is not None and export.order_agreement.value == 1 and export.shift.value == 0
    assert "final is step_24: all their scores are equal." in caplog.text
    text, *_, checkpoints, _ = found[0].blocks()
    assert "**final is step_24**" in text["markdown"] and "step_12** to **step_24**" in text["markdown"]
    assert [row["name"] for row in checkpoints["rows"]] == ["step_12", "step_24", "step_36", "final (is step_24)"]
    assert report_blocks(summaries, found)[0]["markdown"].endswith(
        "- **final is step_24**: all their scores are equal."
    )
    write_results(tmp_path, summaries, drift=found)
    assert [one["final_is"] for one in json.loads((tmp_path / "results.json").read_text())["drift"]] == ["step_24"] * 2


def test_final_that_differs_anywhere_is_none_of_the_checkpoints() -> None:
    def nearly(n: int, text: str) -> float:
        return perfect(n, text) + (1e-7 if n == 29 and "right" in text else 0.0)

    (found, _) = find_drift(run(**STEPS, final=nearly))
    assert found.final_is is None and found.steps[-1].before == "step_36"
    assert "none of these has its scores" in found.blocks()[0]["markdown"]
    nothing: Scoring = lambda n, text: None  # noqa: E731
    (unknown, _) = find_drift(run(step_1=nothing, step_2=by_length, final=nothing))
    assert unknown.final_is is None  # no score at all is no likeness
