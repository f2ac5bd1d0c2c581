"""RM-Bench, JudgeBench and LLMBar.

RM-Bench: right and subtly wrong completions, each in three styles (Liu et al. 2024, arXiv
2410.16184). A[i][j] = P(chosen in style i > rejected in style j), styles from plain to fancy. Hard
is the mean of the upper triangle (the wrong completion is the fancier one), normal of the diagonal,
easy of the lower triangle. A domain is the mean of its three, overall the mean of the four domains,
where the two halves of safety are pooled. All as in the authors' `compute_accuracy`. A prompt that
lacks a score is wrong in every cell.

JudgeBench: pairs of which one is objectively right (Tan et al. 2024, arXiv 2410.12784). A judge
sees each pair in both orders; a reward model's two votes are the same unless its scores tie, so a
pair is right where the better completion scores higher. The pairs are the 350 that GPT-4o wrote, of
which the headline is (ScalerLab/JudgeBench at d8740a8; `compute_final_metrics`). Model cards such
as that of Skywork-Reward-V2 have the plain mean of the four categories, which is a section here.

LLMBar: 419 expert comparisons of who follows the instruction (Zeng et al. 2023, arXiv 2310.07641).
The headline is the plain mean of the sets in the data, the section Adversarial that of its four
(princeton-nlp/LLMBar at caa7bee, `Metrics_Reference`). On the hub LLMBar is only a program, so it
is read from RewardBench's data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field

from treeward.data.preference import Preference
from treeward.errors import DataError
from treeward.evaluation.results import ScoredExample, SuiteResult, by_subset
from treeward.evaluation.statistics import combined
from treeward.evaluation.suites.interface import Prompt, Suite, one_of, published_example
from treeward.evaluation.suites.rewardbench import RewardBench

# --- RM-Bench -------------------------------------------------------------------------------------

DOMAINS = ("chat", "math", "code", "safety")
_SUBSETS = ("chat", "math", "code", "safety-refuse", "safety-response")
# The cells of each difficulty: rows are styles of the chosen, columns styles of the rejected.
_DIFFICULTIES = {
    "hard": np.triu_indices(3, 1),
    "normal": np.diag_indices(3),
    "easy": np.tril_indices(3, -1),
}

ThreeTexts = Annotated[list[str], Field(min_length=3, max_length=3)]


class StyleRow(BaseModel):
    """A row of `total_dataset.json`."""

    id: str | int
    prompt: Prompt
    chosen: ThreeTexts
    rejected: ThreeTexts
    domain: Annotated[str, one_of(*_SUBSETS)]


class RMBench(Suite):
    """Four domains; the headline is their mean."""

    name = "rmbench"
    title = "RM-Bench"
    hub_path = "THU-KEG/RM-Bench"
    schema = StyleRow
    num_published = 1327

    def load(self, source: str | None = None) -> list[Preference]:
        """As `Suite.load`; in a folder `total_dataset.json` counts, and not the files of single
        domains beside it."""
        if source is not None:
            files = sorted(Path(source).rglob("total_dataset*.json*"))
            if files:
                source = str(files[0])
        return super().load(source)

    def _example(self, row: StyleRow, where: str) -> Preference:
        """Six completions, each three from plain to fancy: concise, detailed, with markdown."""
        texts = [*row.chosen, *row.rejected]
        ranks = (0, 0, 0, 1, 1, 1)
        return published_example(where, row.domain, row.id, row.prompt, texts, ranks)

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        domains: dict[str, list[ScoredExample]] = defaultdict(list)
        for example in scored:
            # The two halves of safety, "safety-refuse" and "safety-response", are one domain.
            domain, _, _ = example.example.task_name.partition("-")
            domains[domain].append(example)
        names = [domain for domain in DOMAINS if domain in domains]
        sections = [self.part(domain, domains[domain], _share_of_wins) for domain in names]
        overall = combined("overall", sections)
        for difficulty, places in _DIFFICULTIES.items():
            value = partial(_share_of_wins, places=places)
            of_domains = [self.part(difficulty, domains[domain], value) for domain in names]
            sections.append(combined(difficulty, of_domains))
        subsets = tuple(self.parts(_SUBSETS, scored, _share_of_wins).values())
        return SuiteResult(self.name, overall, sections=tuple(sections), subsets=subsets)


def _share_of_wins(example: ScoredExample, places: Any = ...) -> float:
    """How often the chosen one in style i beats the rejected one in style j, over these places (i,
    j), by default all nine."""
    if example.failed:
        return 0.0
    chosen_S, rejected_S = np.array(example.scores, dtype=np.float64).reshape(2, 3)
    # A tie is no win.
    is_win_SS = chosen_S[:, None] > rejected_S[None, :]
    return float(is_win_SS[places].mean())


# --- JudgeBench -----------------------------------------------------------------------------------

CATEGORIES: Mapping[str, str] = {
    "Knowledge": "mmlu-pro",
    "Reasoning": "livebench-reasoning",
    "Math": "livebench-math",
    "Coding": "livecodebench",
}
"""The first letters of the sources of each category."""


class JudgedRow(BaseModel):
    """A row of the split `gpt`."""

    pair_id: str | int
    source: str
    question: Prompt
    response_A: str
    response_B: str
    label: Annotated[str, one_of("A>B", "B>A")]


class JudgeBench(Suite):
    """Four categories; the headline is the accuracy over all pairs: those of GPT-4o, the split
    `gpt` of the hub."""

    name = "judgebench"
    title = "JudgeBench"
    hub_path = "ScalerLab/JudgeBench"
    split = "gpt"
    schema = JudgedRow
    num_published = 350

    def _example(self, row: JudgedRow, where: str) -> Preference:
        texts = (row.response_A, row.response_B)
        ranks = (0, 1) if row.label == "A>B" else (1, 0)
        for category, start in CATEGORIES.items():
            if row.source.startswith(start):
                return published_example(where, category, row.pair_id, row.question, texts, ranks)
        raise DataError(
            "there is no such source in JudgeBench",
            where=where,
            field="source",
            got=row.source,
            need=f"one that begins with {', '.join(CATEGORIES.values())}",
        )

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        categories = tuple(self.parts(CATEGORIES, scored).values())
        # What model cards report. The headline is the authors', over all pairs.
        mean = combined("Mean of the categories", categories)
        return SuiteResult(
            self.name,
            self.part("accuracy", scored),
            sections=(*categories, mean),
            subsets=categories,
        )


# --- LLMBar ---------------------------------------------------------------------------------------

SETS = ("Natural", "Neighbor", "GPTInst", "GPTOut", "Manual")
"""All but Natural are adversarial."""


class LLMBar(Suite):
    """Natural and four adversarial sets; the headline is their mean."""

    name = "llmbar"
    title = "LLMBar"
    hub_path = RewardBench.hub_path
    num_published = 419

    def load(self, source: str | None = None) -> list[Preference]:
        """The subsets `llmbar-...` of RewardBench's data, set by set; `source` as of
        `Suite.load`."""
        try:
            pairs = RewardBench().load(source)
        except DataError as error:
            if source is None:
                raise  # the hub's own error names the fix
            fix = (
                f"give a copy of {self.hub_path}, which has LLMBar's sets; other files are "
                "comparisons: --data FILE"
            )
            raise error.but(fix=fix) from error
        sets = {name.lower(): name for name in SETS}
        named = []
        for pair in pairs:
            if pair.task_name.startswith("llmbar-"):
                # RewardBench writes "llmbar-adver-neighbor", and LLMBar "Neighbor".
                last_word = pair.task_name.lower().split("-")[-1]
                named.append(replace(pair, task_name=sets[last_word]))
        return sorted(named, key=lambda pair: SETS.index(pair.task_name))

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        groups = by_subset(scored)
        subsets = tuple(self.part(name, group) for name, group in groups.items())
        natural = [part for part in subsets if part.name == "Natural"]
        adversarial = [part for part in subsets if part.name != "Natural"]
        sections = natural
        if adversarial:
            sections = [*natural, combined("Adversarial", adversarial)]
        return SuiteResult(
            self.name, combined("accuracy", subsets), sections=tuple(sections), subsets=subsets
        )
