"""`Metric`, `SuiteResult`, `Evaluation`: the numbers of an evaluation, as `results.json` holds them.

    Metric("accuracy", 0.71, low=0.62, high=0.79, count=100)

Every number carries what it was computed from: how many examples, and an interval where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Metric", "SuiteResult", "Unit"]

Unit = Literal["pairs", "examples"]
"""What is counted: pairs of replies, or whole examples."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A number with its 95 % interval (None where there is none) and how many examples it is of.

    `value`: None where nothing could be computed. `note`: what a reader must know to read it, one sentence.
    """

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    count: int | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """What one model does in one suite. `headline`: the number that the suite is known by.

    `sections` make up the headline and `subsets` the sections; `details`: further numbers of the suite, JSON.
    `headline_of_scored`, `parts_of_scored`: headline, sections and subsets of the examples that have a score alone,
    where some have none (`num_failed`); None and empty where all have one, or none has.
    """

    suite: str
    headline: Metric
    sections: tuple[Metric, ...] = ()
    subsets: tuple[Metric, ...] = ()
    num_examples: int = 0
    num_failed: int = 0
    num_ties: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)
    headline_of_scored: Metric | None = None
    parts_of_scored: tuple[Metric, ...] = ()

    @property
    def unit(self) -> Unit:
        """What the headline counts: "pairs" of replies where a suite pools these, else "examples"."""
        return "pairs" if "num_pairs" in self.details else "examples"
