"""`EnvironmentScorer`: an environment instead of a reward model, for `eval` and `bon`.

judge = make_environment("judge", {"base_url": url, "model": "m", "mode": "pairwise"})
scorer = EnvironmentScorer(judge)
scorer.score_groups([[conversation, other], ...], [info, ...])  # its rewards, as scores
scorer.usage()  # of a judge: {"num_requests": 120, ..., "seconds": 31.0}
"""

from __future__ import annotations

import itertools
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
        """What the environment has cost since the last call; empty for one that costs nothing."""
        cost: Cost | None = getattr(self.environment, "cost", None)
        if cost is None:
            return {}
        # The environment counts from its beginning, and each suite's own share is asked for.
        before = self._cost
        self._cost = asdict(cost)
        return {name: value - before.get(name, 0) for name, value in self._cost.items()}

    def score_groups(
        self, groups: Sequence[Sequence[AnyConversation]], infos: Sequence[Mapping[str, Any]]
    ) -> list[list[Score]]:
        """A list of scores for each group, with the components of the rewards as heads. `infos`:
        the data's columns for each group, as `ground_truth`."""
        conversations: list[AnyConversation] = []
        env_infos: list[dict[str, Any]] = []
        for g, (group, info) in enumerate(zip(groups, infos, strict=True)):
            conversations.extend(group)
            # Two groups may have the same prompt, and are compared apart.
            env_infos += [{**info, GROUP: f"group {g}"}] * len(group)
        rewards = iter(self.environment.reward(conversations, env_infos))
        scores = []
        for group in groups:
            group_scores = []
            for reward in itertools.islice(rewards, len(group)):
                score = Score(
                    reward.value,
                    heads=tuple(reward.components.values()),
                    head_names=tuple(reward.components),
                    error=reward.error,
                    judgement=reward.score.judgement,
                )
                group_scores.append(score)
            scores.append(group_scores)
        return scores
