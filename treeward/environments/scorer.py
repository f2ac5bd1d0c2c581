"""`EnvironmentScorer`: an environment instead of a reward model, for `eval` and `bon`.

scorer = EnvironmentScorer(make_environment("judge", {"base_url": url, "model": "m", "mode": "pairwise"}))
scorer.score_groups([[conversation, other], ...], [info, ...])     # its rewards, as scores
scorer.usage()                     # of a judge: {"num_requests": 120, ..., "seconds": 31.0, "position_bias": 0.12}
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from treeward.environments.interface import GROUP, Environment
from treeward.scoring.score import Conversation, Cost, Score


class EnvironmentScorer:
    """Rewards as scores, one group of completions of a prompt at a time."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self._seen: dict[str, list[float]] = defaultdict(list)
        self._cost: dict[str, float] = {}

    def usage(self) -> dict[str, float]:
        """A judge's usage since the last call, and the mean of each reward component."""
        means = {name: fmean(values) for name, values in self._seen.items()}
        self._seen.clear()
        now: Cost | None = getattr(self.environment, "cost", None)
        if now is None:
            return means
        before, self._cost = self._cost, asdict(now)
        return {name: value - before.get(name, 0) for name, value in self._cost.items()} | means

    def score_groups(
        self, groups: Sequence[Sequence[Conversation]], infos: Sequence[Mapping[str, Any]]
    ) -> list[list[Score]]:
        """A list of scores for each group. `infos`: the data's columns for each group, as `ground_truth`."""
        flat = [conversation for group in groups for conversation in group]
        env_infos = [{**info, GROUP: f"group {g}"} for g, info in enumerate(infos) for _ in groups[g]]
        rewards = self.environment.reward(flat, env_infos)
        for reward in rewards:
            for part, value in reward.components.items():
                self._seen[part].append(value)
        scores = iter([Score(r.value, error=r.error, judgement=r.score.judgement) for r in rewards])
        return [[next(scores) for _ in group] for group in groups]
