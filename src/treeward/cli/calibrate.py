"""`treeward calibrate`: fit a model's shaping constants and how sure it is, and keep them in its
contract.

examples:
  treeward calibrate results/quickstart/final --data held_out.jsonl
  treeward calibrate results/quickstart/final --dataset-name HelpSteer3 --split validation
  treeward calibrate results/quickstart/final --data held_out.jsonl --trained-on train.jsonl

The constants are the mean and standard deviation of the scores, the score that length alone
predicts, and a temperature. With --trained-on each score gets a spread too. docs/scoring.md says
what they are used for.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Iterable, Iterator
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
from treeward.cli.options import (
    ModelOptions,
    checked_model,
    load,
    section_of,
    with_model_options,
)
from treeward.config.data import DatasetConfig
from treeward.config.load import load_section
from treeward.errors import ConfigError
from treeward.formatting import format_number
from treeward.progress import ShownProgress
from treeward.tables import Column, results_table
from treeward.training.step_file import flattened

if TYPE_CHECKING:
    from treeward.data.preference import Preference
    from treeward.data.table_files import UnchosenSplitError
    from treeward.model.contract import SpreadContract

logger = logging.getLogger(__name__)

# Too long to show: a curve has dozens of points.
_NOT_SHOWN: Any = {"length_curve": {"lengths", "values"}, "provenance": {"fingerprint"}}


@with_model_options
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
    trained_on: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The comparisons that the model was trained on, from which its scores get a "
            "spread: a file, folder or hub name, or a section as {data_path: FILE, split: train}.",
        ),
    ] = None,
    *,
    options: ModelOptions,
) -> int:
    config = dataset_config(data, dataset_name, split, data_option)
    trained_config = None
    if trained_on is not None:
        if trained_on.lstrip().startswith("{"):
            where = "--trained-on"
            values = {"dataset_name": "auto", **section_of(trained_on, where)}
            trained_config = load_section(DatasetConfig, values, where=where)
        else:
            # The columns of both sets have the same names.
            trained_config = dataset_config(trained_on, None, None, data_option)

    def choose(error: UnchosenSplitError) -> str:
        if trained_config is not None and error.where == trained_config.data_path:
            section = f"{{data_path: {error.where}, split: {error.choice}}}"
            return f"the split: --trained-on {shlex.quote(section)}"
        return split_option(error)

    with choosing_split(choose):
        _calibrate(model, config, trained_config, options)
    return 0


def _calibrate(
    model: str, config: DatasetConfig, trained_config: DatasetConfig | None, options: ModelOptions
) -> None:
    # A dataset that brings its own data has a split `train` by default.
    default_split = "train" if config.data_path is None else ""
    if (config.split or default_split).startswith("train"):
        logger.warning("On data that the model was trained on the temperature is too low.")
        logger.warning("A split `train` may be such data.")

    # Imports that take seconds come after the checks of the options.
    from treeward.data.datasets import open_dataset
    from treeward.model.contract import read_contract, write_contract
    from treeward.scoring.calibration import calibrate
    from treeward.scoring.scorer import Scorer
    from treeward.scoring.spread import check_head, fit_spread, keep_spread

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
    trained_stream = None
    if trained_config is not None:
        trained_stream = open_dataset(trained_config)
    section = checked_model({"models": [model]}, "MODEL", options)
    # A spread that is fitted anew may be missing, or damaged.
    scorer, _, _ = load(section, options.batch_tokens, with_spread=trained_config is None)
    assert isinstance(scorer, Scorer)
    if trained_config is not None:
        check_head(scorer)
    name = _name_of(config)
    with ShownProgress(unit="comparisons") as progress:
        calibration = calibrate(scorer, _counted(stream, "calibrating", progress), name=name)
    constants = flattened(calibration.model_dump(exclude=_NOT_SHOWN))
    rows = []
    for key, value in constants:
        shown = format_number(value) if isinstance(value, float) else value
        rows.append({"constant": key, "value": shown})
    sys.stdout.write(results_table(rows, ["constant", "value"]) + "\n")
    # The rest of the contract stays, its hash of the scores too.
    path = write_contract(contract.model_copy(update={"calibration": calibration}), model)
    logger.info("Wrote the constants to %s.", path)
    if trained_config is None or trained_stream is None:
        return
    with ShownProgress(unit="comparisons") as progress:
        fitted = fit_spread(
            scorer,
            _counted(trained_stream, "reading what it was trained on", progress),
            _counted(open_dataset(config), "reading what was held out", progress),
            names=(_name_of(trained_config), name),
        )
    contract = keep_spread(fitted, scorer, folder)
    assert contract.spread is not None
    sys.stdout.write("\n" + _spread_table(contract.spread) + "\n")
    logger.info("Wrote the spread to %s, and its name to %s.", folder / contract.spread.file, path)


def _name_of(config: DatasetConfig) -> str:
    name = str(config.data_path or config.dataset_name)
    if config.split:
        name += f"[{config.split}]"
    return name


def _counted(
    stream: Iterable[tuple[Preference, str]], what: str, progress: ShownProgress
) -> Iterator[Preference]:
    # The number of comparisons is not known before they are read.
    for number, (preference, _) in enumerate(stream, start=1):
        progress.show(what, number, 0)
        yield preference


def _spread_table(spread: SpreadContract) -> str:
    """What the spread is worth on the held-out pairs, beside a temperature, which is one number for
    all of them."""
    metrics = spread.metrics
    alone = "margin alone"
    cooled = "with a temperature"
    spread_out = "with the spread"
    title = f"{metrics.num_pairs} held-out pairs"
    rows: list[dict[str, Any]] = [
        {
            title: "negative log-likelihood, nats",
            alone: metrics.nll,
            cooled: metrics.nll_temperature,
            spread_out: metrics.nll_spread,
        },
        {
            title: "ECE",
            alone: metrics.ece,
            cooled: metrics.ece_temperature,
            spread_out: metrics.ece_spread,
        },
        {
            title: "AUROC of a right order",
            alone: metrics.auroc_margin,
            cooled: metrics.auroc_margin,
            spread_out: metrics.auroc_sureness,
        },
        # Of both orientations of each pair EUCE is the same number.
        {title: "ELCE, EUCE", spread_out: metrics.elce},
        {title: "confident and right", spread_out: metrics.confident_true},
        {title: "confident and wrong", spread_out: metrics.confident_false},
    ]
    for beta, score in metrics.ranking.items():
        rows.append({title: f"ranking score, beta {beta}", spread_out: score})
    columns = [Column(name, format=".3f") for name in (alone, cooled, spread_out)]
    about = (
        f"spread of {spread.num_pairs:,} pairs of {spread.trained_on.data}, penalty "
        f"{spread.penalty:g}; each half of the prompts of {spread.held_out.data} is measured by "
        "what the other half chose"
    )
    return results_table(rows, [title, *columns]) + "\n" + about
