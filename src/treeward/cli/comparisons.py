"""Which dataset reads a file of comparisons: by its name, or by the keys of its first row (`auto`).

    config = dataset_config("held_out.jsonl", None, None, ["prompt_key=question"])

`--data-option prompt_key=question` reaches every key of `DatasetConfig`, with values as in an
override of a run.

    with choosing_split(split_option):    # an error about a split says what the verb calls it
        ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from omegaconf import OmegaConf

from treeward.config.data import DataConfig, DatasetConfig, PromptDataConfig
from treeward.config.load import load_section
from treeward.errors import ConfigError

if TYPE_CHECKING:
    from treeward.data.table_files import UnchosenSplitError

DatasetName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="The format of the data; default: by the keys of its first row."
    ),
]
Split = Annotated[str | None, typer.Option(help="The split of the data, if it has several.")]
DataOptions = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE", help="Set a key of the data, as prompt_key=question; may be repeated."
    ),
]


ChooseSplit = Callable[["UnchosenSplitError"], str]
"""The words of a command line that choose the split an error asks for."""


def split_option(error: UnchosenSplitError) -> str:
    """The words of verbs with the option `Split`."""
    return f"--split {error.choice}"


def split_data_option(error: UnchosenSplitError) -> str:
    """The words of verbs with `DataOptions` and without `Split`."""
    return f"--data-option split={error.choice}"


@contextmanager
def choosing_split(choose: ChooseSplit) -> Iterator[None]:
    """Have an error that asks for a split say how this verb is told one."""
    from treeward.data.table_files import UnchosenSplitError

    try:
        yield
    except UnchosenSplitError as error:
        # The error knows the data, the verb its own options.
        raise error.but(fix=f"add {choose(error)}") from None


def split_key(data: DataConfig | PromptDataConfig) -> ChooseSplit:
    """The words of verbs that run a configuration with this section: an override."""

    def choose(error: UnchosenSplitError) -> str:
        for i, dataset in enumerate(data.train):
            if dataset.data_path == error.where and dataset.split is None:
                key = f"data.train[{i}].split"
                # The short form, which goes to the only set.
                if len(data.train) == 1:
                    key = "data.train_split"
                return f"{key}={error.choice}"
        # The short form, which goes to all validation sets.
        if len(data.validation) == 1:
            return f"data.val_split={error.choice}"
        sets = [dataset for dataset in data.validation if dataset.data_path == error.where]
        names = ", ".join(str(dataset.name) for dataset in sets)
        place = f"split: {error.choice} to the validation set {names}"
        return f"{place}, or data.val_split=... for all of them"

    return choose


def dataset_config(
    data: str | None,
    dataset_name: str | None,
    split: str | None,
    options: Sequence[str] | None = None,
) -> DatasetConfig:
    """The configuration of a file, folder or hub name `data`, or of a dataset that brings its own.

    `options`: further keys as KEY=VALUE. Raises `ConfigError` where neither is given and for
    options that are not those of a dataset.
    """
    pairs: dict[str, str] = {}
    for text in options or ():
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(
                "the option is no KEY=VALUE",
                where="--data-option",
                got=text,
                need="as prompt_key=question",
            )
        pairs[key] = value
    # Text as it is: a column may be called yes.
    keys: Any = {key: value for key, value in pairs.items() if "." not in key}
    # A key with a dot is one of a section within the data's.
    nested = [f"{key}={value}" for key, value in pairs.items() if "." in key]
    keys |= OmegaConf.to_container(OmegaConf.from_dotlist(nested))
    if dataset_name is None and data is None:
        raise ConfigError(
            "there are no comparisons",
            where="--data",
            need="--data FILE, or --dataset-name NAME",
        )
    values = {"dataset_name": dataset_name or "auto", "data_path": data, "split": split, **keys}
    return load_section(DatasetConfig, values, where="--data, --data-option")
