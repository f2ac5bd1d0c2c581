"""`compare`: two models on the same examples, and whether one is better by more than chance.

    mine, other = read_evaluation("results/eval/mine"), read_evaluation("results/eval/other")
    comparison = compare(mine, other)
    comparison.overall.difference.value, comparison.overall.p_value, comparison.notes

Examples are matched by suite and id; what only one model was given is left out and counted. A tie
and an example that could not be scored count as not right, as in `treeward eval`. Examples of one
prompt are one draw, in the tests as in the intervals.

Shapes: N examples.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from treeward.data.preference import Preference
from treeward.data.sources import read_file
from treeward.errors import DataError, nearest_path
from treeward.evaluation.results import Metric, ScoredExample, scored_from_row
from treeward.evaluation.statistics import accuracy_metric, paired_bootstrap, paired_test

_ROWS = "examples.jsonl"

_NOTES = {
    "left_out": "Left out: {} that one of them lacks, of other content, or without a better and a "
    "worse completion.",
    "several": "{} with more than two completions: correct is to have the best-ranked all ahead of "
    "the others, which is stricter than the accuracy over pairs that `treeward eval` shows.",
    "ties": "Not correct for a model: {} on which it ties.",
    "failed": "Not correct for a model: {} that it could not score.",
}
"""What a reader must know of the numbers, by the name of its count; {}: so many examples."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One model's examples by suite. `path`: where they were read; it stands for the model where
    names are equal."""

    name: str
    path: str
    suites: Mapping[str, Sequence[ScoredExample]]


class _Pair(NamedTuple):
    """One example as both models scored it."""

    suite: str
    first: ScoredExample
    second: ScoredExample

    @property
    def prompt(self) -> str:
        return self.first.example.prompt_key


@dataclass(frozen=True, slots=True)
class PairedResult:
    """Two models on the same `count` examples of `num_prompts` prompts. `name`: "all", or the suite
    or subset that these are.

    `difference`: the first's accuracy less the second's, with a paired interval, which holds 0
    wherever `p_value` is 0.05 or more. `only_first` and `only_second`: examples that this model
    alone has right. `p_value`: of `statistics.paired_test`; `adjusted_p_value`: by Holm's method
    (1979) over all parts, None for the overall result.
    """

    name: str
    count: int
    num_prompts: int
    first: Metric
    second: Metric
    difference: Metric
    only_first: int
    only_second: int
    p_value: float
    adjusted_p_value: float | None = None


@dataclass(frozen=True, slots=True)
class ModelComparison:
    """Two models, the first and the second. `parts`: the suites where there are several, and the
    subsets of each suite that has several. `notes`: what a reader must know, a sentence each.
    """

    names: tuple[str, str]
    overall: PairedResult
    parts: tuple[PairedResult, ...]
    notes: tuple[str, ...]


def read_evaluation(path: str | os.PathLike[str]) -> Evaluation:
    """The examples of one model: its folder OUTPUT/<model>, as `treeward eval` wrote it, or an
    `examples.jsonl` of it.

    Raises `DataError` for a path without examples, for rows that are none, and for an id that comes
    twice.
    """
    place = Path(path).resolve()
    files = [place] if place.is_file() else sorted(place.glob(f"*/{_ROWS}"))
    if not files:
        near = nearest_path(place)
        fix = "treeward eval MODEL --suite llmbar --output DIR"
        if near:
            fix = f"did you mean {near}?"
        raise DataError(
            "there is no evaluation here",
            where=str(path),
            need=f"the folder of a model that `treeward eval` wrote, or an {_ROWS} of it",
            fix=fix,
        )
    suites: dict[str, list[ScoredExample]] = {}
    for file in files:
        rows: dict[str, ScoredExample] = {}
        for row in read_file(str(file)):
            scored = scored_from_row(row.values, row.where)
            key = scored.example.id
            if key in rows:
                raise DataError(
                    "two examples have one id",
                    where=row.where,
                    field="id",
                    got=key,
                    need="an id for each example of a suite",
                )
            rows[key] = scored
        suites[file.parent.name] = list(rows.values())
    # A file is OUTPUT/MODEL/SUITE/examples.jsonl.
    return Evaluation(files[0].parent.parent.name, str(path), suites)


def compare(first: Evaluation, second: Evaluation) -> ModelComparison:
    """Compare two models on the examples that both have.

    Where each evaluation has one suite, these are matched whatever they are called. Raises
    `DataError` if there is nothing to compare.
    """
    pairs, counts = _match(first, second)
    overall = _result("all", pairs)
    parts = [_result(name, group) for name, group in _groups(pairs).items()]
    if parts:
        # Here, because it imports pandas, which takes seconds.
        from statsmodels.stats.multitest import multipletests

        # Of many parts some differ by chance.
        p_values = [part.p_value for part in parts]
        _, adjusted, *_ = multipletests(p_values, method="holm")
        for i, p_value in enumerate(adjusted.tolist()):
            parts[i] = replace(parts[i], adjusted_p_value=p_value)
    # Two runs of one model have folders of one name.
    names = (first.name, second.name)
    if first.name == second.name:
        names = (first.path, second.path)
    return ModelComparison(
        names=names,
        overall=overall,
        parts=tuple(parts),
        notes=tuple(_notes(counts, overall, len(parts))),
    )


def _match(first: Evaluation, second: Evaluation) -> tuple[list[_Pair], dict[str, int]]:
    """The ordered examples that both have, and the counts of `_NOTES`."""
    second_suites = dict(second.suites)
    # A file that was renamed between the two evaluations is the same suite.
    if len(first.suites) == len(second_suites) == 1:
        second_suites = dict(zip(first.suites, second_suites.values(), strict=True))
    first_rows = _by_suite_and_id(first.suites)
    second_rows = _by_suite_and_id(second_suites)
    num_with_other_content = 0
    num_without_order = 0
    pairs: list[_Pair] = []
    for key, row in first_rows.items():
        other = second_rows.get(key)
        if other is None:
            continue
        # An id says little: other data may have the same, as numbers of rows.
        if _content(row.example) != _content(other.example):
            num_with_other_content += 1
        elif len(set(row.example.ranks)) < 2:
            num_without_order += 1
        else:
            suite, _ = key
            pairs.append(_Pair(suite, row, other))
    counts = dict.fromkeys(_NOTES, 0)
    counts["left_out"] = len(first_rows.keys() | second_rows.keys()) - len(pairs)
    for pair in pairs:
        if len(pair.first.example.ranks) > 2:
            counts["several"] += 1
        if "tie" in (pair.first.outcome, pair.second.outcome):
            counts["ties"] += 1
        if pair.first.failed or pair.second.failed:
            counts["failed"] += 1
    if not pairs:
        raise DataError(
            "the two evaluations have no example in common that says which model is better",
            where=f"{first.path}, {second.path}",
            got=f"{num_with_other_content + num_without_order} examples with an id in common, of "
            f"them {num_with_other_content} with other content and {num_without_order} without a "
            "better and a worse completion",
            need="examples that both models were given",
            fix="evaluate both models on the same suites",
        )
    return pairs, counts


def _by_suite_and_id(
    suites: Mapping[str, Sequence[ScoredExample]],
) -> dict[tuple[str, str], ScoredExample]:
    rows = {}
    for suite, examples in suites.items():
        for scored in examples:
            rows[suite, scored.example.id] = scored
    return rows


def _content(example: Preference) -> tuple[object, ...]:
    """What both models must have been given: the context, and the completions with their ranks."""
    completions = [(completion.rank, completion.messages) for completion in example.completions]
    return example.context_key, completions


def _notes(counts: Mapping[str, int], overall: PairedResult, num_parts: int) -> list[str]:
    notes = []
    for name, text in _NOTES.items():
        if counts[name] == 1:
            notes.append(text.format("1 example"))
        elif counts[name]:
            notes.append(text.format(f"{counts[name]} examples"))
    if overall.num_prompts == overall.count:
        notes.append("p is of McNemar's exact test, two-sided.")
    else:
        notes.append(
            f"Several examples share a prompt ({overall.count} examples, {overall.num_prompts} "
            "prompts): where they do, p is of the test that flips the signs of whole prompts, and "
            "intervals resample prompts."
        )
    if num_parts:
        notes.append(f"p (Holm) is corrected for looking at {num_parts} parts.")
    return notes


def _groups(pairs: Sequence[_Pair]) -> dict[str, list[_Pair]]:
    """The pairs of each suite, if there are several, and of each subset of a suite that has
    several."""
    suites: dict[str, dict[str, list[_Pair]]] = {}
    for pair in pairs:
        subsets = suites.setdefault(pair.suite, {})
        subsets.setdefault(pair.first.example.task_name, []).append(pair)
    groups: dict[str, list[_Pair]] = {}
    for suite, subsets in suites.items():
        # A single suite is the overall result, and a single subset is its suite.
        prefix = ""
        if len(suites) > 1:
            prefix = f"{suite} / "
            groups[suite] = list(itertools.chain.from_iterable(subsets.values()))
        if len(subsets) > 1:
            for name, subset in subsets.items():
                groups[f"{prefix}{name}"] = subset
    return groups


def _result(name: str, pairs: Sequence[_Pair]) -> PairedResult:
    # 1 where a model is right, else 0.
    first_N = np.array([pair.first.outcome == "right" for pair in pairs], dtype=np.float64)
    second_N = np.array([pair.second.outcome == "right" for pair in pairs], dtype=np.float64)
    prompts = [pair.prompt for pair in pairs]
    p_value = paired_test(first_N - second_N, prompts)
    low, high = paired_bootstrap(first_N, second_N, prompts)
    if p_value >= 0.05 and low is not None and high is not None:
        # Where few examples differ (4 to 0), resampling excludes 0, and the exact test, which is
        # stricter, does not.
        low = min(low, 0.0)
        high = max(high, 0.0)
    difference = float((first_N - second_N).mean())
    return PairedResult(
        name=name,
        count=len(pairs),
        num_prompts=len(set(prompts)),
        first=accuracy_metric(first_N.tolist(), "first", prompts),
        second=accuracy_metric(second_N.tolist(), "second", prompts),
        difference=Metric("difference", difference, low, high, len(pairs)),
        only_first=int(np.sum(first_N > second_N)),
        only_second=int(np.sum(second_N > first_N)),
        p_value=p_value,
    )
