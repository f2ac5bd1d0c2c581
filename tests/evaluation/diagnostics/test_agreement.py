"""What models have used on a suite, and on how many pairs they say the same."""

from __future__ import annotations

import pytest
from evaluated import preference, rated

from treeward.evaluation.diagnostics.agreement import costs_and_agreement
from treeward.evaluation.results import ScoredExample


def scored(*scores: tuple[float | None, ...]) -> list[ScoredExample]:
    examples = []
    for number, row in enumerate(scores):
        texts = [f"answer {i}" for i in range(len(row))]
        ranks = tuple(range(len(row)))
        example = preference(str(number), "all", f"question {number}", texts, ranks)
        examples.append(rated(example, list(row)))
    return examples


def test_models_agree_where_they_prefer_the_same_completion_or_see_a_tie() -> None:
    first = scored((2.0, 1.0), (1.0, 2.0), (1.0, 1.0), (1.0, 1.0))
    second = scored((9.0, 1.0), (9.0, 1.0), (4.0, 4.0), (4.0, 5.0))
    one, two = costs_and_agreement({"a": first, "b": second}, {"a": {}, "b": {}})
    assert one.agreement["b"].value == 0.5
    assert one.agreement == {"b": two.agreement["a"]}


def test_every_pair_of_a_prompt_counts_but_those_without_a_score() -> None:
    first = scored((3.0, 2.0, 1.0))
    second = scored((3.0, None, 5.0))
    one, two = costs_and_agreement({"a": first, "b": second}, {"a": {}, "b": {}})
    assert one.agreement["b"].count == 1
    assert one.agreement["b"].value == 0.0
    assert one.verdicts.value == 1.0
    assert two.verdicts.value == pytest.approx(2 / 3)


def test_a_judge_of_pairs_has_the_share_that_its_order_does_not_change() -> None:
    examples = scored((1.0, 0.0))
    usage = {"judge": {"judge/inconsistent": 0.25, "num_requests": 4.0}, "rm": {"seconds": 1.0}}
    judge, model = costs_and_agreement({"judge": examples, "rm": examples}, usage)
    assert judge.both_orders == 0.75
    assert judge.usage["num_requests"] == 4.0
    assert model.both_orders is None
