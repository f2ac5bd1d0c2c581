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

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict

from treeward.data.sources import read_rows
from treeward.evaluation.examples import EvalExample, ScoredExample
from treeward.evaluation.parts import by_subset, combined
from treeward.evaluation.results import SuiteResult
from treeward.evaluation.suites.interface import Suite
from treeward.evaluation.suites.rewardbench import RewardBench
from treeward.evaluation.suites.rows import Prompt, example, one_of, read_as

SETS = ("Natural", "Neighbor", "GPTInst", "GPTOut", "Manual")
"""All but Natural are adversarial."""

_OTHERS = {"evaluators", "CaseStudy", "Processed"}  # the repository's results, and data of other benchmarks


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
    hub_path = RewardBench.hub_path
    num_published = 419

    def load(self, source: str | None = None) -> list[EvalExample]:
        """The sets of a file, of a folder, or of RewardBench's data; see `Suite.load`.

        The path of a file names its set (`Adversarial/GPTOut/dataset.json`, `natural.jsonl.gz`); a path that names none
        is one set called after the file. A folder may be the authors' repository or any part of it, or RewardBench's
        data, of which the subsets `llmbar-...` are taken.
        """
        path = Path(source or "").absolute()
        if source is not None and path.is_file():
            return _read_set(path, _set_of(path) or path.name.split(".")[0])
        if source is not None and path.is_dir():
            files = [file for file in sorted(path.rglob("*.json*")) if not _OTHERS & set(file.relative_to(path).parts)]
            if sets := {name: file for file in files if (name := _set_of(file))}:
                return [one for name in SETS if name in sets for one in _read_set(sets[name], name)]
        return _of_rewardbench(RewardBench().load(source))

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        parts = {name: self.part(name, group) for name, group in by_subset(scored).items()}
        adversarial = [part for name, part in parts.items() if name in SETS[1:]]
        sections = [parts["Natural"].metric] if "Natural" in parts else []
        sections += [combined("Adversarial", adversarial)] if adversarial else []
        headline, subsets = combined("accuracy", list(parts.values())), tuple(part.metric for part in parts.values())
        return SuiteResult(self.name, headline, sections=tuple(sections), subsets=subsets)


def _set_of(file: Path) -> str | None:
    """The set of `Adversarial/GPTOut/dataset.json`, `natural.jsonl.gz` or `Adversarial_GPTInst.jsonl`, if it is one."""
    stem = file.name.split(".")[0]
    return _named(file.parent.name if stem == "dataset" else stem)


def _named(text: str) -> str | None:
    """The set of a name such as `GPTInst`, `Adversarial_GPTInst` or `llmbar-adver-GPTInst`."""
    last = text.lower().replace("_", "-").split("-")[-1]
    return next((name for name in SETS if name.lower() == last), None)


def _read_set(file: Path, name: str) -> list[EvalExample]:
    examples = []
    for number, row in enumerate(read_rows(str(file)), 1):
        one = read_as(InstructionRow, row)
        ranks = (0, 1) if one.label == "1" else (1, 0)
        examples.append(example(row.where, name, number, one.input, (one.output_1, one.output_2), ranks))
    return examples


def _of_rewardbench(pairs: Sequence[EvalExample]) -> list[EvalExample]:
    own = [pair for pair in pairs if pair.subset.startswith("llmbar-")]
    return [replace(one, subset=name) for name in SETS for one in own if _named(one.subset) == name]
