"""`StepsSuite`: solutions with labels of their steps, in any form that a process reward model is
trained on, as a suite.

    suite = StepsSuite("held_out", DatasetConfig(data_path="steps.jsonl"))
    suite.load()        # a problem each, whose completions are its solutions

Its numbers are those of a validation while training: `training/step_validation.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from treeward.config.data import DatasetConfig
from treeward.config.dataset_table import STEP_SETS
from treeward.data.columns import with_named_prompt
from treeward.data.formats import recognise
from treeward.data.preference import Completion, Preference
from treeward.data.sources import read_rows
from treeward.data.step_datasets import open_step_dataset, recognise_steps, recognised_steps
from treeward.data.step_encoding import labels_of_paths, merged_problems
from treeward.data.steps import paths_of, step_tree
from treeward.errors import DataError
from treeward.evaluation.process_metrics import (
    RIGHT_FROM,
    JudgedSolution,
    first_error_accuracy,
    first_error_of,
    first_wrong,
    process_bench_f1,
)
from treeward.evaluation.results import Metric, ScoredExample, SuiteResult, by_subset
from treeward.evaluation.statistics import accuracy_metric
from treeward.evaluation.suites.interface import Suite

_BLANK_LINES = re.compile(r"\n\s*\n")


def completion_of(steps: Sequence[str]) -> str:
    """A completion that a process reward model parts into these steps.

    Blank lines part the steps of a completion: within a step they become line ends.
    """
    return "\n\n".join(_BLANK_LINES.sub("\n", step.strip()) for step in steps)


def has_steps(config: DatasetConfig) -> bool:
    """Whether the set has labels of steps, and no comparisons. False for one that cannot be read:
    `load` of either suite names the fault."""
    if config.dataset_name != "auto":
        return config.dataset_name in STEP_SETS
    has_pair_keys = (config.chosen_key, config.rejected_key) != ("chosen", "rejected")
    if has_pair_keys or config.rating_key is not None:
        return False  # these name the columns of comparisons
    try:
        rows = read_rows(str(config.data_path), split=config.split, subset=config.subset)
        row = next(iter(rows))
    except DataError:
        return False
    try:
        recognise(with_named_prompt(row.values, config.prompt_key, row.where, required=False), "")
    except DataError:
        try:
            recognise_steps(row.values, row.where)
        except DataError:
            return False
        return True
    return False


class StepsSuite(Suite):
    """Solutions with labels of their steps; `name` is that of the results.

    An example is a problem with all its solutions, which are scored as one tree. A row's
    `task_name` is its subset; rows without one are of the subset `all`. A step that solutions share
    counts once in the accuracy. Steps of a solution without a score count as wrong.
    """

    def __init__(self, name: str, config: DatasetConfig) -> None:
        self.name = name
        self.config = config

    def load(self, source: str | None = None) -> list[Preference]:
        """Every problem with a label; `source` is read in place of the config's `data_path`. Ids
        are the problems' numbers."""
        config = self.config
        if source is not None:
            config = config.model_copy(update={"data_path": source})
        config = recognised_steps(config)
        examples = []
        problems = merged_problems(open_step_dataset(config))
        for number, (problem, where) in enumerate(problems, start=1):
            nodes = step_tree(problem.solutions)
            paths = paths_of(nodes)
            if not paths:
                continue  # nobody has judged a step of it
            completions = []
            for path in paths:
                text = completion_of([nodes[i].text for i in path])
                completions.append(Completion(0, ({"role": "assistant", "content": text},)))
            labels, counts = labels_of_paths(nodes, paths)
            name = problem.task_name
            if name == config.dataset_name:
                name = "all"  # the name of the form, which is no part of the data
            example = Preference(
                problem.context,
                tuple(completions),
                task_name=name,
                template_kwargs=problem.template_kwargs,
                id=str(number),
                info={
                    "step_labels": labels,
                    "step_counts": counts,
                    "is_whole": [nodes[path[-1]].is_end for path in paths],
                },
                where=where,
            )
            examples.append(example)
        return examples

    def is_measured(self, example: ScoredExample) -> bool:
        # The completions have no order: a model without probabilities of steps says nothing.
        return any(example.steps)

    def chance(self, part: str | None = None) -> float | None:
        return None  # it depends on how many of the steps are right

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        headline = _accuracy("accuracy by step", scored)
        subsets = [_accuracy(name, group) for name, group in by_subset(scored).items()]
        # The solutions whose first wrong step the labels tell.
        judged = []
        for example in scored:
            info = example.example.info
            for i, labels in enumerate(info["step_labels"]):
                first_error = first_error_of(labels, is_whole=info["is_whole"][i])
                if first_error is None:
                    continue
                # No label is -2, so a solution without a score is wrong.
                predicted = -2
                probabilities = _probabilities(example, i)
                if probabilities:
                    predicted = first_wrong(probabilities)
                judged.append(JudgedSolution(predicted, first_error))
        values = {
            "first error": first_error_accuracy(judged),
            "ProcessBench F1": process_bench_f1(judged),
        }
        sections = []
        for name, value in values.items():
            # NaN: no solution tells its first wrong step, or one of the two kinds is missing.
            if not math.isnan(value):
                sections.append(Metric(name, value, count=len(judged)))
        return SuiteResult(self.name, headline, sections=tuple(sections), subsets=tuple(subsets))


def _accuracy(name: str, scored: Sequence[ScoredExample]) -> Metric:
    """The share of labelled steps whose more probable label is the step's."""
    values = []
    problems = []
    for example in scored:
        for i, labels in enumerate(example.example.info["step_labels"]):
            counts = example.example.info["step_counts"][i]
            probabilities = _probabilities(example, i)
            for step, (label, count) in enumerate(zip(labels, counts, strict=True)):
                if count == 0:
                    continue  # without a label, or counted in another solution
                is_right = bool(probabilities) and (
                    (probabilities[step] >= RIGHT_FROM) == (label >= RIGHT_FROM)
                )
                values.append(float(is_right))
                problems.append(example.example.prompt_key)
    return accuracy_metric(values, name, problems)


def _probabilities(example: ScoredExample, i: int) -> Sequence[float]:
    """The probabilities of the steps of a solution; none where the model has not read exactly
    these steps."""
    if not example.steps or len(example.steps[i]) != len(example.example.info["step_labels"][i]):
        return ()
    return example.steps[i]
