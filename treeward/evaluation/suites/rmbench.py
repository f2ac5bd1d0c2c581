"""RM-Bench: right and subtly wrong completions, each in three styles (Liu et al. 2024, arXiv 2410.16184).

    RMBench().load("RM-Bench/data/total_dataset.json")   # or the folder, or the hub's THU-KEG/RM-Bench

A[i][j] = P(chosen in style i > rejected in style j), styles from plain to fancy: concise, detailed, detailed markdown.
Hard is the mean of the upper triangle (the wrong completion is the fancier one), normal of the diagonal, easy of the
lower triangle. A domain is the mean of its three, which is the mean of its nine cells; overall is the mean of the four
domains, where the two halves of safety are pooled; hard, normal and easy overall are the means over domains. All as in
the authors' `compute_accuracy`. With `tie_policy="half"` a tie adds half to its cell. A prompt that lacks a score is
wrong in every cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from treeward.data.sources import Row
from treeward.evaluation.examples import EvalExample, ScoredExample
from treeward.evaluation.parts import Part, by_subset, combined
from treeward.evaluation.results import SuiteResult
from treeward.evaluation.suites.interface import Suite
from treeward.evaluation.suites.rows import Prompt, example, one_of, read_as, suite_rows

STYLES = ("concise", "detailed", "markdown")
"""From plain to fancy, the order of the completions in the data."""

DOMAINS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"chat": ("chat",), "math": ("math",), "code": ("code",), "safety": ("safety-refuse", "safety-response")}
)
"""The values of `domain` in the data that make up each of the four domains."""

_SUBSETS = tuple(name for names in DOMAINS.values() for name in names)
# The cells (style of the chosen, style of the rejected) of each.
_DIFFICULTIES = {"hard": np.triu_indices(3, 1), "normal": np.diag_indices(3), "easy": np.tril_indices(3, -1)}

ThreeTexts = Annotated[list[str], Field(min_length=3, max_length=3)]


class StyleRow(BaseModel):
    """A row of `total_dataset.json`."""

    id: str | int
    prompt: Prompt
    chosen: ThreeTexts
    rejected: ThreeTexts
    domain: Annotated[str, one_of(*_SUBSETS)]


class RMBench(Suite):
    """Four domains; the headline is their mean. `details`: the matrix of styles, the mean of those of the domains."""

    name = "rmbench"
    title = "RM-Bench"
    hub_path = "THU-KEG/RM-Bench"
    num_published = 1327

    def load(self, source: str | None = None) -> list[EvalExample]:
        """Six completions, ranks 0, 0, 0, 1, 1, 1, each three in the order of `STYLES`; see `Suite.load`.

        In a folder `total_dataset.json` counts, if it is there, and not the files of single domains beside it.
        """
        total = next(Path(source or "").rglob("total_dataset*.json*"), None) if source is not None else None
        rows = suite_rows(source if total is None else str(total), self.hub_path, split=None)
        return [_example(row) for row in rows]

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        groups, cells = by_subset(scored), {one.example.id: self._cells(one) for one in scored}

        def part(name: str, own: Sequence[ScoredExample], places: Any = ...) -> Part:
            return self.part(name, own, lambda one: float(cells[one.example.id][places].mean()))

        all_domains = {domain: [o for name in names for o in groups.get(name, ())] for domain, names in DOMAINS.items()}
        domains = {domain: own for domain, own in all_domains.items() if own}
        parts = [part(domain, own) for domain, own in domains.items()]
        difficulties = [
            combined(name, [part(name, own, places) for own in domains.values()])
            for name, places in _DIFFICULTIES.items()
        ]
        matrices = [np.mean([cells[one.example.id] for one in own], axis=0) for own in domains.values()]
        return SuiteResult(
            self.name,
            combined("overall", parts),
            sections=(*(one.metric for one in parts), *difficulties),
            subsets=tuple(part(name, groups[name]).metric for name in _SUBSETS if name in groups),
            details={"matrix": np.mean(matrices, axis=0).tolist() if matrices else None},
        )

    def _cells(self, scored: ScoredExample) -> NDArray[np.float64]:
        """(3, 3): whether the chosen one in style i beats the rejected one in style j."""
        if scored.failed:
            return np.zeros((3, 3))
        chosen, rejected = np.array(scored.scores, dtype=np.float64).reshape(2, 3)
        beyond = chosen[:, None] - rejected[None, :]
        return np.where(beyond > 0, 1.0, np.where((beyond == 0) & (self.tie_policy == "half"), 0.5, 0.0))


def _example(row: Row) -> EvalExample:
    one = read_as(StyleRow, row)
    return example(row.where, one.domain, one.id, one.prompt, (*one.chosen, *one.rejected), (0, 0, 0, 1, 1, 1))
