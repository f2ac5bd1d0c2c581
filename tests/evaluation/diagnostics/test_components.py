"""The parts of a reward, as the criteria of a rubric: what they tell apart, and whether they agree
with what is known of the completions."""

from __future__ import annotations

import pytest

from treeward.evaluation.diagnostics.components import RatedGroup, component_statistics


def group(prompt: str, gold: list[float | None], **components: list[float]) -> RatedGroup:
    values = []
    for i in range(len(gold)):
        values.append({name: column[i] for name, column in components.items()})
    return RatedGroup(prompt, values, gold)


def test_criteria_that_all_or_no_completions_meet_are_counted_at_each_prompt() -> None:
    groups = [
        group("a", [1.0, 0.0], polite=[0.9, 0.8], unit=[1.0, 0.0]),
        group("b", [1.0, 0.0], polite=[0.1, 0.2], unit=[0.0, 1.0]),
        group("c", [1.0, 0.0], polite=[0.7, 0.6], unit=[0.0, 0.4]),
    ]
    found = component_statistics(groups)
    assert found is not None
    assert (found.num_criteria, found.num_always_met, found.num_never_met) == (6, 2, 2)
    polite = found.components["polite"]
    assert polite.always_met == pytest.approx(2 / 3)
    assert polite.never_met == pytest.approx(1 / 3)


def test_agreement_is_of_pairs_whose_gold_and_values_differ() -> None:
    # gold 2 > 1 > 0: of the pairs (2, 1), (2, 0), (1, 0) the first is tied in the component, the
    # second agrees and the third agrees; another prompt's only pair does not.
    groups = [
        group("a", [2.0, 1.0, 0.0], unit=[1.0, 1.0, 0.0]),
        group("b", [0.0, 1.0], unit=[1.0, 0.0]),
        group("c", [1.0, 1.0], unit=[1.0, 0.0]),
        group("d", [None, 1.0], unit=[1.0, 0.0]),
    ]
    found = component_statistics(groups)
    assert found is not None
    agreement = found.components["unit"].agreement
    assert agreement.count == 3
    assert agreement.value == pytest.approx(2 / 3)
    assert found.agreement.value == agreement.value


def test_a_missing_component_is_no_zero() -> None:
    one = RatedGroup("a", [{"unit": 1.0}, {}, {"unit": 0.0}], [2.0, 1.0, 0.0])
    found = component_statistics([one])
    assert found is not None
    assert found.components["unit"].mean == 0.5
    assert found.components["unit"].agreement.count == 1


def test_numbers_beyond_0_and_1_are_no_criteria() -> None:
    found = component_statistics([group("a", [1.0, 0.0], score=[3.0, 0.5])])
    assert found is not None
    assert found.num_criteria == 0
    assert found.components["score"].always_met is None
    assert found.components["score"].agreement.value == 1.0


def test_a_prompt_with_one_completion_shows_nothing_about_the_others() -> None:
    found = component_statistics([group("a", [1.0], unit=[1.0])])
    assert found is not None
    assert found.num_criteria == 0
    assert found.components["unit"].always_met is None


def test_details_are_left_out() -> None:
    assert component_statistics([RatedGroup("a", [{"judge/label_mass": 1.0}], [1.0])]) is None
