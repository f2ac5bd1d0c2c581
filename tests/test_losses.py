"""Each loss against a plain loop in float64, forward and backward; metrics, which are sums and
counts."""

from __future__ import annotations

import inspect
import math
from functools import reduce
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from treeward.config.loss import LOSSES, LabelConfig, LossConfig, StepLabelConfig
from treeward.data.step_encoding import encode_steps
from treeward.losses import (
    METRIC_NAMES,
    GradeSums,
    RewardMetrics,
    RewardSums,
    bradley_terry,
    function_of,
    grade_metrics,
    graded,
    plackett_luce,
    ranked_pairs,
    squared_error,
)
from treeward.step_losses import labelled_steps

GROUPS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=5)
MANY = [[i // 2 for i in range(32)], [0], [1, 0]]


def plain_loss(
    scores: Tensor, ranks: list[Any], margins: list[Any], ties: str, smoothing: float, center: float
) -> tuple[Tensor, int]:
    """The formula of the docstring, pair by pair in float64."""
    total = scores.double().sum() * 0
    groups = 0
    start = 0
    for group, margin in zip(ranks, margins, strict=True):
        losses = []
        for i in range(len(group)):
            for j in range(len(group)):
                a = scores[start + i].double()
                b = scores[start + j].double()
                if group[i] < group[j]:
                    d = a - b - (margin or 0.0)
                    loss = -(1 - smoothing) * F.logsigmoid(d) - smoothing * F.logsigmoid(-d)
                elif group[i] == group[j] and i < j and ties == "half":
                    loss = -0.5 * F.logsigmoid(a - b) - 0.5 * F.logsigmoid(b - a)
                else:
                    continue
                losses.append(loss + center * (a + b) ** 2)
        groups += bool(losses)
        if losses:
            total = total + sum(losses) / len(losses)
        start += len(group)
    return total, groups


@given(
    GROUPS,
    st.sampled_from(["drop", "half"]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.0, 0.01]),
    st.booleans(),
    st.integers(0, 9),
)
@example(MANY, "half", 0.1, 0.01, True, 0)
def test_loss_and_gradient_equal_a_plain_loop(
    ranks: list[list[int]],
    ties: str,
    smoothing: float,
    center: float,
    with_margins: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.randn(sum(map(len, ranks)), generator=generator) * 3).requires_grad_()
    margins = [0.5 * g if with_margins and g != 1 else None for g in range(len(ranks))]
    pairs = ranked_pairs(ranks, strengths=margins if with_margins else None, ties=ties)  # type: ignore[arg-type]
    loss = bradley_terry(
        scores, pairs, label_smoothing=smoothing, center_rewards_coefficient=center
    )
    want, groups = plain_loss(scores, ranks, margins, ties, smoothing, center)
    assert pairs.num_units == groups
    assert loss.dtype == torch.float32 and loss.shape == ()
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=1e-6)
    got_gradient, want_gradient = (torch.autograd.grad(x, scores)[0] for x in (loss, want))
    torch.testing.assert_close(got_gradient, want_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("difference", [-1e4, -100.0, 88.8, 1e4])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_extreme_differences_stay_finite(difference: float, smoothing: float) -> None:
    scores = torch.tensor([difference, 0.0], requires_grad=True)
    loss = bradley_terry(scores, ranked_pairs([(0, 1)]), label_smoothing=smoothing)
    loss.backward()
    wrong = max(-difference, 0.0) * (1 - smoothing) + max(difference, 0.0) * smoothing
    assert float(loss.detach()) == pytest.approx(wrong, abs=1e-5)
    slope = smoothing if difference > 0 else smoothing - 1
    assert scores.grad is not None and scores.grad.tolist() == pytest.approx(
        [slope, -slope], abs=1e-6
    )


def test_ties() -> None:
    assert ranked_pairs([(0, 0), (0, 1)]).num_units == 1
    assert len(ranked_pairs([(0, 0, 0)]).better_P) == 0
    half = ranked_pairs([(0, 0)], strengths=[5.0], ties="half")
    assert half.tied_P.tolist() == [True] and half.margin_P.tolist() == [0.0]
    scores = torch.tensor([1.0, 3.0], requires_grad=True)
    # a tie is even however the labels are smoothed
    loss = bradley_terry(scores, half, label_smoothing=0.3)
    want = (F.softplus(torch.tensor(2.0)) + F.softplus(torch.tensor(-2.0))) / 2
    torch.testing.assert_close(loss, want)
    equal = torch.tensor([1.0, 1.0], requires_grad=True)
    bradley_terry(equal, half).backward()
    assert equal.grad is not None and equal.grad.tolist() == [0.0, 0.0]


def test_bfloat16_scores_are_compared_in_float32() -> None:
    scores = torch.tensor([8.0, 8.0625], dtype=torch.bfloat16)
    loss = bradley_terry(scores, ranked_pairs([(0, 1)]))
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(math.log1p(math.exp(0.0625)), rel=1e-6)


STRENGTH_SCORES = torch.tensor([1.0, 0.0, 0.5, 0.0, -0.5])
STRENGTH_RANKS = [(0, 1), (0, 1, 2)]
Kind = Literal["margin", "soft_label", "weight"]


def win(difference: float) -> float:
    """The loss of a pair that the better one wins."""
    return math.log1p(math.exp(-difference))


def soft(difference: float, log_odds: float) -> float:
    """The loss of a pair that the better one wins with these log-odds."""
    return win(difference) + difference / (1 + math.exp(log_odds))


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("margin", win(1 - 1), win(0.5 - 1)),
        ("soft_label", soft(1, 1), soft(0.5, 1)),
        ("weight", win(1), win(0.5)),
    ],
)
def test_a_strength_is_a_margin_a_soft_label_or_a_weight(
    kind: Kind, first: float, second: float
) -> None:
    """HelpSteer's grade of the first pair, and the scores of a group, of which the last has
    none."""
    strengths = [2.0, (3.0, 1.0, None)]
    pairs = ranked_pairs(STRENGTH_RANKS, strengths=strengths, strength=kind, strength_scale=0.5)
    want = first + (second + win(1.0) + win(0.5)) / 3
    assert float(bradley_terry(STRENGTH_SCORES, pairs)) == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("margin", win(1), win(0.5)),
        ("soft_label", soft(1, -2), (win(0.5) + win(-0.5)) / 2),
        ("weight", 0.0, 0.0),
    ],
)
def test_a_strength_against_the_ranks_says_nothing(kind: Kind, first: float, second: float) -> None:
    strengths = [-2.0, (0.0, 1.0, None)]
    pairs = ranked_pairs(STRENGTH_RANKS, strengths=strengths, strength=kind, weight="pair")
    want = first + second + win(1.0) + win(0.5)
    assert pairs.num_units == 4
    assert float(bradley_terry(STRENGTH_SCORES, pairs)) == pytest.approx(want, abs=1e-6)


def test_the_log_odds_of_a_probability_are_that_probability() -> None:
    """As a judge gives it."""
    pairs = ranked_pairs([(0, 1)], strengths=[math.log(4)], strength="soft_label")
    assert pairs.target_P.tolist() == pytest.approx([0.8])


def test_a_soft_label_is_smoothed() -> None:
    """0.2 becomes 0.26."""
    pairs = ranked_pairs([(0, 1)], strengths=[math.log(0.25)], strength="soft_label")
    loss = float(bradley_terry(STRENGTH_SCORES, pairs, label_smoothing=0.1))
    assert loss == pytest.approx(win(1) + 0.74, abs=1e-6)


def test_a_soft_label_of_any_strength_is_finite() -> None:
    pairs = ranked_pairs([(0, 1)] * 2, strengths=[-1e5, 1e5], strength="soft_label")
    assert pairs.target_P.tolist() == [0.0, 1.0]


@given(GROUPS, st.sampled_from(["group", "pair"]), st.integers(0, 9))
@example(MANY, "group", 0)
def test_plackett_luce_equals_a_plain_loop(ranks: list[list[int]], weight: str, seed: int) -> None:
    """Full and partial rankings: the best of what is left is chosen, and tied completions are never
    compared."""
    scores = (
        torch.randn(sum(map(len, ranks)), generator=torch.Generator().manual_seed(seed)) * 3
    ).requires_grad_()
    pairs = ranked_pairs(ranks, weight=weight, unit="choice")  # type: ignore[arg-type]
    want = scores.double().sum() * 0
    units = 0
    start = 0
    for group in ranks:
        own = scores[start : start + len(group)].double()
        worse = [[j for j, other in enumerate(group) if other > rank] for rank in group]
        choices = [
            torch.logsumexp(own[[i, *rest]], 0) - own[i] for i, rest in enumerate(worse) if rest
        ]
        units += len(choices) if weight == "pair" else bool(choices)
        if choices:
            want = want + sum(choices) / (1 if weight == "pair" else len(choices))
        start += len(group)
    loss = plackett_luce(scores, pairs)
    assert pairs.num_units == units
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=1e-6)
    got_gradient, want_gradient = (torch.autograd.grad(x, scores)[0] for x in (loss, want))
    torch.testing.assert_close(got_gradient, want_gradient, rtol=1e-5, atol=1e-6)


def test_plackett_luce_of_two_is_bradley_terry_and_stays_finite() -> None:
    for d in (-1e4, -5.0, 0.0, 3.0, 1e4):
        scores = torch.tensor([d, 0.0], requires_grad=True)
        losses = [plackett_luce(scores, ranked_pairs([(0, 1)], unit="choice"))]
        losses.append(bradley_terry(scores, ranked_pairs([(0, 1)])))
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*(torch.autograd.grad(loss, scores)[0] for loss in losses))
    scores = torch.tensor([-1e4, 0.0, 1e4, 3.0], requires_grad=True)
    loss = plackett_luce(scores, ranked_pairs([(0, 1, 2, 3)], unit="choice"))
    assert float(loss.detach()) == pytest.approx((2e4 + 1e4 + 0) / 3)
    assert torch.autograd.grad(loss, scores)[0].tolist() == pytest.approx(
        [-1 / 3, -1 / 3, 2 / 3, 0]
    )


def test_squared_error_skips_what_has_no_grade() -> None:
    nan = math.nan
    grades = [[(4.0, nan), (1.0, 2.0)], [(nan, nan)], [(3.0, 1e4)]]
    targets = graded(grades, stds=(2.0, 1.0))
    values = (
        torch.tensor([[3.0, nan], [1.0, 0.0], [9.0, 9.0], [5.0, 0.0]])
        .nan_to_num(7.0)
        .requires_grad_()
    )
    loss = squared_error(values, targets)
    want = (0.25 + 0 + 4) / 4 + (
        1 + 1e8
    ) / 2  # each group weighs 1, each attribute in its own units
    assert targets.num_units == 2 and float(loss.detach()) == pytest.approx(want)
    gradient = torch.autograd.grad(loss, values)[0]
    assert gradient.tolist() == [[-0.125, 0], [0, -1.0], [0, 0], [0.5, -1e4]]
    assert graded([], stds=(1.0, 1.0)).values_SH.shape == (0, 2)


@pytest.mark.parametrize("name", LOSSES)
def test_an_option_of_a_loss_is_a_key_and_reaches_it(name: str) -> None:
    parameters = inspect.signature(function_of(name)).parameters.values()
    options = {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}
    options.pop("ties", None)  # `data.ties` chooses the model of ties
    assert LossConfig().arguments(name) == options


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.learns == "pairs"])
def test_of_a_tied_pair_no_completion_is_the_better_one(name: str) -> None:
    scores = torch.tensor([0.3, 2.0], requires_grad=True)
    pairs = ranked_pairs([(0, 0)], ties="half")
    gradient = torch.autograd.grad(function_of(name)(scores, pairs), scores)[0]
    swapped = torch.autograd.grad(function_of(name)(scores.flip(0), pairs), scores)[0]
    assert torch.equal(gradient, swapped)


def test_every_loss_of_the_configuration_is_there() -> None:
    read = {option for loss in LOSSES.values() for option in loss.options}
    assert read == LossConfig.model_fields.keys()
    assert LabelConfig.model_fields.keys() <= inspect.signature(ranked_pairs).parameters.keys()
    # One option is read before equal steps are merged, and one after.
    before = inspect.signature(encode_steps).parameters.keys()
    after = inspect.signature(labelled_steps).parameters.keys()
    assert StepLabelConfig.model_fields.keys() <= before | after


def measure(scores: torch.Tensor, ranks: list[list[int]], ties: str = "drop") -> RewardMetrics:
    pairs = ranked_pairs(ranks, ties=ties)  # type: ignore[arg-type]
    sums = RewardSums()
    sums.add(scores, pairs, bradley_terry(scores, pairs))
    return sums.read()


@given(GROUPS, st.sets(st.integers(1, 7)), st.sampled_from(["drop", "half"]), st.integers(0, 9))
def test_metrics_of_any_split_add_up(
    ranks: list[list[int]], cuts: set[int], ties: str, seed: int
) -> None:
    scores = torch.randn(sum(map(len, ranks)), generator=torch.Generator().manual_seed(seed))
    parts = scores.split([len(group) for group in ranks])
    bounds = pairwise([0, *sorted(cut for cut in cuts if cut < len(ranks)), len(ranks)])
    batches = [measure(torch.cat(parts[low:high]), ranks[low:high], ties) for low, high in bounds]
    whole = measure(scores, ranks, ties).means()
    added = reduce(RewardMetrics.__add__, batches, RewardMetrics()).means()
    assert tuple(whole) == METRIC_NAMES
    for name in METRIC_NAMES:
        assert added[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-6, nan_ok=True)


def test_metrics_worked_by_hand() -> None:
    """Two pairs right of three; a tie is no pair; equal scores are not right."""
    metrics = measure(
        torch.tensor([2.0, 1.0, 0.0, 0.0, 5.0, 4.0, 9.0]), [[0, 1], [0, 1], [0, 1, 1]], "half"
    )
    assert (metrics.num_units, metrics.num_pairs, metrics.num_correct) == (3, 4, 2)
    means = metrics.means()
    graded_sums = RewardSums()  # whose loss is a mean over more comparisons than have pairs
    graded_sums.add(torch.tensor([1.0, 0.0]), ranked_pairs([[0, 1]]), torch.tensor(6.0), 3)
    assert graded_sums.read().means()["loss"] == 2.0
    assert means["accuracy"] == 0.5
    assert (
        means["chosen_rewards"] == (2 + 0 + 5 + 5) / 4
        and means["rejected_rewards"] == (1 + 0 + 4 + 9) / 4
    )
    assert means["reward_margin"] == means["chosen_rewards"] - means["rejected_rewards"]


def test_metrics_of_nothing_are_nan_not_zero() -> None:
    assert all(math.isnan(value) for value in RewardMetrics().means().values())
    only_ties = measure(torch.tensor([1.0, 2.0]), [[0, 0]], "half").means()
    assert math.isnan(only_ties["accuracy"]) and not math.isnan(only_ties["loss"])
    assert RewardMetrics() + RewardMetrics() == RewardMetrics()


def test_errors_and_correlations_of_grades_are_those_of_numpy_however_they_are_batched() -> None:
    generator = np.random.default_rng(0)
    grades = generator.integers(0, 5, (30, 3)).astype(float)
    values = generator.normal(size=(30, 3))
    grades[generator.random((30, 3)) < 0.3] = np.nan
    grades[:, 1] = np.where(np.isnan(grades[:, 1]), np.nan, 3.0)  # no correlation with a constant
    grades[:, 2] = np.nan
    sums = GradeSums()
    for rows in (slice(0, 7), slice(7, 7), slice(7, 30)):
        sums.add(torch.tensor(values[rows]), graded([grades[rows].tolist()], stds=(1.0,) * 3))
    assert sums.sums_6H is not None
    found = grade_metrics(sums.sums_6H, ["a", "b", "c"])
    known = ~np.isnan(grades)
    x = values[known[:, 0], 0]
    y = grades[known[:, 0], 0]
    wrong = [float(np.mean((values[known[:, i], i] - grades[known[:, i], i]) ** 2)) for i in (0, 1)]
    assert (found["mse_a"], found["mse_b"], found["mse"]) == pytest.approx((*wrong, sum(wrong) / 2))
    assert found["pearson_a"] == found["pearson"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert math.isnan(found["pearson_b"]) and math.isnan(found["mse_c"])
