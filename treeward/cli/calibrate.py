"""`treeward calibrate`: fit a model's shaping constants on comparisons, and keep them in its contract."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

from treeward.cli.comparisons import add_data_option, advice_of_a_command, data_options, dataset_config
from treeward.cli.interrupts import check_interrupts, heeding_interrupts
from treeward.cli.model_arguments import add_model_arguments, model_options, shaping_section
from treeward.config.data import DatasetConfig
from treeward.config.reward_shaping import RewardCalibration
from treeward.errors import ConfigError, DataError

__all__ = ["EXAMPLES", "add_arguments", "run"]

logger = logging.getLogger(__name__)

EXAMPLES = """\
examples:
  treeward calibrate results/quickstart/final --data held_out.jsonl
  treeward calibrate results/quickstart/final --dataset-name Bundled --split length_controlled
  treeward calibrate results/quickstart/final --data held_out.jsonl --data-option prompt_key=question
  treeward calibrate results/quickstart/final --data held_out.jsonl --shaping "{length_calibration: true}"
  treeward calibrate org/reward-model --data held_out.jsonl --output calibration.json

The data are comparisons that the model was not trained on, in any format that `treeward train` reads. The constants go
into the model's reward_contract.json, where `reward_shaping` finds them; a section given as --shaping too, which
`reward_shaping: contract` of an environment and `treeward score --shaping contract` then use."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder or hub name of a reward model")
    parser.add_argument("--data", default=None, metavar="FILE", help="comparisons: a file, a folder, or a hub name")
    parser.add_argument("--dataset-name", default=None, metavar="NAME", help="their format; default: seen in the data")
    parser.add_argument("--split", default=None, help="split of a hub dataset, of a saved folder or of Bundled")
    add_data_option(parser)
    parser.add_argument(
        "--length-unit", choices=("tokens", "characters"), default="tokens", help="what replies are measured in"
    )
    parser.add_argument(
        "--shaping", metavar="YAML", help="a reward_shaping section to keep in the contract beside the constants"
    )
    parser.add_argument(
        "--output", default=None, metavar="FILE", help="write the constants here as JSON, and leave the model alone"
    )
    add_model_arguments(parser)


@heeding_interrupts
def run(arguments: argparse.Namespace) -> int:
    shaping = None if arguments.shaping is None else shaping_section(arguments.shaping)
    if shaping is not None and arguments.output is not None:
        raise ConfigError(
            "a reward_shaping section is kept in a contract, and --output is none", where="--shaping, --output"
        )
    options_of_data = data_options(arguments.data_option)
    config = dataset_config(arguments.data, arguments.dataset_name, arguments.split, options_of_data)
    _check_split(config)
    options = model_options(arguments)
    contracts = importlib.import_module("treeward.model.contract")
    contract = None
    if arguments.output is None:  # what cannot be written is told before the work, not after it
        _check_folder(arguments.model)
        contract = contracts.read_contract(arguments.model)
        if contract is None:
            raise _cannot_keep(arguments.model, f"a folder without {contracts.CONTRACT_FILE}")
    with advice_of_a_command():
        calibration = _calibrate(arguments, config, options)
    check_interrupts()  # nothing is replaced by a command that was told to stop
    results = importlib.import_module("treeward.tables")
    sys.stdout.write(results.results_table(_rows(calibration), ["constant", "value"]) + "\n")
    if contract is None:
        _write(calibration, Path(arguments.output))
        logger.info("Wrote the constants to %s.", arguments.output)
        return 0
    added = {"calibration": calibration} | ({} if shaping is None else {"reward_shaping": shaping})
    path = contracts.write_contract(contract.model_copy(update=added), arguments.model)
    if contract.calibration is not None:
        logger.info("The calibration that %s had%s is replaced.", path, _origin(contract.calibration))
    logger.info("Wrote the constants to %s.", path)
    return 0


def _calibrate(arguments: argparse.Namespace, config: DatasetConfig, options: dict[str, Any]) -> RewardCalibration:
    datasets = importlib.import_module("treeward.data.datasets")
    scorer_class = importlib.import_module("treeward.scoring.scorer").Scorer
    fitting = importlib.import_module("treeward.scoring.calibration")
    from treeward.progress import ShownProgress

    stream = datasets.open_dataset(config)
    logger.info("Loading %s.", arguments.model)
    scorer = scorer_class.load(arguments.model, **options)
    source = config.data_path or config.dataset_name
    source = source if config.split is None else f"{source}[{config.split}]"
    logger.info("Scoring the comparisons of %s.", source)
    num_scored = 0
    with ShownProgress(check_interrupts, unit="comparisons") as progress:

        def tell(since: int) -> None:
            nonlocal num_scored
            num_scored += since
            progress.show("calibrating", num_scored, 0)

        progress.show("calibrating", 0, 0)
        calibration: RewardCalibration = fitting.calibrate(
            scorer,
            (preference for preference, _ in stream),
            name=source,
            length_unit=arguments.length_unit,
            on_progress=tell,
        )
    return calibration


def _check_split(config: DatasetConfig) -> None:
    if config.dataset_name == "Bundled" and config.split is None:
        raise ConfigError(
            "the bundled data has several splits, and one of them is for training",
            where="--split",
            got="no split",
            need="a split that the model was not trained on: validation or length_controlled",
        )
    if (config.split or "").startswith("train"):
        logger.warning("Calibrating on a split called %s: on data that a model was trained on, its temperature comes "
                       "out too low.", config.split)  # fmt: skip


def _check_folder(model: str) -> None:
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise _cannot_keep(model, "no folder of this machine")
    if not os.access(folder, os.W_OK):
        raise _cannot_keep(model, "a folder that cannot be written")


def _cannot_keep(model: str, got: str) -> ConfigError:
    return ConfigError(
        "the constants cannot be kept with the model",
        where=model,
        got=got,
        need="a model folder that treeward has exported and that can be written",
        fix="write them to a file of their own with --output calibration.json",
    )


def _write(calibration: RewardCalibration, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(calibration.model_dump_json(indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(
            "the constants cannot be written", where=str(path), got=str(error), need="a file that can be written"
        ) from error


def _origin(calibration: RewardCalibration) -> str:
    source = calibration.provenance
    return "" if source is None else f" (from {source.data}, {source.date})"


def _rows(calibration: RewardCalibration) -> list[dict[str, str | None]]:
    known, curve, temperature = calibration.normalization, calibration.length_curve, calibration.temperature
    source = calibration.provenance
    assert known is not None and source is not None  # `calibrate` gives both
    explained = None if curve is None else f"{1 - (curve.residual_std / known.std) ** 2:.1%}"
    loss = None if temperature is None else f"{temperature.nll_before:.4f} at 1, {temperature.nll_after:.4f} at T"
    return [
        {"constant": "comparisons", "value": f"{source.num_comparisons:,}"},
        {"constant": "completions with a score", "value": f"{source.num_conversations:,}"},
        {"constant": "completions without one", "value": f"{source.num_failed:,}"},
        {"constant": "mean score", "value": f"{known.mean:.4f}"},
        {"constant": "standard deviation", "value": f"{known.std:.4f}"},
        {"constant": "variance that length explains", "value": explained},
        {"constant": "temperature T", "value": None if temperature is None else f"{temperature.value:.4f}"},
        {"constant": "loss per pair, in nats", "value": loss},
    ]
