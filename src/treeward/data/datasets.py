"""Named datasets of comparisons: from the `data` section of a config to a stream of preferences.

    # dataset_name: auto, recognised by a row's keys
    stream = open_dataset(DatasetConfig(data_path="train.jsonl"))
    for preference, where in stream:  # restartable: each loop reads the data again
        ...

The names are those of `COMPARISON_SETS` in `config/dataset_table.py`. A set of your own is a
`RowDataset` whose `to_preference` parses a row, registered by `register_dataset`; it may bring its
own data (`hub_path`). The config may also name a class by its dotted path: see
`treeward.data.registry`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

from treeward.config.data import DatasetConfig
from treeward.config.dataset_table import COMPARISON_SETS, KnownDataset
from treeward.data.columns import (
    CONVERSATION_COLUMNS,
    EVERY_CONVERSATION,
    PROMPT_COLUMNS,
    prompt_column,
    unread_columns,
    with_named_prompt,
    with_own_prompt,
)
from treeward.data.formats import recognise
from treeward.data.preference import (
    Preference,
    check_prompted,
    completions_column,
    first_with_value,
    preference_from_dict,
)
from treeward.data.ratings import COMPLETION_COLUMNS
from treeward.data.registry import ObjectRows, Registry, arguments_of, function_of
from treeward.data.sources import Row, RowSource, raised, read_rows
from treeward.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

_DATASETS = Registry("datasets", COMPARISON_SETS, example="my_module.MyDataset")
_Class = TypeVar("_Class", bound=type[Any])

# For columns that are not read: the first row of a file may lack some of them.
_ROWS_LOOKED_AT = 20


def register_dataset(name: str, *aliases: str) -> Callable[[_Class], _Class]:
    """Class decorator: `dataset_name: <name>` (or an alias) in a config means this class."""
    return _DATASETS.register(name, *aliases)


def open_dataset(config: DatasetConfig) -> RowDataset:
    """One training or validation set; its rows are checked while they are read. Raises
    `ConfigError` for an unknown name or an unusable class; `DataError` for missing data, and under
    "auto" for an unknown format."""
    if config.split_validation_size > 0 and config.part is None:
        need = "part: train, or part: validation for the rows held out"
        raise config.error("part split_validation_size", need)
    config = recognised(config)  # a row's keys tell which class reads it
    entry = _DATASETS.find(config.dataset_name)
    dataset: RowDataset
    if isinstance(entry, KnownDataset):
        dataset = KnownRows(config, entry)
    elif issubclass(entry, RowDataset):
        dataset = entry(config)
    else:
        dataset = _ObjectDataset(config, entry)
    # Before a row is read, so that the log has it before the tokenizing begins.
    dataset.name_unread_columns()
    if config.part is not None:
        dataset.name += ", held out" if config.part == "validation" else ", not held out"
    return dataset


def recognised(config: DatasetConfig, *, skip_broken: bool = False) -> DatasetConfig:
    """The configuration with `auto` replaced by the format of the named keys, or of the first row's
    keys. `skip_broken`: skip invalid rows, unless all are."""
    if config.dataset_name != "auto":
        return config
    # A configuration that names the keys of a pair says the format with them.
    if (config.chosen_key, config.rejected_key) != ("chosen", "rejected"):
        return config.model_copy(update={"dataset_name": "BinaryPreferenceDataset"})
    errors: list[DataError] = []
    broken = errors.append if skip_broken else raised
    path = str(config.data_path)
    try:
        for row in read_rows(path, split=config.split, subset=config.subset, broken=broken):
            try:
                name = _format_of(row, config)
            except DataError as error:
                broken(error)
                continue
            logger.info("%s: read as %s", config.data_path, name)
            return config.model_copy(update={"dataset_name": name})
    except DataError as error:
        # The first broken row tells more than that no row is left.
        raise errors[0] if errors else error from None
    # There is at least one row, and all are broken.
    raise errors[0]


def _format_of(row: Row, config: DatasetConfig) -> str:
    """The format of a row. Raises `DataError` if there is none."""
    values = with_named_prompt(row.values, config.prompt_key, row.where, required=False)
    if config.rating_key is None:
        return recognise(values, row.where)
    # A rating has a column of its own, or is one of each completion.
    if completions_column(row.values) is not None:
        return "PreferenceDataset"
    if first_with_value(row.values, COMPLETION_COLUMNS) is not None:
        return "GradedDataset"
    summary = "the row has no completion to rate"
    columns = ", ".join(COMPLETION_COLUMNS)
    need = f"completions with a rating each, or one of {columns} with its rating"
    raise DataError(summary, where=row.where, got=sorted(row.values), need=need)


class RowDataset(RowSource):
    """A restartable stream of preferences with their places. A subclass defines `to_preference`.

    `columns`: those that it reads, besides the prompt and the columns of every conversation; None
    if unknown. `needs_prompt_key`: whether a row must have the column that `prompt_key` names.
    """

    columns: tuple[str, ...] | None = None
    needs_prompt_key: bool = False
    _has_told = False

    def to_preference(self, row: Row) -> Preference | None:
        """Parse one row; None for a row without a comparison. Raises `DataError` naming
        `row.where`."""
        raise NotImplementedError

    @property
    def task_name(self) -> str:
        return type(self).__name__

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the content and of its parsing.

        For a class outside this package, a digest of the comparisons that it gives. Its code cannot
        tell: there is no source in a notebook, and helpers of other modules change too.
        """
        cls = type(self)
        config = self.config
        if not cls.__module__.startswith("treeward."):
            digest = hashlib.blake2b(digest_size=16)
            for preference, _ in self:
                # The file may move. An object whose text names its place in memory has another
                # digest in every process: nothing is reused then.
                text = repr(replace(preference, where=None))
                digest.update(text.encode("utf-8", "replace"))
            return digest.hexdigest()
        parts = [
            self.content(),
            cls.__qualname__,
            self.task_name,
            repr(self.files),
            # Keys that choose what of a row is read give other tokens of the same file.
            config.prompt_key,
            config.chosen_key,
            config.rejected_key,
            config.rating_key,
            config.kwargs,
            *config.attributes,
        ]
        # A set that holds nothing out keeps its tokens when the seed changes.
        if config.split_validation_size:
            parts += [config.split_validation_size, config.part, config.seed]
        return hashlib.blake2b(json.dumps(parts, default=repr).encode(), digest_size=16).hexdigest()

    def rows(self) -> Iterator[Row]:
        """The rows, with the prompt of the named column alone."""
        column = self.config.prompt_key
        for row in super().rows():
            try:
                values = with_named_prompt(
                    row.values,
                    column,
                    row.where,
                    required=self.needs_prompt_key,
                )
            except DataError as error:
                self.broken(error)
                continue
            values = dict(values)
            # A named completion may have a usual name of prompts, as `messages`, which went above.
            for key in (self.config.chosen_key, self.config.rejected_key):
                if key in row.values:
                    values[key] = row.values[key]
            yield Row(values, row.where)

    def name_unread_columns(self) -> None:
        """Log one line with the columns of the first rows that hold text, a list or an object and
        are not read."""
        if self.columns is None:
            return
        config = self.config
        read = {*self.columns, *EVERY_CONVERSATION, *config.attributes}
        if config.rating_key is not None:
            read.add(config.rating_key)
        unread: dict[str, None] = {}  # an ordered set
        # Not `self.rows`, which has left columns out and joined rows.
        rows = read_rows(self.path, split=self.split, subset=self.subset, broken=lambda error: None)
        for row in itertools.islice(rows, _ROWS_LOOKED_AT):
            try:
                prompt = config.prompt_key or prompt_column(row.values, row.where)
            except DataError:
                continue  # an invalid row, whose error comes when the data is read
            columns_read = read if prompt is None else read | {prompt}
            unread |= dict.fromkeys(unread_columns(row.values, columns_read))
        if unread:
            # An environment may read them, as a judge its rubric: a reward model never does.
            columns = ", ".join(unread)
            logger.info("%s: no conversation has these columns: %s", self.name, columns)

    def _info(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of a row that are no part of its conversations; nothing where these are
        unknown."""
        if self.columns is None:
            return {}
        read = {*self.columns, *EVERY_CONVERSATION, *PROMPT_COLUMNS, *CONVERSATION_COLUMNS}
        return {name: value for name, value in values.items() if name not in read}

    def __iter__(self) -> Iterator[tuple[Preference, str]]:
        num_rows = 0
        num_alone = 0
        # The first row's. All rows must be alike: a score means another thing without a prompt.
        is_prompted: bool | None = None
        self.left_out = []
        for row in self.rows():
            num_rows += 1
            try:
                preference = self.to_preference(row)
                if preference is None:
                    num_alone += 1
                    continue
                first = preference.completions[0]
                messages = (*preference.context, *first.messages)
                if is_prompted is None and not check_prompted(messages, None, row.where):
                    columns = ", ".join(map(str, row.values))
                    logger.warning("%s: the rows have no prompt (columns: %s).", self.name, columns)
                is_prompted = check_prompted(messages, is_prompted, row.where)
                # The prompt files come after: another template must not move a prompt to the other
                # part.
                # Rows without a context are divided by their first completion.
                if not self.is_of_part(preference.context or first.messages):
                    continue
                context = self.files.complete(preference.context, row.where)
            except DataError as error:
                self.broken(error)
                continue
            yield replace(preference, context=context, info=self._info(row.values)), row.where
        if num_alone:
            logger.warning(
                "%s: %d of %d prompts have fewer than two completions: left out",
                self.name,
                num_alone,
                num_rows,
            )
        # Data may be read several times: for a tokenizer, to encode, to look for overlap.
        if self.left_out and not self._has_told:
            self._has_told = True
            logger.warning(
                "%s: %d completions %s: left out",
                self.name,
                len(self.left_out),
                self.left_out_because,
            )


class KnownRows(RowDataset):
    """A data set of the table."""

    def __init__(self, config: DatasetConfig, known: KnownDataset) -> None:
        super().__init__(config, known)
        self.known: KnownDataset = known
        self.needs_prompt_key = known.needs_prompt_key
        columns = list(known.columns)
        if known.prompt is not None:
            columns.append(known.prompt)
        for form in known.forms:
            for column in form.completions:
                # The configuration may name it anew.
                option = f"{column}_key"
                columns.append(getattr(config, option) if option in known.options else column)
        self.columns = tuple(columns)
        self._parser = function_of(known.parser)
        self._arguments = arguments_of(known, config)

    @property
    def task_name(self) -> str:
        return self.known.name

    def rows(self) -> Iterator[Row]:
        """The rows for the parser."""
        rows = self._prompted_rows()
        # Some sets join rows, or leave some out, before one is parsed.
        if self.known.prepare is not None:
            rows = function_of(self.known.prepare)(rows, self)
        return rows

    def _prompted_rows(self) -> Iterator[Row]:
        for row in super().rows():
            try:
                values = with_own_prompt(row.values, self.known.prompt, row.where)
            except DataError as error:
                self.broken(error)
                continue
            yield Row(dict(values), row.where)

    def _info(self, values: Mapping[str, Any]) -> dict[str, Any]:
        if self.known.prepare is not None:
            return {}  # a row is made of several, whose columns are those of its completions
        return super()._info(values)

    def to_preference(self, row: Row) -> Preference | None:
        # The parser is of any type, because it is named by text.
        preference: Preference | None = self._parser(
            row.values,
            where=row.where,
            task_name=self.task_name,
            **self._arguments,
        )
        return preference


class _ObjectDataset(ObjectRows, RowDataset):
    """A dataset of a class by dotted path, with rows as those of `PreferenceDataset`."""

    @property
    def task_name(self) -> str:
        name = getattr(self.spec, "task_name", None) or getattr(self.dataset, "task_name", None)
        if isinstance(name, str):
            return name
        summary = f"{self.config.dataset_name} has no task name"
        need = 'task_spec = TaskDataSpec(task_name="..."), or an attribute task_name'
        raise ConfigError(summary, field="dataset_name", got=name, need=need)

    def to_preference(self, row: Row) -> Preference:
        return preference_from_dict(
            row.values,
            where=row.where,
            task_name=self.task_name,
            attributes=self.config.attributes,
            rating_key=self.config.rating_key,
        )
