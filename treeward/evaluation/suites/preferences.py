"""`PreferenceSuite`: any preference data that the trainer reads, as a suite.

    PreferenceSuite("mine", DatasetConfig(data_path="validation.jsonl")).load()

Of K completions every pair with different ranks counts, as in the trainer's validation: the accuracy is over pairs,
pooled, with an interval over prompts. Examples without an order (all ranks equal) count in no accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treeward.config.data import DatasetConfig
from treeward.data.datasets import open_dataset
from treeward.evaluation.examples import EvalExample, ScoredExample
from treeward.evaluation.results import Metric, SuiteResult
from treeward.evaluation.statistics import Part, by_subset
from treeward.evaluation.suites.interface import Suite, TiePolicy


class PreferenceSuite(Suite):
    """The comparisons of one dataset; `name` is that of its results. A row's `task_name` is its subset."""

    def __init__(self, name: str, config: DatasetConfig, *, tie_policy: TiePolicy = "strict") -> None:
        super().__init__(tie_policy=tie_policy)
        self.name, self.config = name, config

    def load(self, source: str | None = None) -> list[EvalExample]:
        """Everything in the set; `source` is read in place of the config's `data_path`. Ids are the rows' numbers."""
        config = self.config if source is None else self.config.model_copy(update={"data_path": source})
        examples = []
        for number, (preference, where) in enumerate(open_dataset(config), 1):
            suite_data: dict[str, Any] = {}
            grades = [completion.score for completion in preference.completions]
            if any(grade is not None for grade in grades):
                suite_data["grades"] = grades
            if preference.margin is not None:
                suite_data["margin"] = preference.margin
            examples.append(
                EvalExample(
                    id=str(number),
                    subset=preference.task_name,
                    context=preference.context,
                    completions=tuple(completion.messages for completion in preference.completions),
                    ranks=tuple(completion.rank for completion in preference.completions),
                    suite_data=suite_data,
                    where=where,
                )
            )
        return examples

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        ordered = [one for one in scored if len(set(one.example.ranks)) > 1]
        headline = self._pairwise("accuracy", ordered)
        subsets = tuple(self._pairwise(name, group) for name, group in by_subset(ordered).items())
        return SuiteResult(self.name, headline, subsets=subsets, details={"num_pairs": headline.count})

    def _pairwise(self, name: str, scored: Sequence[ScoredExample]) -> Metric:
        pairs = [(one, better, worse) for one in scored for better, worse in one.pairs()]
        prompts = [one.example.prompt_key for one, _, _ in pairs]
        return Part.of(name, [self._value(*pair) for pair in pairs], prompts, "pairs").metric

    def _value(self, one: ScoredExample, better: int, worse: int) -> float:
        a, b = one.scores[better], one.scores[worse]
        if a is None or b is None:
            return 0.0
        return 0.5 if a == b and self.tie_policy == "half" else float(a > b)
