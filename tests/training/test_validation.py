"""What the end of a run says of its validation sets."""

from __future__ import annotations

import math

import pytest

from treeward.evaluation.statistics import wilson
from treeward.training.validation import learnt


@pytest.mark.parametrize(
    ("accuracy", "size", "loss", "trained", "said"),
    [
        (
            32 / 60,
            60,
            0.72,
            0.27,
            [
                "(40.9% to 65.4%) on 60 comparisons is not significantly better than chance, 50%",
                "0.720, is diverging from that of training, 0.270",
            ],
        ),
        (
            0.84,
            200,
            0.41,
            0.39,
            ["is better than chance", "0.410, is not diverging from that of training, 0.390"],
        ),
        (0.1, 50, 1.2, 0.69, ["is worse than chance", "is diverging"]),
        (
            0.84,
            200,
            0.41,
            None,
            ["is better than chance, 50%."],
        ),  # of a run that was complete already
        (math.nan, 200, 0.41, 0.39, None),  # graded comparisons, all tied
    ],
)
def test_a_run_says_what_its_held_out_data_tell(
    accuracy: float, size: int, loss: float, trained: float | None, said: list[str] | None
) -> None:
    losses = [] if trained is None else [0.69] * 60 + [trained] * 20
    means = {"accuracy": accuracy, "loss": loss}
    if not math.isnan(accuracy):
        low, high = wilson(accuracy * size, size)
        means |= {"accuracy_low": low, "accuracy_high": high}
    told = learnt(means, size, losses)
    if said is None:
        assert told is None
    else:
        assert told is not None
        assert all(part in told for part in said)


def test_a_skipped_step_does_not_hide_that_a_run_diverges() -> None:
    means = {"accuracy": 0.84, "accuracy_low": 0.78, "accuracy_high": 0.89, "loss": 1.2}
    told = learnt(means, 200, [0.69] * 60 + [0.27] * 20 + [math.nan, math.inf])
    assert told is not None
    assert "1.200, is diverging from that of training, 0.270" in told
    told = learnt(means, 200, [math.nan] * 3)
    assert told is not None
    assert told.endswith("is better than chance, 50%.")
