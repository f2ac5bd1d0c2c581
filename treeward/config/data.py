"""`DataConfig`: which comparisons to train on and which to validate on.

The form that everything else sees is two tuples of named sets:

    data:
      train:
        - {dataset_name: BinaryPreferenceDataset, data_path: train.jsonl, prompt_key: question}
      validation:
        - {data_path: plain.jsonl, name: plain}
        - {data_path: hard.jsonl, name: hard}

Two more forms are accepted and mean the same (see `treeward.config.data_forms`): the flat one, as `dataset_name`,
`train_data_path`, `val_data_path`, `val_data_paths: {name: path}`, `train_split`, `val_split`, and blocks with shared
values, as `train: {...}`, `validation: {...}`, `default: {...}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from treeward.config.base import Strict
from treeward.config.data_forms import FORM_KEYS, normalise_data
from treeward.errors import ConfigError

__all__ = ["DataConfig", "DatasetConfig", "check_longest_input", "check_sets"]

_NEEDS_A_PATH = ("PreferenceDataset", "BinaryPreferenceDataset")


class DatasetConfig(Strict):
    """One set of comparisons: its format, where it lies, and how to read it."""

    ignored_keys: ClassVar[Mapping[str, str]] = {
        "processor": "conversations are rendered by the model's own chat template",
        "env_name": "preference data is not scored by an environment",
    }

    dataset_name: str = "PreferenceDataset"
    """A registered format (`PreferenceDataset`, `BinaryPreferenceDataset`, `HelpSteer3`, `Tulu3Preference`,
    `Bundled`, ...) or the dotted path of a class, as `my.module.MyDataset`."""
    name: str | None = None
    """Name of a validation set: its metrics are `validation-<name>/...`. The only unnamed one is called `default`."""
    data_path: str | None = None
    """A file (jsonl, json, csv, parquet, arrow, each also gzipped), a `save_to_disk` folder, or a hub name."""
    split: str | None = None
    """Split of a hub dataset or of a saved folder."""
    subset: str | None = None
    """Configuration name of a hub dataset."""
    weight: PositiveFloat = 1.0
    """Training only: passes over this set per epoch. 0.5 is a seeded half of its rows, 2.0 is every row twice."""
    non_contextual_answer: bool = False
    """Training only: each comparison that is kept also gets a good answer to another prompt, worse than all of its own,
    so that length, tone and format count for nothing in an answer to another question (Liu et al. 2024, arXiv
    2409.13156)."""
    prompt_key: str = "prompt"
    """`BinaryPreferenceDataset`: the key of the prompt (a string or messages)."""
    chosen_key: str = "chosen"
    """`BinaryPreferenceDataset`: the key of the better answer."""
    rejected_key: str = "rejected"
    """`BinaryPreferenceDataset`: the key of the worse answer."""
    prompt_file: str | None = None
    """A text file with one `{}`, in whose place the last user message is put."""
    system_prompt_file: str | None = None
    """A text file whose content becomes the system message of conversations that have none."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """More arguments for the constructor of a class that was given by its dotted path."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        return {key: value for key, value in raw.items() if value is not None or key not in cls.model_fields}

    @field_validator("name")
    @classmethod
    def _name_fits_a_metric(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[^\s/]+", name):
            raise ConfigError(
                "a validation set's name cannot be part of a metric's name",
                got=name,
                need="no spaces and no slashes: the metrics are called validation-<name>/loss, ...",
            )
        return name

    @model_validator(mode="after")
    def _has_a_path(self) -> DatasetConfig:
        if self.data_path is None and self.dataset_name in _NEEDS_A_PATH:
            raise ConfigError(
                f"{self.dataset_name} needs a data_path",
                got="no data_path",
                need="a file, a folder or a hub name",
                fix="give data_path, or the dataset_name of a set that brings its own data, as HelpSteer3",
            )
        return self


class DataConfig(Strict):
    """The training and validation sets, and what happens to rows that do not fit."""

    ignored_keys: ClassVar[Mapping[str, str]] = DatasetConfig.ignored_keys
    other_forms: ClassVar[tuple[str, ...]] = FORM_KEYS

    train: tuple[DatasetConfig, ...]
    """The training sets, mixed by their weights."""
    validation: tuple[DatasetConfig, ...] = ()
    """The validation sets; each is reported by its name, and `eval/rm/*` pools all of them."""
    shuffle: bool = True
    """A new order of the training comparisons in each epoch, determined by `rm.seed`."""
    max_input_seq_length: PositiveInt | None = None
    """Longest conversation, in tokens. None: `policy.max_total_sequence_length`."""
    num_workers: int | None = Field(default=None, ge=0)
    """Processes that tokenize; 0 and 1 mean this one. None: decided by the size of the data."""
    truncation: Literal["drop", "truncate_left", "error"] = "drop"
    """What happens to a comparison that is too long: left out and counted, its context cut from the left, an error."""
    ties: Literal["drop", "half", "error"] = "drop"
    """What happens to completions of equal rank: left out and counted, half a win for either side, an error."""
    cache_dir: str | None = None
    """Where tokenized data is kept. None: `.treeward_cache` in the working folder."""

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, raw: Any) -> Any:
        return normalise_data(raw, DatasetConfig.key_names()) if isinstance(raw, Mapping) else raw

    @model_validator(mode="after")
    def _check_sets(self) -> DataConfig:
        check_sets(self.train, self.validation, "every row of a validation set counts once")
        for i, dataset in enumerate(self.validation):
            if dataset.non_contextual_answer:
                raise ConfigError(
                    "a validation set has non_contextual_answer",
                    field=f"validation[{i}].non_contextual_answer",
                    got="true",
                    need="false: such answers are easy to tell, and would flatter the accuracy",
                    fix="give it to the training sets alone, as data.non_contextual_answer or in data.train",
                )
        return self


class _NamedSet(Protocol):
    @property
    def name(self) -> str | None: ...
    @property
    def weight(self) -> float: ...


def check_sets(train: Sequence[object], validation: Sequence[_NamedSet], why_no_weight: str) -> None:
    """Raise `ConfigError` where nothing is trained on, or validation sets cannot be told apart or have weights."""
    if not train:
        raise ConfigError(
            "there is no training data",
            field="train",
            got="an empty list",
            need="at least one set",
            fix="give data.train.data_path",
        )
    names = [dataset.name for dataset in validation]
    for i, dataset in enumerate(validation):
        if dataset.name in names[:i]:
            raise ConfigError(
                "two validation sets have the same name",
                field=f"validation[{i}].name",
                got=dataset.name,
                need="a different name for each: their metrics would overwrite each other",
            )
        if dataset.weight != 1.0:
            raise ConfigError(
                "a validation set has a weight",
                field=f"validation[{i}].weight",
                got=dataset.weight,
                need=f"no weight: {why_no_weight}",
            )


def check_longest_input(longest: int | None, limit: int, *, what_shares_it: str = "") -> None:
    """Raise `ConfigError` for a `data.max_input_seq_length` above `policy.max_total_sequence_length`, in tokens."""
    if longest is not None and longest > limit:
        raise ConfigError(
            "data.max_input_seq_length is larger than policy.max_total_sequence_length",
            field="data.max_input_seq_length",
            got=f"{longest} tokens, policy.max_total_sequence_length: {limit}",
            need=f"at most policy.max_total_sequence_length{what_shares_it}",
            fix="set data.max_input_seq_length=null to follow policy.max_total_sequence_length",
        )
