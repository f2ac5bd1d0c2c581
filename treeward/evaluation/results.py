"""`Metric`, `SuiteResult`, `Diagnostic`: the numbers of an evaluation, as `results.json` holds them.

    Metric("accuracy", 0.71, low=0.62, high=0.79, count=100)

Every number carries its number of examples, and an interval where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Unit = Literal["pairs", "examples"]
"""What is counted: pairs of completions, or whole examples."""

Block = dict[str, Any]
"""A part of a report; `treeward.evaluation.report.blocks` has the kinds."""


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

    def with_notes(self, *notes: str | None) -> Metric:
        """The metric with further sentences in its note."""
        return replace(self, note=" ".join(filter(None, (self.note, *notes))) or None)


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """What one model does in one suite. `headline`: the number that the suite is known by.

    `sections` make up the headline and `subsets` the sections; `details`: further numbers of the suite, JSON.
    `num_failed`: examples without a score, which count as wrong.
    """

    suite: str
    headline: Metric
    sections: tuple[Metric, ...] = ()
    subsets: tuple[Metric, ...] = ()
    num_examples: int = 0
    num_failed: int = 0
    num_ties: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def scored(self) -> str:
        """How many of the examples have a score, in words."""
        return f"{self.num_examples - self.num_failed:,} of {self.num_examples:,} scored"

    @property
    def unit(self) -> Unit:
        """What the headline counts: "pairs" of completions where a suite pools these, else "examples"."""
        return "pairs" if "num_pairs" in self.details else "examples"


@dataclass(frozen=True)
class Diagnostic:
    """The numbers of one diagnostic of one model, each also an attribute: `length.accuracy_gap.value`.

    `numbers`: by their names in `results.json`. `points`: its curve, as an item of a block of kind `curves`; None
    without one.
    """

    numbers: Mapping[str, Metric]
    points: Block | None = None

    def __getattr__(self, name: str) -> Metric:
        numbers: Mapping[str, Metric] = self.__dict__.get("numbers", {})
        if name not in numbers:
            raise AttributeError(f"the diagnostic has no number {name}; it has {', '.join(numbers)}")
        return numbers[name]
