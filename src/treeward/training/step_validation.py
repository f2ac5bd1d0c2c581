"""`StepValidation`: the measurements of a validation of a process reward model on one set.

Shapes: none; a solution is a path of the tree of its problem.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treeward.data.encoding import Comparison
from treeward.evaluation.process_metrics import (
    JudgedSolution,
    first_error_accuracy,
    first_error_of,
    first_wrong,
    process_bench_f1,
)
from treeward.evaluation.results import Metric
from treeward.step_losses import StepTotals

FIRST_ERROR = "first_error_accuracy"

_MISSING = {
    FIRST_ERROR: "There is no solution whose first wrong step the labels tell.",
    "processbench_f1": "It needs solutions with a wrong step, and solutions without one.",
}


@dataclass(frozen=True, slots=True)
class StepValidation:
    """The measurements of one set: sums over its steps, and for each problem its solutions whose
    first wrong step the labels tell."""

    totals: StepTotals
    problems: tuple[tuple[JudgedSolution, ...], ...]

    def metrics(self) -> dict[str, Metric]:
        """The metrics by name; without a value a metric's note says why."""
        return pooled_steps([self])


def pooled_steps(sets: Sequence[StepValidation]) -> dict[str, Metric]:
    """The metrics over the steps and solutions of all sets."""
    totals = StepTotals()
    judged: list[JudgedSolution] = []
    for result in sets:
        totals += result.totals
        for solutions in result.problems:
            judged += solutions
    metrics: dict[str, Metric] = {}
    for name, value in totals.means().items():
        metrics[name] = Metric(name, value, count=totals.num_steps)
    values = {
        FIRST_ERROR: first_error_accuracy(judged),
        "processbench_f1": process_bench_f1(judged),
    }
    for name, value in values.items():
        if math.isnan(value):
            metrics[name] = Metric(name, None, count=len(judged), note=_MISSING[name])
        else:
            metrics[name] = Metric(name, value, count=len(judged))
    return metrics


def solutions_of(
    problems: Mapping[int, Comparison], log_odds: Sequence[float]
) -> dict[int, tuple[JudgedSolution, ...]]:
    """The solutions of each problem, whose log-odds lie one step after another, as judged."""
    judged_problems: dict[int, tuple[JudgedSolution, ...]] = {}
    start = 0
    for i, problem in problems.items():
        judged = []
        for labels, is_whole in zip(problem.step_labels, problem.is_whole, strict=True):
            end = start + len(labels)
            # 0 is the log-odds of a probability of 1/2.
            predicted = first_wrong(log_odds[start:end], threshold=0.0)
            first_error = first_error_of(labels, is_whole=is_whole)
            # Unknown is not right: such a solution is in neither of ProcessBench's two kinds.
            if first_error is not None:
                judged.append(JudgedSolution(predicted, first_error))
            start = end
        judged_problems[i] = tuple(judged)
    return judged_problems
