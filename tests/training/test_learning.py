"""A run that does not learn says so, in the log and where its results are seen; one that does has no false alarm."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from treeward.cli.main import main
from treeward.losses import RewardMetrics
from treeward.training.learning import LearningWatch, learnt

STEPS = ["rm.max_num_steps=50", "rm.max_num_epochs=9", "rm.val_period=null", "rm.val_at_end=false",
         "checkpointing.metric_name=null", "checkpointing.save_period=50"]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["policy.optimizer.kwargs.lr=1.0e-12"], ["The loss is at chance: 0.", "Try ten times "]),
        (["policy.optimizer.kwargs.lr=30"], ["The loss is worse than chance: ", "Try a tenth of "]),
        (
            ["policy.optimizer={name: torch.optim.SGD, kwargs: {lr: 10, weight_decay: 0.1}}"],
            ["The loss is at chance: 0.", "Try a tenth of "],
        ),
        (["policy.optimizer.kwargs.lr=3.0e-3"], None),
    ],
)
def test_a_run_that_does_not_learn_says_so_once_and_at_the_end(
    tiny_run: Callable[..., Any],
    tmp_path: Any,
    options: list[str],
    words: list[str] | None,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny_run()
    assert main(["train", "--config", str(tmp_path / "run.yaml"), *STEPS, *options]) == 0
    warnings = [one.message for one in caplog.records if one.name == "treeward.training.learning"]
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]
    if words is None:
        assert warnings == [] and shown == []
        return
    [warning], [line] = warnings, shown
    for word in (*words, "policy.optimizer.kwargs.lr", "another checkpointing.checkpoint_dir"):
        assert word in warning and word in line


@pytest.mark.parametrize(
    ("labels", "options", "chance"),
    [
        (
            lambda n: {"chosen": "Yes.", "rejected": f"No {n}.", "margin": 2},
            ["rm.loss.strength=margin"],
            math.log1p(math.exp(2)),
        ),
        (  # the mean grade, which leaves the variance
            lambda n: {"completions": ["Yes.", "No."], "scores": [7, 3]},
            ["policy.reward_model_cfg.reward_model_type=regression"],
            1.0,
        ),
    ],
)
def test_chance_is_the_loss_of_equal_scores_and_a_short_run_is_told_so(
    tiny_run: Callable[..., Any],
    tmp_path: Any,
    write_rows: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    labels: Callable[[int], dict[str, Any]],
    options: list[str],
    chance: float,
) -> None:
    path = write_rows("labels.jsonl", [{"prompt": f"Say {n}."} | labels(n) for n in range(32)])
    tiny_run()
    few = [
        "rm.max_num_steps=2",
        "policy.train_global_batch_size=16",
        "policy.optimizer.kwargs.lr=1.0e-12",
        f"data.train=[{{data_path: {path}}}]",
        *options,
    ]
    assert main(["train", "--config", str(tmp_path / "run.yaml"), *STEPS, *few]) == 0
    warning = capsys.readouterr().out.splitlines()[-1]
    assert f"equal scores give {chance:.4f}" in warning
    assert "So few steps (2)" in warning and "policy.train_global_batch_size" in warning


def metrics(gaps: Any) -> RewardMetrics:
    """Of a step whose pairs' scores differ by `gaps`."""
    loss, size = float(np.logaddexp(0, -gaps).sum()), len(gaps)
    return RewardMetrics(loss, size, size, int((gaps > 0).sum()), 0.0, 0.0)


def test_small_steps_that_scatter_are_no_false_alarm() -> None:
    """Accuracy 0.65, loss 0.64, eight comparisons a step: the mean of ten steps is often above chance."""
    draw = np.random.default_rng(1)
    verdicts = []
    for _ in range(200):
        watch = LearningWatch(24, learning_rate=1e-5)
        for step in range(1, 25):
            watch.see(step, metrics(draw.normal(0.35, 0.9, 8)), 8 * math.log(2))
        verdicts.append(watch.verdict())
    assert sum(one is not None for one in verdicts) <= 2


def test_a_few_huge_losses_do_not_hide_that_the_others_are_at_chance() -> None:
    watch = LearningWatch(96, learning_rate=1e-5)
    for step in range(1, 97):
        watch.see(step, replace(metrics(np.tile([0.1, -0.1], 4)), loss_sum=800.0 if step % 12 == 0 else 5.9), 8 * 0.7)
    assert watch.verdict() is not None


def test_a_high_rate_at_chance_is_to_be_lowered() -> None:
    watch = LearningWatch(50, learning_rate=1e-3)
    for step in range(1, 51):
        watch.see(step, metrics(np.tile([0.01, -0.01], 4)), 8 * math.log(2))
    assert "at chance" in str(watch.verdict()) and "Try a tenth of " in str(watch.verdict())


@pytest.mark.parametrize(
    ("accuracy", "size", "loss", "trained", "said"),
    [
        (
            32 / 60,
            60,
            0.72,
            0.27,
            ["(0.409 to 0.654) is not told from chance", "0.720, has parted from that of training, 0.270"],
        ),
        (0.84, 200, 0.41, 0.39, ["is better than chance", "0.410, has not parted from that of training, 0.390"]),
        (0.1, 50, 1.2, 0.69, ["is worse than chance", "has parted"]),
        (0.84, 200, 0.41, None, ["is better than chance, 0.5."]),  # of a run that was complete already
        (math.nan, 200, 0.41, 0.39, None),  # graded comparisons, all tied
    ],
)
def test_a_run_says_what_its_held_out_data_tell(
    accuracy: float, size: int, loss: float, trained: float | None, said: list[str] | None
) -> None:
    losses = [] if trained is None else [0.69] * 60 + [trained] * 20
    told = learnt({"accuracy": accuracy, "loss": loss}, size, losses)
    assert told is None if said is None else told is not None and all(part in told for part in said)
