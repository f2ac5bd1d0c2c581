"""Metrics of process reward models: first errors, and ProcessBench's F1.

    found = JudgedSolution(predicted=2, first_error=2)
    right = JudgedSolution(predicted=-1, first_error=-1)
    judged = [found, right]
    first_error_accuracy(judged)      # 1.0: in both the first wrong step is found
    process_bench_f1(judged)          # the harmonic mean of the two kinds' accuracies

ProcessBench: Zheng et al. 2024, arXiv 2412.06559; its code/run_eval_prm_rlhflow.py at e802463.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

RIGHT_FROM = 0.5
"""The least probability of a step that is called right: the more probable of its two labels."""


@dataclass(frozen=True, slots=True)
class JudgedSolution:
    """The index of the first wrong step of a solution, -1 where all are right: `predicted` by a
    model, and `first_error` of its labels."""

    predicted: int
    first_error: int

    @property
    def is_found(self) -> bool:
        return self.predicted == self.first_error


def first_wrong(probabilities: Sequence[float], threshold: float = RIGHT_FROM) -> int:
    """The index of the first step whose probability of being right is below the threshold; -1 where
    there is none."""
    for i, probability in enumerate(probabilities):
        if probability < threshold:
            return i
    return -1


def first_error_of(labels: Sequence[float], *, is_whole: bool = True) -> int | None:
    """The index of the first wrong step by the labels, NaN for none; -1 where all are right. None
    where nothing says which is the first: a step before it has no label, or the labels are not of
    the whole solution, and all are right."""
    for i, label in enumerate(labels):
        if math.isnan(label):
            return None
        if label < RIGHT_FROM:
            return i
    return -1 if is_whole else None


def first_error_accuracy(judged: Sequence[JudgedSolution]) -> float:
    """The share of solutions whose first wrong step is found exactly, or that are found to have
    none; NaN without any."""
    if not judged:
        return math.nan
    return fmean(solution.is_found for solution in judged)


def accuracies_by_kind(judged: Sequence[JudgedSolution]) -> tuple[float, float]:
    """`first_error_accuracy` of the solutions with an error, and of those without one."""
    with_error = []
    without_error = []
    for solution in judged:
        if solution.first_error == -1:
            without_error.append(solution)
        else:
            with_error.append(solution)
    return first_error_accuracy(with_error), first_error_accuracy(without_error)


def process_bench_f1(judged: Sequence[JudgedSolution]) -> float:
    """ProcessBench's F1: the harmonic mean of the accuracy on solutions with an error, where the
    exact index counts, and of the accuracy on those without one. NaN where one kind is missing."""
    error_accuracy, right_accuracy = accuracies_by_kind(judged)
    total = error_accuracy + right_accuracy
    if total == 0:
        return 0.0
    return 2 * error_accuracy * right_accuracy / total
