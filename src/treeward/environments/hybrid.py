"""`HybridEnvironment`: several environments that make one reward.

    HybridEnvironment({"members": {
        "helpful": {"type": "reward_model", "weight": 1.0, "model_name": "results/rm/final"},
        "format": {"type": "rules", "weight": 0.2, "rule": "regex", "pattern": "</think>"},
    }})

The reward is the weighted sum of the members' rewards. With `mode: fallback` the next member gets
what the one before finds wrong or cannot check: for example first a rule, then a judge. The
components are each member's reward by its name, and its components as `member/component`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from treeward.config.reward_environments import HybridEnvironmentConfig
from treeward.environments.interface import (
    WHERE,
    ConfiguredEnvironment,
    Conversations,
    Environment,
    Infos,
    Reward,
)
from treeward.environments.registry import make_environment
from treeward.scoring.score import Score

_VERDICTS = ("correct", "correctness")
"""The components of rules that say whether an answer is right; the second is of
`math_multi_reward`."""


class HybridEnvironment(ConfiguredEnvironment[HybridEnvironmentConfig]):
    """Members side by side or, in a fallback, one after the other."""

    name = "hybrid_env"
    section = HybridEnvironmentConfig

    def __init__(self, env_config: Mapping[str, Any] | HybridEnvironmentConfig) -> None:
        super().__init__(env_config)
        self.members: dict[str, Environment] = {}
        try:
            for name, member in self.config.enabled_members.items():
                where = f"{WHERE}.members.{name}"
                self.members[name] = make_environment(name, member.section, where=where)
        except BaseException:
            # The members before it may have started processes.
            self.shutdown()
            raise

    @property
    def user_code(self) -> str:
        return " ".join(filter(None, (member.user_code for member in self.members.values())))

    def check_info(self, info: Mapping[str, Any], where: str | None) -> None:
        for member in self.members.values():
            member.check_info(info, where)

    def row_components(self, info: Mapping[str, Any]) -> list[str]:
        names = []
        for name, member in self.members.items():
            names += [f"{name}/{component}" for component in member.row_components(info)]
        return names

    def rewards(self, conversations: Conversations, env_infos: Infos) -> list[Reward]:
        if self.config.mode == "fallback":
            return self._fallback(conversations, env_infos)

        def ask(member: Environment) -> list[Reward]:
            return member.rewards(conversations, env_infos)

        # Side by side, because most of them wait: for a judge, a server or processes.
        with ThreadPoolExecutor(len(self.members)) as threads:
            rewards = dict(zip(self.members, threads.map(ask, self.members.values()), strict=True))
        weights = {name: member.weight for name, member in self.config.enabled_members.items()}
        sums = []
        for i in range(len(conversations)):
            parts = {name: member_rewards[i] for name, member_rewards in rewards.items()}
            sums.append(_weighted_sum(parts, weights))
        return sums

    def shutdown(self) -> bool:
        # A list, because `all` would stop at the first that is not free.
        return all([member.shutdown() for member in self.members.values()])

    def _fallback(self, conversations: Conversations, env_infos: Infos) -> list[Reward]:
        parts_by_sample: list[dict[str, Reward]] = [{} for _ in conversations]
        pending = list(range(len(conversations)))
        for name, member in self.members.items():
            if not pending:
                break
            pending_conversations = [conversations[i] for i in pending]
            pending_infos = [env_infos[i] for i in pending]
            member_rewards = member.rewards(pending_conversations, pending_infos)
            still_pending = []
            for i, reward in zip(pending, member_rewards, strict=True):
                parts_by_sample[i][name] = reward
                # The next member gets what has no reward, or is wrong by a rule.
                verdicts = [reward.components.get(component) for component in _VERDICTS]
                if reward.value is None or 0.0 in verdicts:
                    still_pending.append(i)
            pending = still_pending
        rewards = []
        for parts in parts_by_sample:
            *_, last = parts.values()
            # The failures of members before it are mended where the last has a reward.
            error = _errors(parts) if last.value is None else None
            rewards.append(replace(last, components=_components(parts), error=error))
        return rewards


def _weighted_sum(parts: Mapping[str, Reward], weights: Mapping[str, float]) -> Reward:
    """The sum of weight times reward over `parts`, by name; its score is the same sum before
    shaping.

    There is none where a part has none. Names of components, and reasons, begin with the name of
    their part.
    """
    components = _components(parts)
    judgements = [part.score.judgement for part in parts.values()]
    judgement = "\n\n".join(filter(None, judgements)) or None
    error = _errors(parts)
    if error is not None:
        return Reward(
            None,
            Score(None, judgement=judgement),
            components=components,
            error=error,
            weights=weights,
        )
    # No value is None here: `_errors` would have named it.
    total = sum(weights[name] * (part.value or 0.0) for name, part in parts.items())
    if not math.isfinite(total):
        return Reward(None, components=components, error="the weighted sum is not finite")
    raw = sum(weights[name] * (part.raw or 0.0) for name, part in parts.items())
    return Reward(total, Score(raw, judgement=judgement), components=components, weights=weights)


def _components(parts: Mapping[str, Reward]) -> dict[str, float]:
    components: dict[str, float] = {}
    for name, part in parts.items():
        if part.value is not None:
            components[name] = part.value
        components |= {f"{name}/{key}": value for key, value in part.components.items()}
    return components


def _errors(parts: Mapping[str, Reward]) -> str | None:
    errors = [f"{name}: {part.error}" for name, part in parts.items() if part.value is None]
    return "; ".join(errors) or None
