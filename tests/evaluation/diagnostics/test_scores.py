"""Distributions, saturation and drift have the numbers that were planted."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from treeward.errors import DataError
from treeward.evaluation.diagnostics.scores import (
    QUANTILES,
    compare_checkpoints,
    describe_scores,
    population_stability_index,
)
from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.report.blocks import check_blocks


@pytest.fixture(scope="module")
def drawn(make_example: Any) -> list[ScoredExample]:
    """Two subsets of 60 and 30 pairs, normal scores around 0 and around 5."""
    rng = np.random.default_rng(0)
    found = []
    for i in range(90):
        subset, middle = ("low", 0.0) if i % 3 else ("high", 5.0)
        example = make_example(str(i), f"prompt {i}", [f"good {i}", f"bad {i}"], subset=subset)
        scores = tuple(float(score) for score in rng.normal(middle, 2.0, 2))
        found.append(ScoredExample(example, scores, (6, 5), (9, 9)))
    return found


def changed(scored: list[ScoredExample], function: Any) -> list[ScoredExample]:
    return [replace(one, scores=tuple(function(score) for score in one.scores)) for one in scored]


def test_distributions_are_those_of_the_subsets(drawn: list[ScoredExample]) -> None:
    found = describe_scores(drawn)
    assert [(one.name, one.count) for one in found.subsets] == [("high", 60), ("low", 120)]
    of_high = np.array([score for one in drawn for score in one.scores if one.example.subset == "high"])
    high = found.subsets[0]
    assert (high.mean, high.std) == pytest.approx((of_high.mean(), of_high.std()))
    assert high.quantiles == pytest.approx(np.quantile(of_high, QUANTILES))
    assert sum(found.overall.counts) == 180 and sum(found.margins) == 90
    assert np.add(high.counts, found.subsets[1].counts).tolist() == list(found.overall.counts)
    assert 0 in found.margin_edges and found.mean.low < found.mean.value < found.mean.high
    blocks = json.loads(json.dumps(found.blocks("mine"), allow_nan=False))
    check_blocks(blocks, [])
    assert [block["kind"] for block in blocks] == ["histogram", "table", "table"]
    assert [row["name"] for row in blocks[1]["rows"]] == ["all", "high", "low"]


def test_saturation_is_of_margins_beyond_five_temperatures(make_example: Any) -> None:
    margins = [6.0, 4.9, -5.1, 0.5, -1.0, 5.0]
    scored = [
        ScoredExample(make_example(str(i), str(i), ["a", "b"]), (margin, 0.0), (1, 1), (1, 1))
        for i, margin in enumerate(margins)
    ]
    found = describe_scores(scored)
    assert found.saturated.value == 2 / 6 and found.saturated_wrong.value == 1 / 2
    assert found.saturated_wrong.count == 2
    assert describe_scores(scored, temperature=0.1).saturated.value == 5 / 6
    assert describe_scores(scored, temperature=2.0).saturated.value == 0


def test_equal_scores_of_equal_texts_are_no_ties(make_example: Any) -> None:
    def scored(id: str, replies: list[str], scores: tuple[float | None, ...]) -> ScoredExample:
        return ScoredExample(make_example(id, "p" + id[0], replies), scores, (1,) * len(replies), (1,) * len(replies))

    rows = [
        scored("a", ["x", "x"], (1.0, 1.0)),
        scored("b", ["x", "y"], (2.0, 2.0)),
        scored("c", ["x", "y"], (3.0, 4.0)),
        scored("c2", ["x", "z"], (3.0, 5.0)),  # the reply "x" to "pc" is scored twice
        scored("d", ["x", "y"], (None, 4.0)),
    ]
    found = describe_scores(rows)
    assert (found.ties.value, found.ties.count) == (1 / 3, 3)  # b, of b, c and c2
    assert found.repeated.value == 4 / 9  # both of b; 4.0 of c and d
    assert found.num_failed == 1
    assert all(metric.value is None for metric in describe_scores([]).metrics())


def test_a_half_precision_head_is_seen_by_its_repeated_scores(drawn: list[ScoredExample]) -> None:
    rounded = changed(drawn, lambda score: round(score * 16) / 16)
    assert describe_scores(drawn).repeated.value == 0
    assert describe_scores(rounded).repeated.value > 0.5


def test_the_same_scores_have_not_drifted(drawn: list[ScoredExample]) -> None:
    drift = compare_checkpoints(drawn, drawn)
    values = {metric.name: metric.value for metric in drift.metrics()}
    assert values["shift"] == values["relative_shift"] == values["psi"] == values["shape_psi"] == 0
    assert values["scale_ratio"] == values["order_agreement"] == 1
    assert values["rank_correlation"] == pytest.approx(1)
    assert drift.before == drift.after and drift.num_unmatched == 0


def test_a_shift_and_a_scale_are_found_apart_from_the_order(drawn: list[ScoredExample]) -> None:
    drift = compare_checkpoints(drawn, changed(drawn, lambda score: 3 * score + 10))
    scores = np.array([score for one in drawn for score in one.scores])
    assert drift.scale_ratio.value == pytest.approx(3)
    assert drift.shift.value == pytest.approx((2 * scores + 10).mean())
    assert drift.shift.low < drift.shift.value < drift.shift.high
    assert drift.relative_shift.value == pytest.approx(drift.shift.value / scores.std())
    assert drift.rank_correlation.value == pytest.approx(1) and drift.order_agreement.value == 1
    assert drift.psi.value > 0.25 and drift.shape_psi.value == pytest.approx(0, abs=1e-12)
    flipped = compare_checkpoints(drawn, changed(drawn, lambda score: -score))
    assert flipped.correlation.value == pytest.approx(-1) and flipped.order_agreement.value == 0
    bent = compare_checkpoints(drawn, changed(drawn, lambda score: math.exp(score / 2)))
    assert bent.rank_correlation.value == pytest.approx(1) and bent.shape_psi.value > 0.25
    check_blocks(json.loads(json.dumps(bent.blocks("one", "two"), allow_nan=False)), [])


def test_examples_are_matched_by_id(drawn: list[ScoredExample]) -> None:
    moved = changed(drawn, lambda score: score + 1)
    assert compare_checkpoints(drawn, moved[::-1]).shift.value == pytest.approx(1)
    some = compare_checkpoints(drawn, moved[:10])
    assert some.shift.count == 20
    failed = [replace(moved[0], scores=(None, 1.0)), *moved[1:]]
    assert compare_checkpoints(drawn, failed).num_unmatched == 1
    other = replace(moved[0], example=replace(moved[0].example, completions=moved[1].example.completions))
    with pytest.raises(DataError, match="not scored on the same examples"):
        compare_checkpoints(drawn, [other])
    with pytest.raises(DataError, match="no scores to compare"):
        compare_checkpoints(drawn, [])


def test_the_stability_index_is_that_of_the_formula() -> None:
    expected, actual = np.arange(100.0), np.concatenate([np.arange(50.0), np.full(150, 99.5)])
    # With two bins, cut at the median: shares (50, 50) and (50, 150), each with half a count added.
    p, q = np.array([50.5, 50.5]) / 101, np.array([50.5, 150.5]) / 201
    assert population_stability_index(expected, actual, 2) == pytest.approx(((q - p) * np.log(q / p)).sum())
    assert population_stability_index(expected, np.full(30, 1e9)) < 20  # finite, though nine bins are empty
    rng = np.random.default_rng(0)
    same = [population_stability_index(rng.normal(size=400), rng.normal(size=300)) for _ in range(200)]
    assert np.mean(same) == pytest.approx(9 * (1 / 400 + 1 / 300), rel=0.15)
    assert population_stability_index(np.zeros(9), np.zeros(9)) == 0
