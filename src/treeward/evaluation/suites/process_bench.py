"""ProcessBench: which step of a solution is the first wrong one (Zheng et al. 2024, arXiv
2412.06559).

Rows are `id, generator, problem, steps, final_answer_correct, label`: the index of the first wrong
step, or -1. A model's answer is the first step that it calls wrong, -1 without any. Of the
solutions with an error the exact index counts; the F1 of a subset is the harmonic mean of that
accuracy and of the one on solutions without an error (code/run_eval_prm_rlhflow.py at e802463). The
headline is the plain mean of the four subsets: Math-Shepherd's 47.9, 29.5, 24.8 and 23.8 give the
paper's 31.5.

A step is called wrong where its probability is below 1/2, the more probable of two labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Annotated, Any

from pydantic import BaseModel, Field

from treeward.data.preference import Preference
from treeward.errors import DataError
from treeward.evaluation.process_metrics import (
    JudgedSolution,
    accuracies_by_kind,
    first_wrong,
    process_bench_f1,
)
from treeward.evaluation.results import Metric, ScoredExample, SuiteResult, by_subset
from treeward.evaluation.suites.interface import (
    Suite,
    published_example,
    suite_rows,
)
from treeward.evaluation.suites.steps import completion_of

SUBSETS = ("gsm8k", "math", "olympiadbench", "omnimath")
"""The splits on the hub, and the beginnings of the ids."""


class ProcessBenchRow(BaseModel):
    """A row of any split."""

    id: str
    problem: str
    steps: Annotated[list[str], Field(min_length=1)]
    label: Annotated[int, Field(ge=-1)]


class ProcessBench(Suite):
    """The first wrong steps of 3,400 solutions; the headline is the mean F1 of four subsets."""

    name = "processbench"
    title = "ProcessBench"
    hub_path = "Qwen/ProcessBench"
    schema = ProcessBenchRow
    num_published = 3400

    def load(self, source: str | None = None) -> list[Preference]:
        """The solutions of all subsets. `source`: the file of one, or a folder with a file for each
        subset that is there."""
        if source is not None:
            rows = list(suite_rows(source, str(self.hub_path), split=None))
        else:
            rows = []
            for subset in SUBSETS:
                rows += suite_rows(None, str(self.hub_path), split=subset)
        return self._examples(rows)

    def _example(self, row: Any, where: str) -> Preference:
        if row.label >= len(row.steps):
            raise DataError(
                "the label is no index of a step",
                where=where,
                field="label",
                got=row.label,
                need=f"-1 to {len(row.steps) - 1}",
            )
        subset = row.id.rpartition("-")[0] or "all"
        prompt = ({"role": "user", "content": row.problem},)
        example = published_example(where, subset, row.id, prompt, [completion_of(row.steps)], [0])
        info = {"first_error": row.label, "num_steps": len(row.steps)}
        # The published id has its subset already, as "gsm8k-12".
        return replace(example, id=row.id, info=info)

    def is_measured(self, example: ScoredExample) -> bool:
        # A solution is one completion: it has probabilities of steps, and no pairs.
        return bool(_probabilities(example))

    def chance(self, part: str | None = None) -> float | None:
        return None  # it depends on how many steps the solutions have

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        parts: list[Metric] = []
        f1_of_subsets: list[float] = []
        accuracies: dict[str, Mapping[str, float | None]] = {}
        for name, group in by_subset(scored).items():
            judged = []
            for example in group:
                # A solution that the model has not read is wrong, whatever its label: none is -2.
                predicted = -2
                probabilities = _probabilities(example)
                if probabilities:
                    predicted = first_wrong(probabilities)
                judged.append(JudgedSolution(predicted, example.example.info["first_error"]))
            f1 = process_bench_f1(judged)
            # NaN, where one kind of solutions is missing, is no number of a report.
            if not math.isnan(f1):
                f1_of_subsets.append(f1)
                parts.append(Metric(name, f1, count=len(group)))
            error_accuracy, right_accuracy = accuracies_by_kind(judged)
            # JSON has no NaN, and `details` are written as they are.
            accuracies[name] = {
                "error": None if math.isnan(error_accuracy) else error_accuracy,
                "correct": None if math.isnan(right_accuracy) else right_accuracy,
            }
        if f1_of_subsets:
            headline = Metric("F1", fmean(f1_of_subsets), count=len(scored))
        else:
            note = "No subset has solutions with an error and solutions without one."
            headline = Metric("F1", None, count=len(scored), note=note)
        return SuiteResult(
            self.name,
            headline,
            sections=tuple(parts),
            subsets=tuple(parts),
            details={"accuracy": accuracies},
        )


def _probabilities(example: ScoredExample) -> Sequence[float]:
    """The probabilities that the steps are right; none where the model has not read exactly the
    solution's steps."""
    if not example.steps:
        return ()
    [probabilities] = example.steps  # a solution is one completion
    # As where a step is blank, which no model reads: the label would count other steps.
    if len(probabilities) != example.example.info["num_steps"]:
        return ()
    return probabilities
