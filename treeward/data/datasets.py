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

The config may also name a class by its dotted path, which then needs no base class: see `treeward.data.registry`.

The `prompt_file` and `system_prompt_file` of a config (see `treeward.data.prompt_files`) apply to the stream of any
dataset, not to `formatted_ds`, which is the data as it lies.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import random
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from typing import Any, ClassVar, TypeVar

from treeward.config.data import DatasetConfig
from treeward.data.preference import (
    Message,
    Preference,
    from_binary_row,
    from_helpsteer3_row,
    from_transcripts,
    last_text,
    preference_from_dict,
    preference_to_dict,
)
from treeward.data.prompt_files import PromptFiles
from treeward.data.registry import Registry, construct, rows_of, task_name_of
from treeward.data.sources import Row, fingerprint, read_rows
from treeward.data.synthetic.bundled import bundled_path
from treeward.errors import ConfigError, DataError

__all__ = [
    "BinaryPreferenceDataset",
    "Bundled",
    "HHTranscripts",
    "HelpSteer3",
    "HelpSteer3Dataset",
    "PreferenceDataset",
    "PreferenceStream",
    "RowDataset",
    "TaskDataSpec",
    "Tulu3Preference",
    "Tulu3PreferenceDataset",
    "open_dataset",
    "register_dataset",
]

logger = logging.getLogger(__name__)

_DATASETS = Registry("datasets", example="my_module.MyDataset")
_Class = TypeVar("_Class", bound=type[Any])

_WINDOW = 4096
"""Comparisons whose best completions are at hand: data of any size can be streamed."""

_TRIES = 16
"""Draws of a completion of another prompt; data in which few prompts differ may have none."""


@dataclass(frozen=True)
class TaskDataSpec:
    """The name of a task and the files that its conversations are completed with."""

    task_name: str
    prompt_file: str | None = None
    system_prompt_file: str | None = None


class PreferenceStream:
    """Preferences with the places they come from; iterating again starts over.

    `name`: for messages: the path and split, or the class. `fingerprint` changes when the content does, or the way it
    is parsed.
    """

    def __init__(
        self, name: str, read: Callable[[], Iterable[tuple[Preference, str]]], fingerprint: Callable[[], str]
    ) -> None:
        self.name, self._read, self._fingerprint = name, read, fingerprint

    @cached_property
    def fingerprint(self) -> str:
        return self._fingerprint()

    def __iter__(self) -> Iterator[tuple[Preference, str]]:
        return iter(self._read())


def register_dataset(name: str, *aliases: str) -> Callable[[_Class], _Class]:
    """Class decorator: `dataset_name: <name>` (or an alias) in a config means this class."""
    return _DATASETS.register(name, *aliases)


def open_dataset(config: DatasetConfig) -> PreferenceStream:
    """The stream of one training or validation set.

    Raises `ConfigError` for an unknown name (with the nearest one), a class that cannot be imported or constructed, or
    one without the attributes of a dataset; `DataError` for data that is not there. Rows are checked as they come.
    """
    dataset = construct(_DATASETS.find(config.dataset_name), config)
    if isinstance(dataset, RowDataset):
        # Only validation sets have a name; without path and split, the dataset's own validation split is meant.
        is_own_validation = config.name is not None and config.data_path is None and config.split is None
        stream = dataset.stream("validation" if is_own_validation else "train")
    else:
        stream = _stream_of_object(dataset, config)
    if not config.non_contextual_answer:
        return stream
    digest = f"{stream.fingerprint}+non-contextual 1"
    return PreferenceStream(stream.name, lambda: _with_non_contextual(stream), lambda: digest)


def _stream_of_object(dataset: Any, config: DatasetConfig) -> PreferenceStream:
    """The rows in the rank format of an object of a class by dotted path."""
    rows, name = rows_of(dataset, config)
    task_name, files = task_name_of(dataset, config.dataset_name), PromptFiles.of_object(dataset, config)

    def parse() -> Iterator[tuple[Preference, str]]:
        where = ""
        for number, row in enumerate(rows, 1):
            where = f"{name}:row {number}"
            yield preference_from_dict(row, where=where, task_name=task_name), where
        if not where:
            raise DataError("there are no rows", where=name, got="an empty dataset", need="at least one row")

    def digest() -> str:  # nobody knows how the class came by its rows, so the rows themselves are compared
        parsed = (preference_to_dict(preference) for preference, _ in parse())
        return _digest(repr(files), *(json.dumps(row, sort_keys=True, default=repr) for row in parsed))

    return PreferenceStream(name, lambda: _completed(parse(), files, name), digest)


def _completed(
    preferences: Iterable[tuple[Preference, str]], files: PromptFiles, name: str
) -> Iterator[tuple[Preference, str]]:
    """Apply the prompt files, and count at the end the completions whose last message is not the assistant's."""
    total, others, first = 0, 0, ""
    for preference, where in preferences:
        total += 1
        if any(completion.messages[-1]["role"] != "assistant" for completion in preference.completions):
            others, first = others + 1, first or where
        yield replace(preference, context=files.complete(preference.context, where)), where
    if others:
        logger.warning(
            "%s: in %d of %d comparisons a completion does not end with an assistant message (the first is %s); "
            "its score is read after that other message",
            *(name, others, total, first),
        )


def _digest(*parts: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(json.dumps(part).encode())
    return digest.hexdigest()


# --- completions of other prompts ------------------------------------------------------------------------------------


def _with_non_contextual(stream: PreferenceStream) -> Iterator[tuple[Preference, str]]:
    """The preferences, each with a good completion of another prompt (`Preference.non_contextual`), if one is found.

    A reward model that has only seen completions of the prompt never had to learn that a completion must be one: it may
    like the length, politeness or format of a text whatever the question is, and a policy finds that out. A good
    completion of another prompt, ranked below all of the prompt's own, prevents it (Liu et al. 2024, "RRM", arXiv
    2409.13156). On a prefix tree it costs its own tokens and no prompt's.

    It is a best completion of the last 4096 comparisons (for the first ones, of the first 4096). Prompts are the same
    if their last user messages are, letter case and punctuation aside. Roles must fit. The same data gives the same
    draw. Whether a comparison is kept depends on its own completions alone: see `encoding`.
    """
    rows = iter(stream)
    head = list(islice(rows, _WINDOW))
    window = deque((preference for preference, _ in head), maxlen=_WINDOW)
    generator = random.Random(0)
    for number, (preference, where) in enumerate(chain(head, rows)):
        if number >= _WINDOW:
            window.append(preference)
        yield replace(preference, non_contextual=_drawn(preference, window, generator)), where


def _drawn(preference: Preference, window: deque[Preference], generator: random.Random) -> tuple[Message, ...] | None:
    own = [completion.messages for completion in preference.completions]
    for _ in range(_TRIES):
        other = window[generator.randrange(len(window))]
        best = min(other.completions, key=lambda completion: completion.rank).messages
        if best not in own and _question(other) != _question(preference) and _roles(other) == _roles(preference):
            return best
    return None


def _question(preference: Preference) -> str:
    """The words of the last user message, or of the completion's first message where it brings the question itself."""
    users = [message for message in preference.context if message["role"] == "user"]
    text = last_text(users[-1:] or preference.completions[0].messages[:1])
    return " ".join(re.findall(r"\w+", text.lower()))


def _roles(preference: Preference) -> tuple[str | None, list[str]]:
    """The role that a completion follows, and those of its own messages."""
    before = preference.context[-1]["role"] if preference.context else None
    return before, [message["role"] for message in preference.completions[0].messages]


# --- datasets whose rows come from sources.py ------------------------------------------------------------------------


class RowDataset:
    """A dataset that parses the rows of a file, folder or hub dataset: `to_preference` is all that a subclass needs.

    `train_data_path` (or `data_path`) and `val_data_path` are paths for `sources.read_rows`, with their splits; without
    a path the dataset's own `hub_path` is read. `formatted_ds` maps "train", and "validation" if there is such data, to
    rows in the rank format; they are read when first used.
    """

    hub_path: ClassVar[str | None] = None
    hub_subset: ClassVar[str | None] = None
    hub_splits: ClassVar[Mapping[str, str]] = {"train": "train"}
    """The splits on the hub for "train" and "validation", which are read without a path."""
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
        self._files = PromptFiles.load(prompt_file, system_prompt_file)
        self._sources: dict[str, tuple[str, str | None, str | None]] = {}
        if path is not None:
            self._sources["train"] = (path, own_split, subset)
        elif self.hub_path is not None:
            for role, hub_split in self.hub_splits.items():
                chosen = own_split if role == "train" else val_split
                self._sources[role] = (self.hub_path, chosen or hub_split, subset or self.hub_subset)
        else:
            summary, need = f"{type(self).__name__} needs a path", "a file, a folder or a hub name"
            raise ConfigError(summary, field="data_path", need=need)
        if val_data_path is not None or (val_split is not None and path is not None):
            self._sources["validation"] = (val_data_path or str(path), val_split, subset)

    def to_preference(self, row: Row) -> Preference:
        """Parse one row; raises `DataError` naming `row.where`."""
        raise NotImplementedError

    @property
    def task_name(self) -> str:
        return self.task_spec.task_name

    @cached_property
    def formatted_ds(self) -> dict[str, list[dict[str, Any]]]:
        """Rows in the rank format, by "train" and "validation"."""
        return {role: [preference_to_dict(each) for each, _ in self._parse(role)] for role in self._sources}

    @property
    def dataset(self) -> list[dict[str, Any]]:
        return self.formatted_ds["train"]

    def stream(self, role: str) -> PreferenceStream:
        """The preferences of "train" or "validation"."""
        if role not in self._sources:
            summary, got = (
                f"{type(self).__name__} has no data of its own for {role}",
                f"only {', '.join(self._sources)}",
            )
            raise ConfigError(summary, field="split", got=got, need="data_path, or the split to use")
        path, split, subset = self._sources[role]
        name = path if split is None else f"{path}[{split}]"
        cls = type(self)

        def digest() -> str:
            return _digest(
                fingerprint(path, split=split, subset=subset),
                f"{cls.__module__}.{cls.__qualname__} {cls.parsing_version}",
                _source_text(cls),
                json.dumps(self.settings(), sort_keys=True),
                self.task_name,
                repr(self._files),
            )

        return PreferenceStream(name, lambda: _completed(self._parse(role), self._files, name), digest)

    def settings(self) -> Mapping[str, Any]:
        """Other settings that decide how a row is parsed; part of the fingerprint."""
        return {}

    def _parse(self, role: str) -> Iterator[tuple[Preference, str]]:
        path, split, subset = self._sources[role]
        return ((self.to_preference(row), row.where) for row in read_rows(path, split=split, subset=subset))


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
        prompt_file: str | None = None,
        system_prompt_file: str | None = None,
        **source: str | None,
    ) -> None:
        files = {"prompt_file": prompt_file, "system_prompt_file": system_prompt_file}
        super().__init__(train_data_path, val_data_path, train_split, val_split, **source, **files)
        self._keys = {"prompt_key": prompt_key, "chosen_key": chosen_key, "rejected_key": rejected_key}

    def to_preference(self, row: Row) -> Preference:
        return from_binary_row(row.values, row.where, task_name=self.task_name, **self._keys)

    def settings(self) -> Mapping[str, Any]:
        return self._keys


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

    The true quality of its completions is known: `treeward.data.synthetic.gold_quality`.
    """

    def __init__(self, split: str = "train", *, prompt_file: str | None = None, system_prompt_file: str | None = None):
        super().__init__(str(bundled_path(split)), prompt_file=prompt_file, system_prompt_file=system_prompt_file)


HelpSteer3Dataset = HelpSteer3
Tulu3PreferenceDataset = Tulu3Preference


def _either(first: str | None, second: str | None, first_name: str, second_name: str) -> str | None:
    if first is not None and second is not None and first != second:
        summary, got = f"{first_name} and {second_name} contradict each other", f"{first!r} and {second!r}"
        raise ConfigError(summary, field=first_name, got=got, need="one of the two")
    return first if first is not None else second


def _source_text(cls: type[Any]) -> str:
    """The source of a class outside this package: its author need not remember to raise `parsing_version`."""
    if cls.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return ""
    try:
        return inspect.getsource(inspect.getmodule(cls) or cls)
    except (OSError, TypeError):
        return ""
