"""RM-Bench: right and subtly wrong answers, each in three styles (Liu et al. 2024, arXiv 2410.16184).

    style_matrix([(1.0, 2.0, 3.0)], [(0.0, 1.5, 2.5)])   # (3, 3), a row per style of the chosen answer
    RMBench().load("RM-Bench/data/total_dataset.json")   # or the folder, or the hub's THU-KEG/RM-Bench

A[i][j] = P(chosen in style i > rejected in style j), styles from plain to fancy: concise, detailed, detailed markdown.
Hard is the mean of the upper triangle (the wrong answer is the fancier one), normal of the diagonal, easy of the lower
triangle. A domain is the mean of its three, which is the mean of its nine cells; overall is the mean of the four
domains, where the two halves of safety are pooled; hard, normal and easy overall are the means over domains. All as in
the authors' `compute_accuracy`. With `tie_policy="half"` a tie adds half to its cell.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeward.data.sources import Row
from treeward.evaluation.examples import EvalExample, ScoredExample
from treeward.evaluation.results import SuiteResult
from treeward.evaluation.statistics import mean
from treeward.evaluation.suites.interface import Suite, TiePolicy
from treeward.evaluation.suites.parts import Part, by_subset, combined, prompt_of, with_notes
from treeward.evaluation.suites.rewardbench import result_path
from treeward.evaluation.suites.rows import (
    assistant,
    data_files,
    id_field,
    name_field,
    prompt_field,
    repository_rows,
    texts_field,
    with_distinct_ids,
)

__all__ = ["DIFFICULTIES", "DOMAINS", "STYLES", "RMBench", "style_matrix"]

STYLES = ("concise", "detailed", "markdown")
"""From plain to fancy, the order of the answers in the data."""

DOMAINS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"chat": ("chat",), "math": ("math",), "code": ("code",), "safety": ("safety-refuse", "safety-response")}
)
"""The values of `domain` in the data that make up each of the four domains."""

DIFFICULTIES: Mapping[str, tuple[tuple[int, int], ...]] = MappingProxyType(
    {"hard": ((0, 1), (0, 2), (1, 2)), "normal": ((0, 0), (1, 1), (2, 2)), "easy": ((1, 0), (2, 0), (2, 1))}
)
"""The cells (style of the chosen, style of the rejected) of each."""

_SIZE = 1327
_TOTAL = "total_dataset"

Matrix = NDArray[np.float64]


def style_matrix(
    chosen_N3: Sequence[Sequence[float]], rejected_N3: Sequence[Sequence[float]], tie_policy: TiePolicy = "strict"
) -> Matrix:
    """A (3, 3): A[i][j] is how often of N prompts, N >= 1, the chosen one in style i beats the rejected one in j."""
    chosen, rejected = np.asarray(chosen_N3, np.float64)[:, :, None], np.asarray(rejected_N3, np.float64)[:, None, :]
    wins = (chosen > rejected).astype(np.float64)
    if tie_policy == "half":
        wins += (chosen == rejected) / 2
    matrix: Matrix = wins.mean(axis=0)
    return matrix


class RMBench(Suite):
    """Four domains; the headline is their mean. `details`: the matrix of each, and hard, normal and easy overall."""

    name = "rmbench"
    title = "RM-Bench"
    hub_path = "THU-KEG/RM-Bench"

    def load(self, source: str | None = None) -> list[EvalExample]:
        """Rows of id, prompt, chosen and rejected (lists of three), domain; see `Suite.load`.

        In a folder `total_dataset.json` counts, if it is there, and not the files of single domains beside it. Six
        completions, ranks 0, 0, 0, 1, 1, 1; `suite_data["styles"]` has the style of each.
        """
        return with_distinct_ids([_example(row) for row in repository_rows(_total(source), self.hub_path, split=None)])

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        groups = by_subset(scored)
        cells = {subset: [self._cells(one) for one in group] for subset, group in groups.items()}
        parts: dict[str, Part] = {}
        by_difficulty: dict[str, list[Part]] = {name: [] for name in DIFFICULTIES}
        matrices: dict[str, Matrix] = {}
        for domain, names in DOMAINS.items():
            own = [matrix for name in names for matrix in cells.get(name, ())]
            if not own:
                continue
            prompts = [prompt_of(one.example) for name in names for one in groups.get(name, ())]
            matrices[domain] = np.mean(own, axis=0)
            parts[domain] = Part.of(domain, [mean(matrix) for matrix in own], prompts)
            for name, places in DIFFICULTIES.items():
                outcomes = [mean(np.array([matrix[place] for place in places])) for matrix in own]
                by_difficulty[name].append(Part.of(name, outcomes, prompts))
        overall = combined("overall", list(parts.values()), [1.0] * len(parts))
        difficulties = {name: combined(name, group, [1.0] * len(group)) for name, group in by_difficulty.items()}
        subsets = tuple(
            Part.of(name, map(mean, cells[name]), [prompt_of(one.example) for one in groups[name]]).metric
            for names in DOMAINS.values()
            for name in names
            if name in cells
        )
        every = list(matrices.values())
        details: dict[str, Any] = {
            "styles": list(STYLES),
            "matrix": np.mean(every, axis=0).tolist() if every else None,
            "matrices": {domain: matrix.tolist() for domain, matrix in matrices.items()},
            **{name: metric.value for name, metric in difficulties.items()},
        }
        sections = (*(part.metric for part in parts.values()), *difficulties.values())
        return SuiteResult(self.name, with_notes(overall, _missing(groups)), sections, subsets, details=details)

    def _cells(self, scored: ScoredExample) -> Matrix:
        if any(score is None for score in scored.scores):
            return np.zeros((3, 3))
        scores = [float(score) for score in scored.scores if score is not None]
        return style_matrix([scores[:3]], [scores[3:]], self.tie_policy)

    def published_files(self, scored: Sequence[ScoredExample], model_name: str) -> dict[str, Any]:
        """`results/<model>.json`: the data's rows with `score_chosen` and `score_rejected`, as `run_rm.py` writes."""
        rows = []
        for one in scored:
            texts = [completion[-1]["content"] for completion in one.example.completions]
            rows.append(
                {
                    "id": one.example.suite_data.get("id", one.example.id),
                    "prompt": one.example.context[-1]["content"],
                    "chosen": texts[:3],
                    "rejected": texts[3:],
                    "domain": one.example.subset,
                    "score_chosen": list(one.scores[:3]),
                    "score_rejected": list(one.scores[3:]),
                }
            )
        return {result_path("results", model_name): rows}


def _total(source: str | None) -> str | None:
    if source is None:
        return None
    found = [file for file in data_files(source) if os.path.basename(file).startswith(_TOTAL)]
    return found[0] if found else source


def _example(row: Row) -> EvalExample:
    known = tuple(name for names in DOMAINS.values() for name in names)
    domain, published = name_field(row, "domain", known, "domain of RM-Bench"), id_field(row, "id")
    chosen, rejected = (texts_field(row, name, count=len(STYLES)) for name in ("chosen", "rejected"))
    return EvalExample(
        id=f"{domain}/{published}",
        subset=domain,
        context=prompt_field(row, "prompt"),
        completions=tuple(map(assistant, (*chosen, *rejected))),
        ranks=(0, 0, 0, 1, 1, 1),
        suite_data={"id": row.values["id"], "styles": [*STYLES, *STYLES]},
        where=row.where,
    )


def _missing(groups: Mapping[str, Sequence[ScoredExample]]) -> str | None:
    count = sum(map(len, groups.values()))
    absent = [domain for domain, names in DOMAINS.items() if not any(name in groups for name in names)]
    if not absent and count == _SIZE:
        return None
    names = f"; none of {', '.join(absent)}" if absent else ""
    return f"These are {count} of {_SIZE} prompts{names}: not comparable with published scores."
