"""`EnvironmentScorer`: an environment instead of a reward model, for `eval` and `bon`.

    judge = make_environment("judge", {"base_url": url, "model": "m", "mode": "pairwise"})
    scorer = EnvironmentScorer(judge)
    scorer.score_groups([[conversation, other], ...], [info, ...])      # its rewards, as scores
    scorer.usage()      # of a judge: {"num_requests": 120, ..., "seconds": 31.0}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from treeward.data.conversation import AnyConversation
from treeward.environments.interface import GROUP, Environment
from treeward.scoring.score import Cost, Score


class EnvironmentScorer:
    """Rewards as scores, one group of completions of a prompt at a time."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self._cost: dict[str, float] = {}

    def usage(self) -> dict[str, float]:
        now: Cost | None = getattr(self.environment, "cost", None)
        before, self._cost = self._cost, {} if now is None else asdict(now)
        return {name: value - before.get(name, 0) for name, value in self._cost.items()}

    def score_groups(
        self, groups: Sequence[Sequence[AnyConversation]], infos: Sequence[Mapping[str, Any]]
    ) -> list[list[Score]]:
        """A list of scores for each group, with the components of the rewards as heads. `infos`:
        the data's columns for each group, as `ground_truth`."""
        flat = [conversation for group in groups for conversation in group]
        env_infos = [
            {**info, GROUP: f"group {g}"} for g, info in enumerate(infos) for _ in groups[g]
        ]
        rewards = self.environment.reward(flat, env_infos)
        scores = iter(
            Score(
                reward.value,
                heads=tuple(reward.components.values()),
                head_names=tuple(reward.components),
                error=reward.error,
                judgement=reward.score.judgement,
            )
            for reward in rewards
        )
        return [[next(scores) for _ in group] for group in groups]
