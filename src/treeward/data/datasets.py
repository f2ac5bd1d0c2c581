"""Named datasets of comparisons: from the `data` section of a config to a stream of preferences.

    stream = open_dataset(DatasetConfig(data_path="train.jsonl"))   # dataset_name: auto, recognised by a row's keys
    for preference, where in stream:              # restartable: each loop reads the data again
        ...

A dataset is a `RowDataset` whose `to_preference` parses a row, registered by `register_dataset`; it may bring its own
data (`hub_path`). The config may also name a class by its dotted path: see `treeward.data.registry`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar, TypeVar

from treeward.config.data import DatasetConfig
from treeward.data.bundled import bundled_path
from treeward.data.columns import EVERY_CONVERSATION, prompt_column, unread_columns, with_named_prompt
from treeward.data.conversation import parse_json_list
from treeward.data.formats import recognise
from treeward.data.preference import (
    Preference,
    check_prompted,
    completions_column,
    from_binary_row,
    from_helpsteer3_row,
    from_transcripts,
    grades_of,
    preference_from_dict,
    required,
    turns_of,
)
from treeward.data.registry import ObjectRows, Registry
from treeward.data.sources import Row, RowSource, raised, read_rows
from treeward.data.winners import WINNER_COLUMNS, from_winner_row
from treeward.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

_DATASETS = Registry("datasets", example="my_module.MyDataset")
_Class = TypeVar("_Class", bound=type[Any])

_ROWS_LOOKED_AT = 20  # for columns that are not read


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
    dataset.name_unread_columns()
    if config.part is not None:
        dataset.name += ", held out" if config.part == "validation" else ", not held out"
    return dataset


def recognised(config: DatasetConfig, *, skip_broken: bool = False) -> DatasetConfig:
    """The configuration with `auto` replaced by the format of the named keys, or of the first row's keys.
    `skip_broken`: skip invalid rows, unless all are."""
    if config.dataset_name != "auto":
        return config
    if (config.chosen_key, config.rejected_key) != ("chosen", "rejected"):
        return config.model_copy(update={"dataset_name": "BinaryPreferenceDataset"})
    errors: list[DataError] = []
    broken = errors.append if skip_broken else raised
    try:
        for row in read_rows(str(config.data_path), split=config.split, subset=config.subset, broken=broken):
            try:
                values = with_named_prompt(row.values, config.prompt_key, row.where, required=False)
                name = _format_with_rating(row) if config.rating_key else recognise(values, row.where)
            except DataError as error:
                broken(error)
                continue
            logger.info("%s: read as %s", config.data_path, name)
            return config.model_copy(update={"dataset_name": name})
    except DataError as error:
        raise errors[0] if errors else error from None
    raise errors[0]


def _format_with_rating(row: Row) -> str:
    """The format of a row whose rating has a column of its own, or is one of each completion."""
    if completions_column(row.values) is not None:
        return "PreferenceDataset"
    if any(row.values.get(name) is not None for name in GradedDataset.completion_columns):
        return "GradedDataset"
    need = f"completions with a rating each, or one of {', '.join(GradedDataset.completion_columns)} with its rating"
    raise DataError("the row has no completion to rate", where=row.where, got=sorted(row.values), need=need)


class RowDataset(RowSource):
    """A restartable stream of preferences with their places. A subclass defines `to_preference`.

    `columns`: those that it reads, besides the prompt and the columns of every conversation; None if unknown.
    `needs_prompt_key`: whether a row must have the column that `prompt_key` names.
    """

    columns: ClassVar[tuple[str, ...] | None] = None
    needs_prompt_key: ClassVar[bool] = False

    def to_preference(self, row: Row) -> Preference | None:
        """Parse one row; None for a row without a comparison. Raises `DataError` naming `row.where`."""
        raise NotImplementedError

    left_out: Sequence[str] = ()
    """The places of the completions that the last pass has left out for a fault of the published data."""
    left_out_because: ClassVar[str] = ""
    """The fault of the completions in `left_out`, for a sentence: "2 completions have ..."."""
    _has_told = False

    @property
    def task_name(self) -> str:
        return type(self).__name__

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the content and of its parsing.

        For a class outside this package, a digest of the comparisons that it gives. Its code cannot tell: there is no
        source in a notebook, and helpers of other modules change too.
        """
        cls, config = type(self), self.config
        if not cls.__module__.startswith("treeward."):
            digest = hashlib.blake2b(digest_size=16)
            for preference, _ in self:
                # The file may move; an object without a text of its own is new in every process, and nothing is reused.
                digest.update(repr(replace(preference, where=None)).encode("utf-8", "replace"))
            return digest.hexdigest()
        parts = [
            *(self.content(), cls.__module__, cls.__qualname__, self.task_name, repr(self.files)),
            *(config.prompt_key, config.chosen_key, config.rejected_key, config.rating_key, config.kwargs),
            *config.attributes,
            *((config.split_validation_size, config.part, config.seed) if config.split_validation_size else ()),
        ]
        return hashlib.blake2b(json.dumps(parts, default=repr).encode(), digest_size=16).hexdigest()

    def rows(self) -> Iterator[Row]:
        """The rows, with the prompt of the named column alone."""
        column, required = self.config.prompt_key, self.needs_prompt_key
        for row in super().rows():
            try:
                values = with_named_prompt(row.values, column, row.where, required=required)
            except DataError as error:
                self.broken(error)
                continue
            yield Row(dict(values), row.where)

    def name_unread_columns(self) -> None:
        """Log one line with the columns of the first rows that hold text, a list or an object and are not read."""
        if self.columns is None:
            return
        config = self.config
        read = {*self.columns, *EVERY_CONVERSATION, *config.attributes}
        if config.rating_key is not None:
            read.add(config.rating_key)
        unread: dict[str, None] = {}
        for row in itertools.islice(self._raw_rows(), _ROWS_LOOKED_AT):
            try:
                prompt = config.prompt_key or prompt_column(row.values, row.where)
            except DataError:
                continue  # an invalid row, whose error comes when the data is read
            columns_read = read if prompt is None else read | {prompt}
            unread |= dict.fromkeys(unread_columns(row.values, columns_read))
        if unread:
            logger.info("%s: these columns are not read: %s", self.name, ", ".join(unread))

    def _raw_rows(self) -> Iterator[Row]:
        """The readable rows of the file."""
        return read_rows(self.path, split=self.split, subset=self.subset, broken=lambda error: None)

    def __iter__(self) -> Iterator[tuple[Preference, str]]:
        total, alone = 0, 0
        is_prompted: bool | None = None
        self.left_out = list[str]()
        for total, row in enumerate(self.rows(), 1):  # noqa: B007
            try:
                preference = self.to_preference(row)
                if preference is None:
                    alone += 1
                    continue
                messages = (*preference.context, *preference.completions[0].messages)
                if is_prompted is None and not check_prompted(messages, None, row.where):
                    got = ", ".join(map(str, row.values))
                    logger.warning("%s: the rows have no prompt (columns: %s).", self.name, got)
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
        if self.left_out and not self._has_told:
            self._has_told = True  # data may be read several times: for a tokenizer, to encode, to look for overlap
            num_left_out = len(self.left_out)
            logger.warning("%s: %d completions %s: left out", self.name, num_left_out, self.left_out_because)


@register_dataset("PreferenceDataset")
class PreferenceDataset(RowDataset):
    """Rows of a prompt and `completions` with ranks or scores, optionally `margin` and `task_name`."""

    columns: ClassVar[tuple[str, ...] | None] = ("completions", "responses", "scores")

    def to_preference(self, row: Row) -> Preference | None:
        return preference_from_dict(
            row.values,
            where=row.where,
            task_name=self.task_name,
            attributes=self.config.attributes,
            rating_key=self.rating_key,
        )

    @property
    def rating_key(self) -> str | None:
        """The key of each completion's rating; None for the usual names."""
        key: str | None = self.config.rating_key
        return key


@register_dataset("BinaryPreferenceDataset")
class BinaryPreferenceDataset(RowDataset):
    """Rows of a prompt, a chosen and a rejected completion, under keys that may be named; see `from_binary_row`."""

    needs_prompt_key = True

    def __init__(self, config: DatasetConfig) -> None:
        super().__init__(config)
        self.columns = (config.chosen_key, config.rejected_key)  # type: ignore[misc]

    def to_preference(self, row: Row) -> Preference:
        keys = {key: getattr(self.config, key) for key in ("chosen_key", "rejected_key")}
        return from_binary_row(row.values, row.where, task_name=self.task_name, **keys)


@register_dataset("HelpSteer3", "HelpSteer3Dataset")
class HelpSteer3(RowDataset):
    """nvidia/HelpSteer3, or a copy of it or of HelpSteer2's preferences: two responses and a grade from -3 to 3."""

    hub_path, hub_subset = "nvidia/HelpSteer3", "preference"
    columns = ("context", "prompt", "response1", "response2", "response_1", "response_2", "overall_preference")

    def to_preference(self, row: Row) -> Preference:
        return from_helpsteer3_row(row.values, row.where, task_name=self.task_name)


class _PromptsOfAnyLength(PreferenceDataset):
    """Rows of which some have too few completions to compare: they are left out."""

    def to_preference(self, row: Row) -> Preference | None:
        fewest, completions = 1 if self.config.attributes else 2, row.values.get("completions")
        return None if isinstance(completions, list) and len(completions) < fewest else super().to_preference(row)


@register_dataset("UltraFeedback")
class UltraFeedback(_PromptsOfAnyLength):
    """openbmb/UltraFeedback, or a copy of it: `completions` of an `instruction`, ranked by `overall_score`.

    About 2,000 completions have an `overall_score` of 10 where the annotator gave 1, as its authors have confirmed
    (https://github.com/OpenBMB/UltraFeedback/issues/8). The `fine-grained_score` of such a completion is low. It is
    left out, because its true grade is not in the data.
    """

    hub_path = "openbmb/UltraFeedback"
    left_out_because = "have an overall_score of 10 beside a fine-grained_score of 2 or less, a mistyped 1"

    def to_preference(self, row: Row) -> Preference | None:
        values = row.values
        completions = parse_json_list(values.get("completions"), "completions", row.where)
        if isinstance(completions, list):
            sound = [completion for completion in completions if not _is_mistyped(completion)]
            num_mistyped = len(completions) - len(sound)
            if num_mistyped:
                self.left_out = [*self.left_out, *[row.where] * num_mistyped]
            values = {**values, "completions": sound}
        return super().to_preference(Row(values, row.where))


def _is_mistyped(completion: Any) -> bool:
    """Whether the `overall_score` of 10 of a completion of UltraFeedback contradicts its other grades."""
    if not isinstance(completion, dict):
        return False
    overall = completion.get("overall_score")
    fine_grained = completion.get("fine-grained_score")
    return overall == 10 and isinstance(fine_grained, int | float) and fine_grained <= 2


@register_dataset("GradedDataset")
class GradedDataset(_PromptsOfAnyLength):
    """Rows of a prompt, a `response`, `completion` or `answer`, and its grades; `score`, or the column `rating_key`,
    ranks the completions of a prompt. Rows of one prompt follow each other."""

    completion_columns: ClassVar[tuple[str, ...]] = ("completion", "response", "answer")
    columns = completion_columns
    needs_prompt_key = True
    score_key = "score"

    @property
    def rating_key(self) -> str | None:
        return None  # `rows` has made it the score

    def rows(self) -> Iterator[Row]:
        """One row per prompt, at the place of its first response; warns about prompts that come back later."""
        seen, again = set[str](), 0
        for prompt, group in groupby(self._responses(), lambda response: response[0]):
            responses = list(group)
            key = json.dumps(prompt, sort_keys=True, default=repr)
            again += key in seen
            seen.add(key)
            completions = [completion for _, completion, _ in responses]
            yield Row({**prompt, "completions": completions}, responses[0][2])
        if again:
            logger.warning(
                "%s: %d times a prompt comes back after rows of others. Only rows that follow each other are compared: "
                "sort the file by its prompt.",
                self.name,
                again,
            )

    def _responses(self) -> Iterator[tuple[dict[str, Any], dict[str, Any], str]]:
        """The columns of each row's prompt, its completion, and its place."""
        score_key = self.config.rating_key or self.score_key
        need = f"a row of prompt, response and {score_key}"
        for row in super().rows():
            values, where = row.values, row.where
            text_key = next((name for name in self.completion_columns if values.get(name) is not None), "response")
            try:
                column = prompt_column(values, where) or "prompt"
                prompt = {name: values[name] for name in EVERY_CONVERSATION if values.get(name) is not None}
                prompt["prompt"] = turns_of(required(values, column, where, need))
                response, score = required(values, text_key, where, need), values.get(score_key)
                if not self.config.attributes:
                    required(values, score_key, where, need)
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
    columns = ("prompt", "chosen", "rejected")

    def to_preference(self, row: Row) -> Preference:
        # The prompt's column repeats a part of the conversations.
        values = {**row.values, "prompt": None}
        return from_binary_row(values, row.where, task_name=self.task_name)


@register_dataset("HHTranscripts", "hh-rlhf")
class HHTranscripts(RowDataset):
    """Anthropic/hh-rlhf, or data like it: transcripts of Human and Assistant; see `preference.parse_transcript`."""

    hub_path = "Anthropic/hh-rlhf"
    columns = ("chosen", "rejected")

    def to_preference(self, row: Row) -> Preference:
        return from_transcripts(row.values, row.where, task_name=self.task_name)


@register_dataset("WinnerDataset")
class WinnerDataset(RowDataset):
    """Rows of two completions, or two conversations, and the name of the better one; see `winners`."""

    needs_prompt_key = True
    columns = (*{column for columns in WINNER_COLUMNS for column in columns}, "model_a", "model_b")

    def to_preference(self, row: Row) -> Preference:
        return from_winner_row(row.values, row.where, task_name=self.task_name)


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

    columns = None

    @property
    def task_name(self) -> str:
        name = getattr(self.spec, "task_name", None) or getattr(self.dataset, "task_name", None)
        if isinstance(name, str):
            return name
        dataset, need = self.config.dataset_name, 'task_spec = TaskDataSpec(task_name="..."), or an attribute task_name'
        raise ConfigError(f"{dataset} has no task name", field="dataset_name", got=name, need=need)
