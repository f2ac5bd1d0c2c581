"""Advantages against the same formulas written out for one completion at a time, and what length
does to rewards."""

from __future__ import annotations

import math
import statistics
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from treeward.config.grpo import GRPOConfig
from treeward.rl.advantages import STD_FLOOR, advantages, shaped_rewards, used_completions
from treeward.rl.generation import CompletionGroup, Prompt, SampledCompletion

REWARDS = [
    [1.0, 0.0, 0.0, 1.0],
    [2.0, 2.0, 2.0, 2.0],
    [0.5, -1.0, 3.0, 0.25],
    [7.0, 1.0, 1.0, 1.0],
    [5.0] * 4,
]
KNOWN = [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
ALL = [
    GRPOConfig(**options)
    for options in (
        {},
        {"normalize_rewards": False},
        {"use_leave_one_out_baseline": True},
        {"use_leave_one_out_baseline": True, "normalize_rewards": False},
        {"adv_estimator": {"name": "leave_one_out"}},
        {"adv_estimator": {"name": "reinforce_plus_plus"}},
        {"adv_estimator": {"name": "reinforce_plus_plus", "minus_baseline": False}},
    )
]


@pytest.fixture
def given_rewards() -> Tensor:
    return torch.tensor(REWARDS).masked_fill(torch.tensor(KNOWN) == 0, torch.nan)


def members(p: int) -> list[float]:
    return [r for r, k in zip(REWARDS[p], KNOWN[p], strict=True) if k]


def written_out(p: int, g: int, config: GRPOConfig) -> float:
    own = members(p)
    reward = REWARDS[p][g]
    if config.adv_estimator.name == "reinforce_plus_plus":
        groups = [members(q) for q in range(len(REWARDS))]
        base = [statistics.mean(group or [0.0]) for group in groups]
        if not config.adv_estimator.minus_baseline:
            base = [statistics.mean(chain.from_iterable(groups))] * len(REWARDS)
        spread = []
        for group, baseline in zip(groups, base, strict=True):
            spread += [r - baseline for r in group]
        std = (sum(d * d for d in spread) / (len(spread) - 1)) ** 0.5
        return (reward - base[p]) / (std + STD_FLOOR)
    if len(own) < 2:
        return 0.0
    others = [r for h, r in enumerate(REWARDS[p]) if KNOWN[p][h] and h != g]
    leaves_one_out = (
        config.adv_estimator.name == "leave_one_out" or config.use_leave_one_out_baseline
    )
    value = reward - statistics.mean(others if leaves_one_out else own)
    return value / (statistics.stdev(own) + STD_FLOOR) if config.normalize_rewards else value


@pytest.mark.parametrize("config", ALL)
def test_it_is_the_formula(config: GRPOConfig, given_rewards: Tensor) -> None:
    got = advantages(given_rewards, config)
    assert got.dtype == torch.float32
    for p in range(len(REWARDS)):
        for g in range(4):
            want = written_out(p, g, config) if KNOWN[p][g] else 0.0
            assert float(got[p, g]) == pytest.approx(want, abs=1e-6)
    infinite = given_rewards.nan_to_num(nan=torch.inf)
    assert torch.equal(advantages(infinite, config), got) and torch.equal(
        advantages(-infinite, config), -got
    )
    # an offset does not swallow the differences
    apart = advantages(given_rewards.double() + 2**20, config) - got
    assert float(apart.abs().max()) < 1e-6


@given(st.floats(-1e3, 1e3), st.integers(2, 9), st.sampled_from(ALL))
def test_equal_rewards_teach_exactly_nothing(value: float, size: int, config: GRPOConfig) -> None:
    rewards = torch.full((2, size), value, dtype=torch.float64)
    assert torch.equal(advantages(rewards, config), torch.zeros(2, size))


def test_advantages_are_cut_at_last(given_rewards: Tensor) -> None:
    plain = advantages(given_rewards, GRPOConfig())
    assert float(plain.min()) < -0.5 and float(plain.max()) > 0.8
    for low, high in ((-0.5, 0.8), (-0.5, None), (None, 0.8)):
        config = GRPOConfig(advantage_clip_low=low, advantage_clip_high=high)
        assert torch.equal(advantages(given_rewards, config), plain.clamp(low, high))


def group(prompt_tokens: int, *lengths: int, truncated: tuple[bool, ...] = ()) -> CompletionGroup:
    """A prompt and completions of so many tokens."""
    cut = truncated or (False,) * len(lengths)
    completions = (SampledCompletion((5,) * n, "", c) for n, c in zip(lengths, cut, strict=True))
    return CompletionGroup(Prompt(()), (1,) * prompt_tokens, tuple(completions))


def test_used_completions() -> None:
    groups = [group(2, 3, 1, 0, truncated=(True, False, False))] * 2
    rewards = torch.tensor([[1.0, 2.0, 3.0], [1.0, math.nan, 3.0]])
    assert used_completions(groups, rewards.isfinite(), GRPOConfig()).tolist() == [
        [True, True, False],
        [True, False, False],
    ]
    masked = used_completions(groups, rewards.isfinite(), GRPOConfig(overlong_filtering=True))
    assert masked.tolist() == [[False, True, False], [False] * 3]


def test_scaling_is_linear_and_clipped(tiny_grpo: Any) -> None:
    scaling = "grpo.reward_scaling={enabled: true, source_min: -5, source_max: 5, target_min: 1, target_max: 3}"
    rewards = torch.tensor([[-9.0, -5.0, 0.0, 2.5, 5.0, 9.0, math.nan]])
    found = shaped_rewards(tiny_grpo(scaling), [group(2, *[1] * 7)], rewards)[0]
    assert found[:6].tolist() == [1.0, 1.0, 2.0, 2.5, 3.0, 3.0] and found[6].isnan()


def test_the_overlong_punishment_is_equation_13_and_grows_on_beyond_its_maximum(
    tiny_grpo: Any,
) -> None:
    """Of 64 tokens a prompt of 20 leaves 44, and one of 4 the 50 that are asked for at most."""
    shaping = "{enabled: true, overlong_buffer_length: 10, overlong_buffer_penalty: 2, max_response_length: 50}"
    options = (f"grpo.reward_shaping={shaping}", "policy.max_total_sequence_length=64")
    config = tiny_grpo(*options, "policy.generation.max_new_tokens=null")
    for prompt, room in ((4, 50), (20, 44), (62, 2)):
        lengths = range(room + 9)
        found = shaped_rewards(config, [group(prompt, *lengths)], torch.ones(1, len(lengths)))
        buffer = min(10, room)
        for length in lengths:
            punishment = max(length - (room - buffer), 0) / buffer
            assert float(found[0, length]) == pytest.approx(1.0 - 2 * punishment, abs=1e-6)
