"""A planted liking for length or markdown is found, and has its size."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from conftest import REPOSITORY
from evaluated import preference

from treeward.evaluation.diagnostics.biases import diagnose_length, diagnose_style, markdown_density
from treeward.user_code import import_object

gold_quality = import_object(f"{REPOSITORY}/examples/gold.py:gold_quality", field="gold")


@pytest.fixture(scope="module")
def diagnosed(bundled: Any, score_with: Any) -> Any:
    """The diagnosis of a split scored by gold quality and `bias` per 100 characters, with a little
    noise."""

    def make(split: str, bias: float) -> Any:
        rng = random.Random(f"{split}/{bias}")

        def score(context: Any, text: str) -> float:
            return gold_quality(list(context), text) + bias * len(text) / 100 + rng.gauss(0, 0.1)

        return diagnose_length(score_with(bundled(split), score))

    return cache(make)


def test_a_bias_costs_length_controlled_accuracy_and_opens_the_gap(diagnosed: Any) -> None:
    fair, liking, loving = (diagnosed("length_controlled", bias) for bias in (0.0, 0.3, 3.0))
    accuracies = [one.length_controlled_accuracy.value for one in (fair, liking, loving)]
    assert accuracies[0] > 0.94 and accuracies[0] - accuracies[1] > 0.05 and accuracies[2] < 0.62
    assert fair.accuracy_gap.low < 0 < fair.accuracy_gap.high and liking.accuracy_gap.low > 0.15
    # of the data
    assert (
        fair.longer_is_right.value == liking.longer_is_right.value == pytest.approx(0.5, abs=0.01)
    )


def test_strata_are_bounded_by_a_tenth_of_the_longer_completion(score_with: Any) -> None:
    sizes = {"longer": 112, "similar": 111, "similar too": 90, "shorter": 89}
    examples = [
        preference(name, "s", name, ["x" * size, "y" * 100]) for name, size in sizes.items()
    ]
    examples.append(preference("tied", "s", "e", ["x", "y" * 100], ranks=[0, 0]))
    metrics = diagnose_length(
        score_with(examples, lambda context, text: float("x" in text))
    ).numbers
    strata = ("accuracy_longer_right", "accuracy_shorter_right", "accuracy_similar_length")
    assert [metrics[name].count for name in strata] == [1, 1, 2] and metrics[
        "longer_is_right"
    ].value == 0.5
    controlled = metrics["length_controlled_accuracy"]
    assert (controlled.value, controlled.count) == (1, 2) and (
        controlled.low or 1
    ) < 0.6  # of two pairs


def test_a_completion_without_a_score_is_left_out_and_a_tie_is_wrong(score_with: Any) -> None:
    examples = []
    for i in range(8):
        length = 9 if i % 2 else 2
        examples.append(preference(str(i), "s", str(i), ["good " * length, "poor " * 5]))
    tied = diagnose_length(
        score_with(examples, lambda context, text: float("good" in text and len(text) < 20))
    )
    assert (tied.accuracy_longer_right.value, tied.accuracy_shorter_right.value) == (0, 1)
    assert tied.accuracy_gap.note is None

    def all_but_one(context: Any, text: str) -> float | None:
        return None if context[0]["content"] == "1" else float("good" in text)

    half = diagnose_length(score_with(examples[:7], all_but_one))
    assert (half.accuracy_longer_right.value, half.accuracy_longer_right.count) == (1, 2)
    assert half.length_controlled_accuracy.value == 1 and half.accuracy_gap.value == 0
    assert half.longer_is_right.count == 7  # of the data


def test_markdown_is_counted_outside_code_blocks() -> None:
    rich = (
        "# Title\n\nSome **bold words** and __more of them__, a `name` and 2 * 3 * 4.\n\n- "
        "first\n* second\n1. third\n"
        "\n| a | b |\n|---|---|\n\n```python\n# no heading\n- no item, **no bold**\n```\n"
    )
    assert markdown_density(rich) == pytest.approx(100 * 10 / len(rich.split()))
    plain = (
        "It is 2 ** 3, snake__case__name, #hashtag, 3.5 and - so on.\nWell-known | true\n--- \n**"
    )
    assert markdown_density(plain) == markdown_density("") == 0
    assert markdown_density("```\nnever closed\n# not a heading") == 100 / 7
    assert markdown_density("~~~\n# code\n~~~\n# heading") == 200 / 6


@pytest.fixture(scope="module")
def dressed() -> list[Any]:
    """Pairs whose better completion (it says "right") has markdown as often as the other, of its
    own amount."""
    rng = random.Random(3)
    examples = []
    for i in range(300):
        texts = []
        for word in ("right", "wrong"):
            sentences = [f"{word} words {rng.random():.3f}" for _ in range(rng.randint(3, 8))]
            lines = [f"- {s}" if rng.random() < 0.5 else s for s in sentences]
            texts.append("\n".join((["## Answer"] if rng.random() < 0.5 else []) + lines))
        examples.append(preference(str(i), "s", f"question {i}", texts))
    return examples


def test_a_liking_of_markdown_costs_style_controlled_accuracy(
    dressed: Any, score_with: Any
) -> None:
    def liking(effect: float) -> Any:
        rng = random.Random(0)
        return lambda context, text: (
            ("right" in text) + effect * markdown_density(text) + rng.gauss(0, 0.2)
        )

    fair, biased = (diagnose_style(score_with(dressed, liking(effect))) for effect in (0.0, 0.1))
    assert fair.style_controlled_accuracy.value > 0.99
    assert (
        biased.accuracy_more_markdown_right.value == 1
        and biased.accuracy_less_markdown_right.value < 0.9
    )
    only = diagnose_style(score_with(dressed, lambda context, text: markdown_density(text)))
    assert only.style_controlled_accuracy.value == 0.5
