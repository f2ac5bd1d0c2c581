"""Advantages against the same formulas written out for one completion at a time."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from treeward.rl.advantages import AdvantageSettings, advantages, informative_groups

REWARDS = [[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0], [0.5, -1.0, 3.0, 0.25], [7.0, 1.0, 1.0, 1.0], [5.0] * 4]
KNOWN = [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
FLOOR = 0.01
ALL = [
    AdvantageSettings(std_floor=FLOOR),
    AdvantageSettings(normalize_rewards=False),
    AdvantageSettings(use_leave_one_out_baseline=True, std_floor=FLOOR),
    AdvantageSettings(use_leave_one_out_baseline=True, normalize_rewards=False),
    AdvantageSettings("leave_one_out"),
    AdvantageSettings("reinforce_plus_plus", std_floor=FLOOR),
    AdvantageSettings("reinforce_plus_plus", minus_baseline=False, std_floor=FLOOR),
]


@pytest.fixture
def given_rewards() -> tuple[Tensor, Tensor]:
    rewards, known = torch.tensor(REWARDS), torch.tensor(KNOWN)
    return rewards.masked_fill(known == 0, torch.nan), known


def members(p: int) -> list[float]:
    return [r for r, k in zip(REWARDS[p], KNOWN[p], strict=True) if k]


def written_out(p: int, g: int, settings: AdvantageSettings) -> float:
    own, reward = members(p), REWARDS[p][g]
    if settings.name == "reinforce_plus_plus":
        base = [statistics.mean(members(q)) if members(q) else 0.0 for q in range(len(REWARDS))]
        everything = [r for q in range(len(REWARDS)) for r in members(q)]
        if not settings.minus_baseline:
            base = [statistics.mean(everything)] * len(REWARDS)
        spread = [r - base[q] for q in range(len(REWARDS)) for r in members(q)]
        std = (sum(d * d for d in spread) / (len(spread) - 1)) ** 0.5
        return (reward - base[p]) / (std + FLOOR)
    if len(own) < 2:
        return 0.0
    others = [r for h, r in enumerate(REWARDS[p]) if KNOWN[p][h] and h != g]
    alone = settings.name == "leave_one_out" or settings.use_leave_one_out_baseline
    value = reward - statistics.mean(others if alone else own)
    divided = settings.name == "grpo" and settings.normalize_rewards
    return value / (statistics.stdev(own) + FLOOR) if divided else value


@pytest.mark.parametrize("settings", ALL)
def test_it_is_the_formula(settings: AdvantageSettings, given_rewards: tuple[Tensor, Tensor]) -> None:
    got = advantages(*given_rewards, settings)
    assert got.dtype == torch.float32
    for p in range(len(REWARDS)):
        for g in range(4):
            want = written_out(p, g, settings) if KNOWN[p][g] else 0.0
            assert float(got[p, g]) == pytest.approx(want, abs=1e-6)


def test_the_only_good_completion_is_not_blown_up() -> None:
    """With the std of the others its advantage would be of the order 1 / floor."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1e-4]])
    settings = AdvantageSettings(use_leave_one_out_baseline=True)
    assert float(advantages(rewards, torch.ones(1, 4), settings).abs().max()) < 3


def test_a_large_offset_does_not_swallow_the_differences() -> None:
    small = torch.tensor([[0.0, 0.0625, 0.5, 1.0, 0.125]])
    for settings in ALL:
        known = torch.ones(1, 5)
        apart = advantages(small + 1e6, known, settings) - advantages(small, known, settings)
        assert float(apart.abs().max()) < 1e-6


@given(st.floats(-1e3, 1e3), st.integers(2, 9), st.sampled_from(ALL), st.sampled_from([0.0, 1e-6]))
def test_equal_rewards_teach_exactly_nothing(
    value: float, size: int, settings: AdvantageSettings, floor: float
) -> None:
    rewards, known = torch.full((2, size), value, dtype=torch.float64), torch.ones(2, size)
    settings = AdvantageSettings(
        settings.name,
        settings.normalize_rewards,
        settings.use_leave_one_out_baseline,
        settings.minus_baseline,
        std_floor=max(floor, 1e-12),
    )
    assert torch.equal(advantages(rewards, known, settings), torch.zeros(2, size))


def test_nothing_is_known(given_rewards: tuple[Tensor, Tensor]) -> None:
    rewards, _ = given_rewards
    for settings in ALL:
        assert not advantages(rewards.fill_(torch.nan), torch.zeros(5, 4), settings).any()
        assert advantages(torch.zeros(0, 0), torch.zeros(0, 0), settings).shape == (0, 0)
        assert advantages(torch.zeros(2, 0), torch.zeros(2, 0), settings).shape == (2, 0)


def test_informative_groups(given_rewards: tuple[Tensor, Tensor]) -> None:
    assert informative_groups(*given_rewards).tolist() == [True, False, True, False, False]
    assert informative_groups(torch.zeros(2, 0), torch.zeros(2, 0)).tolist() == [False, False]
