"""Checkpoints may be chosen by the diagnostics of `treeward eval`, which validation measures alike."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treeward.config.data import DatasetConfig
from treeward.data.datasets import open_dataset
from treeward.data.preference import preference_to_dict
from treeward.evaluation.gates import GATE_METRICS
from treeward.evaluation.session import Candidate, run_evaluation
from treeward.evaluation.suites.preferences import PreferenceSuite
from treeward.scoring.scorer import Scorer
from treeward.training.export import result_columns
from treeward.training.state import read_state
from treeward.training.tracking import read_metrics
from treeward.training.train import RewardModelRun, TrainingOutcome, train

ROBUST = "checkpointing.metric_name=validation-held_out/robust_accuracy"


def evaluated(outcome: TrainingOutcome, config: DatasetConfig, perturbations: int | None = None) -> dict[str, float]:
    """The numbers of `treeward eval` of an exported model on a set."""
    scorer = Scorer.load(str(outcome.model_folder), device="cpu")
    suite = PreferenceSuite("held_out", config)
    candidate = Candidate("model", lambda: (scorer, {"model": "model"}))
    (summary,) = run_evaluation([candidate], [(suite, None)], num_perturbations=perturbations).summaries
    metrics = [*summary.statistics.metrics(), *summary.length.metrics()]
    if summary.perturbations is not None:
        metrics.append(summary.perturbations.robust_accuracy)
    found = {metric.name: metric.value for metric in metrics if metric.value is not None}
    return found | {"accuracy": found["pair_accuracy"]}


def test_validation_says_what_an_evaluation_of_the_exported_model_says(
    tiny_run: Callable[..., Any], write_rows: Callable[..., str]
) -> None:
    stream = open_dataset(DatasetConfig(dataset_name="Bundled", split="length_controlled"))
    rows = [preference_to_dict(preference) for preference, _ in stream]
    file = write_rows("sets.jsonl", (row | {"task_name": f"task {i % 7}"} for i, row in enumerate(rows[:140])))
    options = ["rm.val_batches=null", "rm.val_period=0", "rm.val_perturbations=8", "policy.optimizer.kwargs.lr=0.01"]
    config = tiny_run(*options, f"data.validation=[{{data_path: {file}, name: held_out}}]")
    outcome = train(config, show_progress=False)
    measured = outcome.validation["held_out"]
    expected = evaluated(outcome, config.data.validation[0], perturbations=8)
    assert {*GATE_METRICS, "robust_accuracy", "accuracy"} <= measured.keys()
    for name in (*GATE_METRICS, "robust_accuracy", "accuracy"):
        assert measured[name] == pytest.approx(expected[name], abs=1e-6), name
    # The numbers differ where they should: the test would not see one that stands for another.
    assert measured["worst_subset"] < measured["accuracy"]
    assert 0 < measured["robust_accuracy"] < measured["accuracy"]
    assert measured["accuracy_shorter_right"] < measured["length_controlled_accuracy"]
    assert abs(measured["kendall_tau"]) > 1e-3


def test_the_checkpoint_with_the_best_diagnostic_is_exported(tiny_run: Callable[..., Any], tmp_path: Path) -> None:
    name = "val:validation-held_out_length_controlled_accuracy"
    outcome = train(
        tiny_run(f"checkpointing.metric_name={name}", "policy.optimizer.kwargs.lr=0.02", "rm.val_batches=8"),
        show_progress=False,
    )
    lines = read_metrics(tmp_path / "logs" / "metrics.jsonl")
    values = {
        line["step"]: line["validation-held_out/length_controlled_accuracy"] for line in lines if "eval/rm/loss" in line
    }
    assert len(values) == 3 and len(set(values.values())) > 1
    best = max(values, key=lambda step: (values[step], step))
    assert outcome.model_step == best
    assert outcome.validation["held_out"]["length_controlled_accuracy"] == values[best]
    state = read_state(tmp_path / "checkpoints" / f"step_{best}")
    assert state.own_validation["validation-held_out/length_controlled_accuracy"] == values[best]
    # The metric is a column, and the card says what it is worth.
    assert outcome.choice.num_checkpoints == 3
    assert [column.key for column in result_columns(outcome.choice)][3] == "length_controlled_accuracy"
    card = (outcome.model_folder / "README.md").read_text()
    assert "best of 3 by length_controlled_accuracy on held_out" in card and "expect lower numbers" in card
    measured = outcome.validation["held_out"]
    assert "better completion longer" in card and f"{measured['accuracy_longer_right']:.3f}" in card


def test_a_metric_without_a_value_ranks_last_and_says_why_once(
    tiny_run: Callable[..., Any], write_rows: Callable[..., str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": f"{i}?", "chosen": "a long completion " * 4 + str(i), "rejected": "no"} for i in range(8)]
    file = write_rows("held_out.jsonl", rows)
    data = f"[{{dataset_name: BinaryPreferenceDataset, data_path: {file}, name: held_out}}]"
    name = "checkpointing.metric_name=validation-held_out/length_controlled_accuracy"
    with caplog.at_level(logging.WARNING, logger="treeward.training.train"):
        outcome = train(tiny_run(f"data.validation={data}", name), show_progress=False)
    warnings = [record.getMessage() for record in caplog.records if "rank last" in record.getMessage()]
    assert len(warnings) == 1
    assert "no pair whose better completion is clearly the shorter" in warnings[0]
    assert outcome.model_step == 6, "the latest, as without a metric"
    lines = read_metrics(tmp_path / "logs" / "metrics.jsonl")
    assert any("validation-held_out/accuracy_longer_right" in line for line in lines)
    assert not any("length_controlled_accuracy" in key for line in lines for key in line)


def test_robust_accuracy_ranks_and_a_run_that_was_killed_goes_on_alike(
    tiny_run: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trajectory: Callable[[Path], list[str]],
) -> None:
    options = [ROBUST, "rm.val_perturbations=6", "rm.max_num_steps=4"]
    paths = [f"checkpointing.checkpoint_dir={tmp_path}/other", f"logger.log_dir={tmp_path}/other_logs"]
    whole = train(tiny_run(*options, *paths), show_progress=False)
    take_step = RewardModelRun.step

    def die_after_three(self: RewardModelRun, number: int) -> Any:
        if number == 4:
            raise KeyboardInterrupt
        return take_step(self, number)

    monkeypatch.setattr(RewardModelRun, "step", die_after_three)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_run(*options), show_progress=False)
    monkeypatch.undo()
    outcome = train(tiny_run(*options), show_progress=False)
    assert trajectory(tmp_path / "logs") == trajectory(tmp_path / "other_logs")
    assert outcome.validation == whole.validation and outcome.model_step == whole.model_step
    for step in (2, 4):
        states = [read_state(tmp_path / folder / f"step_{step}") for folder in ("checkpoints", "other")]
        assert states[0] == states[1] and "validation-held_out/robust_accuracy" in states[0].own_validation
