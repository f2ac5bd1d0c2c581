"""Rewrites do what they say, their effect on a score is measured, and known weaknesses of scorers
are found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from evaluated import RuleScorer, preference

from treeward.data.preference import Preference
from treeward.evaluation.diagnostics.perturbations import (
    diagnose_perturbations,
    perturbed,
    sample_examples,
)
from treeward.evaluation.diagnostics.rewrites import rewrites_of
from treeward.evaluation.results import Diagnostic, ScoredExample, score_examples

USUAL = rewrites_of("usual")


def by_letters(context: Any, text: str) -> float:
    return float(sum(map(ord, text)) % 997)


def scored(scorer: Any, examples: Sequence[Preference]) -> list[ScoredExample]:
    rewritten = [perturbed(example, USUAL) for example in examples]
    return list(score_examples(scorer, rewritten, at_once=16))


def diagnosed(
    rule: RuleScorer, examples: Sequence[Preference], num_examples: int = 200
) -> Diagnostic:
    sampled = sample_examples(examples, num_examples)
    return diagnose_perturbations(sampled, scored(rule, sampled), USUAL)


def test_a_scorer_that_likes_length_is_won_by_padding_and_never_by_cutting(bundled: Any) -> None:
    metrics = diagnosed(
        RuleScorer(lambda context, text: len(text) / 100), bundled("length_controlled")
    )
    assert (metrics.padding_relative_shift.low or 0) > 0.8
    assert (metrics.padding_rejected_flips.value or 0) > 0.2
    assert (metrics.truncated_50_relative_shift.high or 0) < 0
    assert (metrics.robust_accuracy.value or 0) < (metrics.accuracy.value or 0)


def test_the_numbers_of_a_hand_made_table() -> None:
    made = {
        "a": ((3.0, 1.0), (3.5, 3.25)),  # right; the worse completion is lifted over the better one
        "b": ((2.0, 1.0), (0.5, 1.0)),  # right; the better completion falls below the worse
        "c": ((1.0, 3.0), (4.0, 2.0)),  # wrong before: no flip to count
        "d": ((2.0, 0.0), (2.0, 2.0)),  # right; the worse completion draws level
        "e": ((2.0, 0.0), (None, 1.0)),  # right; the better one could not be rewritten
    }

    def score(context: Any, text: str) -> float | None:
        """Of the texts as they are, and padded; nothing of the other rewrites."""
        side = 0 if text.startswith("good") else 1
        is_known = text in ("good", "poor")
        is_padded = text.startswith(("good ", "poor "))
        return made[context[-1]["content"]][int(is_padded)][side] if is_known or is_padded else None

    diagnostic = diagnosed(
        RuleScorer(score), [preference(name, "s", name, ["good", "poor"]) for name in made]
    )
    numbers = {name: (metric.value, metric.count) for name, metric in diagnostic.numbers.items()}
    assert numbers["accuracy"] == (4 / 5, 5)
    # a and d are lost to a lifted completion, b to a fallen one
    assert numbers["robust_accuracy"] == (
        1 / 5,
        5,
    )
    assert numbers["padding_rejected_flips"] == (2 / 4, 4)
    # Both completions padded: a stays right, b becomes wrong, c right, and d a tie.
    assert numbers["padding_accuracy_before"] == (3 / 4, 4)
    assert numbers["padding_accuracy_after"] == (2 / 4, 4)
    assert numbers["padding_flips"] == (3 / 4, 4)
    # Where a rewrite takes something away there is no winner that should stay one.
    assert "empty_flips" not in numbers
    shift = sum([0.5, 2.25, -1.5, 0.0, 3.0, -1.0, 0.0, 2.0, 1.0]) / 9
    assert numbers["padding_relative_shift"] == (
        pytest.approx(shift / ((2 + 1 + 2 + 2 + 2) / 5)),
        9,
    )
    assert (
        numbers["markdown_relative_shift"] == (None, 0)
        and numbers["markdown_rejected_flips"][1] == 0
    )


def test_the_sample_is_drawn_from_the_examples_that_can_be_rewritten(bundled: Any) -> None:
    examples = bundled("validation")
    ordered = [example for example in examples if len(set(example.ranks)) > 1]
    assert len(ordered) < len(examples)  # some are ties
    first = sample_examples(examples, 50)
    assert len(first) == 50 and all(example in ordered for example in first)
    places = list(map(examples.index, first))
    assert places == sorted(places)
    some = ordered[:150]
    ids = []
    for count in (20, 40):
        ids.append([example.id for example in sample_examples(some, count)])
    assert set(ids[0]) < set(ids[1])  # so that a larger sample scores only what it has more
    fewer = [example for example in some if example.id not in ids[0][:3]]
    assert set(ids[0][3:]) <= {example.id for example in sample_examples(fewer, 20)}
    assert scored(RuleScorer(by_letters), first[23:]) == scored(RuleScorer(by_letters), first)[23:]
    unusable = [
        preference("a", "s", "p", ["x", "y"], ranks=[0, 0]),
        preference("b", "s", "p", ["x", " "]),
    ]
    assert sample_examples(unusable, 5) == []
