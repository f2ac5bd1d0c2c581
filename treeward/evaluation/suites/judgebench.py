"""JudgeBench: pairs of which one is objectively right, with labels A>B or B>A (Tan et al. 2024, arXiv 2410.12784).

    net_vote("A>B", score_a=1.2, score_b=0.3)            # 2: right in both orders
    JudgeBench().load("JudgeBench/data")                 # or the hub's ScalerLab/JudgeBench

A judge sees each pair in both orders; a vote for the label counts 1, against it -1, anything else 0, and the pair is
right if the sum is above 0. A reward model's two votes are the same unless its scores tie, which sums to 0: not right.
(With `--single_game`, which the authors' README allows for reward models, a tie would be right where the label is B>A.)
The headline is the accuracy over the 350 pairs that GPT-4o wrote, each counting once, not the mean of the categories:
the authors' `run_judge.py` takes one writer's file and prints four categories and "Overall", all pairs of the file
(ScalerLab/JudgeBench at d8740a8; `compute_final_metrics` in `utils/metrics.py`). The 270 pairs of Claude 3.5 Sonnet are
in subsets of their own. Without any of GPT-4o the headline is of all pairs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel

from treeward.data.sources import Row, read_rows
from treeward.errors import DataError
from treeward.evaluation.examples import EvalExample, ScoredExample
from treeward.evaluation.results import SuiteResult
from treeward.evaluation.suites.interface import Suite
from treeward.evaluation.suites.parts import by_subset, with_notes
from treeward.evaluation.suites.rows import (
    OneOf,
    Prompt,
    assistant,
    data_files,
    read_as,
    repository_rows,
    with_distinct_ids,
)

__all__ = ["CATEGORIES", "JudgeBench", "net_vote"]

CATEGORIES: Mapping[str, str] = MappingProxyType(
    {
        "Knowledge": "mmlu-pro",
        "Reasoning": "livebench-reasoning",
        "Math": "livebench-math",
        "Coding": "livecodebench",
    }
)
"""What the sources of each category begin with."""

Label = Literal["A>B", "B>A"]

# Who wrote the pairs: the beginning of `response_model`, which is also the name of the split on the hub.
_WRITERS = ("gpt", "claude")
_SIZE = 350


class JudgedRow(BaseModel):
    """A row of the splits `gpt` and `claude`."""

    pair_id: str | int
    source: str
    question: Prompt
    response_model: str
    response_A: str
    response_B: str
    label: Annotated[str, OneOf(("A>B", "B>A"), "label of JudgeBench")]


def net_vote(label: Label, score_a: float, score_b: float) -> int:
    """2, 0 or -2: the votes of both orders. A pair whose scores tie is decided for the second completion in either."""
    first = "A>B" if score_a > score_b else "B>A"
    second = "B>A" if score_b > score_a else "A>B"
    return sum(1 if vote == label else -1 for vote in (first, second))


class JudgeBench(Suite):
    """Four categories; the headline is the accuracy over the pairs of GPT-4o."""

    name = "judgebench"
    title = "JudgeBench"
    hub_path = "ScalerLab/JudgeBench"

    def load(self, source: str | None = None) -> list[EvalExample]:
        """The splits `gpt` and `claude` of the hub or of a copy, or the files of the authors' repository, or one file.

        See `Suite.load`.
        """
        return with_distinct_ids([_example(row) for row in _rows(source, self.hub_path)])

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        writers: dict[str, list[ScoredExample]] = {}
        for one in scored:
            writers.setdefault(one.example.suite_data["writer"], []).append(one)
        main = writers.get("gpt", list(scored))
        sections = [
            self.part(category, own).metric
            for category in CATEGORIES
            if (own := [one for one in main if one.example.suite_data["category"] == category])
        ]
        note = f"These are {len(main)} pairs and not the {_SIZE} of GPT-4o: not comparable with published scores."
        complete = len(main) == _SIZE and "gpt" in writers
        return SuiteResult(
            self.name,
            with_notes(self.part("accuracy", main).metric, None if complete else note),
            sections=tuple(sections),
            subsets=tuple(self.part(subset, group).metric for subset, group in by_subset(scored).items()),
            details={"by_writer": {writer: self.part(writer, own).metric.value for writer, own in writers.items()}},
        )

    def outcome_value(self, scored: ScoredExample) -> float:
        a, b = scored.scores
        if a is None or b is None:
            return 0.0
        net = net_vote("A>B" if scored.example.ranks == (0, 1) else "B>A", a, b)
        return 0.5 if net == 0 and self.tie_policy == "half" else float(net > 0)

    def published_files(self, scored: Sequence[ScoredExample], model_name: str) -> dict[str, Any]:
        """`outputs/dataset=judgebench,response_model=...,judge_name=reward_model,judge_model=....jsonl`.

        The rows of the data with both judgments, as `run_judge.py` writes them and its metrics read them.
        """
        files: dict[str, Any] = {}
        for one in scored:
            pair = one.example.suite_data["pair"]
            judge = model_name.strip("/").replace("/", "_")
            name = f"response_model={pair['response_model']},judge_name=reward_model,judge_model={judge}.jsonl"
            files.setdefault(f"outputs/dataset=judgebench,{name}", []).append(_judged(one, pair, model_name))
        return files


def _rows(source: str | None, hub_path: str) -> Iterator[Row]:
    splits: Sequence[str | None] = _WRITERS
    if source is not None and os.path.isdir(source):
        names = {os.path.basename(file): file for file in data_files(source)}
        pairs = [
            file for name, file in names.items() if name.startswith("dataset=judgebench") and "judge_name=" not in name
        ]
        if pairs:  # the authors' repository; the files with judge_name are results
            return chain.from_iterable(map(read_rows, pairs))
        found = [
            writer
            for writer in _WRITERS
            if os.path.isdir(os.path.join(source, writer)) or any(name.startswith(writer) for name in names)
        ]
        splits = found or [None]
    elif source is not None and os.path.exists(source):
        splits = [None]
    return chain.from_iterable(repository_rows(source, hub_path, split=split) for split in splits)


def _example(row: Row) -> EvalExample:
    one = read_as(JudgedRow, row)
    category = next((name for name, start in CATEGORIES.items() if one.source.startswith(start)), None)
    if category is None:
        raise DataError(
            "there is no such source in JudgeBench",
            where=row.where,
            field="source",
            got=one.source,
            need=f"a name that begins with {', '.join(CATEGORIES.values())}",
        )
    model = one.response_model
    writer = next((name for name in _WRITERS if model.lower().startswith(name)), model)
    texts = ("question", "response_A", "response_B")
    return EvalExample(
        id=str(one.pair_id),
        subset=f"{category} ({writer})",
        context=one.question,
        completions=(assistant(one.response_A), assistant(one.response_B)),
        ranks=(0, 1) if one.label == "A>B" else (1, 0),
        suite_data={
            "writer": writer,
            "category": category,
            "pair": {key: value for key, value in row.values.items() if key not in texts},
        },
        where=row.where,
    )


def _judged(one: ScoredExample, pair: Mapping[str, Any], model_name: str) -> dict[str, Any]:
    texts = [completion[-1]["content"] for completion in one.example.completions]
    a, b = one.scores
    judgments: list[Any] = [None, None]
    if a is not None and b is not None:
        judgments = [
            {
                "judgment": {"judge_model": model_name, "scores": list(scores)},
                "decision": "A>B" if scores[0] > scores[1] else "B>A",
            }
            for scores in ((a, b), (b, a))
        ]
    return {
        **pair,
        "question": one.example.context[-1]["content"],
        "response_A": texts[0],
        "response_B": texts[1],
        "judge_name": "reward_model",
        "judgments": judgments,
    }
