"""JudgeBench: pairs of which one is objectively right, with labels A>B or B>A (Tan et al. 2024, arXiv 2410.12784).

    JudgeBench().load("JudgeBench/data")                 # or the hub's ScalerLab/JudgeBench

A judge sees each pair in both orders; a vote for the label counts 1, against it -1, anything else 0, and the pair is
right if the sum is above 0. A reward model's two votes are the same unless its scores tie, which sums to 0: so a pair
is right where the better completion scores higher, and a tie is not. (With `--single_game`, which the authors' README
allows for reward models, a tie would be right where the label is B>A.)
The headline is the accuracy over the 350 pairs that GPT-4o wrote, each counting once, not the mean of the categories:
the authors' `run_judge.py` takes one writer's file and prints four categories and "Overall", all pairs of the file
(ScalerLab/JudgeBench at d8740a8; `compute_final_metrics` in `utils/metrics.py`). The 270 pairs of Claude 3.5 Sonnet are
in subsets of their own. Without any of GPT-4o the headline is of all pairs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from pydantic import BaseModel

from treeward.data.sources import Row, read_rows
from treeward.errors import DataError
from treeward.evaluation.examples import EvalExample, ScoredExample
from treeward.evaluation.parts import by_subset
from treeward.evaluation.results import SuiteResult
from treeward.evaluation.suites.interface import Suite
from treeward.evaluation.suites.rows import Prompt, example, one_of, read_as, suite_rows

CATEGORIES: Mapping[str, str] = MappingProxyType(
    {
        "Knowledge": "mmlu-pro",
        "Reasoning": "livebench-reasoning",
        "Math": "livebench-math",
        "Coding": "livecodebench",
    }
)
"""The first letters of the sources of each category."""

# Who wrote the pairs: the beginning of `response_model`, which is also the name of the split on the hub.
_WRITERS = ("gpt", "claude")


class JudgedRow(BaseModel):
    """A row of the splits `gpt` and `claude`."""

    pair_id: str | int
    source: str
    question: Prompt
    response_model: str
    response_A: str
    response_B: str
    label: Annotated[str, one_of("A>B", "B>A")]


class JudgeBench(Suite):
    """Four categories; the headline is the accuracy over the pairs of GPT-4o."""

    name = "judgebench"
    title = "JudgeBench"
    hub_path = "ScalerLab/JudgeBench"
    num_published = 350

    def load(self, source: str | None = None) -> list[EvalExample]:
        """The splits `gpt` and `claude` of the hub or of a copy, or the files of the authors' repository, or one file.

        See `Suite.load`.
        """
        return [_example(row) for row in _rows(source, self.hub_path)]

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        main = [one for one in scored if one.example.suite_data["writer"] == "gpt"] or scored
        categories = {name: [one for one in main if one.example.subset.startswith(name)] for name in CATEGORIES}
        return SuiteResult(
            self.name,
            self.part("accuracy", main).metric,
            sections=tuple(self.part(name, own).metric for name, own in categories.items() if own),
            subsets=tuple(self.part(subset, group).metric for subset, group in by_subset(scored).items()),
        )


def _rows(source: str | None, hub_path: str) -> Iterator[Row]:
    if source is not None and os.path.isfile(source):
        return read_rows(source)
    # The authors' repository; the files with judge_name are results.
    files = sorted(str(file) for file in Path(source).rglob("dataset=judgebench*")) if source else []
    if files := [file for file in files if "judge_name=" not in file]:
        return chain.from_iterable(map(read_rows, files))
    return chain.from_iterable(suite_rows(source, hub_path, split=split) for split in _WRITERS)


def _example(row: Row) -> EvalExample:
    one = read_as(JudgedRow, row)
    category = next((name for name, start in CATEGORIES.items() if one.source.startswith(start)), None)
    if category is None:
        need = f"a name that begins with {', '.join(CATEGORIES.values())}"
        summary = "there is no such source in JudgeBench"
        raise DataError(summary, where=row.where, field="source", got=one.source, need=need)
    model = one.response_model
    writer = next((name for name in _WRITERS if model.lower().startswith(name)), model)
    ranks, texts = (0, 1) if one.label == "A>B" else (1, 0), (one.response_A, one.response_B)
    return example(row.where, f"{category} ({writer})", one.pair_id, one.question, texts, ranks, writer=writer)
