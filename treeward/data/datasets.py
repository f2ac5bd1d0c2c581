"""Named datasets: from the `data` section of a config to a stream of preferences.

    stream = open_dataset(DatasetConfig(dataset_name="BinaryPreferenceDataset", data_path="train.jsonl"))
    for preference, where in stream:              # restartable: each loop reads the data again
        ...

A dataset says how its rows are parsed, and may bring its own data:

    @register_dataset("MyPreferences")
    class MyPreferences(RowDataset):
        hub_path = "me/my-preferences"            # read when no data_path is given

        def to_preference(self, row: Row) -> Preference:
            return preference_from_dict(convert(row.values), where=row.where, task_name=self.task_name)

A class may also be named by its dotted path in the config, and then needs no base class: see `treeward.data.custom`.

The `prompt_file` and `system_prompt_file` of a config (see `treeward.data.prompt_files`) apply to the stream of any
dataset, not to `formatted_ds`, which is the data as it lies.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, overload

from treeward.config.data import DatasetConfig
from treeward.data.custom import construct, open_contract
from treeward.data.non_contextual import WithNonContextual
from treeward.data.preference import (
    Preference,
    from_binary_row,
    from_helpsteer3_row,
    from_transcripts,
    preference_from_dict,
    preference_to_dict,
)
from treeward.data.prompt_files import Prompts, completed
from treeward.data.registry import Registry
from treeward.data.sources import Row, fingerprint, read_rows
from treeward.data.synthetic.bundled import bundled_path
from treeward.errors import ConfigError

__all__ = [
    "BinaryPreferenceDataset",
    "Bundled",
    "HHTranscripts",
    "HelpSteer3",
    "HelpSteer3Dataset",
    "PreferenceDataset",
    "PreferenceStream",
    "RankRows",
    "RowDataset",
    "TaskDataSpec",
    "Tulu3Preference",
    "Tulu3PreferenceDataset",
    "open_dataset",
    "register_dataset",
]

_DATASETS = Registry("datasets", example="my_module.MyDataset")
_Class = TypeVar("_Class", bound=type[Any])


@dataclass(frozen=True)
class TaskDataSpec:
    """The name of a task and the files that its conversations are completed with."""

    task_name: str
    prompt_file: str | None = None
    system_prompt_file: str | None = None


class PreferenceStream(Protocol):
    """Preferences with the places they come from; iterating again starts over."""

    @property
    def name(self) -> str:
        """For messages: the path and split, or the class."""

    @property
    def fingerprint(self) -> str:
        """Changes when the content does, or what is made of it."""

    def __iter__(self) -> Iterator[tuple[Preference, str]]: ...


def register_dataset(name: str, *aliases: str) -> Callable[[_Class], _Class]:
    """Class decorator: `dataset_name: <name>` (or an alias) in a config means this class."""
    return _DATASETS.register(name, *aliases)


def open_dataset(config: DatasetConfig) -> PreferenceStream:
    """The stream of one training or validation set.

    Raises `ConfigError` for an unknown name (with the nearest one), a class that cannot be imported or constructed, or
    one that does not offer what a dataset must; `DataError` for data that is not there. Rows are checked as they come.
    """
    stream = _open(config)
    return WithNonContextual(stream) if config.non_contextual_answer else stream


def _open(config: DatasetConfig) -> PreferenceStream:
    dataset = construct(_DATASETS.find(config.dataset_name), config)
    if not isinstance(dataset, RowDataset):
        return open_contract(dataset, config)
    # Only validation sets have a name; without path and split, the dataset's own validation split is meant.
    is_own_validation = config.name is not None and config.data_path is None and config.split is None
    return dataset.stream("validation" if is_own_validation else "train")


# --- datasets whose rows come from sources.py ------------------------------------------------------------------------


class RowDataset:
    """A dataset that parses the rows of a file, folder or hub dataset: `to_preference` is all that a subclass needs.

    `train_data_path` (or `data_path`) and `val_data_path` are what `sources.read_rows` takes, with their splits;
    without a path the dataset's own `hub_path` is read. `formatted_ds` maps "train", and "validation" if there is such
    data, to rows in the rank format; they are read when first used.
    """

    hub_path: ClassVar[str | None] = None
    hub_subset: ClassVar[str | None] = None
    hub_splits: ClassVar[Mapping[str, str]] = {"train": "train"}
    """What is read without a path: "train" and "validation", each with its split on the hub."""
    parsing_version: ClassVar[int] = 1
    """Part of the fingerprint: raised when `to_preference` gives something else for the same row."""

    def __init__(
        self,
        train_data_path: str | None = None,
        val_data_path: str | None = None,
        train_split: str | None = None,
        val_split: str | None = None,
        *,
        data_path: str | None = None,
        split: str | None = None,
        subset: str | None = None,
        prompt_file: str | None = None,
        system_prompt_file: str | None = None,
    ) -> None:
        path = _either(train_data_path, data_path, "train_data_path", "data_path")
        own_split = _either(train_split, split, "train_split", "split")
        self.task_spec = TaskDataSpec(type(self).__name__, prompt_file, system_prompt_file)
        self._prompts = Prompts.load(prompt_file, system_prompt_file)
        self._sources: dict[str, tuple[str, str | None, str | None]] = {}
        if path is not None:
            self._sources["train"] = (path, own_split, subset)
        elif self.hub_path is not None:
            for role, hub_split in self.hub_splits.items():
                asked = own_split if role == "train" else val_split
                self._sources[role] = (self.hub_path, asked or hub_split, subset or self.hub_subset)
        else:
            raise ConfigError(
                f"{type(self).__name__} needs a path", field="data_path", need="a file, a folder or a hub name"
            )
        if val_data_path is not None or (val_split is not None and path is not None):
            self._sources["validation"] = (val_data_path or str(path), val_split, subset)

    def to_preference(self, row: Row) -> Preference:
        """Parse one row; raises `DataError` naming `row.where`."""
        raise NotImplementedError

    @property
    def task_name(self) -> str:
        return self.task_spec.task_name

    @cached_property
    def formatted_ds(self) -> dict[str, RankRows]:
        """Rows in the rank format, by "train" and "validation"; read lazily."""
        return {role: RankRows(_RowStream(self, source, Prompts())) for role, source in self._sources.items()}

    @property
    def dataset(self) -> RankRows:
        return self.formatted_ds["train"]

    def stream(self, role: str) -> PreferenceStream:
        """The preferences of "train" or "validation"."""
        if role not in self._sources:
            raise ConfigError(
                f"{type(self).__name__} has no data of its own for {role}",
                field="split",
                got=f"only {', '.join(self._sources)}",
                fix="give data_path, or the split to use",
            )
        return _RowStream(self, self._sources[role], self._prompts)

    def settings(self) -> Mapping[str, Any]:
        """What else decides how a row is parsed; part of the fingerprint."""
        return {}


class RankRows(Sequence[dict[str, Any]]):
    """The rows of a stream as dicts in the rank format. Iterating streams; the first index or `len` reads them all."""

    def __init__(self, stream: PreferenceStream) -> None:
        self._stream = stream

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        return [preference_to_dict(preference) for preference, _ in self._stream]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (preference_to_dict(preference) for preference, _ in self._stream)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        return self._rows[index]


class _RowStream:
    """The preferences of one source of a `RowDataset`."""

    def __init__(self, dataset: RowDataset, source: tuple[str, str | None, str | None], prompts: Prompts) -> None:
        self._dataset = dataset
        self._path, self._split, self._subset = source
        self._prompts = prompts
        self.name = f"{self._path}[{self._split}]" if self._split is not None else self._path

    @cached_property
    def fingerprint(self) -> str:
        cls = type(self._dataset)
        return _digest(
            fingerprint(self._path, split=self._split, subset=self._subset),
            f"{cls.__module__}.{cls.__qualname__} {cls.parsing_version}",
            _source_text(cls),
            json.dumps(self._dataset.settings(), sort_keys=True),
            self._dataset.task_name,
            repr(self._prompts),
        )

    def __iter__(self) -> Iterator[tuple[Preference, str]]:
        rows = read_rows(self._path, split=self._split, subset=self._subset)
        parsed = ((self._dataset.to_preference(row), row.where) for row in rows)
        return completed(parsed, self._prompts, self.name)


@register_dataset("PreferenceDataset")
class PreferenceDataset(RowDataset):
    """Rows in the rank format: `context`, `completions` with ranks, optionally scores, `margin` and `task_name`."""

    def to_preference(self, row: Row) -> Preference:
        return preference_from_dict(row.values, where=row.where, task_name=self.task_name)


@register_dataset("BinaryPreferenceDataset")
class BinaryPreferenceDataset(RowDataset):
    """Rows of a prompt, a chosen and a rejected completion, under keys that may be named; see `from_binary_row`."""

    def __init__(
        self,
        train_data_path: str | None = None,
        val_data_path: str | None = None,
        prompt_key: str = "prompt",
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
        train_split: str | None = None,
        val_split: str | None = None,
        *,
        data_path: str | None = None,
        split: str | None = None,
        subset: str | None = None,
        prompt_file: str | None = None,
        system_prompt_file: str | None = None,
    ) -> None:
        super().__init__(
            train_data_path,
            val_data_path,
            train_split,
            val_split,
            data_path=data_path,
            split=split,
            subset=subset,
            prompt_file=prompt_file,
            system_prompt_file=system_prompt_file,
        )
        self.prompt_key, self.chosen_key, self.rejected_key = prompt_key, chosen_key, rejected_key

    def to_preference(self, row: Row) -> Preference:
        return from_binary_row(
            row.values,
            row.where,
            prompt_key=self.prompt_key,
            chosen_key=self.chosen_key,
            rejected_key=self.rejected_key,
            task_name=self.task_name,
        )

    def settings(self) -> Mapping[str, Any]:
        return {"prompt": self.prompt_key, "chosen": self.chosen_key, "rejected": self.rejected_key}


@register_dataset("HelpSteer3", "HelpSteer3Dataset")
class HelpSteer3(RowDataset):
    """nvidia/HelpSteer3, or a copy of it: two responses and a grade from -3 to 3, where 0 is a tie."""

    hub_path = "nvidia/HelpSteer3"
    hub_subset = "preference"
    hub_splits: ClassVar[Mapping[str, str]] = {"train": "train", "validation": "validation"}

    def to_preference(self, row: Row) -> Preference:
        return from_helpsteer3_row(row.values, row.where, task_name=self.task_name)


@register_dataset("Tulu3Preference", "Tulu3PreferenceDataset")
class Tulu3Preference(RowDataset):
    """The preference mixture of Tulu 3 8B, or a copy of it: chosen and rejected are whole conversations."""

    hub_path = "allenai/llama-3.1-tulu-3-8b-preference-mixture"

    def to_preference(self, row: Row) -> Preference:
        return from_binary_row(row.values, row.where, prompt_key=None, task_name=self.task_name)


@register_dataset("HHTranscripts", "hh-rlhf")
class HHTranscripts(RowDataset):
    """Anthropic/hh-rlhf, or data like it: transcripts of Human and Assistant; see `preference.parse_transcript`."""

    hub_path = "Anthropic/hh-rlhf"
    hub_splits: ClassVar[Mapping[str, str]] = {"train": "train", "validation": "test"}

    def to_preference(self, row: Row) -> Preference:
        return from_transcripts(row.values, row.where, task_name=self.task_name)


@register_dataset("Bundled")
class Bundled(PreferenceDataset):
    """The generated data that comes with treeward: splits `train`, `validation` and `length_controlled`.

    Its answers' true quality is known: `treeward.data.synthetic.gold_quality`.
    """

    def __init__(self, split: str = "train", *, prompt_file: str | None = None, system_prompt_file: str | None = None):
        super().__init__(str(bundled_path(split)), prompt_file=prompt_file, system_prompt_file=system_prompt_file)


HelpSteer3Dataset = HelpSteer3
Tulu3PreferenceDataset = Tulu3Preference


def _either(first: str | None, second: str | None, first_name: str, second_name: str) -> str | None:
    if first is not None and second is not None and first != second:
        raise ConfigError(
            f"{first_name} and {second_name} contradict each other",
            field=first_name,
            got=f"{first!r} and {second!r}",
            need="one of the two",
        )
    return first if first is not None else second


def _digest(*parts: str) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _source_text(cls: type[Any]) -> str:
    """The source of a class outside this package: its author need not remember to raise `parsing_version`."""
    if cls.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return ""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return Path(file).read_text("utf-8") if file is not None and file.endswith(".py") else ""
