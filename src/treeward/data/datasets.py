"""Named datasets of comparisons: from the `data` section of a config to a stream of preferences.

    stream = open_dataset(DatasetConfig(data_path="train.jsonl"))   # dataset_name: auto, recognised by a row's keys
    for preference, where in stream:              # restartable: each loop reads the data again
        ...

A dataset is a `RowDataset` whose `to_preference` parses a row, registered by `register_dataset`; it may bring its own
data (`hub_path`). The config may also name a class by its dotted path: see `treeward.data.registry`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar, TypeVar

from treeward.config.data import DatasetConfig
from treeward.data.bundled import bundled_path
from treeward.data.formats import recognise
from treeward.data.preference import (
    Preference,
    check_prompted,
    from_binary_row,
    from_helpsteer3_row,
    from_transcripts,
    grades_of,
    preference_from_dict,
    prompt_key,
    required,
    turns_of,
)
from treeward.data.registry import ObjectRows, Registry
from treeward.data.sources import Row, RowSource, raised, read_rows
from treeward.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

_DATASETS = Registry("datasets", example="my_module.MyDataset")
_Class = TypeVar("_Class", bound=type[Any])

_NAMED_KEYS = ("prompt_key", "chosen_key", "rejected_key")


def register_dataset(name: str, *aliases: str) -> Callable[[_Class], _Class]:
    """Class decorator: `dataset_name: <name>` (or an alias) in a config means this class."""
    return _DATASETS.register(name, *aliases)


def open_dataset(config: DatasetConfig) -> RowDataset:
    """One training or validation set; its rows are checked while they are read. Raises `ConfigError` for an unknown
    name or an unusable class; `DataError` for missing data, and under "auto" for an unknown format."""
    if config.split_validation_size > 0 and config.part is None:
        need = "part: train, or part: validation for the rows held out"
        raise config.error("part split_validation_size", need)
    config = recognised(config)
    cls = _DATASETS.find(config.dataset_name)
    dataset: RowDataset = cls(config) if issubclass(cls, RowDataset) else _ObjectDataset(config, cls)
    if config.part is not None:
        dataset.name += ", held out" if config.part == "validation" else ", not held out"
    return dataset


def recognised(config: DatasetConfig, *, skip_broken: bool = False) -> DatasetConfig:
    """The configuration with `auto` replaced by the format of the named keys, or of the first row's keys.
    `skip_broken`: skip invalid rows, unless all are."""
    if config.dataset_name != "auto":
        return config
    if any(getattr(config, key) != type(config).model_fields[key].default for key in _NAMED_KEYS):
        return config.model_copy(update={"dataset_name": "BinaryPreferenceDataset"})
    errors: list[DataError] = []
    broken = errors.append if skip_broken else raised
    try:
        for row in read_rows(str(config.data_path), split=config.split, subset=config.subset, broken=broken):
            try:
                name = recognise(row.values, row.where)
                key = prompt_key(row.values, row.where) if name == "BinaryPreferenceDataset" else None
            except DataError as error:
                broken(error)
                continue
            logger.info("%s: read as %s", config.data_path, name)
            return config.model_copy(update={"dataset_name": name, "prompt_key": key or config.prompt_key})
    except DataError as error:
        raise errors[0] if errors else error from None
    raise errors[0]


class RowDataset(RowSource):
    """A restartable stream of preferences with their places. A subclass defines `to_preference`."""

    def to_preference(self, row: Row) -> Preference | None:
        """Parse one row; None for a row without a comparison. Raises `DataError` naming `row.where`."""
        raise NotImplementedError

    @property
    def task_name(self) -> str:
        return type(self).__name__

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the content and of its parsing."""
        cls, config = type(self), self.config
        parts = [
            *(self.content(), cls.__module__, cls.__qualname__, _source_of(cls), self.task_name, repr(self.files)),
            *(config.prompt_key, config.chosen_key, config.rejected_key, config.kwargs),
            *config.attributes,
            *((config.split_validation_size, config.part, config.seed) if config.split_validation_size else ()),
        ]
        return hashlib.blake2b(json.dumps(parts, default=repr).encode(), digest_size=16).hexdigest()

    def __iter__(self) -> Iterator[tuple[Preference, str]]:
        total, alone = 0, 0
        is_prompted: bool | None = None
        for total, row in enumerate(self.rows(), 1):  # noqa: B007
            try:
                preference = self.to_preference(row)
                if preference is None:
                    alone += 1
                    continue
                messages = (*preference.context, *preference.completions[0].messages)
                is_prompted = check_prompted(messages, is_prompted, row.where)
                if not self.is_of_part(preference.context or preference.completions[0].messages):
                    continue
                context = self.files.complete(preference.context, row.where)
            except DataError as error:
                self.broken(error)
                continue
            yield replace(preference, context=context), row.where
        if alone:
            logger.warning("%s: %d of %d prompts have fewer than two completions: left out", self.name, alone, total)


@register_dataset("PreferenceDataset")
class PreferenceDataset(RowDataset):
    """Rows of a prompt and `completions` with ranks or scores, optionally `margin` and `task_name`."""

    def to_preference(self, row: Row) -> Preference | None:
        attributes = self.config.attributes
        return preference_from_dict(row.values, where=row.where, task_name=self.task_name, attributes=attributes)


@register_dataset("BinaryPreferenceDataset")
class BinaryPreferenceDataset(RowDataset):
    """Rows of a prompt, a chosen and a rejected completion, under keys that may be named; see `from_binary_row`."""

    def to_preference(self, row: Row) -> Preference:
        keys = {key: getattr(self.config, key) for key in _NAMED_KEYS}
        return from_binary_row(row.values, row.where, task_name=self.task_name, **keys)


@register_dataset("HelpSteer3", "HelpSteer3Dataset")
class HelpSteer3(RowDataset):
    """nvidia/HelpSteer3, or a copy of it or of HelpSteer2's preferences: two responses and a grade from -3 to 3."""

    hub_path, hub_subset = "nvidia/HelpSteer3", "preference"

    def to_preference(self, row: Row) -> Preference:
        return from_helpsteer3_row(row.values, row.where, task_name=self.task_name)


@register_dataset("UltraFeedback")
class UltraFeedback(PreferenceDataset):
    """openbmb/UltraFeedback, or a copy of it: `completions` of an `instruction`, ranked by `overall_score`."""

    hub_path: ClassVar[str | None] = "openbmb/UltraFeedback"

    def to_preference(self, row: Row) -> Preference | None:
        fewest, completions = 1 if self.config.attributes else 2, row.values.get("completions")
        return None if isinstance(completions, list) and len(completions) < fewest else super().to_preference(row)


@register_dataset("GradedDataset")
class GradedDataset(UltraFeedback):
    """Rows of a prompt, a `response` or `completion`, and its grades; `score` ranks the completions of a prompt. Rows
    of one prompt follow each other."""

    hub_path: ClassVar[str | None] = None
    score_key = "score"

    def rows(self) -> Iterator[Row]:
        """One row per prompt, at the place of its first response; warns about prompts that come back later."""
        seen, again = set[int](), 0
        for prompt, group in groupby(self._responses(), lambda response: response[0]):
            responses, key = list(group), hash(str(prompt))
            again += key in seen
            seen.add(key)
            values = {"prompt": turns_of(prompt), "completions": [completion for _, completion, _ in responses]}
            yield Row(values, responses[0][2])
        if again:
            logger.warning(
                "%s: %d times a prompt comes back after rows of others. Only rows that follow each other are compared: "
                "sort the file by its prompt.",
                self.name,
                again,
            )

    def _responses(self) -> Iterator[tuple[Any, dict[str, Any], str]]:
        """The prompt of each row, its completion, and its place."""
        need = f"a row of prompt, response and {self.score_key}"
        for row in super().rows():
            values, where = row.values, row.where
            text_key = "completion" if values.get("completion") is not None else "response"
            try:
                prompt = required(values, prompt_key(values, where) or "prompt", where, need)
                response, score = required(values, text_key, where, need), values.get(self.score_key)
                if not self.config.attributes:
                    required(values, self.score_key, where, need)
                grades = grades_of(values, self.config.attributes, where)
            except DataError as error:
                self.broken(error)
                continue
            yield prompt, {**values, **grades, "response": response, "score": score}, where


@register_dataset("HelpSteer2")
class HelpSteer2(GradedDataset):
    """nvidia/HelpSteer2, or a copy of it: rows of one prompt follow each other, and `helpfulness` ranks them."""

    hub_path, score_key = "nvidia/HelpSteer2", "helpfulness"


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
    """The generated data that comes with treeward: splits `train`, `validation` and `length_controlled`. The true
    quality of its completions is known: examples/gold.py."""

    hub_path = "Bundled"

    def __init__(self, config: DatasetConfig) -> None:
        super().__init__(config)
        self.path, self.split = str(bundled_path(self.split or "train")), None
        self.name = self.path


class _ObjectDataset(ObjectRows, PreferenceDataset):
    """A dataset of a class by dotted path."""

    @property
    def task_name(self) -> str:
        name = getattr(self.spec, "task_name", None) or getattr(self.dataset, "task_name", None)
        if isinstance(name, str):
            return name
        dataset, need = self.config.dataset_name, 'task_spec = TaskDataSpec(task_name="..."), or an attribute task_name'
        raise ConfigError(f"{dataset} has no task name", field="dataset_name", got=name, need=need)


def _source_of(cls: type[Any]) -> str:
    """The source of a class outside this package, so that a change of its code changes the fingerprint."""
    if cls.__module__.startswith("treeward."):
        return ""
    try:
        return inspect.getsource(inspect.getmodule(cls) or cls)
    except (OSError, TypeError):
        return ""
