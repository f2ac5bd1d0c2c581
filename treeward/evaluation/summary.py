"""`summarize`: from the scored examples of one model in one suite to every number of an evaluation.

summary = summarize(suite, scored, "my-model")
summary.result.headline, summary.length.accuracy_gap, summary.statistics.ece
"""

from __future__ import annotations

from dataclasses import dataclass

from treeward.evaluation.diagnostics.biases import diagnose_length, diagnose_style
from treeward.evaluation.diagnostics.overlap import Overlap, diagnose_overlap
from treeward.evaluation.diagnostics.scores import statistics_of
from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.results import Diagnostic, SuiteResult
from treeward.evaluation.suites.interface import Suite


@dataclass(frozen=True, slots=True)
class Summary:
    """Every number of one model in one suite. `training_overlap`: the examples that the training data has."""

    model: str
    suite: Suite
    result: SuiteResult
    statistics: Diagnostic
    length: Diagnostic
    style: Diagnostic
    examples: tuple[ScoredExample, ...]
    perturbations: Diagnostic | None = None
    overlap: Diagnostic | None = None
    training_overlap: Overlap | None = None

    @property
    def title(self) -> str:
        """That of the suite."""
        return self.suite.title or self.suite.name

    @property
    def diagnostics(self) -> dict[str, Diagnostic]:
        """The diagnostics that were made, by their names in `results.json`, in the order of a report."""
        named = {
            "length": self.length,
            "style": self.style,
            "perturbations": self.perturbations,
            "statistics": self.statistics,
            "overlap": self.overlap,
        }
        return {name: diagnostic for name, diagnostic in named.items() if diagnostic is not None}


def summarize(
    suite: Suite,
    examples: tuple[ScoredExample, ...],
    model: str,
    *,
    perturbations: Diagnostic | None = None,
    overlap: Overlap | None = None,
) -> Summary:
    """The numbers of one model in one suite."""
    result = suite.summarize(examples)
    return Summary(
        model=model,
        suite=suite,
        result=result,
        statistics=statistics_of(examples, result, name=f"{model} on {suite.name}"),
        length=diagnose_length(examples),
        style=diagnose_style(examples),
        examples=examples,
        perturbations=perturbations,
        overlap=None if overlap is None else diagnose_overlap(suite, examples, overlap),
        training_overlap=overlap,
    )
