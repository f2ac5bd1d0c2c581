"""Which dataset reads a file of comparisons: said by its name, or told by the keys of its first row (`auto`).

    config = dataset_config("held_out.jsonl", None, None, ["prompt_key=question"])

`--data-option prompt_key=question` reaches every key of `DatasetConfig`, with values as in an override of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from omegaconf import OmegaConf

from treeward.config.data import DatasetConfig
from treeward.config.load import load_section
from treeward.errors import ConfigError

DatasetName = Annotated[str | None, typer.Option(metavar="NAME", help="Format of the data; default: seen in them.")]
Split = Annotated[str | None, typer.Option(help="Split of the data.")]
DataOptions = Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Its keys, as prompt_key=question.")]


def dataset_config(
    data: str | None, dataset_name: str | None, split: str | None, options: Sequence[str] | None = None
) -> DatasetConfig:
    """The configuration of a file, folder or hub name `data`, or of a dataset that brings its own.

    `options`: further keys as KEY=VALUE. Raises `ConfigError` where neither is given and for options that are not those
    of a dataset.
    """
    if wrong := [text for text in options or () if "=" not in text]:
        raise ConfigError("this is no KEY=VALUE", where="--data-option", got=wrong[0], need="as prompt_key=question")
    pairs = dict(text.split("=", 1) for text in options or ())
    keys: Any = {key: pairs[key] for key in pairs if "." not in key}  # text as it is: a column may be called yes
    keys |= OmegaConf.to_container(OmegaConf.from_dotlist([f"{key}={pairs[key]}" for key in pairs if "." in key]))
    if dataset_name is None and data is None:
        raise ConfigError("there are no comparisons", where="--data", need="--data FILE, or --dataset-name NAME")
    values = {"dataset_name": dataset_name or "auto", "data_path": data, "split": split, **keys}
    return load_section(DatasetConfig, values, where="--data, --data-option")
