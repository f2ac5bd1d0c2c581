"""`Suite`: a named set of examples with the arithmetic that its published numbers are computed by.

    get_suite("rewardbench").summarize(scored)    # a ScoredExample for each example, of any model

- An example that could not be scored counts as **wrong**: left out, a model would be the better
  the more it cannot read. The result says how many were scored, and has no numbers where nothing
  was.
- A tie of chosen and rejected counts 0, as in the published code.
- A subset or section that the data lacks is left out, not zero, and the headline's note says that
  examples are missing.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from treeward.config.data import DatasetConfig
from treeward.data.conversation import check_messages
from treeward.data.datasets import KnownRows, open_dataset
from treeward.data.preference import Completion, Preference
from treeward.data.sources import KINDS, Row, file_suffix, missing_file, read_rows
from treeward.errors import DataError
from treeward.evaluation.results import Metric, ScoredExample, SuiteResult, by_subset
from treeward.evaluation.statistics import accuracy_metric

Schema = TypeVar("Schema", bound=BaseModel)


class Suite(ABC):
    """A named set of examples and its arithmetic."""

    name: str
    """As `get_suite` knows it; the name of its folder of results."""
    title: ClassVar[str] = ""
    """As its authors write it."""
    hub_path: ClassVar[str | None] = None
    """The dataset on the hub that `load(None)` reads."""
    git_url: ClassVar[str | None] = None
    """The repository of a suite that is not on the hub."""
    split: ClassVar[str | None] = None
    """The split of `hub_path`."""
    schema: ClassVar[type[BaseModel]]
    """The schema of its rows."""
    num_published: ClassVar[int | None] = None
    """How many examples the published headline counts."""

    def load(self, source: str | None = None) -> list[Preference]:
        """The examples in the order of the data; `run_evaluation` makes ids that come twice
        distinct.

        `source`: a file or folder in the published schema, the name of a copy on the hub, or None
        for `hub_path`. Raises `DataError` naming file, row and field for data that is not there or
        not in the schema.
        """
        return self._examples(suite_rows(source, str(self.hub_path), split=self.split))

    def _examples(self, rows: Iterable[Row]) -> list[Preference]:
        """An example of each row."""
        examples = []
        for row in rows:
            examples.append(self._example(read_as(self.schema, row), row.where))
        return examples

    def copy_of(self, source: str | None) -> str:
        """The source of a suite that has no data on the hub.

        Raises `DataError` where there is none, or nothing lies there.
        """
        if source is None:
            raise DataError(
                f"{self.title} is not on the hub",
                where=self.name,
                need="a copy of its repository",
                fix=f"git clone {self.git_url} FOLDER, and --suite {self.name}=FOLDER",
            )
        if not os.path.exists(source):
            raise missing_file(source)
        return source

    def _example(self, row: Any, where: str) -> Preference:
        """The example of a row, which is of `schema`."""
        raise NotImplementedError

    def summarize(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        """The suite's numbers; values are None where there is nothing to compute them from."""
        result = self._compute(scored)
        headline = result.headline
        sections = result.sections
        subsets = result.subsets
        is_any_measured = any(self.is_measured(example) for example in scored)
        if scored and not is_any_measured:
            # An example without a score counts as wrong, so the arithmetic has made 0 % of them
            # all. But a model that could not be asked is not a model that is always wrong.
            no_value: dict[str, Any] = {"value": None, "low": None, "high": None}
            note = "Nothing was scored, so there is no result."
            headline = replace(headline, note=note, **no_value)
            sections = tuple(replace(section, **no_value) for section in sections)
            subsets = tuple(replace(subset, **no_value) for subset in subsets)
        # A part of the data, as of `--limit`, has another mean than the whole.
        if self.num_published not in (None, headline.count):
            note = (
                f"These are {headline.count} of {self.num_published} examples: not comparable with "
                "published scores."
            )
            if headline.note:
                note = f"{headline.note} {note}"
            headline = replace(headline, note=note)
        outcomes = [example.outcome for example in scored]
        return replace(
            result,
            headline=headline,
            sections=sections,
            subsets=subsets,
            num_examples=len(scored),
            num_failed=sum(example.failed for example in scored),
            num_ties=outcomes.count("tie"),
        )

    def is_measured(self, example: ScoredExample) -> bool:
        """Whether the model has given what the suite's arithmetic needs of an example: scores of
        both completions of one of its pairs."""
        for better, worse in example.pairs():
            if example.scores[better] is not None and example.scores[worse] is not None:
                return True
        return False

    @abstractmethod
    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        """Headline, sections, subsets and details of `summarize`; an example without scores counts
        as wrong."""

    def chance(self, part: str | None = None) -> float | None:
        """The headline, or the section or subset `part`, of random scores; None: not known.

        0.5 wherever pairs are compared, as the authors of RM-Bench (arXiv 2410.16184, abstract) and
        JudgeBench (arXiv 2410.12784, abstract) say. Suites with another rule override this and cite
        its source.
        """
        return 0.5

    def part(
        self,
        name: str,
        scored: Sequence[ScoredExample],
        value: Callable[[ScoredExample], float] | None = None,
    ) -> Metric:
        """The metric of a subset: the share of its examples that are right, or the mean of `value`
        of each. The interval treats examples of one prompt as dependent.
        """
        if value is None:
            values = [float(example.outcome == "right") for example in scored]
        else:
            values = [value(example) for example in scored]
        prompts = [example.example.prompt_key for example in scored]
        return accuracy_metric(values, name, prompts)

    def parts(
        self,
        names: Iterable[str],
        scored: Sequence[ScoredExample],
        value: Callable[[ScoredExample], float] | None = None,
    ) -> dict[str, Metric]:
        """`part` of each of these subsets by its name, in this order; a subset that the data lacks
        is left out."""
        groups = by_subset(scored)
        parts = {}
        for name in names:
            if name in groups:
                parts[name] = self.part(name, groups[name], value)
        return parts


class PreferenceSuite(Suite):
    """Any preference data that the trainer reads, as a suite; `name` is that of its results.

        PreferenceSuite("mine", DatasetConfig(data_path="validation.jsonl")).load()

    A row's `task_name` is its subset; rows without one are of the subset `all`. Of K completions
    every pair with different ranks counts, as in the trainer's validation: the accuracy is over
    pairs, pooled, with an interval over prompts. Examples without an order (all ranks equal) count
    in no accuracy.
    """

    def __init__(self, name: str, config: DatasetConfig) -> None:
        self.name = name
        self.config = config

    def load(self, source: str | None = None) -> list[Preference]:
        """Everything in the set; `source` is read in place of the config's `data_path`. Ids are the
        rows' numbers."""
        config = self.config
        if source is not None:
            config = config.model_copy(update={"data_path": source})
        dataset = open_dataset(config)
        # A row that says nothing has the name of its format or class, which is no part of the data.
        format_name = type(dataset).__name__
        if isinstance(dataset, KnownRows):
            format_name = dataset.task_name
        examples = []
        for number, (preference, where) in enumerate(dataset, start=1):
            name = preference.task_name
            if name == format_name:
                name = "all"
            examples.append(replace(preference, id=str(number), where=where, task_name=name))
        return examples

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        ordered = [example for example in scored if len(set(example.example.ranks)) > 1]
        headline = self._pairwise("accuracy", ordered)
        subsets = [self._pairwise(name, group) for name, group in by_subset(ordered).items()]
        # `SuiteResult.unit` reads it: the headline counts pairs, and not examples.
        details = {"num_pairs": headline.count}
        return SuiteResult(self.name, headline, subsets=tuple(subsets), details=details)

    def _pairwise(self, name: str, scored: Sequence[ScoredExample]) -> Metric:
        """The accuracy over all pairs; a tie and a missing score are wrong."""
        values = []
        prompts = []
        for example in scored:
            for i, j in example.pairs():
                better = example.scores[i]
                worse = example.scores[j]
                is_right = better is not None and worse is not None and better > worse
                values.append(float(is_right))
                prompts.append(example.example.prompt_key)
        return accuracy_metric(values, name, prompts)


def suite_rows(source: str | None, hub_path: str, *, split: str | None) -> Iterator[Row]:
    """The rows of one split of the hub's `hub_path` (None), of a copy of it, or of a file, which is
    taken whole.

    In a folder a file with the split's name counts first (`filtered.jsonl`). Raises `DataError` as
    `read_rows` does.
    """
    if source is not None and os.path.isdir(source):
        files = sorted(Path(source).glob(f"{split}.*"))
        named = [file for file in files if file_suffix(file.name) in KINDS]
        if named:
            source = str(named[0])
    # `read_rows` refuses a split that is not in a file's name. A pattern of files has a suffix.
    is_file = source is not None and (os.path.isfile(source) or file_suffix(source) in KINDS)
    if is_file:
        split = None
    return read_rows(source or hub_path, split=split)


def read_as(schema: type[Schema], row: Row) -> Schema:
    """The row's values as a schema; columns that it does not name are ignored.

    Raises `DataError` with place and field for a value that is missing, None or not of the field's
    type.
    """
    try:
        return schema.model_validate(row.values)
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(
            "the row does not fit the suite",
            where=row.where,
            field=".".join(map(str, first["loc"])),
            got=first["input"],
            need=first["msg"],
        ) from error


def one_of(*names: str) -> Any:
    """A text that is one of these."""
    return Field(pattern=f"^({'|'.join(names)})$")


def _messages(value: Any) -> Any:
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    return check_messages(value, "prompt", None)


Prompt = Annotated[tuple[dict[str, Any], ...], BeforeValidator(_messages)]
"""A prompt: text, read as one user message, or a list of messages."""


def published_example(
    where: str, subset: str, id: str | int, prompt: Any, texts: Sequence[str], ranks: Sequence[int]
) -> Preference:
    """An example whose completions are one message each. Its id is the subset, and after it the
    published `id`."""
    completions = []
    for rank, text in zip(ranks, texts, strict=True):
        message = {"role": "assistant", "content": text}
        completions.append(Completion(rank, (message,)))
    return Preference(
        prompt, tuple(completions), task_name=subset, id=f"{subset}/{id}", where=where
    )
