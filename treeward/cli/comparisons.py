"""Which dataset reads a file of comparisons: said by its name, or told by the keys of its first row.

    config = dataset_config("held_out.jsonl", None, None, ["prompt_key=question"])

`--data-option prompt_key=question` reaches every key of `DatasetConfig`, with values as in an override of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from omegaconf import OmegaConf

from treeward.config.data import DatasetConfig
from treeward.config.load import load_section
from treeward.errors import ConfigError, DataError

_FORMS = {
    "PreferenceDataset": {"context", "completions"},
    "HelpSteer3": {"response1", "response2", "overall_preference"},
    "BinaryPreferenceDataset": {"prompt", "chosen", "rejected"},
}
"""The keys that tell the format of a row."""

DatasetName = Annotated[str | None, typer.Option(metavar="NAME", help="Format of the data; default: seen in them.")]
Split = Annotated[str | None, typer.Option(help="Split of --data, or of a dataset that brings its own.")]
DataOptions = Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Keys of a dataset (docs/config.md).")]


def dataset_config(
    data: str | None, dataset_name: str | None, split: str | None, options: Sequence[str] | None = None
) -> DatasetConfig:
    """The configuration of a file, folder or hub name `data`, or of a dataset that brings its own.

    `options`: further keys as KEY=VALUE. Raises `ConfigError` where neither is given and for options that are not those
    of a dataset, and `DataError` for rows of no known format.
    """
    if wrong := [text for text in options or () if "=" not in text]:
        raise ConfigError("this is no KEY=VALUE", where="--data-option", got=wrong[0], need="as prompt_key=question")
    pairs = [text.partition("=") for text in options or ()]
    keys: Any = {key: value for key, _, value in pairs if "." not in key}  # text as it is: a column may be called yes
    keys |= OmegaConf.to_container(OmegaConf.from_dotlist([f"{key}={value}" for key, _, value in pairs if "." in key]))
    if dataset_name is None and {"prompt_key", "chosen_key", "rejected_key"} & keys.keys():
        dataset_name = "BinaryPreferenceDataset"  # the only one that reads these keys
    if dataset_name is None:
        if data is None:
            raise ConfigError("there are no comparisons", where="--data", need="--data FILE, or --dataset-name NAME")
        from treeward.data.sources import read_rows

        first = next(read_rows(data, split=split, subset=keys.get("subset")))  # or it raises
        dataset_name = _format_of(first.values, first.where)
    values = {"dataset_name": dataset_name, "data_path": data, "split": split, **keys}
    return load_section(DatasetConfig, values, where="--data, --data-option")


def _format_of(values: Mapping[str, Any], where: str) -> str:
    """The registered dataset that reads rows such as this one."""
    keys = {key for key, value in values.items() if value is not None}
    if found := [name for name, needed in _FORMS.items() if needed <= keys]:
        return found[0]
    if {"chosen", "rejected"} <= keys:  # whole conversations, as messages or as a transcript
        is_transcript = isinstance(values["chosen"], str) and not values["chosen"].lstrip().startswith("[")
        return "HHTranscripts" if is_transcript else "Tulu3Preference"
    need = "context and completions with ranks; or prompt, chosen and rejected; or chosen and rejected conversations"
    fix = "name the keys, as --data-option prompt_key=question; or the dataset, as --dataset-name HelpSteer3"
    got = f"keys {sorted(map(str, values))}"
    raise DataError("the row is a comparison in no known format", where=where, got=got, need=need, fix=fix)
