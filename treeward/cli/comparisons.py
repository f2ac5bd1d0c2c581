"""Which dataset reads a file of comparisons: said by its name, or told by the keys of its first row.

    config = dataset_config("held_out.jsonl", None, None, data_options(["prompt_key=question"]))

`--data-option prompt_key=question` reaches every key of `DatasetConfig`, with values as in an override of a run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, cast

import typer
from omegaconf import OmegaConf

from treeward.config.base import nearest_name
from treeward.config.data import DatasetConfig
from treeward.config.load import apply_override, load_section
from treeward.errors import ConfigError, DataError

__all__ = ["DataOptions", "advice_of_a_command", "data_options", "dataset_config"]

_FORMS = {
    "PreferenceDataset": {"completions"},
    "HelpSteer3": {"response1", "response2", "overall_preference"},
    "BinaryPreferenceDataset": {"prompt", "chosen", "rejected"},
}
"""The keys that tell the format of a file; `chosen` and `rejected` without a prompt are told by their values."""

_OF_LLMBAR = {"input", "output_1", "output_2", "label"}
_BINARY_KEYS = ("prompt_key", "chosen_key", "rejected_key")
_SAID_OTHERWISE = {"dataset_name": "--dataset-name", "data_path": "--data", "split": "--split"}
_OF_TRAINING = ("name", "weight")
_OPTIONS = tuple(key for key in DatasetConfig.model_fields if key not in _SAID_OTHERWISE and key not in _OF_TRAINING)
"""What `--data-option` takes: how the comparisons are read."""


DataOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--data-option",
        metavar="KEY=VALUE",
        help=f"How the comparisons are read, as prompt_key=question; of {', '.join(_OPTIONS)}. May be repeated.",
    ),
]


def data_options(given: Sequence[str]) -> dict[str, Any]:
    """The keys of `DatasetConfig` that `--data-option` gives, in order; the last of one key counts.

    Raises `ConfigError` for what is no KEY=VALUE, and for a key that there is not or that has an option of its own.
    """
    found: dict[str, Any] = {}
    for text in given:
        key, is_pair, value = text.partition("=")
        key = key.strip()
        root, _, inner = key.partition(".")
        if key in _SAID_OTHERWISE:
            fix = f"{_SAID_OTHERWISE[key]} {value}"
            raise ConfigError("this has an option of its own", where="--data-option", got=text, fix=fix)
        if not is_pair or not value or root not in _OPTIONS or (inner and root != "kwargs"):
            near = nearest_name(root, _OPTIONS)
            raise ConfigError(
                "this says nothing of how comparisons are read",
                where="--data-option",
                got=text,
                need=f"KEY=VALUE, of {', '.join(_OPTIONS)}",
                fix=f"did you mean {near}={value or '...'}?" if near else None,
            )
        if not inner and root != "kwargs":
            found[key] = value  # text as it is: a column may be called yes, or 1
            continue
        arguments = OmegaConf.create({"kwargs": found.get("kwargs", {})})
        apply_override(arguments, f"{key}={value}")
        found |= cast(dict[str, Any], OmegaConf.to_container(arguments))
    return found


@contextlib.contextmanager
def advice_of_a_command() -> Iterator[None]:
    """What an error about a row advises is said as this command takes it, not as a configuration of training does."""
    try:
        yield
    except DataError as error:
        advice = error.fix or ""
        keys = [key for key in ("dataset_name", *_BINARY_KEYS, "data.split", "add split") if key in advice]
        if not keys:
            raise
        if any(key in advice for key in _BINARY_KEYS):
            advice = "name the keys, as --data-option prompt_key=question; or the format, as --dataset-name HelpSteer3"
        else:
            advice = advice.replace("dataset_name: ", "--dataset-name ").replace("add split: ", "add --split ")
            if "BinaryPreferenceDataset" in advice:
                advice += ", and say which keys it reads: --data-option prompt_key=question"
        options = {"where": error.where, "field": error.field, "got": error.got, "need": error.need}
        given = {key: value for key, value in options.items() if value is not None}
        raise DataError(error.summary, **given, fix=advice) from error


def dataset_config(
    data: str | None, dataset_name: str | None, split: str | None, options: Mapping[str, Any] | None = None
) -> DatasetConfig:
    """The configuration of a file, folder or hub name `data`, or of a dataset that brings its own.

    `options`: further keys, as `data_options` gives them. Raises `ConfigError` where neither is given, for options that
    are not those of a dataset, and `DataError` for rows of no known format.
    """
    options = options or {}
    if dataset_name is None and any(key in options for key in _BINARY_KEYS):
        dataset_name = "BinaryPreferenceDataset"  # the only one that reads these keys
    if dataset_name is None:
        if data is None:
            raise ConfigError(
                "there are no comparisons",
                where="--data",
                got="neither --data nor --dataset-name",
                need="comparisons: a file, or the name of a dataset that brings its own",
            )
        from treeward.data.sources import read_rows

        with advice_of_a_command():
            first = next(read_rows(data, split=split, subset=options.get("subset")))  # or it raises
        dataset_name = _format_of(first.values, first.where)
    values = {"dataset_name": dataset_name, "data_path": data, "split": split, **options}
    return load_section(DatasetConfig, values, where="--data, --data-option")


def _format_of(values: Mapping[str, Any], where: str) -> str:
    """The registered dataset that reads rows such as this one."""
    keys = {key for key, value in values.items() if value is not None}
    for name, needed in _FORMS.items():
        if needed <= keys:
            return name
    if {"chosen", "rejected"} <= keys:  # whole conversations, as messages or as a transcript
        is_transcript = isinstance(values["chosen"], str) and not values["chosen"].lstrip().startswith("[")
        return "HHTranscripts" if is_transcript else "Tulu3Preference"
    if keys >= _OF_LLMBAR:
        raise DataError(
            "these are the rows of a suite, LLMBar",
            where=where,
            got=f"keys {sorted(map(str, values))}",
            need="comparisons",
            fix=f"treeward eval MODEL --suite llmbar={where.rpartition(':')[0] or 'FILE'}",
        )
    raise DataError(
        "the row is a comparison in no known format",
        where=where,
        got=f"keys {sorted(map(str, values))}",
        need="context and completions with ranks; or prompt, chosen and rejected; or chosen and rejected conversations",
        fix="name the keys, as --data-option prompt_key=question; or say which dataset reads it, as --dataset-name "
        "HelpSteer3",
    )
