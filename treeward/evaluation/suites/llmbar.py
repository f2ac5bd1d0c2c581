"""LLMBar: 419 expert comparisons of who follows the instruction (Zeng et al. 2023, arXiv 2310.07641).

    LLMBar().load("LLMBar/Dataset")             # the authors' repository: Natural and four adversarial sets
    LLMBar().load("natural.jsonl.gz")           # one set: rows of input, output_1, output_2, label

The headline is the plain mean of the sets that there are: of Natural alone its accuracy, of all five the mean of five.
The section Adversarial is the plain mean of the four: the paper's 82.8 % of GPT-4 is that mean of the accuracies in the
authors' repository (princeton-nlp/LLMBar at caa7bee, `evaluators/GPT-4/Metrics_Reference/statistics.json` of each set);
over its 319 pairs it would be 84.5 %.

On the hub LLMBar is only a program, and code from the hub is never run; the same 419 pairs are part of RewardBench's
data, from which they are read when no source is given.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from treeward.data.sources import Row, read_rows
from treeward.errors import DataError
from treeward.evaluation.examples import EvalExample, ScoredExample
from treeward.evaluation.results import SuiteResult
from treeward.evaluation.suites.interface import Suite
from treeward.evaluation.suites.parts import Part, by_subset, combined, prompt_of, with_notes
from treeward.evaluation.suites.rows import assistant, data_files, field_of, prompt_field, repository_rows, text_field

__all__ = ["SIZES", "LLMBar"]

SIZES: Mapping[str, int] = MappingProxyType(
    {"Natural": 100, "Neighbor": 134, "GPTInst": 92, "GPTOut": 47, "Manual": 46}
)
"""How many pairs each set has; all but Natural are adversarial."""

_REWARDBENCH = "allenai/reward-bench"
_PREFIX = "llmbar-"


class LLMBar(Suite):
    """Natural and four adversarial sets; the headline is their mean."""

    name = "llmbar"
    title = "LLMBar"
    hub_path = _REWARDBENCH

    def load(self, source: str | None = None) -> list[EvalExample]:
        """Rows of input, output_1, output_2, label (1 or 2); see `Suite.load`.

        The set of a file is what its path names (`Adversarial/GPTOut/dataset.json`, `natural.jsonl.gz`); a path that
        names none is one set called after the file. A folder may be the authors' repository or any part of it, or
        RewardBench's data, of which the subsets `llmbar-...` are taken.
        """
        if source is None or not os.path.exists(source):
            return _of_rewardbench(repository_rows(source, _REWARDBENCH, split="filtered"))
        if os.path.isfile(source):
            return _of_file(source, _set_of(source))
        sets = {name: file for file in reversed(data_files(source)) if (name := _known_set(source, file)) is not None}
        if sets:
            ordered = [name for name in SIZES if name in sets]
            return [example for name in ordered for example in _of_file(sets[name], name)]
        return _of_rewardbench(repository_rows(source, _REWARDBENCH, split="filtered"))

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        groups = by_subset(scored)
        parts = {
            name: Part.of(name, map(self.outcome_value, group), [prompt_of(one.example) for one in group])
            for name, group in groups.items()
        }
        adversarial = [part for name, part in parts.items() if name in SIZES and name != "Natural"]
        sections = [parts["Natural"].metric] if "Natural" in parts else []
        if adversarial:
            sections.append(combined("Adversarial", adversarial, [1.0] * len(adversarial)))
        # Of one set it is that set's accuracy with its own interval, not a mean of means.
        headline = combined("accuracy", list(parts.values()), [1.0] * len(parts))
        return SuiteResult(
            self.name,
            with_notes(headline, _missing(groups)),
            sections=tuple(sections),
            subsets=tuple(part.metric for part in parts.values()),
        )


def _known_set(root: str, file: str) -> str | None:
    """The set in a file, as `GPTOut/dataset.json` or `natural.jsonl.gz`; None for files that are not of LLMBar."""
    inside = Path(os.path.relpath(file, root))
    stem = inside.name.split(".")[0]
    if {"evaluators", "CaseStudy", "Processed"} & set(inside.parts):
        return None
    folder = Path(os.path.abspath(file)).parent.name
    return _named(folder) if stem == "dataset" else _named(stem)


def _set_of(file: str) -> str:
    stem = os.path.basename(file).split(".")[0]
    parent = os.path.basename(os.path.dirname(os.path.abspath(file)))
    return _named(stem) or (_named(parent) if stem == "dataset" else None) or stem


def _named(text: str) -> str | None:
    """The set of a name such as `GPTInst`, `Adversarial_GPTInst` or `llmbar-adver-GPTInst`."""
    last = text.lower().replace("_", "-").split("-")[-1]
    return next((name for name in SIZES if name.lower() == last), None)


def _of_file(file: str, name: str) -> list[EvalExample]:
    return [_example(row, name, number) for number, row in enumerate(read_rows(file), 1)]


def _example(row: Row, name: str, number: int) -> EvalExample:
    label = field_of(row, "label", "1 or 2: the better output")
    if str(label) not in ("1", "2"):
        raise DataError("label is neither output", where=row.where, field="label", got=label, need="1 or 2")
    return EvalExample(
        id=f"{name}/{number}",
        subset=name,
        context=prompt_field(row, "input"),
        completions=(assistant(text_field(row, "output_1")), assistant(text_field(row, "output_2"))),
        ranks=(0, 1) if str(label) == "1" else (1, 0),
        where=row.where,
    )


def _of_rewardbench(rows: Iterator[Row]) -> list[EvalExample]:
    by_set: dict[str, list[EvalExample]] = {name: [] for name in SIZES}
    for row in rows:
        subset = text_field(row, "subset")
        name = _named(subset) if subset.startswith(_PREFIX) else None
        if name is None:
            continue
        by_set[name].append(
            EvalExample(
                id=f"{name}/{len(by_set[name]) + 1}",
                subset=name,
                context=prompt_field(row, "prompt"),
                completions=(assistant(text_field(row, "chosen")), assistant(text_field(row, "rejected"))),
                ranks=(0, 1),
                suite_data={"id": row.values.get("id")},
                where=row.where,
            )
        )
    return [example for examples in by_set.values() for example in examples]


def _missing(groups: Mapping[str, Sequence[ScoredExample]]) -> str | None:
    wrong = [name for name, size in SIZES.items() if name in groups and len(groups[name]) != size]
    other = [name for name in groups if name not in SIZES]
    absent = [name for name in SIZES if name not in groups]
    notes = []
    if absent:
        notes.append(f"Of {', '.join(groups) or 'no set'} alone; without {', '.join(absent)}.")
    if wrong or other:
        notes.append(f"Not the published pairs of {', '.join((*wrong, *other))}: not comparable with published scores.")
    return " ".join(notes) or None
