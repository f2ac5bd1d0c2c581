"""Checkpoints may be chosen by the diagnostics of `treeward eval`; why numbers may be too good is said."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from treeward.config.data import DatasetConfig
from treeward.data.datasets import open_dataset
from treeward.data.preference import preference_to_dict
from treeward.evaluation.diagnostics.scores import GATE_METRICS
from treeward.evaluation.session import Candidate, run_evaluation
from treeward.evaluation.suites import PreferenceSuite
from treeward.scoring.scorer import Scorer
from treeward.training.setup import set_up
from treeward.training.state import read_state
from treeward.training.tracking import read_metrics
from treeward.training.train import TrainingOutcome, train

METRIC = "checkpointing.metric_name=val:validation-held_out_length_controlled_accuracy"


def evaluated(outcome: TrainingOutcome, config: DatasetConfig) -> dict[str, float]:
    """The numbers of `treeward eval` of an exported model on a set."""
    scorer = Scorer.load(str(outcome.model_folder), device="cpu")
    suite = PreferenceSuite("held_out", config)
    candidate = Candidate("model", lambda: (scorer, {"model": "model"}))
    (summary,) = run_evaluation([candidate], [(suite, None)]).summaries
    metrics = [*summary.statistics.numbers.values(), *summary.length.numbers.values()]
    found = {metric.name: metric.value for metric in metrics if metric.value is not None}
    return found | {"accuracy": found["pair_accuracy"]}


@pytest.mark.slow
def test_validation_says_what_an_evaluation_of_the_exported_model_says(
    tiny_run: Callable[..., Any], write_rows: Callable[..., Path]
) -> None:
    stream = open_dataset(DatasetConfig(dataset_name="Bundled", split="length_controlled"))
    rows = [preference_to_dict(preference) for preference, _ in stream]
    file = write_rows("sets.jsonl", (row | {"task_name": f"task {i % 7}"} for i, row in enumerate(rows[:140])))
    options = ["rm.val_batches=null", "rm.val_period=0", "policy.optimizer.kwargs.lr=0.01"]
    config = tiny_run(*options, f"data.validation=[{{data_path: {file}, name: held_out}}]")
    outcome = train(config, show_progress=False)
    measured = outcome.validation["held_out"]
    expected = evaluated(outcome, config.data.validation[0])
    for name in (*GATE_METRICS, "accuracy"):
        assert measured[name] == pytest.approx(expected[name], abs=1e-6), name
    # The numbers differ where they should: the test would not see one that stands for another.
    assert measured["worst_subset"] < measured["accuracy"]
    assert measured["accuracy_shorter_right"] < measured["length_controlled_accuracy"]
    assert abs(measured["kendall_tau"]) > 1e-3


@pytest.mark.slow
def test_the_checkpoint_with_the_best_diagnostic_is_exported_and_said_to_be_chosen(
    tiny_run: Callable[..., Any], tmp_path: Path
) -> None:
    outcome = train(tiny_run(METRIC, "policy.optimizer.kwargs.lr=0.02", "rm.val_batches=8"), show_progress=False)
    name = "validation-held_out/length_controlled_accuracy"
    lines = read_metrics(tmp_path / "logs" / "metrics.jsonl")
    values = {line["step"]: line[name] for line in lines if "eval/rm/loss" in line}
    assert len(values) == 3 and len(set(values.values())) > 1
    best = max(values, key=lambda step: (values[step], step))
    measured = outcome.validation["held_out"]
    assert outcome.model_step == best and measured["length_controlled_accuracy"] == values[best]
    assert read_state(tmp_path / "checkpoints" / f"step_{best}").own_validation[name] == values[best]
    card = (outcome.model_folder / "README.md").read_text()
    assert "| length controlled accuracy |" in card
    assert "better completion longer" in card and f"{measured['accuracy_longer_right']:.3f}" in card


def test_validation_data_that_is_trained_on_is_said_before_the_first_step(
    tiny_run: Callable[..., Any], caplog: pytest.LogCaptureFixture, write_rows: Callable[..., Path]
) -> None:
    def rows(numbers: Iterable[int]) -> list[dict[str, str]]:
        return [{"prompt": f"{n} + 1?", "chosen": f"It is {n + 1}.", "rejected": "No."} for n in numbers]

    binary = "dataset_name: BinaryPreferenceDataset"
    train_file, val_file = write_rows("train.jsonl", rows(range(30))), write_rows("val.jsonl", rows(range(20, 36)))
    options = [
        f"data.train={{{binary}, data_path: {train_file}, split: null, non_contextual_answer: true}}",
        f"data.validation=[{{{binary}, data_path: {val_file}, name: held_out}}]",
        "rm.val_batches=null",
    ]
    set_up(tiny_run(*options))
    said = [record.getMessage() for record in caplog.records if "training data" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith("10 of 16 comparisons of the validation set held_out")


def test_a_metric_without_a_value_ranks_last_and_says_why_once(
    tiny_run: Callable[..., Any], write_rows: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": f"{i}?", "chosen": "a long completion " * 4 + str(i), "rejected": "no"} for i in range(8)]
    file = write_rows("held_out.jsonl", rows)
    data = f"[{{dataset_name: BinaryPreferenceDataset, data_path: {file}, name: held_out}}]"
    with caplog.at_level(logging.WARNING, logger="treeward.training.train"):
        outcome = train(tiny_run(f"data.validation={data}", METRIC), show_progress=False)
    (warned,) = [record.getMessage() for record in caplog.records if "rank last" in record.getMessage()]
    assert 'no scored pair whose right completion is "shorter"' in warned
    assert outcome.model_step == 6 and outcome.caveats == {}, "the latest, as without a metric"
    lines = read_metrics(tmp_path / "logs" / "metrics.jsonl")
    assert any("validation-held_out/accuracy_longer_right" in line for line in lines)
    assert not any("length_controlled_accuracy" in key for line in lines for key in line)
