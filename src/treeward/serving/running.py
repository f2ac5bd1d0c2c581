"""`RunningRewards`: normalisation of NeMo Gym's rewards by their mean and deviation so far.

NeMo Gym repeats a request whose connection was lost, and verifies rollouts again. So a conversation
keeps its first value and statistics, and after `SIZE` conversations the statistics are fixed.
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
"""What the deviation is raised by: that of equal rewards is 0."""
_CLIP = 5.0
"""Standard deviations that a normalised reward is clipped to."""


class RunningRewards:
    """The rewards of the first `SIZE` conversations of this process, by a hash of each."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, dict[str, float]]] = {}
        self._lock = threading.Lock()

    def normalized(self, reward: Reward, key: str) -> Reward:
        """(r - mean) / (std + 1e-8), clipped, with the population statistics of the rewards so far,
        this one included. A missing reward stays missing.
        """
        if reward.value is None:
            return reward
        with self._lock:
            # A repeated request gets what it got before, also from the statistics of then.
            if key in self._known:
                value, parts = self._known[key]
            elif len(self._known) < SIZE:
                value = reward.value
                parts = self._statistics(value)
                self._known[key] = value, parts
            else:
                value = reward.value
                parts = self._statistics()
        std = parts["running_std"] + _EPSILON
        normalized = normalize(value, parts["running_mean"], std, _CLIP)
        components = {**reward.components, **parts}
        return replace(reward, value=normalized, components=components)

    def _statistics(self, *new: float) -> dict[str, float]:
        values = [value for value, _ in self._known.values()]
        values += new
        return {
            "running_mean": statistics.fmean(values),
            "running_std": statistics.pstdev(values),
            "running_count": float(len(values)),
        }
