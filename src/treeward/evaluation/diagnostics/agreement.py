"""`costs_and_agreement`: what judges and models have used on one suite, and whether they say the
same.

    rows = costs_and_agreement({"judge": scored, "rm": other}, {"judge": usage, "rm": other_usage})
    rows[0].agreement["rm"].value       # the share of pairs on which both say the same
    rows[0].verdicts.value              # the share of completions with a score

Agreement needs no labels. It is over all pairs of completions of a prompt to which both give
scores: they say the same where both prefer the same completion, or where both see a tie.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treeward.evaluation.results import Metric, ScoredExample
from treeward.evaluation.statistics import accuracy_metric


@dataclass(frozen=True, slots=True)
class CostAndAgreement:
    """One model on one suite.

    `usage`: what this evaluation has used, as `num_prompt_tokens` and `seconds`; examples that an
    earlier one kept cost nothing. `verdicts`: the share of completions with a score. `both_orders`:
    of a judge of pairs, the share of pairs whose winner does not change with their order; None of
    others. `agreement`: with each other model by its name.
    """

    model: str
    usage: Mapping[str, float]
    verdicts: Metric
    both_orders: float | None
    agreement: Mapping[str, Metric]


def costs_and_agreement(
    scored: Mapping[str, Sequence[ScoredExample]], usage: Mapping[str, Mapping[str, float]]
) -> list[CostAndAgreement]:
    """A row for each model of `scored`, the examples of one suite in one order; both mappings are
    by the model's name."""
    agreement: dict[str, dict[str, Metric]] = {name: {} for name in scored}
    for first, second in itertools.combinations(scored, 2):
        metric = _agreement(scored[first], scored[second])
        agreement[first][second] = metric
        agreement[second][first] = metric
    rows = []
    for name, examples in scored.items():
        # Only a judge of pairs has asked in both orders.
        inconsistent = usage[name].get("judge/inconsistent")
        both_orders = None if inconsistent is None else 1.0 - inconsistent
        has_score = []
        prompts = []
        for example in examples:
            for score in example.scores:
                has_score.append(float(score is not None))
                prompts.append(example.example.prompt_key)
        verdicts = accuracy_metric(has_score, "verdicts", prompts)
        rows.append(CostAndAgreement(name, usage[name], verdicts, both_orders, agreement[name]))
    return rows


def _agreement(
    first_model: Sequence[ScoredExample], second_model: Sequence[ScoredExample]
) -> Metric:
    agrees = []
    prompts = []
    for first, second in zip(first_model, second_model, strict=True):
        assert first.example.id == second.example.id, "these are not the same examples"
        for i, j in itertools.combinations(range(len(first.scores)), 2):
            preferred_by_first = _preferred(first.scores[i], first.scores[j])
            preferred_by_second = _preferred(second.scores[i], second.scores[j])
            # A missing score is counted among the verdicts, and is no disagreement.
            if preferred_by_first is None or preferred_by_second is None:
                continue
            agrees.append(float(preferred_by_first == preferred_by_second))
            prompts.append(first.example.prompt_key)
    return accuracy_metric(agrees, "agreement", prompts)


def _preferred(score: float | None, other: float | None) -> int | None:
    """1 for the first, -1 for the second, 0 for a tie; None where a score is missing."""
    if score is None or other is None:
        return None
    return (score > other) - (score < other)
