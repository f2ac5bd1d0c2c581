"""LLMBar: 419 expert comparisons of who follows the instruction (Zeng et al. 2023, arXiv 2310.07641).

    LLMBar().load("LLMBar/Dataset")             # the authors' repository: Natural and four adversarial sets
    LLMBar().load("natural.jsonl.gz")           # one set: rows of input, output_1, output_2, label

The headline is the plain mean of the sets in the data: for Natural alone its accuracy, for all five the mean of five.
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
from typing import Annotated

from pydantic import BaseModel, ConfigDict

from treeward.data.sources import Row, read_rows
from treeward.evaluation.examples import EvalExample, ScoredExample
from treeward.evaluation.parts import by_subset, combined, with_notes
from treeward.evaluation.results import SuiteResult
from treeward.evaluation.suites.interface import Suite
from treeward.evaluation.suites.rewardbench import PairRow
from treeward.evaluation.suites.rows import Prompt, data_files, example, one_of, read_as, repository_rows

SIZES: Mapping[str, int] = MappingProxyType(
    {"Natural": 100, "Neighbor": 134, "GPTInst": 92, "GPTOut": 47, "Manual": 46}
)
"""How many pairs each set has; all but Natural are adversarial."""

_REWARDBENCH = "allenai/reward-bench"


class InstructionRow(BaseModel):
    """A row of a set."""

    input: Prompt
    output_1: str
    output_2: str
    label: Annotated[str, one_of("1", "2")]
    model_config = ConfigDict(coerce_numbers_to_str=True)


class LLMBar(Suite):
    """Natural and four adversarial sets; the headline is their mean."""

    name = "llmbar"
    title = "LLMBar"
    hub_path = _REWARDBENCH

    def load(self, source: str | None = None) -> list[EvalExample]:
        """The sets of a file, of a folder, or of RewardBench's data; see `Suite.load`.

        The path of a file names its set (`Adversarial/GPTOut/dataset.json`, `natural.jsonl.gz`); a path that names none
        is one set called after the file. A folder may be the authors' repository or any part of it, or RewardBench's
        data, of which the subsets `llmbar-...` are taken.
        """
        if source is not None and os.path.isfile(source):
            own = _set_of(source) or os.path.basename(source).split(".")[0]
            return [_example(row, own, number) for number, row in enumerate(read_rows(source), 1)]
        if source is not None and os.path.isdir(source):
            others = {"evaluators", "CaseStudy", "Processed"}  # results, and data of other benchmarks
            files = [
                file for file in data_files(source) if not others & set(os.path.relpath(file, source).split(os.sep))
            ]
            sets = {name: file for file in reversed(files) if (name := _set_of(file)) is not None}
            if sets:
                return [one for name in SIZES if name in sets for one in self.load(sets[name])]
        return _of_rewardbench(repository_rows(source, _REWARDBENCH, split="filtered"))

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        groups = by_subset(scored)
        parts = {name: self.part(name, group) for name, group in groups.items()}
        adversarial = [part for name, part in parts.items() if name in SIZES and name != "Natural"]
        sections = [parts["Natural"].metric] if "Natural" in parts else []
        if adversarial:
            sections.append(combined("Adversarial", adversarial))
        return SuiteResult(
            self.name,
            with_notes(combined("accuracy", list(parts.values())), *_incomplete(groups)),
            sections=tuple(sections),
            subsets=tuple(part.metric for part in parts.values()),
        )


def _set_of(file: str) -> str | None:
    """The set of `Adversarial/GPTOut/dataset.json`, `natural.jsonl.gz` or `Adversarial_GPTInst.jsonl`, if it is one."""
    path = Path(os.path.abspath(file))
    stem = path.name.split(".")[0]
    return _named(path.parent.name if stem == "dataset" else stem)


def _named(text: str) -> str | None:
    """The set of a name such as `GPTInst`, `Adversarial_GPTInst` or `llmbar-adver-GPTInst`."""
    last = text.lower().replace("_", "-").split("-")[-1]
    return next((name for name in SIZES if name.lower() == last), None)


def _example(row: Row, name: str, number: int) -> EvalExample:
    one = read_as(InstructionRow, row)
    ranks = (0, 1) if one.label == "1" else (1, 0)
    return example(row.where, f"{name}/{number}", name, one.input, (one.output_1, one.output_2), ranks)


def _of_rewardbench(rows: Iterator[Row]) -> list[EvalExample]:
    by_set: dict[str, list[EvalExample]] = {name: [] for name in SIZES}
    for row in rows:
        pair = read_as(PairRow, row)
        name = _named(pair.subset) if pair.subset.startswith("llmbar-") else None
        if name is not None:
            own, texts = by_set[name], (pair.chosen, pair.rejected)
            own.append(example(row.where, f"{name}/{len(own) + 1}", name, pair.prompt, texts, (0, 1), id=pair.id))
    return [one for examples in by_set.values() for one in examples]


def _incomplete(groups: Mapping[str, Sequence[ScoredExample]]) -> list[str]:
    wrong = [name for name, group in groups.items() if len(group) != SIZES.get(name)]
    absent = [name for name in SIZES if name not in groups]
    notes = [f"Of {', '.join(groups) or 'no set'} alone; without {', '.join(absent)}."] if absent else []
    notes += [f"Not the published pairs of {', '.join(wrong)}: not comparable with published scores."] if wrong else []
    return notes
