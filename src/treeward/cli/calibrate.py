"""`treeward calibrate`: fit a model's shaping constants on comparisons, and keep them in its
contract.

examples:
  treeward calibrate results/quickstart/final --data held_out.jsonl
  treeward calibrate results/quickstart/final --dataset-name HelpSteer3 --split validation

The constants are the mean and standard deviation of the scores, the score that length alone
predicts, and a temperature. docs/scoring.md says what they are used for.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treeward.cli.comparisons import (
    DataOptions,
    DatasetName,
    Split,
    choosing_split,
    dataset_config,
    split_option,
)
from treeward.cli.options import ModelOptions, checked_model, load, with_model_options
from treeward.errors import ConfigError
from treeward.formatting import format_number
from treeward.progress import ShownProgress
from treeward.tables import results_table
from treeward.training.step_file import flattened

if TYPE_CHECKING:
    from treeward.data.preference import Preference

logger = logging.getLogger(__name__)

# Too long to show: a curve has dozens of points.
_NOT_SHOWN: Any = {"length_curve": {"lengths", "values"}, "provenance": {"fingerprint"}}


@with_model_options
@choosing_split(split_option)
def run(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="The folder of an exported model; its contract gets the constants.",
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Comparisons that the model was not trained on: a file, folder or hub name.",
        ),
    ] = None,
    dataset_name: DatasetName = None,
    split: Split = None,
    data_option: DataOptions = None,
    *,
    options: ModelOptions,
) -> int:
    config = dataset_config(data, dataset_name, split, data_option)
    # A dataset that brings its own data has a split `train` by default.
    default_split = "train" if config.data_path is None else ""
    if (config.split or default_split).startswith("train"):
        logger.warning("On data that the model was trained on the temperature is too low.")
        logger.warning("A split `train` may be such data.")

    # Imports that take seconds come after the checks of the options.
    from treeward.data.datasets import open_dataset
    from treeward.model.contract import read_contract, write_contract
    from treeward.scoring.calibration import calibrate

    # The constants are written into the contract of this folder.
    folder = Path(model).expanduser()
    contract = None
    if folder.is_dir() and os.access(folder, os.W_OK):
        contract = read_contract(model)
    # Errors before the work, not after it.
    if contract is None:
        raise ConfigError(
            "the constants cannot be kept with the model",
            where=model,
            need="a model folder that can be written, with its contract",
            fix=f"copy the model into another folder, and there: treeward verify {model} --write",
        )
    if options.head_weights is not None:
        weights = options.head_weights
        raise ConfigError(
            "the constants are fitted to the score of the contract, so the heads need its weights",
            where="--head-weights",
            got=weights,
            need="the contract's weights of heads",
            fix=f"treeward verify {model} --write --force --head-weights {weights} first",
        )
    stream = open_dataset(config)
    section = checked_model({"models": [model]}, "MODEL", options)
    scorer, _, _ = load(section, options.batch_tokens)
    name = str(config.data_path or config.dataset_name)
    if config.split:
        name += f"[{config.split}]"
    with ShownProgress(unit="comparisons") as progress:
        # The number of comparisons is not known before they are read.
        def counted() -> Iterator[Preference]:
            for number, (preference, _) in enumerate(stream, start=1):
                progress.show("calibrating", number, 0)
                yield preference

        calibration = calibrate(scorer, counted(), name=name)
    constants = flattened(calibration.model_dump(exclude=_NOT_SHOWN))
    rows = []
    for key, value in constants:
        shown = format_number(value) if isinstance(value, float) else value
        rows.append({"constant": key, "value": shown})
    sys.stdout.write(results_table(rows, ["constant", "value"]) + "\n")
    # The rest of the contract stays, its hash of the scores too.
    path = write_contract(contract.model_copy(update={"calibration": calibration}), model)
    logger.info("Wrote the constants to %s.", path)
    return 0
