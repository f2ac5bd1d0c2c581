"""`treeward train --model ... --data ...`: a first run without YAML, and a dry run."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from messages import write_jsonl
from verbs import Command, Ended

from treeward.config.first_run import RATES, rate_of
from treeward.config.load import load_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def first_run(
    treeward: Command,
    policy_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Ended]:
    """`treeward train` in a folder of its own, with a model of 256 positions and 60 comparisons as
    CSV.
    """
    monkeypatch.chdir(tmp_path)
    with Path("pairs.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("prompt", "chosen", "rejected"))
        writer.writerows((f"What is {n} + 1?", f"It is {n + 1}.", "No idea.") for n in range(60))
    return lambda *words: treeward("train", "--model", policy_folder, "--data", "pairs.csv", *words)


@pytest.mark.slow
def test_a_dry_run_tells_what_was_chosen_and_trains_nothing(
    first_run: Callable[..., Ended],
) -> None:
    ended = first_run("--dry-run")
    assert ended.code == 0, ended.err
    for choice in (
        "data.dataset_name=BinaryPreferenceDataset ",
        "data.split_validation_size=0.2 ",
        "policy.optimizer.kwargs.lr=1.0e-04 ",
        "policy.precision=",
        "policy.train_global_batch_size=16 ",
        "policy.max_total_sequence_length=256 ",
    ):
        assert choice in ended.out
    assert "comparisons kept; " in ended.out
    assert "\nvalidation default: " in ended.out
    assert "\nSteps: 4\nThe first step: 16 comparisons, " in ended.out
    assert "\nMemory: 0.0" in ended.out
    assert not Path("results").exists()


def test_it_trains_as_it_says_and_overrides_win(first_run: Callable[..., Ended]) -> None:
    write_jsonl(Path("val.jsonl"), {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"})
    options = [
        "--validation",
        "val.jsonl",
        "policy.optimizer.kwargs.lr=2.0e-3",
        "rm.max_num_steps=2",
    ]
    ended = first_run(*options)
    assert ended.code == 0, ended.err
    assert "kwargs.lr=" not in ended.out
    assert "split_validation_size" not in ended.out
    assert "The model of step 2 of 2 is in results/rm/final" in ended.out
    resolved = load_config("logs/rm/config.yaml")
    assert resolved.policy.optimizer.kwargs["lr"] == 2e-3
    assert {dataset.dataset_name for dataset in resolved.data.train} == {"BinaryPreferenceDataset"}


def test_both_are_laid_over_a_configuration(first_run: Callable[..., Ended]) -> None:
    ended = first_run(
        "--config",
        "small",
        "policy.max_total_sequence_length=128",
        "rm.max_num_steps=1",
    )
    assert ended.code == 0, ended.err
    # That of small.yaml is for a model from scratch.
    assert "policy.optimizer.kwargs.lr=1.0e-04 " in ended.out
    assert "batch_size" not in ended.out, "it is that of small.yaml"


@pytest.mark.parametrize("words", [[], ["--model", "a/model"], ["--data", "pairs.csv"]])
def test_what_is_missing_is_named(words: list[str], treeward: Command) -> None:
    ended = treeward("train", *words)
    assert ended.code == 2
    assert "--model MODEL with --data FILE, or --config FILE" in ended.err


def test_validation_data_without_data_is_a_mistake(treeward: Command) -> None:
    ended = treeward("train", "--config", "rm", "--validation", "val.jsonl")
    assert ended.code == 2
    assert "--validation belongs to --data" in ended.err


@pytest.mark.parametrize(
    ("parameters", "lr"),
    [(135e6, 5e-5), (268e6, 1e-5), (1.5e9, 2e-6), (70e9, 2e-6)],
)
def test_the_rate_is_that_of_the_nearest_size(parameters: float, lr: float) -> None:
    assert rate_of(parameters).lr == lr


def test_the_guide_has_the_table_of_rates() -> None:
    guide = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    for rate in RATES:
        row = next(line for line in guide.splitlines() if line.startswith(f"| {rate.model} |"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert float(cells[1].partition(" ")[0]) == rate.lr
        assert cells[2:] == [rate.comparisons, rate.source]


def test_steps_need_no_configuration_either(first_run: Callable[..., Ended]) -> None:
    """Four rows of each of 24 problems: problems are held out, and are what a step has 16 of."""
    rows = []
    for n in range(96):
        steps = [f"{n % 24} + 1 = {n}.", f"It is {n}."]
        rows.append({"prompt": f"{n % 24} + 1?", "completions": steps, "labels": [1, 0.5]})
    write_jsonl(Path("steps.jsonl"), *rows)
    kind = "policy.reward_model_cfg.reward_model_type=process"
    words = ["--data", "steps.jsonl", kind, "policy.reward_model_cfg.step_token='^'"]
    ended = first_run(*words, "--dry-run")
    assert ended.code == 0, ended.err
    assert "data.dataset_name=StepDataset " in ended.out
    assert "there are 24 problems and no --validation" in ended.out
    assert "problems a step; steps an epoch: at most 2" in ended.out
    assert "\nThe first step: 16 problems, " in ended.out
    ended = first_run(*words, "rm.max_num_steps=1")
    assert ended.code == 0, ended.err
    assert "ProcessBench F1" in ended.out


def test_a_dry_run_of_a_frozen_backbone_plans_no_passes_of_a_step(
    first_run: Callable[..., Ended],
) -> None:
    ended = first_run("--dry-run", "policy.reward_model_cfg.freeze_backbone=true")
    assert ended.code == 0, ended.err
    assert "reads all data once, before the first step" in ended.out
    assert "\nThe first step: 16 comparisons, of the head alone\n" in ended.out
    assert "forward passes" not in ended.out


def test_of_few_comparisons_none_are_held_out(first_run: Callable[..., Ended]) -> None:
    """As of the example files of the guide to data."""
    lines = Path("pairs.csv").read_text(encoding="utf-8").splitlines(keepends=True)
    Path("pairs.csv").write_text("".join(lines[:4]), encoding="utf-8")
    ended = first_run("--dry-run")
    assert ended.code == 0, ended.err
    assert "data.split_validation_size=0 " in ended.out
    assert "3 comparisons are too few to hold some out" in ended.out
    assert "3 of 3 comparisons kept" in ended.out
