"""The Bradley-Terry loss against a plain loop, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from treeward.losses import bradley_terry, ranked_pairs

GROUPS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=5)


def plain_loss(
    scores: Tensor,
    ranks: Sequence[Sequence[int]],
    margins: Sequence[float | None],
    ties: str,
    smoothing: float,
    center: float,
) -> tuple[Tensor, int]:
    """The formula of the docstring, pair by pair in float64."""
    total, groups, start = scores.double().sum() * 0, 0, 0
    for group, margin in zip(ranks, margins, strict=True):
        losses = []
        for i in range(len(group)):
            for j in range(len(group)):
                a, b = scores[start + i].double(), scores[start + j].double()
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
@settings(deadline=None)
def test_loss_and_gradient_equal_a_plain_loop(
    ranks: list[list[int]], ties: str, smoothing: float, center: float, with_margins: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.randn(sum(map(len, ranks)), generator=generator) * 3).requires_grad_()
    margins = [0.5 * g if with_margins and g != 1 else None for g in range(len(ranks))]
    pairs = ranked_pairs(ranks, margins=margins if with_margins else None, ties=ties)  # type: ignore[arg-type]
    loss = bradley_terry(scores, pairs, label_smoothing=smoothing, center_rewards_coefficient=center)
    want, groups = plain_loss(scores, ranks, margins, ties, smoothing, center)
    assert pairs.num_groups == groups
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
    assert scores.grad is not None and scores.grad.isfinite().all()
    assert float(scores.grad.sum()) == 0.0


def test_ties() -> None:
    assert ranked_pairs([(0, 0), (0, 1)]).num_groups == 1
    assert len(ranked_pairs([(0, 0, 0)]).better_P) == 0
    half = ranked_pairs([(0, 0)], margins=[5.0], ties="half")
    assert half.tied_P.tolist() == [True] and half.margin_P.tolist() == [0.0]
    scores = torch.tensor([1.0, 3.0], requires_grad=True)
    loss = bradley_terry(scores, half, label_smoothing=0.3)  # a tie is even however the labels are smoothed
    want = (F.softplus(torch.tensor(2.0)) + F.softplus(torch.tensor(-2.0))) / 2
    torch.testing.assert_close(loss, want)
    equal = torch.tensor([1.0, 1.0], requires_grad=True)
    bradley_terry(equal, half).backward()
    assert equal.grad is not None and equal.grad.tolist() == [0.0, 0.0]


def test_nothing_to_compare_is_a_loss_of_zero_that_can_be_differentiated() -> None:
    scores = torch.randn(3, requires_grad=True)
    pairs = ranked_pairs([(0,), (1, 1)])
    assert (pairs.num_groups, pairs.better_P.dtype) == (0, torch.long)
    loss = bradley_terry(scores, pairs, center_rewards_coefficient=0.1)
    loss.backward()
    assert float(loss.detach()) == 0.0 and scores.grad is not None and not scores.grad.any()


def test_bfloat16_scores_are_compared_in_float32() -> None:
    scores = torch.tensor([8.0, 8.0625], dtype=torch.bfloat16)
    loss = bradley_terry(scores, ranked_pairs([(0, 1)]))
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(math.log1p(math.exp(0.0625)), rel=1e-6)


def test_an_accidental_bug_would_be_seen() -> None:
    """The comparison with the loop fails for a margin of the wrong sign."""
    scores = torch.tensor([1.0, 0.0])
    wrong = bradley_terry(scores, ranked_pairs([(0, 1)], margins=[-1.0]))
    want, _ = plain_loss(scores, [(0, 1)], [1.0], "drop", 0.0, 0.0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(wrong.double(), want, rtol=1e-6, atol=1e-6)
