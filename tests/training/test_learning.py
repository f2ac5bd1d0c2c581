"""A run that does not learn says so, in the log and where its results are seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from treeward.cli.main import main

STEPS = ["rm.max_num_steps=24", "rm.val_period=null", "rm.val_at_end=false", "checkpointing.metric_name=null"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["policy.optimizer.kwargs.lr=1.0e-12"], "The loss is at chance: 0."),
        (["policy.optimizer.kwargs.lr=30"], "The loss is worse than chance: "),
        (
            ["policy.optimizer={name: torch.optim.SGD, kwargs: {lr: 10, weight_decay: 0.1}}"],
            "The scores have collapsed",
        ),
        (["policy.optimizer.kwargs.lr=3.0e-3"], None),
    ],
)
def test_a_run_that_does_not_learn_says_so_once_and_at_the_end(
    tiny_run: Callable[..., Any],
    tmp_path: Any,
    options: list[str],
    message: str | None,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny_run()
    assert main(["train", "--config", str(tmp_path / "run.yaml"), *STEPS, *options]) == 0
    warnings = [one.message for one in caplog.records if one.name == "treeward.training.learning"]
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]
    if message is None:
        assert warnings == [] and shown == []
    else:
        assert len(warnings) == 1 and warnings[0].startswith(message) and "policy.optimizer.kwargs.lr" in warnings[0]
        assert len(shown) == 1 and message in shown[0]


def test_a_run_of_too_few_steps_is_told_so(
    tiny_run: Callable[..., Any], tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_run()
    few = ["rm.max_num_steps=2", "policy.train_global_batch_size=128", "policy.optimizer.kwargs.lr=1.0e-6"]
    assert main(["train", "--config", str(tmp_path / "run.yaml"), *STEPS, *few]) == 0
    warning = capsys.readouterr().out.splitlines()[-1]
    assert "So few steps (2)" in warning and "policy.train_global_batch_size" in warning
