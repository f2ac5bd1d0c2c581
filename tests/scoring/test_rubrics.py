"""Rubrics in the forms of their sources, and rewards by the sources' formulas.

The worked rubric: weights 3 (met), 2 (not met), 1 (met) and -2, whose bad thing is there. What each
source makes of it was computed by hand from its code or paper.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from treeward.config.reward_environments import Aggregation
from treeward.errors import DataError
from treeward.evaluation.diagnostics.components import RatedGroup, component_statistics
from treeward.scoring.rubrics import (
    Criterion,
    check_weights,
    read_rubric,
    rubric_reward,
)

# --- Forms
# ------------------------------------------------------------------------------------------

MULTICHALLENGE = {
    "rubric": [
        {"question": "Does it keep the date?", "pass_criteria": "YES", "weight": 2},
        {"question": "Does it ask for the name again?", "pass_criteria": "NO"},
    ]
}
FINANCE_AGENT = {
    "rubric": json.dumps(
        [
            {
                "criteria": "States the revenue.",
                "operator": "correctness",
                "modifiers": {"severity": 3, "category": "must_pass"},
            },
            {"criteria": "Names the year.", "modifiers": {"severity": 1}},
        ]
    )
}
OPEN_INSTRUCT = {
    "rubric": json.dumps(
        {
            "query": "Why is the sky blue?",
            "rubrics": [
                {"description": "Names scattering.", "weight": 1.0, "title": "Physics"},
                {"rubric_item": "Is short.", "weight": 0.5},
                {"Ingredient": "A false claim.", "weight": -1.0},
            ],
        }
    )
}
HEALTHBENCH = {
    "rubrics": [
        {"criterion": "Advises to see a doctor.", "points": 7, "tags": ["level:example"]},
        {"criterion": "Invents a dose.", "points": -8, "tags": []},
    ]
}
RUBRICS_AS_REWARDS = {
    "rubric": [
        {"title": "Answer", "description": "Essential Criteria: States 12.", "weight": 5},
        {"title": "Silence", "description": "Pitfall Criteria: Omits the unit.", "weight": -1},
    ]
}
PAPERBENCH = {
    "rubric": {
        "id": "root",
        "requirements": "The paper is replicated.",
        "weight": 1,
        "sub_tasks": [
            {"id": "code", "requirements": "Code runs.", "weight": 3, "sub_tasks": []},
            {
                "id": "results",
                "requirements": "Results agree.",
                "weight": 1,
                "sub_tasks": [
                    {"id": "table", "requirements": "Table 1.", "weight": 1, "sub_tasks": []},
                    {"id": "figure", "requirements": "Figure 2.", "weight": 1, "sub_tasks": []},
                ],
            },
        ],
    }
}


def read(row: dict[str, Any]) -> tuple[Criterion, ...]:
    return read_rubric(row).criteria


def test_texts() -> None:
    alone = (Criterion("criterion_1", "It is polite."),)
    assert read({"rubric": "It is polite."}) == alone
    assert read({"criteria": ["It is polite."]}) == alone
    assert read({"rubric_json": '["It is polite."]'}) == alone
    assert read({"rubric": "[Be polite]"}) == (Criterion("criterion_1", "[Be polite]"),)


def test_multichallenge() -> None:
    assert read(MULTICHALLENGE) == (
        Criterion("criterion_1", "Does it keep the date?", 2.0),
        Criterion("criterion_2", "Does it ask for the name again?", is_met_by_no=True),
    )


def test_finance_agent() -> None:
    assert read(FINANCE_AGENT) == (
        Criterion("criterion_1", "States the revenue.", 3.0, is_veto=True),
        Criterion("criterion_2", "Names the year.", 1.0),
    )


def test_open_instruct() -> None:
    assert read(OPEN_INSTRUCT) == (
        Criterion("Physics", "Names scattering.", 1.0),
        Criterion("criterion_2", "Is short.", 0.5),
        Criterion("criterion_3", "A false claim.", -1.0),
    )


def test_healthbench() -> None:
    assert read(HEALTHBENCH) == (
        Criterion("criterion_1", "Advises to see a doctor.", 7.0),
        Criterion("criterion_2", "Invents a dose.", -8.0),
    )


def test_rubrics_as_rewards() -> None:
    assert read(RUBRICS_AS_REWARDS) == (
        Criterion("Answer", "States 12.", 5.0, category="essential"),
        Criterion("Silence", "Omits the unit.", -1.0, category="pitfall"),
    )


def test_paperbench_has_the_weights_of_its_leaves() -> None:
    assert read(PAPERBENCH) == (
        Criterion("code", "Code runs.", 0.75),
        Criterion("table", "Table 1.", 0.125),
        Criterion("figure", "Figure 2.", 0.125),
    )


def test_names_are_distinct() -> None:
    named = [{"title": "Tone", "text": "Polite."}, {"title": "Tone", "text": "Calm."}]
    assert [one.name for one in read({"rubric": named})] == ["Tone", "Tone_2"]
    # A name that the numbering would make is there already.
    titles = ["a", "a_3", "a"]
    named = [{"title": title, "text": str(i)} for i, title in enumerate(titles)]
    assert [one.name for one in read({"rubric": named})] == ["a", "a_3", "a_3_3"]


def test_a_name_with_a_slash_is_no_detail_of_a_reward() -> None:
    criteria = read({"rubric": [{"title": "Input/output", "text": "It names both."}]})
    summary = component_statistics([RatedGroup("p", [{criteria[0].name: 1.0}], [None])])
    assert summary is not None and list(summary.components) == ["Input-output"]


@pytest.mark.parametrize(
    ("row", "field", "summary"),
    [
        ({}, "rubric", "no rubric"),
        ({"rubric": []}, "rubric", "no rubric"),
        ({"rubric": 7}, "rubric", "no rubric"),
        ({"rubric": {"query": "?"}}, "rubric", "no rubric"),
        ({"rubric": {"rubrics": [7]}}, "rubric.rubrics[0]", "no criterion"),
        ({"criteria": ["a", {"weight": 2}]}, "criteria[1]", "no text"),
        ({"rubric": [{"text": "a", "points": "3"}]}, "rubric[0].points", "no weight"),
        ({"rubric": [{"text": "a", "weight": True}]}, "rubric[0].weight", "no weight"),
        (
            {"rubric": [{"text": "a", "modifiers": {"severity": "high"}}]},
            "rubric[0].modifiers.severity",
            "no weight",
        ),
        (
            {"rubric": [{"text": "a", "pass_criteria": "MAYBE"}]},
            "rubric[0].pass_criteria",
            "no answer",
        ),
        (
            {"rubric": {"requirements": "r", "sub_tasks": [{"requirements": "a", "weight": 0}]}},
            "rubric",
            "share their weight",
        ),
    ],
)
def test_what_is_no_rubric_is_named(row: dict[str, Any], field: str, summary: str) -> None:
    with pytest.raises(DataError, match=summary) as caught:
        read_rubric(row, where="train.jsonl:3")
    assert caught.value.field == field
    assert caught.value.where == "train.jsonl:3"


# --- Formulas
# ---------------------------------------------------------------------------------------

WORKED = [
    {"text": "Essential Criteria: a", "weight": 3},
    {"text": "Important Criteria: b", "weight": 2},
    {"text": "Optional Criteria: c", "weight": 1},
    {"text": "Pitfall Criteria: d", "weight": -2},
]
MET = [1.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("aggregation", "want"),
    [
        ("weighted", 2 / 6),
        ("absolute", 2 / 8),
        ("signed", 2 / 4),
        ("categories", 1.3 / 2.9),
        ("mean", 0.5),
        ("min", 0.0),
        ("max", 1.0),
    ],
)
def test_each_aggregation_is_the_formula_of_its_source(
    aggregation: Aggregation, want: float
) -> None:
    got = rubric_reward(read_rubric({"rubric": WORKED}), MET, aggregation, least_weight=0.5)
    assert got == pytest.approx(want, abs=1e-9)


def test_a_bad_thing_may_be_asked_for_as_something_to_answer_by_no() -> None:
    """The judge has said yes to it, so the criterion is not met."""
    asked = [*WORKED[:3], {"text": "d", "weight": 2, "pass_criteria": "NO"}]
    got = rubric_reward(read_rubric({"rubric": asked}), [1, 0, 1, 0], "weighted", least_weight=0.5)
    assert got == pytest.approx(4 / 8)


def test_probabilities_are_expected_rewards() -> None:
    rubric = read_rubric({"rubric": WORKED})
    got = rubric_reward(rubric, [0.5, 0.25, 1.0, 0.5], "weighted", least_weight=0.5)
    assert got == pytest.approx((1.5 + 0.5 + 1.0 - 1.0) / 6)


def test_a_criterion_without_a_verdict_is_left_out() -> None:
    rubric = read_rubric({"rubric": WORKED})
    assert rubric_reward(rubric, [1, 0, 1, None], "weighted", least_weight=0.5) == 4 / 6


def test_missing_verdicts_make_no_signed_reward_larger_than_a_whole_one() -> None:
    """Without the first criterion 2.1 - 2 = 0.1 is left to divide by."""
    criteria = [
        {"text": "a", "weight": 3},
        {"text": "b", "weight": 2.1},
        {"text": "c", "weight": -2},
    ]
    rubric = read_rubric({"rubric": criteria})
    got = rubric_reward(rubric, [None, 1.0, 0.0], "signed", least_weight=0.5)
    assert got == pytest.approx(2.1 / 4.1 * 7.1 / 3.1)
    whole = rubric_reward(rubric, [1.0, 1.0, 0.0], "signed", least_weight=0.5)
    assert whole == pytest.approx(5.1 / 3.1)


def test_without_enough_verdicts_there_is_no_reward() -> None:
    """Weights of 5 in 8 are known, or of 3."""
    rubric = read_rubric({"rubric": WORKED})
    assert rubric_reward(rubric, [1, 0, None, None], "mean", least_weight=0.6) == 0.5
    assert rubric_reward(rubric, [1, None, None, None], "mean", least_weight=0.6) is None
    assert rubric_reward(rubric, [None] * 4, "mean", least_weight=0.0) is None


def test_where_only_bad_things_have_verdicts_there_is_nothing_to_divide_by() -> None:
    rubric = read_rubric({"rubric": WORKED})
    assert rubric_reward(rubric, [None, None, None, 1.0], "weighted", least_weight=0.0) is None


@pytest.mark.parametrize(
    ("met", "want"),
    [
        ([1, 1], 1.0),
        ([0.6, 0], 3 * 0.6 / 4),  # likelier met than not
        ([0.5, 1], (3 * 0.5 + 1) / 4),
        ([0.4, 1], 0.0),
        ([0, 1], 0.0),
        ([None, 1], None),
    ],
)
def test_a_veto_decides(met: list[float | None], want: float | None) -> None:
    rubric = read_rubric(FINANCE_AGENT)
    assert rubric_reward(rubric, met, "weighted", least_weight=0.1) == pytest.approx(want)


def test_weights_that_cannot_be_divided_by_are_refused() -> None:
    rubric = read_rubric({"rubric": [{"text": "Rude.", "points": -3}]})
    check_weights(rubric, "absolute")
    with pytest.raises(DataError, match="no sum to divide by"):
        check_weights(rubric, "weighted")


def test_brackets_without_end_are_a_text() -> None:
    [criterion] = read_rubric({"rubric": "[" * 100_000}).criteria
    assert criterion.text == "[" * 100_000


def test_lists_of_parquet_are_arrays_at_any_depth() -> None:
    task = {"requirements": "a", "weight": np.int64(3), "sub_tasks": None}
    tree = {"requirements": "r", "sub_tasks": np.array([task, task], dtype=object)}
    items = np.array([{"text": "b", "points": 2}, {"text": "c", "points": None}], dtype=object)
    assert [one.text for one in read_rubric({"rubric": items}).criteria] == ["b", "c"]
    assert [one.text for one in read_rubric({"rubric": {"rubrics": items}}).criteria] == ["b", "c"]
    assert [one.weight for one in read_rubric({"rubric": tree}).criteria] == [0.5, 0.5]
    with pytest.raises(DataError, match="no rubric"):
        read_rubric({"rubric": np.array([])})
