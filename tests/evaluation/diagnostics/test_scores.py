"""Statistics have the numbers that were planted, and those by which checkpoints are chosen are of
`treeward eval`."""

from __future__ import annotations

import math
import random

import pytest
from evaluated import preference, rated

from treeward.config.data import DatasetConfig
from treeward.data.preference import Completion, Preference
from treeward.evaluation.diagnostics.biases import diagnose_length, diagnose_style
from treeward.evaluation.diagnostics.scores import (
    GATE_METRICS,
    gate_metrics,
    grade_errors,
    scored_comparison,
    statistics_of,
)
from treeward.evaluation.results import ScoredExample
from treeward.evaluation.suites import PreferenceSuite


def test_nothing_has_no_numbers() -> None:
    for nothing in (statistics_of([]), diagnose_length([]), diagnose_style([])):
        assert all(metric.value is None for metric in nothing.numbers.values())


def test_a_value_that_a_completion_lacks_is_compared_with_no_grade() -> None:
    """A criterion without a verdict is missing, and no 0."""
    grades = [{"unit": 1.0}, {"unit": 1.0}, {"unit": 0.0}]
    completions = []
    for number, grade in enumerate(grades):
        message = {"role": "assistant", "content": str(number)}
        completions.append(Completion(number, (message,), grades=grade))
    example = ScoredExample(
        Preference(({"role": "user", "content": "a"},), tuple(completions)),
        scores=(1.0, 0.5, 0.0),
        lengths=(1, 1, 1),
        num_tokens=(1, 1, 1),
        errors=(None, None, None),
        heads=({"unit": 0.5}, {"style": 1.0}, {"unit": 0.5}),
    )
    errors = grade_errors([example])
    # Without the second completion: with a 0 there it would be (0.25 + 1 + 0.25) / 3.
    assert errors["mse"].value == pytest.approx(0.25)
    assert errors["mse"].count == 2


# --- by which checkpoints are chosen --------------------------------------------------------------


def drawn(
    seed: int, count: int, *, most: int, missing: int
) -> tuple[list[ScoredExample], list[ScoredExample]]:
    """Examples as `treeward eval` has them (prompts shared, some scores missing), and as a
    validation knows them."""
    generator = random.Random(seed)
    full = []
    numbers = []
    for i in range(count):
        size = generator.randint(2, most)
        ranks = tuple(generator.randint(0, 2) for _ in range(size))
        drawn_scores = [0.5, 0.5, *(generator.gauss(0, 2) for _ in range(5))]
        scores = tuple(
            generator.choice([*[math.nan] * missing, *drawn_scores]) for _ in range(size)
        )
        lengths = tuple(generator.randint(0, 40) for _ in range(size))
        subset = generator.choice(["chat", "code", "maths"])
        example = preference(
            str(i), subset, f"question {i // 3}", ["x" * length for length in lengths], ranks
        )
        full.append(rated(example, [None if math.isnan(score) else score for score in scores]))
        numbers.append(
            scored_comparison(str(i), subset, scores=scores, ranks=ranks, lengths=lengths)
        )
    return full, numbers


@pytest.mark.parametrize(
    ("count", "most", "missing"), [(200, 4, 1), (200, 2, 1), (1, 2, 0), (200, 3, 7)]
)
def test_they_are_the_numbers_of_an_evaluation(count: int, most: int, missing: int) -> None:
    full, numbers = drawn(count + most, count, most=most, missing=missing)
    suite = PreferenceSuite("any", DatasetConfig(data_path="rows.jsonl"))
    expected = {
        **statistics_of(full, suite.summarize(full)).numbers,
        **diagnose_length(full).numbers,
    }
    gates = gate_metrics(numbers)
    assert tuple(gates) == GATE_METRICS
    for name, metric in gates.items():
        assert metric.value == pytest.approx(expected[name].value, abs=1e-12), name
        assert metric.count == expected[name].count or metric.value is None, name
        assert (metric.low, metric.high) == (None, None), (
            "prompts are not known, so no interval would be right"
        )
    worst = gates["worst_subset"]
    assert worst.note == expected["worst_subset"].note or (worst.value is None and worst.note)


def pair(margin: float, better: int, worse: int) -> ScoredExample:
    return scored_comparison(
        "1", "all", scores=[margin, 0.0], ranks=[0, 1], lengths=[better, worse]
    )


def test_what_cannot_be_measured_says_why() -> None:
    gates = gate_metrics([pair(1.0, 100, 50), pair(1.0, 100, 99)])
    for name in ("length_controlled_accuracy", "accuracy_shorter_right", "accuracy_gap"):
        assert gates[name].value is None
        assert gates[name].note
    assert (
        gates["accuracy_longer_right"].value == 1.0 and gates["accuracy_longer_right"].note is None
    )
    nothing = gate_metrics([])
    assert all(metric.value is None and metric.note for metric in nothing.values())
    broken = scored_comparison(
        "1", "all", scores=[math.nan, math.inf], ranks=[0, 1], lengths=[9, 5]
    )
    gates = gate_metrics([broken, pair(1.0, 9, 5)])
    assert broken.scores == (None, None) and gates["worst_subset"].value == 0.5, (
        "it counts as wrong"
    )
    assert gates["accuracy_longer_right"].count == 1, "no judgement"


def test_groups_worked_by_hand() -> None:
    """A tie of the best with another is not right, ties in the data are no pairs, a missing score
    is wrong."""
    groups = [
        ([2.0, 1.0, 0.0], [0, 1, 2], True, True),
        ([2.0, 0.0, 1.0], [0, 1, 2], False, True),
        ([2.0, 2.0, 1.0], [0, 1, 1], False, False),
        ([1.0, 2.0, 0.0], [0, 0, 1], True, True),
        ([math.nan, 1.0, 0.0], [0, 1, 2], False, False),
        ([1.0, 1.0], [0, 0], None, None),
    ]
    scored = [
        scored_comparison("1", "a", scores=s, ranks=r, lengths=[1] * len(s))
        for s, r, _, _ in groups
    ]
    gates = gate_metrics(scored)
    assert (gates["group_accuracy"].value, gates["best_of_k"].value) == (2 / 5, 3 / 5)
    assert gates["group_accuracy"].count == gates["best_of_k"].count == 5
    # tau-b of the first four, which have more than two scores: C - D over the root of the untied
    # pairs of both sides
    assert gates["kendall_tau"].value == pytest.approx((1 + 1 / 3 + 1 / 2 + 2 / math.sqrt(6)) / 4)
