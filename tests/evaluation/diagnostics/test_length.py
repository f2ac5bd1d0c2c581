"""A planted length bias is found and has its size; where there is none, none is found."""

from __future__ import annotations

import json
import math
import random
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from treeward.data.synthetic import gold_quality
from treeward.evaluation.diagnostics.completions import collect_pairs
from treeward.evaluation.diagnostics.length import STRATA_NAMES, diagnose_length
from treeward.evaluation.diagnostics.strata import stratify
from treeward.evaluation.report.blocks import check_blocks
from treeward.evaluation.statistics import wilson


@pytest.fixture(scope="module")
def biased(bundled: Any, score_with: Any) -> Any:
    """A split scored by gold quality and `bias` per 100 characters, with a little noise."""

    def make(split: str, bias: float, noise: float = 0.1) -> Any:
        rng = random.Random(f"{split}/{bias}")

        def score(context: Any, text: str) -> float:
            return gold_quality(list(context), text) + bias * len(text) / 100 + rng.gauss(0, noise)

        return score_with(bundled(split), score)

    return make


@pytest.fixture(scope="module")
def diagnosed(biased: Any) -> Any:
    """The diagnosis of `biased`."""
    return cache(lambda split, bias: diagnose_length(biased(split, bias)))


@pytest.mark.parametrize("bias", [-0.2, 0.0, 0.05, 0.3])
@pytest.mark.parametrize("split", ["length_controlled", "validation"])
def test_the_planted_bias_of_the_bundled_data_is_recovered(split: str, bias: float, diagnosed: Any) -> None:
    found = diagnosed(split, bias).slope_given_rank
    assert found.low <= bias <= found.high
    assert found.high - found.low < 0.12
    if abs(bias) > 0.1:
        assert found.low > 0.1 or found.high < -0.1


def test_on_data_whose_better_completions_are_longer_only_the_slope_given_rank_is_a_bias(diagnosed: Any) -> None:
    unbiased = diagnosed("validation", 0.0)
    assert unbiased.longer_is_right.value == pytest.approx(0.78, abs=0.02)
    assert unbiased.slope.low > 0.2  # what a perfect model has here
    assert abs(unbiased.slope_given_rank.value) < 0.06
    balanced = diagnosed("length_controlled", 0.0)
    assert balanced.longer_is_right.value == pytest.approx(0.5, abs=0.01)
    assert balanced.slope.low < 0 < balanced.slope.high


def test_a_bias_costs_length_controlled_accuracy_and_opens_the_gap(diagnosed: Any) -> None:
    fair, liking, loving = (diagnosed("length_controlled", bias) for bias in (0.0, 0.3, 3.0))
    accuracies = [one.length_controlled_accuracy.value for one in (fair, liking, loving)]
    assert accuracies[0] > 0.94 and accuracies[0] - accuracies[1] > 0.05 and accuracies[2] < 0.62
    assert fair.accuracy_gap.low < 0 < fair.accuracy_gap.high
    assert liking.accuracy_gap.low > 0.15
    assert liking.relative_slope.value > 0.5 and fair.relative_slope.high < 0.1
    assert fair.pearson.low < 0 < fair.pearson.high and liking.spearman.low > 0.3


def test_a_model_that_only_likes_length_has_one_zero_and_a_half(bundled: Any, score_with: Any) -> None:
    found = diagnose_length(score_with(bundled("validation"), lambda context, text: float(len(text))))
    assert (found.accuracy_longer_right.value, found.accuracy_shorter_right.value) == (1, 0)
    assert found.length_controlled_accuracy.value == 0.5 and found.accuracy_gap.value == 1
    assert 0.4 < found.length_controlled_accuracy.low < 0.5 < found.length_controlled_accuracy.high < 0.6
    assert found.accuracy_gap.low > 0.9
    assert found.slope.value == pytest.approx(100) and found.slope.low == pytest.approx(100)
    assert found.pearson.value == found.spearman.value == pytest.approx(1)


def test_strata_are_bounded_by_a_tenth_of_the_longer_completion(make_example: Any, score_with: Any) -> None:
    examples = [
        make_example("longer", "a", ["x" * 112, "y" * 100]),
        make_example("similar", "b", ["x" * 111, "y" * 100]),
        make_example("similar too", "c", ["x" * 90, "y" * 100]),
        make_example("shorter", "d", ["x" * 89, "y" * 100]),
        make_example("tied", "e", ["x", "y" * 100], ranks=[0, 0]),
    ]
    found = diagnose_length(score_with(examples, lambda context, text: float("x" in text)))
    counts = (
        found.accuracy_longer_right.count,
        found.accuracy_shorter_right.count,
        found.accuracy_similar_length.count,
    )
    assert counts == (1, 1, 2)
    assert found.longer_is_right.value == 0.5
    assert found.length_controlled_accuracy.value == 1 and found.length_controlled_accuracy.count == 2
    assert found.length_controlled_accuracy.low < 0.6  # of two pairs


def test_an_empty_stratum_leaves_no_value(make_example: Any, score_with: Any) -> None:
    examples = [make_example(str(i), str(i), ["long " * 9, "short"]) for i in range(4)]
    found = diagnose_length(score_with(examples, lambda context, text: float(len(text))))
    assert found.length_controlled_accuracy.value is None and "less" in str(found.length_controlled_accuracy.note)
    assert found.accuracy_gap.value is None and found.accuracy_longer_right.value == 1
    assert diagnose_length([]).length_controlled_accuracy.value is None


def test_a_completion_without_a_score_is_left_out_and_a_tie_is_wrong(make_example: Any, score_with: Any) -> None:
    examples = [make_example(str(i), str(i), ["good " * (9 if i % 2 else 2), "poor " * 5]) for i in range(8)]
    whole = score_with(examples, lambda context, text: float("good" in text))
    broken = score_with(examples, lambda context, text: None if text == "good " * 9 else float("good" in text))
    half = score_with(
        examples[:7], lambda context, text: None if context[0]["content"] == "1" else float("good" in text)
    )
    tied = score_with(examples, lambda context, text: float("good" in text and len(text) < 20))
    assert diagnose_length(whole).length_controlled_accuracy.value == 1
    wrong = diagnose_length(tied)
    assert (wrong.accuracy_longer_right.value, wrong.accuracy_shorter_right.value) == (0, 1)
    assert wrong.length_controlled_accuracy.value == 0.5
    assert wrong.num_left_out == 0 and "score" not in str(wrong.accuracy_gap.note)
    left = diagnose_length(half)
    assert (left.accuracy_longer_right.value, left.accuracy_longer_right.count) == (1, 2)
    assert left.length_controlled_accuracy.value == 1 and left.accuracy_gap.value == 0 and left.num_left_out == 1
    assert left.longer_is_right.count == 7  # of the data
    for metric in (left.length_controlled_accuracy, left.accuracy_gap):
        assert str(metric.note).endswith(" 1 pair has no score and is left out.")
    none = diagnose_length(broken)
    assert (none.num_left_out, none.accuracy_longer_right.count) == (4, 0)
    assert none.length_controlled_accuracy.value is None and "4 pairs have no score" in str(none.accuracy_gap.note)
    notes = {item["note"] for item in none.figures[0]["series"][0]["items"]}
    assert notes == {"4 pairs have no score and are left out."}
    assert not any("note" in item for item in wrong.figures[0]["series"][0]["items"])


def test_the_gap_of_pairs_with_prompts_of_their_own_has_newcombes_interval_or_a_wider_one(
    make_example: Any, score_with: Any
) -> None:
    right = {**{f"{i}": i < 18 for i in range(20)}, **{f"{i}": i < 23 for i in range(20, 30)}}
    examples = [make_example(id, id, ["a" * (200 if int(id) < 20 else 50), "b" * 100]) for id in right]

    def score(context: Any, text: str) -> float:
        return float((text[0] == "a") == right[context[0]["content"]])

    found = diagnose_length(score_with(examples, score)).accuracy_gap
    (low_a, high_a), (low_b, high_b) = wilson(18, 20), wilson(3, 10)
    assert found.value == pytest.approx(0.6)
    assert found.low == pytest.approx(0.6 - math.hypot(0.9 - low_a, high_b - 0.3))
    above = math.hypot(high_a - 0.9, 0.3 - low_b)
    assert found.high is not None and 0.6 + above <= found.high <= 0.6 + 1.4 * above


def test_intervals_of_the_length_controlled_accuracy_hold_what_they_promise(make_example: Any, score_with: Any) -> None:
    # Pairs of their own prompts, and two pairs to a prompt whose outcomes go together.
    pairs = [make_example(f"{i}", f"{i}", ["a" * (300 if i % 3 else 50), "b" * 100]) for i in range(60)]
    groups = [make_example(f"{i}", f"{i}", ["a" * 100, "b" * 50, "b" * 300], ranks=[0, 1, 1]) for i in range(40)]
    truth = NormalDist().cdf(1 / (1 + 2 * 0.3**2) ** 0.5)
    misses = {"pairs": 0, "groups": 0}
    for seed in range(120):
        rng = np.random.default_rng(seed)
        good = {example.id: rng.normal(1.0, 1.0) for example in pairs}

        def score(context: Any, text: str, rng: Any = rng, good: Any = good) -> float:
            return (good[context[0]["content"]] if text[0] == "a" else 0.0) + 0.3 * rng.normal()

        for name, examples in (("pairs", pairs), ("groups", groups)):
            if name == "pairs" or seed < 12:  # bootstraps take longer
                own = collect_pairs(score_with(examples, score))
                found = stratify(own, own.better, own.worse, STRATA_NAMES)["length_controlled_accuracy"]
                assert found.low is not None and found.high is not None
                misses[name] += not found.low <= truth <= found.high
    assert 1 <= misses["pairs"] <= 13 and misses["groups"] <= 3, misses  # 6 and 0.6 are expected


def test_order_of_the_examples_changes_nothing_and_blocks_are_json(biased: Any, diagnosed: Any) -> None:
    scored, found = biased("length_controlled", 0.3), diagnosed("length_controlled", 0.3)
    again = diagnose_length(scored[::-1])
    assert [m.value for m in again.metrics()] == pytest.approx([m.value for m in found.metrics()])
    names = [metric.name for metric in found.metrics()]
    assert len(set(names)) == 11 and "length_controlled_accuracy" in names
    blocks = json.loads(json.dumps(found.figures, allow_nan=False))
    check_blocks(blocks, [])
    assert [block["kind"] for block in blocks] == ["bars", "scatter"]
    series = blocks[1]["series"][0]
    assert len(series["points"]) == sum(len(one.scores) for one in scored)
    assert set(series["points"][0]) == {"x", "y", "text", "id", "group"}
    line = np.interp([100, 250], series["line"]["x"], series["line"]["y"])
    assert (line[1] - line[0]) / 1.5 == pytest.approx(0.3, abs=0.1)  # per 100 characters
