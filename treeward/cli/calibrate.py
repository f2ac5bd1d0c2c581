"""`treeward calibrate`: fit a model's shaping constants on comparisons, and keep them in its contract."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from treeward.cli.comparisons import DataOptions, advice_of_a_command, data_options, dataset_config
from treeward.cli.options import (
    BatchTokens,
    Device,
    Dtype,
    MaxLength,
    Truncation,
    TrustRemoteCode,
    Unchecked,
    loading_options,
    scoring_options,
    shaping_section,
    write_table,
)
from treeward.config.data import DatasetConfig
from treeward.config.reward_shaping import RewardCalibration
from treeward.errors import ConfigError, DataError
from treeward.progress import ShownProgress
from treeward.storage import write_text

__all__ = ["EXAMPLES", "run"]

logger = logging.getLogger(__name__)

EXAMPLES = """\
examples:
  treeward calibrate results/quickstart/final --data held_out.jsonl
  treeward calibrate results/quickstart/final --dataset-name Bundled --split length_controlled
  treeward calibrate results/quickstart/final --data held_out.jsonl --data-option prompt_key=question
  treeward calibrate results/quickstart/final --data held_out.jsonl --shaping "{length_calibration: true}"
  treeward calibrate org/reward-model --data held_out.jsonl --output calibration.json

The data are comparisons that the model was not trained on, in any format that
`treeward train` reads. The constants go into the model's reward_contract.json,
where `reward_shaping` finds them. A section given as --shaping goes there too;
`reward_shaping: contract` of an environment and `--shaping contract` use it."""


def run(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub name of a reward model.")],
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="Comparisons: a file, a folder, or a hub name.")
    ] = None,
    dataset_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Their format; default: seen in them.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of a hub dataset, of a saved folder or of Bundled.")] = None,
    data_option: DataOptions = None,
    length_unit: Annotated[
        Literal["tokens", "characters"], typer.Option(help="Unit of a completion's length.")
    ] = "tokens",
    shaping: Annotated[
        str | None, typer.Option(metavar="YAML", help="A reward_shaping section to keep beside the constants.")
    ] = None,
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the constants here as JSON, and leave the model alone.")
    ] = None,
    batch_tokens: BatchTokens = None,
    max_length: MaxLength = None,
    truncation: Truncation = None,
    unchecked: Unchecked = False,
    device: Device = None,
    dtype: Dtype = "float32",
    trust_remote_code: TrustRemoteCode = False,
) -> int:
    section = None if shaping is None else shaping_section(shaping)
    if section is not None and output is not None:
        raise ConfigError(
            "a reward_shaping section is kept in a contract, and --output is none", where="--shaping, --output"
        )
    config = dataset_config(data, dataset_name, split, data_options(data_option or []))
    _check_split(config)

    from treeward.model.contract import CONTRACT_FILE, read_contract, write_contract

    contract = None
    if output is None:  # what cannot be written is an error before the work, not after it
        _check_folder(model)
        contract = read_contract(model)
        if contract is None:
            raise _cannot_keep(model, f"a folder without {CONTRACT_FILE}")
    options = loading_options(device, dtype, trust_remote_code)
    options |= scoring_options(batch_tokens, max_length, truncation, unchecked)
    with advice_of_a_command():
        calibration = _calibrate(model, config, length_unit, options)
    write_table(_rows(calibration), ["constant", "value"])
    if contract is None:
        _write(calibration, Path(str(output)))
        logger.info("Wrote the constants to %s.", output)
        return 0
    added: dict[str, Any] = {"calibration": calibration} | ({} if section is None else {"reward_shaping": section})
    path = write_contract(contract.model_copy(update=added), model)
    if contract.calibration is not None:
        logger.info("The calibration that %s had%s is replaced.", path, _origin(contract.calibration))
    logger.info("Wrote the constants to %s.", path)
    return 0


def _calibrate(
    model: str, config: DatasetConfig, length_unit: Literal["tokens", "characters"], options: dict[str, Any]
) -> RewardCalibration:
    from treeward.data.datasets import open_dataset
    from treeward.scoring.calibration import calibrate
    from treeward.scoring.scorer import Scorer

    stream = open_dataset(config)
    logger.info("Loading %s.", model)
    scorer = Scorer.load(model, **options)
    source = config.data_path or config.dataset_name
    source = source if config.split is None else f"{source}[{config.split}]"
    logger.info("Scoring the comparisons of %s.", source)
    num_scored = 0
    with ShownProgress(unit="comparisons") as progress:

        def advance(since: int) -> None:
            nonlocal num_scored
            num_scored += since
            progress.show("calibrating", num_scored, 0)

        return calibrate(
            scorer,
            (preference for preference, _ in stream),
            name=source,
            length_unit=length_unit,
            on_progress=advance,
        )


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
        write_text(path, calibration.model_dump_json(indent=2) + "\n")
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
