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

The config may also name a class by its dotted path, which then needs no base class: see `treeward.data.registry`. The
`prompt_file` and `system_prompt_file` of a config apply to the stream of any dataset.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import random
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
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
from treeward.data.registry import Registry, RowSource, construct, rows_of
from treeward.data.sources import Row, fingerprint
from treeward.data.synthetic.bundled import bundled_path
from treeward.errors import ConfigError, DataError

__all__ = ["PreferenceStream", "RowDataset", "TaskDataSpec", "open_dataset", "register_dataset"]

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


@dataclass(frozen=True)
class PreferenceStream:
    """Preferences with the places they come from; iterating again starts over.

    `name`: for messages: the path and split, or the class. `fingerprint` changes when the content does, or the way it
    is parsed.
    """

    name: str
    read: Callable[[], Iterable[tuple[Preference, str]]]
    digest: Callable[[], str]

    @cached_property
    def fingerprint(self) -> str:
        return self.digest()

    def __iter__(self) -> Iterator[tuple[Preference, str]]:
        return iter(self.read())


def register_dataset(name: str, *aliases: str) -> Callable[[_Class], _Class]:
    """Class decorator: `dataset_name: <name>` (or an alias) in a config means this class."""
    return _DATASETS.register(name, *aliases)


def open_dataset(config: DatasetConfig) -> PreferenceStream:
    """The stream of one training or validation set.

    Raises `ConfigError` for an unknown name (with the nearest one), a class that cannot be imported or constructed, or
    one without the attributes of a dataset; `DataError` for data that is not there. Rows are checked as they come.
    """
    cls = _DATASETS.find(config.dataset_name)
    stream = cls(config).stream() if issubclass(cls, RowDataset) else _stream_of_object(construct(cls, config), config)
    if not config.non_contextual_answer:
        return stream
    digest = f"{stream.fingerprint}+non-contextual 1"
    return PreferenceStream(stream.name, lambda: _with_non_contextual(stream), lambda: digest)


# --- datasets of rows ------------------------------------------------------------------------------------------------


class RowDataset(RowSource):
    """A dataset that parses the rows of a file, folder or hub dataset: `to_preference` is all that a subclass needs."""

    parsing_version: ClassVar[int] = 1
    """Part of the fingerprint: raised when `to_preference` gives something else for the same row."""

    def to_preference(self, row: Row) -> Preference:
        """Parse one row; raises `DataError` naming `row.where`."""
        raise NotImplementedError

    @property
    def task_name(self) -> str:
        return type(self).__name__

    @property
    def task_spec(self) -> TaskDataSpec:
        return TaskDataSpec(self.task_name, self.config.prompt_file, self.config.system_prompt_file)

    @cached_property
    def formatted_ds(self) -> dict[str, list[dict[str, Any]]]:
        """The rows in the rank format, under the split's name."""
        return {self.split or "train": [preference_to_dict(each) for each, _ in self._parsed()]}

    def stream(self) -> PreferenceStream:
        """The preferences with their places."""
        files = PromptFiles.load(self.config.prompt_file, self.config.system_prompt_file)

        def digest() -> str:
            cls, config = type(self), self.config
            return _digest(
                fingerprint(self.path, split=self.split, subset=self.subset),
                f"{cls.__module__}.{cls.__qualname__} {cls.parsing_version}",
                _source_text(cls),
                json.dumps([config.prompt_key, config.chosen_key, config.rejected_key, config.kwargs], default=repr),
                self.task_name,
                repr(files),
            )

        return PreferenceStream(self.name, lambda: _completed(self._parsed(), files, self.name), digest)

    def _parsed(self) -> Iterator[tuple[Preference, str]]:
        return ((self.to_preference(row), row.where) for row in self.rows())


@register_dataset("PreferenceDataset")
class PreferenceDataset(RowDataset):
    """Rows in the rank format: `context`, `completions` with ranks, optionally scores, `margin` and `task_name`."""

    def to_preference(self, row: Row) -> Preference:
        return preference_from_dict(row.values, where=row.where, task_name=self.task_name)


@register_dataset("BinaryPreferenceDataset")
class BinaryPreferenceDataset(RowDataset):
    """Rows of a prompt, a chosen and a rejected completion, under keys that may be named; see `from_binary_row`."""

    def to_preference(self, row: Row) -> Preference:
        keys = {key: getattr(self.config, key) for key in ("prompt_key", "chosen_key", "rejected_key")}
        return from_binary_row(row.values, row.where, task_name=self.task_name, **keys)


@register_dataset("HelpSteer3", "HelpSteer3Dataset")
class HelpSteer3(RowDataset):
    """nvidia/HelpSteer3, or a copy of it: two responses and a grade from -3 to 3, where 0 is a tie."""

    hub_path, hub_subset = "nvidia/HelpSteer3", "preference"

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

    def to_preference(self, row: Row) -> Preference:
        return from_transcripts(row.values, row.where, task_name=self.task_name)


@register_dataset("Bundled")
class Bundled(PreferenceDataset):
    """The generated data that comes with treeward: splits `train`, `validation` and `length_controlled`.

    The true quality of its completions is known: `treeward.data.synthetic.gold_quality`.
    """

    hub_path = "Bundled"

    def __init__(self, config: DatasetConfig) -> None:
        super().__init__(config)
        if config.data_path is not None:
            raise ConfigError("the bundled data has its own path", field="data_path", got=config.data_path, need="none")
        self.path, self.split = str(bundled_path(self.split or "train")), None


# --- objects of classes by dotted path -------------------------------------------------------------------------------


def _stream_of_object(dataset: Any, config: DatasetConfig) -> PreferenceStream:
    rows, name = rows_of(dataset, config)
    spec = getattr(dataset, "task_spec", None)
    task_name = getattr(spec, "task_name", None) or getattr(dataset, "task_name", None)
    if not isinstance(task_name, str):
        need = 'task_spec = TaskDataSpec(task_name="..."), or an attribute task_name'
        raise ConfigError(f"{config.dataset_name} has no task name", field="dataset_name", got=task_name, need=need)
    files = PromptFiles.of_object(dataset, config)

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


def _source_text(cls: type[Any]) -> str:
    """The source of a class outside this package: its author need not remember to raise `parsing_version`."""
    if cls.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return ""
    try:
        return inspect.getsource(inspect.getmodule(cls) or cls)
    except (OSError, TypeError):
        return ""
