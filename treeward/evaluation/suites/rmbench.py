"""RM-Bench: right and subtly wrong completions, each in three styles (Liu et al. 2024, arXiv 2410.16184).

    style_matrix([(1.0, 2.0, 3.0)], [(0.0, 1.5, 2.5)])   # (3, 3), a row per style of the chosen completion
    RMBench().load("RM-Bench/data/total_dataset.json")   # or the folder, or the hub's THU-KEG/RM-Bench

A[i][j] = P(chosen in style i > rejected in style j), styles from plain to fancy: concise, detailed, detailed markdown.
Hard is the mean of the upper triangle (the wrong completion is the fancier one), normal of the diagonal, easy of the
lower triangle. A domain is the mean of its three, which is the mean of its nine cells; overall is the mean of the four
domains, where the two halves of safety are pooled; hard, normal and easy overall are the means over domains. All as in
the authors' `compute_accuracy`. With `tie_policy="half"` a tie adds half to its cell.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from treeward.data.sources import Row
from treeward.evaluation.examples import EvalExample, ScoredExample
from treeward.evaluation.parts import Part, by_subset, combined, with_notes
from treeward.evaluation.results import SuiteResult
from treeward.evaluation.suites.interface import Suite, TiePolicy
from treeward.evaluation.suites.rows import (
    Prompt,
    data_files,
    example,
    one_of,
    read_as,
    repository_rows,
    with_distinct_ids,
)

STYLES = ("concise", "detailed", "markdown")
"""From plain to fancy, the order of the completions in the data."""

DOMAINS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"chat": ("chat",), "math": ("math",), "code": ("code",), "safety": ("safety-refuse", "safety-response")}
)
"""The values of `domain` in the data that make up each of the four domains."""

DIFFICULTIES: Mapping[str, tuple[tuple[int, int], ...]] = MappingProxyType(
    {"hard": ((0, 1), (0, 2), (1, 2)), "normal": ((0, 0), (1, 1), (2, 2)), "easy": ((1, 0), (2, 0), (2, 1))}
)
"""The cells (style of the chosen, style of the rejected) of each."""

_SUBSETS = tuple(name for names in DOMAINS.values() for name in names)
_SIZE = 1327

Matrix = NDArray[np.float64]
ThreeTexts = Annotated[list[str], Field(min_length=3, max_length=3)]


class StyleRow(BaseModel):
    """A row of `total_dataset.json`."""

    id: str | int
    prompt: Prompt
    chosen: ThreeTexts
    rejected: ThreeTexts
    domain: Annotated[str, one_of(*_SUBSETS)]


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
        """Six completions, ranks 0, 0, 0, 1, 1, 1; `suite_data["styles"]` has the style of each; see `Suite.load`.

        In a folder `total_dataset.json` counts, if it is there, and not the files of single domains beside it.
        """
        totals = (
            []
            if source is None
            else [file for file in data_files(source) if os.path.basename(file).startswith("total_dataset")]
        )
        rows = repository_rows(totals[0] if totals else source, self.hub_path, split=None)
        return with_distinct_ids([_example(row) for row in rows])

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        groups, cells = by_subset(scored), {one.example.id: self._cells(one) for one in scored}

        def part(name: str, own: Sequence[ScoredExample], places: Any = ...) -> Part:
            return self.part(name, own, lambda one: float(cells[one.example.id][places].mean()))

        domains = {domain: [one for name in names for one in groups.get(name, ())] for domain, names in DOMAINS.items()}
        domains = {domain: own for domain, own in domains.items() if own}
        parts = {domain: part(domain, own) for domain, own in domains.items()}
        difficulties = {
            name: combined(name, [part(name, own, tuple(np.array(places).T)) for own in domains.values()])
            for name, places in DIFFICULTIES.items()
        }
        subsets = tuple(part(name, groups[name]).metric for name in _SUBSETS if name in groups)
        matrices = {domain: np.mean([cells[one.example.id] for one in own], axis=0) for domain, own in domains.items()}
        details: dict[str, Any] = {
            "styles": list(STYLES),
            "matrix": np.mean(list(matrices.values()), axis=0).tolist() if matrices else None,
            "matrices": {domain: matrix.tolist() for domain, matrix in matrices.items()},
            **{name: metric.value for name, metric in difficulties.items()},
        }
        headline = with_notes(combined("overall", list(parts.values())), _incomplete(len(scored), domains))
        sections = (*(one.metric for one in parts.values()), *difficulties.values())
        return SuiteResult(self.name, headline, sections, subsets, details=details)

    def _cells(self, scored: ScoredExample) -> Matrix:
        if any(score is None for score in scored.scores):
            return np.zeros((3, 3))
        scores = [float(score) for score in scored.scores if score is not None]
        return style_matrix([scores[:3]], [scores[3:]], self.tie_policy)


def _example(row: Row) -> EvalExample:
    one = read_as(StyleRow, row)
    texts, styles = (*one.chosen, *one.rejected), [*STYLES, *STYLES]
    ranks = (0, 0, 0, 1, 1, 1)
    return example(row.where, f"{one.domain}/{one.id}", one.domain, one.prompt, texts, ranks, id=one.id, styles=styles)


def _incomplete(count: int, domains: Mapping[str, Sequence[ScoredExample]]) -> str | None:
    absent = [domain for domain in DOMAINS if domain not in domains]
    if not absent and count == _SIZE:
        return None
    names = f"; none of {', '.join(absent)}" if absent else ""
    return f"These are {count} of {_SIZE} prompts{names}: not comparable with published scores."
