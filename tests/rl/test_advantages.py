"""Advantages against the same formulas written out for one group at a time."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from treeward.rl.advantages import group_relative, informative_groups, leave_one_out, reinforce_plus_plus

REWARDS = [[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0], [0.5, -1.0, 3.0, 0.25], [7.0, 1.0, 1.0, 1.0]]
KNOWN = [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 1], [1, 0, 0, 0]]


@pytest.fixture
def given_rewards() -> tuple[Tensor, Tensor]:
    rewards, known = torch.tensor(REWARDS), torch.tensor(KNOWN)
    return rewards.masked_fill(known == 0, torch.nan), known


def members(p: int) -> list[float]:
    return [r for r, k in zip(REWARDS[p], KNOWN[p], strict=True) if k]


def test_group_relative(given_rewards: tuple[Tensor, Tensor]) -> None:
    got = group_relative(*given_rewards, floor=0.01)
    for p in range(4):
        own = members(p)
        for g in range(4):
            want = 0.0
            if KNOWN[p][g] and len(set(own)) > 1:
                want = (REWARDS[p][g] - statistics.mean(own)) / (statistics.stdev(own) + 0.01)
            assert float(got[p, g]) == pytest.approx(want, abs=1e-6)
    centred = group_relative(*given_rewards, normalize=False)
    assert centred[0].tolist() == [0.5, -0.5, -0.5, 0.5]


def test_leave_one_out(given_rewards: tuple[Tensor, Tensor]) -> None:
    got = leave_one_out(*given_rewards)
    for p in range(4):
        for g in range(4):
            want = 0.0
            if KNOWN[p][g] and len(members(p)) > 1:
                others = [r for h, (r, k) in enumerate(zip(REWARDS[p], KNOWN[p], strict=True)) if k and h != g]
                want = REWARDS[p][g] - statistics.mean(others)
            assert float(got[p, g]) == pytest.approx(want, abs=1e-6)


def test_reinforce_plus_plus_is_scaled_by_the_batch(given_rewards: tuple[Tensor, Tensor]) -> None:
    got = reinforce_plus_plus(*given_rewards, floor=0.0)
    centred = group_relative(*given_rewards, normalize=False)
    known = given_rewards[1].bool()
    std = float((centred[known].square().sum() / (known.sum() - 1)).sqrt())
    assert torch.allclose(got, centred / std)


def test_informative_groups(given_rewards: tuple[Tensor, Tensor]) -> None:
    assert informative_groups(*given_rewards).tolist() == [True, False, True, False]


@given(st.floats(-1e3, 1e3), st.integers(2, 9))
def test_equal_rewards_teach_nothing(value: float, size: int) -> None:
    rewards, known = torch.full((1, size), value), torch.ones(1, size)
    for advantages in (group_relative, leave_one_out, reinforce_plus_plus):
        assert not advantages(rewards, known).any()
