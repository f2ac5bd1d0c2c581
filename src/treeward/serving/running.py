"""`RunningRewards`: normalisation of NeMo Gym's rewards by their mean and deviation so far.

NeMo Gym repeats a request whose connection was lost, and verifies rollouts again. So a conversation keeps its first
value and statistics, and after `SIZE` conversations the statistics are fixed.
"""

from __future__ import annotations

import statistics
import threading
from dataclasses import replace

from treeward.scoring.score import Reward
from treeward.scoring.shaping import normalize

SIZE = 1000
"""Conversations after which the statistics are fixed."""
_EPSILON = 1e-8
_CLIP = 5.0
"""Standard deviations that a normalised reward is clipped to."""


class RunningRewards:
    """The rewards of the first `SIZE` conversations of this process, by a hash of each."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, dict[str, float]]] = {}
        self._lock = threading.Lock()

    def normalized(self, reward: Reward, key: str) -> Reward:
        """(r - mean) / (std + 1e-8), clipped, with the population statistics of the rewards so far, this one included.
        A missing reward stays missing.
        """
        if reward.value is None:
            return reward
        with self._lock:
            if key not in self._known and len(self._known) < SIZE:
                self._known[key] = reward.value, self._statistics(reward.value)
            value, parts = self._known.get(key) or (reward.value, self._statistics())
        mean, std = parts["running_mean"], parts["running_std"]
        normalized = normalize(value, mean, std + _EPSILON, _CLIP)
        return replace(reward, value=normalized, components={**reward.components, **parts})

    def _statistics(self, *new: float) -> dict[str, float]:
        values = [*(value for value, _ in self._known.values()), *new]
        mean, std = statistics.fmean(values), statistics.pstdev(values)
        return {"running_mean": mean, "running_std": std, "running_count": float(len(values))}
