"""What length does to rewards: DAPO's equation written out, nothing multiplied, nothing unknown made known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from treeward.errors import ConfigError
from treeward.rl.experience import CompletionGroup, Prompt, SampledCompletion
from treeward.rl.overlong import (
    completion_lengths,
    less_overlong_penalty,
    less_truncation_penalty,
    scaled,
    truncated_completions,
    used_completions,
)

GROUP = CompletionGroup(
    Prompt(()),
    (3, 4),
    (SampledCompletion((5, 6, 7), "", True), SampledCompletion((5,), "", False), SampledCompletion((), "", False)),
)
GROUPS = [GROUP, replace(GROUP, completions=GROUP.completions[:1]), replace(GROUP, completions=())]


def test_lengths_and_truncation_of_groups_of_different_sizes() -> None:
    assert completion_lengths(GROUPS).tolist() == [[3, 1, 0], [3, 0, 0], [0, 0, 0]]
    assert truncated_completions(GROUPS).tolist() == [[True, False, False], [True, False, False], [False] * 3]
    assert completion_lengths([]).dtype == torch.int64 and truncated_completions([]).dtype == torch.bool


def test_used_completions() -> None:
    known = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    for truncated in ("keep", "penalty"):
        used = used_completions(GROUPS, known, truncated=truncated)  # type: ignore[arg-type]
        assert used.tolist() == [[True, True, False], [True, False, False], [False] * 3]
    masked = used_completions(GROUPS, known, truncated="mask")
    assert masked.tolist() == [[False, True, False], [False] * 3, [False] * 3]
    known[0, 1] = 0
    assert not used_completions(GROUPS, known, truncated="mask").any()


def test_a_truncation_penalty_lowers_every_reward_by_the_same() -> None:
    rewards = torch.tensor([[2.0, -3.0, 0.0, math.nan, -1.0]])
    truncated = torch.tensor([[1, 1, 1, 1, 0]])
    got = less_truncation_penalty(rewards, truncated, penalty=0.5)
    assert got[0, :3].tolist() == [1.5, -3.5, -0.5] and got[0, 3].isnan() and got[0, 4] == -1.0
    with pytest.raises(ConfigError, match=r"grpo\.truncation_penalty"):
        less_truncation_penalty(rewards, truncated, penalty=-1.0)


def test_the_soft_overlong_punishment_is_equation_13() -> None:
    longest, buffer, penalty = 20, 8, 0.5
    lengths = torch.arange(30)[None]
    rewards = torch.linspace(-2, 2, 30)[None].clone()
    rewards[0, 15] = math.nan
    got = less_overlong_penalty(rewards, lengths, max_response_length=longest, buffer_length=buffer, penalty=penalty)
    for length in range(30):
        if length == 15:
            assert got[0, length].isnan()
            continue
        if length <= longest - buffer:
            punishment = 0.0
        elif length <= longest:
            punishment = (longest - buffer - length) / buffer
        else:
            punishment = -1.0
        assert float(got[0, length]) == pytest.approx(float(rewards[0, length]) + penalty * punishment, abs=1e-6)


@pytest.mark.parametrize(("buffer", "penalty"), [(0, 1.0), (21, 1.0), (8, -0.5), (8, math.nan)])
def test_buffers_and_penalties_out_of_range(buffer: int, penalty: float) -> None:
    with pytest.raises(ConfigError, match=r"grpo\.reward_shaping\.overlong_buffer"):
        less_overlong_penalty(
            torch.zeros(1, 1), torch.ones(1, 1), max_response_length=20, buffer_length=buffer, penalty=penalty
        )


def test_scaling_is_linear_and_clipped() -> None:
    rewards = torch.tensor([[-9.0, -5.0, 0.0, 2.5, 5.0, 9.0, math.nan, math.inf]])
    got = scaled(rewards, source_min=-5, source_max=5, target_min=1, target_max=3)[0]
    assert got[:6].tolist() == [1.0, 1.0, 2.0, 2.5, 3.0, 3.0] and got[6].isnan() and got[7] == 3.0
    for source, target in (((1, 1), (0, 1)), ((0, 1), (2, 1))):
        with pytest.raises(ConfigError, match=r"grpo\.reward_scaling\.(source|target)_min"):
            scaled(rewards, source_min=source[0], source_max=source[1], target_min=target[0], target_max=target[1])
