"""`RunningRewards`: normalisation of NeMo Gym's rewards by their mean and deviation so far."""

from __future__ import annotations

import math
from dataclasses import replace

from treeward.scoring.score import Reward
from treeward.scoring.shaping import normalize

_EPSILON = 1e-8
_CLIP = 5.0
"""Standard deviations that a normalised reward is clipped to."""


class RunningRewards:
    """Statistics of the rewards so far, by Welford's algorithm."""

    def __init__(self) -> None:
        self._count, self._mean, self._squares = 0, 0.0, 0.0

    def normalized(self, reward: Reward) -> Reward:
        """(r - mean) / (std + 1e-8), clipped, with the population statistics of the rewards so far, this one included.
        A missing reward stays missing.
        """
        if reward.value is None:
            return reward
        self._count += 1
        difference = reward.value - self._mean
        self._mean += difference / self._count
        self._squares += difference * (reward.value - self._mean)
        std = math.sqrt(self._squares / self._count)
        normalized = normalize(reward.value, self._mean, std + _EPSILON, _CLIP)
        parts = {"running_mean": self._mean, "running_std": std, "running_count": float(self._count)}
        return replace(reward, value=normalized, components={**reward.components, **parts})
