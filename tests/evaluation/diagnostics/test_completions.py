"""The regression within prompts is the textbook one, and its intervals hold what they promise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from treeward.evaluation.diagnostics.biases import stratify
from treeward.evaluation.diagnostics.completions import (
    Completions,
    Pairs,
    collect_completions,
    collect_pairs,
    completion_text,
    correlation_metric,
    in_standard_deviations,
    regress_within_prompts,
    shortened,
)


def clustered(seed: int, num_prompts: int = 25, slope: float = 0.7) -> tuple[Any, Any, Any]:
    """Scores, features (N, 2) and prompts: the errors of a prompt go together with its first feature."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 6, num_prompts)
    prompts = np.repeat(np.arange(num_prompts), sizes)
    features = rng.normal(size=(len(prompts), 2)) + 3 * rng.normal(size=num_prompts)[prompts, None]
    # A slope of its own for each prompt: intervals that take completions for independent are too narrow.
    own_slopes = slope + rng.normal(size=num_prompts)[prompts]
    scores = 5 * rng.normal(size=num_prompts)[prompts] + own_slopes * features[:, 0] - 0.3 * features[:, 1]
    return scores + 0.2 * rng.normal(size=len(prompts)), features, prompts


def test_coefficients_and_intervals_are_those_of_the_formula() -> None:
    scores, features, prompts = clustered(1)
    dummies = (prompts[:, None] == np.unique(prompts)).astype(float)
    design = np.column_stack([features, dummies])
    params = np.linalg.lstsq(design, scores, rcond=None)[0][:2]
    g = len(np.unique(prompts))
    changes = []
    for prompt in np.unique(prompts):  # the textbook's jackknife: fitted anew without each prompt
        kept = prompts != prompt
        changes.append(params - np.linalg.lstsq(design[kept], scores[kept], rcond=None)[0][:2])
    reach = stats.t.ppf(0.975, g - 1) * np.sqrt((g - 1) / g * np.sum(np.square(changes), axis=0))
    shuffled = np.random.default_rng(0).permutation(len(scores))
    got = regress_within_prompts(scores[shuffled], features[shuffled], prompts[shuffled], ["a", "b"])
    assert [metric.value for metric in got] == pytest.approx(params.tolist())
    assert [metric.low for metric in got] == pytest.approx((params - reach).tolist())
    assert [metric.high for metric in got] == pytest.approx((params + reach).tolist())
    assert [metric.count for metric in got] == [len(scores)] * 2


def test_intervals_hold_the_slope_in_95_of_100_samples_and_nearly_where_lengths_are_skewed() -> None:
    """Skewed: a few long completions carry the slope and have the largest errors; CR1 holds it in 79 of 100."""
    hits, rng = {"normal": 0, "skewed": 0}, np.random.default_rng(3)
    for seed in range(200):
        scores, features, prompts = clustered(seed, num_prompts=40)
        normal, _ = regress_within_prompts(scores, features, prompts, ["a", "b"])
        prompts, lengths = np.repeat(np.arange(30), 2), rng.lognormal(0, 0.7, size=60)
        scores = 0.5 * lengths + rng.normal(size=30)[prompts] + rng.normal(size=60) * (0.3 + lengths)
        (skewed,) = regress_within_prompts(scores, lengths[:, None], prompts, ["slope"])
        for name, metric, truth in (("normal", normal, 0.7), ("skewed", skewed, 0.5)):
            assert metric.low is not None and metric.high is not None
            hits[name] += metric.low <= truth <= metric.high
    assert 0.91 <= hits["normal"] / 200 <= 0.99 and hits["skewed"] / 200 >= 0.88


def test_what_a_prompt_adds_to_all_its_completions_changes_nothing_and_neither_do_lone_ones() -> None:
    scores, features, prompts = clustered(2)
    want = regress_within_prompts(scores, features, prompts, ["a", "b"])
    shifted = scores + np.random.default_rng(0).normal(size=100)[prompts] * 50
    got = regress_within_prompts(
        np.append(shifted, [9.0, -9.0]), np.vstack([features, [[99, 1], [-99, 1]]]), np.append(prompts, [77, 78]), "ab"
    )
    for one, other in zip(got, want, strict=True):
        assert (one.value, one.low, one.high) == pytest.approx((other.value, other.low, other.high))
        assert one.count == other.count


def test_coefficients_that_the_data_do_not_determine_have_no_value() -> None:
    scores, features, prompts = clustered(3)
    constant = np.column_stack([features[:, 0], prompts.astype(float)])
    slope, of_prompt = regress_within_prompts(scores, constant, prompts, ["slope", "of_prompt"])
    assert slope.value == pytest.approx(regress_within_prompts(scores, features[:, :1], prompts, ["slope"])[0].value)
    assert of_prompt.value is None and "does not vary" in str(of_prompt.note)
    twice = np.column_stack([features[:, 0], 2 * features[:, 0]])
    assert [metric.value for metric in regress_within_prompts(scores, twice, prompts, ["a", "b"])] == [None, None]
    nothing = regress_within_prompts(np.zeros(0), np.zeros((0, 1)), np.zeros(0, dtype=np.int64), ["a"])[0]
    assert (nothing.value, nothing.count) == (None, 0)
    decided, lengths = np.array([0, 0, 1, 1, 2, 2]), np.array([1.0, 3.0, 2.0, 2.0, 2.0, 2.0])
    (by_one,) = regress_within_prompts(np.array([0.0, 1.0, 2.0, 1.0, 1.0, 3.0]), lengths[:, None], decided, ["slope"])
    assert by_one.value == pytest.approx(0.5) and by_one.low is None and by_one.high is None


@pytest.mark.parametrize("num_prompts", [9, 10])
def test_few_prompts_have_no_interval_and_the_note_says_so(num_prompts: int) -> None:
    rng = np.random.default_rng(3)
    prompts, x = np.repeat(np.arange(num_prompts), 3), rng.normal(size=3 * num_prompts)
    y = x + rng.normal(size=3 * num_prompts)
    slope = regress_within_prompts(y, x[:, None], prompts, ["slope"])[0]
    for metric in (slope, correlation_metric(x, y, prompts, "r")):
        assert metric.value is not None and (metric.low is None) is (num_prompts < 10)
        assert ("prompts: too few for an interval" in str(metric.note)) is (num_prompts < 10)


def test_completions_and_pairs_of_examples(make_example: Any, score_with: Any) -> None:
    examples = [
        make_example("a", "one", ["x", "yyyy", "zz"], ranks=[2, 0, 2]),
        make_example("b", "two", ["same", "rank"], ranks=[1, 1]),
        make_example("c", "one", ["w", "vv"]),
    ]
    scored = score_with(examples, lambda context, text: None if text == "w" else float(len(text)))
    found, pairs = collect_completions(scored), collect_pairs(scored)
    assert found.places.tolist() == [1, 0, 1, 0.5, 0.5, 1]
    assert found.prompts.tolist() == [0, 0, 0, 1, 1, 0]  # "c" asks what "a" does
    assert (found.examples.tolist(), found.completions.tolist()) == ([0, 0, 0, 1, 1, 2], [0, 1, 2, 0, 1, 1])
    assert pairs.sides.tolist() == [[1, 0], [1, 2], [0, 1]]
    assert pairs.margins.tolist()[:2] == [3, 2] and np.isnan(pairs.margins[2])
    assert (pairs.outcomes.tolist(), pairs.num_failed) == ([1, 1, 0], 1)
    assert (pairs.better.tolist(), pairs.worse.tolist()) == ([4, 4, 1], [1, 2, 2])
    assert collect_pairs([]).margins.shape == (0,) and collect_pairs([]).sides.shape == (0, 2)


def test_correlations_are_pearsons_with_fishers_interval() -> None:
    rng = np.random.default_rng(5)
    x = rng.integers(0, 6, 80).astype(float)
    y = x + rng.normal(size=80)
    metric = correlation_metric(x, y, np.arange(80), "r")
    known = stats.pearsonr(x, y)
    fisher = known.confidence_interval(0.95)
    assert metric.value == pytest.approx(known.statistic)
    assert metric.low == pytest.approx(fisher.low, abs=0.06) and metric.high == pytest.approx(fisher.high, abs=0.06)
    assert correlation_metric(x, np.full(80, 0.1), np.arange(80), "r").value is None


def test_a_slope_in_standard_deviations_does_not_depend_on_the_scale() -> None:
    scores, features, prompts = clustered(4)
    found = []
    for scale in (1.0, 40.0):
        whole = np.arange(len(scores))
        completions = Completions(scale * scores, features[:, 0], features[:, 1], prompts, whole, whole)
        slope, _ = regress_within_prompts(completions.scores, features, prompts, ["a", "b"])
        found.append(in_standard_deviations(slope, completions, "relative"))
    assert found[0].value == pytest.approx(found[1].value) and found[0].low == pytest.approx(found[1].low)
    spread = np.concatenate([scores[prompts == p] - scores[prompts == p].mean() for p in np.unique(prompts)])
    std = np.sqrt((spread**2).sum() / (len(scores) - len(np.unique(prompts))))
    assert found[0].value == pytest.approx(regress_within_prompts(scores, features, prompts, "ab")[0].value / std)


def test_a_shared_prompt_does_not_make_a_stratum_that_is_all_right_certain() -> None:
    """30 pairs whose better completion is longer, all right, and 30 whose better one is shorter, 29 of them right."""
    better, worse, names = (
        np.repeat([200.0, 50.0], 30),
        np.full(60, 100.0),
        ("share", "more", "less", "same", "gap", "mean"),
    )
    margins, sides = np.array([1.0] * 59 + [-1.0]), np.tile([0, 1], (60, 1))
    apart, shared = (
        stratify(pairs, better, worse, names)
        for prompts in ([*range(60)], [*range(59), 0])
        for pairs in [Pairs(margins, better, worse, np.array(prompts), np.arange(60), sides)]
    )
    # Resampling alone can hardly make the 59 right ones wrong, and says 0.95 and more.
    for name, value in (("mean", 59 / 60), ("gap", 1 / 30)):
        one, other = apart[name], shared[name]
        assert one.value == other.value == pytest.approx(value)
        assert one.low is not None and one.high is not None and other.low is not None and other.high is not None
        assert other.low <= one.low + 0.01 and other.high >= one.high - 0.01


def test_content_in_parts_is_read() -> None:
    assert completion_text(({"role": "assistant", "content": [{"type": "text", "text": "Hi"}]},)) == "Hi"
    assert shortened("a" * 10, 10) == "a" * 10 and shortened("a" * 11, 10) == "a" * 9 + "…"
