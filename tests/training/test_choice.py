"""How the exported checkpoint was chosen, and which comparisons are no test of new data, is said and counted right."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from treeward.training.export import model_card
from treeward.training.setup import choice_of, set_up
from treeward.training.train import train

METRIC = "val:validation-held_out_length_controlled_accuracy"


@pytest.mark.parametrize(
    ("options", "num"),
    [
        ([], 3),  # steps 2, 4 and 6 of 6 are saved and validated
        (["rm.val_period=3", "checkpointing.save_period=2"], 1),
        (["rm.val_period=3", "checkpointing.save_period=3"], 2),
        (["rm.val_period=4", "rm.val_at_end=true", "checkpointing.save_period=2"], 2),  # 4, and 6 at the end
        (["checkpointing.save_period=7"], 1),
        (["checkpointing.save_period=null"], 1),
        (["rm.val_period=7", "rm.val_at_end=false"], 0),
    ],
)
def test_the_checkpoints_that_are_compared_are_counted(
    tiny_run: Callable[..., Any], options: list[str], num: int
) -> None:
    choice = choice_of(tiny_run(f"checkpointing.metric_name={METRIC}", *options), 6)
    assert choice is not None and choice.num_checkpoints == num and choice.among_several == (num > 1)
    assert (choice.metric, choice.sets) == ("length_controlled_accuracy", ("held_out",))


def test_a_single_checkpoint_is_not_called_the_best(
    tiny_run: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "treeward.training"):
        run = set_up(tiny_run("checkpointing.save_period=26", "rm.val_period=26", "rm.max_num_steps=2"))
    (said,) = [record.getMessage() for record in caplog.records if "nothing is chosen" in record.getMessage()]
    assert said.startswith("One checkpoint of this run of 2 steps") and "save_period is 26" in said
    assert "best of" not in model_card(run, 2, {"held_out": {"accuracy": 0.5, "loss": 1.0}})
    caplog.clear()
    with caplog.at_level(logging.WARNING, "treeward.training"):
        set_up(tiny_run())
    assert not [record for record in caplog.records if "nothing is chosen" in record.getMessage()]


def test_validation_data_that_is_trained_on_is_said_before_the_first_step(
    tiny_run: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    write_rows: Callable[..., str],
    tmp_path: Path,
) -> None:
    def rows(numbers: Iterable[int]) -> list[dict[str, str]]:
        return [{"prompt": f"{n} + 1?", "chosen": f"It is {n + 1}.", "rejected": "No."} for n in numbers]

    binary = "dataset_name: BinaryPreferenceDataset"
    train_file, val_file = write_rows("train.jsonl", rows(range(30))), write_rows("val.jsonl", rows(range(20, 36)))
    options = [
        f"data.train={{{binary}, data_path: {train_file}, split: null, non_contextual_answer: true}}",
        f"data.validation=[{{{binary}, data_path: {val_file}, name: held_out}}]",
        "rm.max_num_steps=2", "rm.val_batches=null", "evaluation.enabled=true",
    ]  # fmt: skip
    with caplog.at_level(logging.WARNING, "treeward.training"):
        outcome = train(tiny_run(*options), show_progress=False)
    said = [record.getMessage() for record in caplog.records if "training data" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith("10 of 16 comparisons of the validation set held_out")
    assert outcome.num_trained_on == {"held_out": 10}
    assert (
        "10 of 16 comparisons of held_out are in the training data" in (outcome.model_folder / "README.md").read_text()
    )
    (result,) = json.loads((outcome.report.parent / "results.json").read_text())["results"]
    assert "10 of its 16 comparisons are in the training data" in result["caveat"]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "treeward.training"):
        found = set_up(tiny_run("checkpointing.checkpoint_dir=" + str(tmp_path / "apart")))
    assert found.num_trained_on == {"held_out": 0} and "training data" not in caplog.text
