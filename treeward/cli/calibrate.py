"""`treeward calibrate`: fit a model's shaping constants on comparisons, and keep them in its contract."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from treeward.cli.comparisons import DataOptions, DatasetName, Split, dataset_config
from treeward.cli.options import Model, ModelOptions, load, one_model, parse_yaml, with_model_options, write_table
from treeward.config.load import load_section
from treeward.config.reward_shaping import RewardCalibration, RewardShapingConfig
from treeward.errors import ConfigError, DataError
from treeward.progress import ShownProgress
from treeward.storage import write_text

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


@with_model_options
def run(
    model: Model,
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="Comparisons: a file, a folder, or a hub name.")
    ] = None,
    dataset_name: DatasetName = None,
    split: Split = None,
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
    *,
    options: ModelOptions,
) -> int:
    added: dict[str, Any] = {}
    if shaping is not None:
        if output is not None:
            summary = "a reward_shaping section is kept in a contract, and --output is none"
            raise ConfigError(summary, where="--shaping, --output")
        added["reward_shaping"] = load_section(
            RewardShapingConfig, parse_yaml(shaping, "--shaping", names=False), where="--shaping"
        )
    config = dataset_config(data, dataset_name, split, data_option)
    if config.dataset_name == "Bundled" and config.split is None:
        need = "a split that the model was not trained on: validation or length_controlled"
        raise ConfigError("the bundled data has several splits", where="--split", got="no split", need=need)
    if (config.split or "").startswith("train"):
        logger.warning("Calibrating on a split called %s: on data that a model was trained on, its temperature comes "
                       "out too low.", config.split)  # fmt: skip

    from treeward.data.datasets import open_dataset
    from treeward.model.contract import read_contract, write_contract
    from treeward.scoring.calibration import calibrate

    contract = None
    if output is None:  # what cannot be written is an error before the work, not after it
        folder = Path(model).expanduser()
        contract = read_contract(model) if folder.is_dir() and os.access(folder, os.W_OK) else None
        if contract is None:
            raise ConfigError(
                "the constants cannot be kept with the model",
                where=model,
                got="a folder without a contract" if folder.is_dir() else "no folder of this machine",
                need="a model folder that treeward has exported and that can be written",
                fix="write them to a file of their own with --output calibration.json",
            )
    stream = open_dataset(config)
    logger.info("Loading %s.", model)
    scorer, _ = load(one_model([model], None, None, options.keys), options.batch_tokens)
    name = config.data_path or config.dataset_name
    name = name if config.split is None else f"{name}[{config.split}]"
    logger.info("Scoring the comparisons of %s.", name)
    num_scored = 0
    with ShownProgress(unit="comparisons") as progress:

        def advance(since: int) -> None:
            nonlocal num_scored
            num_scored += since
            progress.show("calibrating", num_scored, 0)

        preferences = (preference for preference, _ in stream)
        found = calibrate(scorer, preferences, name=name, length_unit=length_unit, on_progress=advance)
    write_table(_rows(found), ["constant", "value"])
    if contract is None:
        _write(found, Path(str(output)))
        logger.info("Wrote the constants to %s.", output)
        return 0
    path = write_contract(contract.model_copy(update={"calibration": found, **added}), model)
    if contract.calibration is not None and (source := contract.calibration.provenance):
        logger.info("The calibration that %s had (from %s, %s) is replaced.", path, source.data, source.date)
    logger.info("Wrote the constants to %s.", path)
    return 0


def _write(calibration: RewardCalibration, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, calibration.model_dump_json(indent=2) + "\n")
    except OSError as error:
        need = "a file that can be written"
        raise DataError("the constants cannot be written", where=str(path), got=str(error), need=need) from error


def _rows(calibration: RewardCalibration) -> list[dict[str, str | None]]:
    known, curve, temperature = calibration.normalization, calibration.length_curve, calibration.temperature
    source = calibration.provenance
    assert known is not None and source is not None  # `calibrate` gives both
    explained = None if curve is None else f"{1 - (curve.residual_std / known.std) ** 2:.1%}"
    loss = None if temperature is None else f"{temperature.nll_before:.4f} at 1, {temperature.nll_after:.4f} at T"
    values = {
        "comparisons": f"{source.num_comparisons:,}",
        "completions with a score": f"{source.num_conversations:,}",
        "completions without one": f"{source.num_failed:,}",
        "mean score": f"{known.mean:.4f}",
        "standard deviation": f"{known.std:.4f}",
        "variance that length explains": explained,
        "temperature T": None if temperature is None else f"{temperature.value:.4f}",
        "loss per pair, in nats": loss,
    }
    return [{"constant": constant, "value": value} for constant, value in values.items()]
