"""Named sets of solutions with labels of their steps: from the `data` section of a config to a
stream of problems.

    stream = open_step_dataset(DatasetConfig(data_path="steps.jsonl"))
    for problem, where in stream:       # restartable: each loop reads the data again
        ...

The names are those of `STEP_SETS` in `config/dataset_table.py`. A problem is one row; rows of the
same problem become one tree in `step_encoding.py`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from treeward.config.data import DatasetConfig
from treeward.config.dataset_table import STEP_FORMATS, STEP_SETS, KnownDataset
from treeward.data.columns import shown_keys, with_named_prompt
from treeward.data.registry import Registry, arguments_of, function_of
from treeward.data.sources import Row, RowSource, read_rows
from treeward.data.steps import Problem
from treeward.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

_STEP_SETS = Registry("forms of steps", STEP_SETS, example="StepDataset")


def open_step_dataset(config: DatasetConfig) -> StepDataset:
    """One training or validation set of a process reward model; its rows are checked while they are
    read. Raises `ConfigError` for an unknown name, and `DataError` for missing data and, under
    "auto", for an unknown form."""
    if config.split_validation_size > 0 and config.part is None:
        need = "part: train, or part: validation for the rows held out"
        raise config.error("part split_validation_size", need)
    config = recognised_steps(config)
    known = _STEP_SETS.find(config.dataset_name)
    if not isinstance(known, KnownDataset):
        raise ConfigError(
            "a process reward model reads no class of its own",
            field="dataset_name",
            got=config.dataset_name,
            need=f"auto, or one of {', '.join(STEP_SETS)}",
        )
    return StepDataset(config, known)


def recognised_steps(config: DatasetConfig) -> DatasetConfig:
    """The configuration with `auto` replaced by the form of the first row's keys."""
    if config.dataset_name != "auto":
        return config
    row = next(iter(read_rows(str(config.data_path), split=config.split, subset=config.subset)))
    known = recognise_steps(row.values, row.where)
    logger.info("%s: read as %s", config.data_path, known.name)
    return config.model_copy(update={"dataset_name": known.name})


def recognise_steps(values: Mapping[str, Any], where: str) -> KnownDataset:
    """The form of a row. Raises `DataError` for keys of no known form."""
    keys = {key for key, value in values.items() if value is not None}
    for known in STEP_FORMATS:
        if not any(keys.issuperset(form.keys) for form in known.forms):
            continue
        if known.condition is None or function_of(known.condition)(values):
            return known
    raise DataError(
        "the row has no steps with labels in a known form",
        where=where,
        got=shown_keys(values),
        need="a prompt with completions, which are steps, and labels; docs/process_rewards.md has "
        "the other forms",
    )


class StepDataset(RowSource):
    """A restartable stream of problems with their places."""

    def __init__(self, config: DatasetConfig, known: KnownDataset) -> None:
        super().__init__(config, known)
        self._parser = function_of(known.parser)
        self._arguments = arguments_of(known, config)
        self._name_of_form = known.name
        self._forms = known.forms
        if config.part is not None:
            self.name += ", held out" if config.part == "validation" else ", not held out"

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the content and of its parsing."""
        config = self.config
        parts = [
            self.content(),
            self._name_of_form,
            repr(self.files),
            config.prompt_key,
            self._arguments,
            config.split_validation_size,
            config.part,
        ]
        # A set that holds nothing out keeps its tokens when the seed changes.
        if config.split_validation_size:
            parts.append(config.seed)
        return hashlib.blake2b(json.dumps(parts, default=repr).encode(), digest_size=16).hexdigest()

    def _with_named_prompt(self, row: Row) -> Mapping[str, Any]:
        """The row with the prompt of `prompt_key` alone, and the columns of its form."""
        column = self.config.prompt_key
        values = dict(with_named_prompt(row.values, column, row.where, required=True))
        for form in self._forms:
            for name in form.keys:
                # `input` and `messages` are names of prompts elsewhere, and hold the steps here.
                if name in row.values and name != column:
                    values[name] = row.values[name]
        return values

    def __iter__(self) -> Iterator[tuple[Problem, str]]:
        for row in self.rows():
            try:
                values = self._with_named_prompt(row)
                problem: Problem = self._parser(
                    values, where=row.where, task_name=self._name_of_form, **self._arguments
                )
                # The prompt files come after: another template must not move a problem to the other
                # part.
                if not self.is_of_part(problem.context):
                    continue
                context = self.files.complete(problem.context, row.where)
            except DataError as error:
                self.broken(error)
                continue
            yield replace(problem, context=context), row.where
