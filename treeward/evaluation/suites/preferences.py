"""`PreferenceSuite`: any preference data that the trainer reads, as a suite.

    PreferenceSuite("mine", DatasetConfig(data_path="validation.jsonl")).load()

Of K completions every pair with different ranks counts, as in the trainer's validation: the accuracy is over pairs,
pooled, with an interval over prompts. `best_of_accuracy` in `details` is how often the best-ranked completions are all
ahead of the others, the same number where K is 2. Examples without an order (all ranks equal) count in no accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treeward.config.data import DatasetConfig
from treeward.data.datasets import open_dataset
from treeward.evaluation.examples import EvalExample, ScoredExample
from treeward.evaluation.parts import Part, by_subset
from treeward.evaluation.results import SuiteResult
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
        best = self.part("best_of_accuracy", ordered).metric
        details: dict[str, Any] = {
            "num_pairs": sum(len(list(one.pairs())) for one in ordered),
            "num_tied_pairs": sum(self._is_tie(one, *pair) for one in ordered for pair in one.pairs()),
            "num_unordered": len(scored) - len(ordered),
            "best_of_accuracy": {"value": best.value, "low": best.low, "high": best.high, "count": best.count},
        }
        groups = by_subset(ordered)
        subsets = tuple(self._pairwise(name, group).metric for name, group in groups.items())
        return SuiteResult(self.name, self._pairwise("accuracy", ordered).metric, subsets=subsets, details=details)

    def _pairwise(self, name: str, scored: Sequence[ScoredExample]) -> Part:
        outcomes: list[float] = []
        prompts: list[str] = []
        for one in scored:
            values = [self._pair_value(one, better, worse) for better, worse in one.pairs()]
            outcomes += values
            prompts += [one.example.prompt_key] * len(values)
        return Part.of(name, outcomes, prompts, "pairs")

    def _pair_value(self, one: ScoredExample, better: int, worse: int) -> float:
        if self._is_tie(one, better, worse):
            return 0.5 if self.tie_policy == "half" else 0.0
        a, b = one.scores[better], one.scores[worse]
        return float(a is not None and b is not None and a > b)

    @staticmethod
    def _is_tie(one: ScoredExample, better: int, worse: int) -> bool:
        return one.scores[better] is not None and one.scores[better] == one.scores[worse]
