r"""`treeward check-labels`: which labels look wrong to a head that has not seen their prompts.

examples:
  treeward check-labels train.jsonl --model HuggingFaceTB/SmolLM2-135M-Instruct --output labels
  treeward check-labels pairs.csv --model results/quickstart/final --output labels \
      policy.max_total_sequence_length=1024
  treeward train --model MODEL --data train.jsonl data.labels=labels/labels.jsonl

Any model will do, a bare one or a reward model. It costs what scoring the data costs: only a head
is fitted. The folder has report.html, with the pairs to read, report.json, and labels.jsonl: for
each pair its margin, the margin's spread and a proposal, which data.labels of a run takes. The data
is not changed. A second start uses what the model has read, if it had come to its end.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from treeward.cli.comparisons import (
    DataOptions,
    DatasetName,
    Split,
    choosing_split,
    dataset_config,
    split_option,
)
from treeward.cli.options import output_folder
from treeward.config.first_run import choose, values_of
from treeward.config.load import load_file
from treeward.config.preflight import check_inputs
from treeward.config.run import RewardModelRunConfig
from treeward.errors import ConfigError
from treeward.tables import results_table

_WIDTH = 118
"""Columns of a sentence."""
_CHOSEN_KEYS = ("policy.precision", "policy.max_total_sequence_length")
"""What is chosen as `train` chooses it."""


def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DATA [key=value]...",
            help="Comparisons, in any format of docs/data.md; and overrides of a run, as for "
            "train.",
        ),
    ] = None,
    *,
    model: Annotated[
        str,
        typer.Option(metavar="MODEL", help="The model that reads them: a folder or hub name."),
    ],
    output: Annotated[
        str, typer.Option(metavar="DIR", help="The folder for the report and labels.jsonl.")
    ],
    dataset_name: DatasetName = None,
    split: Split = None,
    data_option: DataOptions = None,
) -> int:
    # Before the model reads the data.
    folder = output_folder(output)
    assert folder is not None
    data, overrides = _data_and_overrides(words or [], dataset_name)
    section = dataset_config(data, dataset_name, split, data_option)
    # Without the defaults: a class by its dotted path gets every key that its section has.
    values: dict[str, Any] = {
        "policy": {"model_name": model, "reward_model_cfg": {"freeze_backbone": True}},
        "data": {"train": [section.model_dump(exclude_unset=True)]},
    }
    loaded = load_file(RewardModelRunConfig, None, overrides, values=values)
    check_inputs(loaded)

    # These import torch, which takes seconds: a mistake is told before.
    from treeward.evaluation.label_check.label_page import (
        FLIP_COLUMNS,
        flip_rows,
        is_precise,
        label_page,
        write_label_check,
    )
    from treeward.planning.facts import facts_of
    from treeward.training.label_check import check_labels

    with choosing_split(split_option):
        facts = facts_of(loaded)
        choices = []
        for choice in choose(loaded, facts, model=True, data=False, run=True):
            if choice.key in _CHOSEN_KEYS:
                choices.append(choice)
        chosen = values_of(choices, values)
        # Once more, because the user's overrides go before what was chosen.
        loaded = load_file(RewardModelRunConfig, None, overrides, values=chosen)
        checked = check_labels(loaded)
    page = label_page(
        checked.numbers,
        checked.examples,
        model=model,
        data=data or str(dataset_name),
        num_unread=checked.num_unread,
    )
    report = write_label_check(folder, page, checked.lines)
    lines: list[str] = []
    for sentence in page.sentences:
        lines += textwrap.wrap(sentence, _WIDTH, break_on_hyphens=False, break_long_words=False)
    table = results_table(flip_rows(checked.numbers), FLIP_COLUMNS)
    lines += ["", table, "", f"The pairs to read, the most suspicious first, are in {report}"]
    if is_precise(checked.numbers):
        labels = folder / "labels.jsonl"
        lines.append(f"Train without the suspects:  treeward train ... data.labels={labels}")
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _data_and_overrides(
    words: Sequence[str], dataset_name: str | None
) -> tuple[str | None, Sequence[str]]:
    """The data, None for a dataset that brings its own, and the overrides.

    Raises `ConfigError` where neither names data.
    """
    data = None
    # A path may have an equals sign too.
    if words and ("=" not in words[0] or Path(words[0]).exists()):
        data = words[0]
        words = words[1:]
    if data is None and dataset_name is None:
        raise ConfigError(
            "there is nothing to check",
            where="command line",
            need="DATA, or --dataset-name NAME of a dataset that brings its own",
        )
    return data, words
