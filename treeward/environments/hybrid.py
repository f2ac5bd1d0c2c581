"""`HybridEnvironment`: several environments that make one reward.

    HybridEnvironment({"members": {
        "helpful": {"type": "reward_model", "weight": 1.0, "model_name": "results/rm/final"},
        "format": {"type": "rules", "weight": 0.2, "rule": "regex", "pattern": "</think>"},
    }})

The reward is the weighted sum; or, with `mode: fallback`, that of the first member whose word holds: a library checks
the answer, and where it cannot say, or says that the answer is wrong, a judge is asked. The components are each
member's reward by its name, and its own components as `member/component`.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal, cast

from treeward.config.base import Strict
from treeward.config.reward_environments import HybridEnvironmentConfig, HybridMember
from treeward.data.preference import Message
from treeward.environments.actors import RayActor
from treeward.environments.configured import ConfiguredEnvironment, log_failures
from treeward.environments.interface import Environment, Reward, undone_on_failure
from treeward.environments.registry import actor_options, environment_class, make_environment
from treeward.errors import CheckpointError

__all__ = ["HybridEnvironment", "weighted_sum"]

_Ask = Callable[[Environment, Sequence[Sequence[Message]], Sequence[Mapping[str, Any]]], list[Reward]]


class HybridEnvironment(ConfiguredEnvironment[HybridEnvironmentConfig]):
    """Members, asked side by side or, in a fallback, one after the other; `HybridEnvironmentConfig` has the keys."""

    name = "hybrid_env"
    _section = HybridEnvironmentConfig

    def __init__(self, env_config: Mapping[str, Any] | HybridEnvironmentConfig, *, where: str = "env_config") -> None:
        super().__init__(env_config, where=where)
        self.members: dict[str, Environment] = {}
        try:
            for name, member in self.config.members.items():
                self.members[name] = make_environment(
                    member.type or name, member.settings, where=f"{where}.members.{name}"
                )
        except BaseException:
            self.shutdown()
            raise
        # With a state, steps of several threads take turns: undoing one must not undo another.
        self._turn: contextlib.AbstractContextManager[Any] = (
            threading.Lock() if self.is_stateful else contextlib.nullcontext()
        )

    @classmethod
    def _options(cls, config: Strict, where: str) -> dict[str, Any]:
        """The strictest of what the members ask for: one that must not be restarted keeps the whole from it."""
        strictest: dict[str, Any] = {}
        for name, member in cast(HybridEnvironmentConfig, config).members.items():
            at = f"{where}.members.{name}"
            options = actor_options(environment_class(member.type or name, where=at), member.settings, where=at)
            for key in ("max_restarts", "max_task_retries"):
                if key in options:
                    strictest[key] = min(options[key], strictest.get(key, RayActor.ray_options[key]))
        return strictest

    def rewards(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        return self._combined(conversations, env_infos, lambda member, *samples: member.rewards(*samples))

    def evaluation_rewards(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        return self._combined(conversations, env_infos, lambda member, *samples: member.evaluation_rewards(*samples))

    @property
    def is_stateful(self) -> bool:
        return any(member.is_stateful for member in self.members.values())

    def state_dict(self) -> dict[str, Any]:
        """The state of each member by its name."""
        return {name: member.state_dict() for name, member in self.members.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.keys() != self.members.keys():
            raise CheckpointError(
                "this is not the state of this hybrid",
                got=f"members {', '.join(map(str, state)) or 'none'}",
                need=f"members {', '.join(self.members)}",
                fix="resume with the configuration that the run was started with",
            )
        for name, member in self.members.items():
            member.load_state_dict(state[name])

    def shutdown(self) -> bool:
        return all([member.shutdown() for member in self.members.values()])

    def _combined(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]], ask: _Ask
    ) -> list[Reward]:
        combine = self._weighted if self.config.mode == "weighted" else self._fallback
        # Where one member fails, another may have counted the step already.
        with self._turn, undone_on_failure(self):
            rewards = combine(conversations, env_infos, ask)
        log_failures(self.name, rewards)
        return rewards

    def _weighted(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]], ask: _Ask
    ) -> list[Reward]:
        # Side by side: a judge waits for its endpoint while a model computes.
        with ThreadPoolExecutor(len(self.members)) as pool:
            asked = [pool.submit(ask, member, conversations, env_infos) for member in self.members.values()]
        by_member = [one.result() for one in asked]
        weights = {name: _weight(member) for name, member in self.config.members.items()}
        return [
            weighted_sum(dict(zip(self.members, parts, strict=True)), weights, missing=self.config.missing)
            for parts in zip(*by_member, strict=True)
        ]

    def _fallback(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]], ask: _Ask
    ) -> list[Reward]:
        asked: list[dict[str, Reward]] = [{} for _ in conversations]
        open_samples = list(range(len(conversations)))
        for name, member in self.members.items():
            if not open_samples:
                break
            said = ask(member, [conversations[i] for i in open_samples], [env_infos[i] for i in open_samples])
            for i, reward in zip(open_samples, said, strict=True):
                asked[i][name] = reward
            open_samples = [i for i in open_samples if self._falls_back(asked[i][name])]
        return [_last_word(parts) for parts in asked]

    def _falls_back(self, reward: Reward) -> bool:
        if reward.value is None:
            return "failed" in self.config.fallback_on
        return "wrong" in self.config.fallback_on and reward.components.get("correct") == 0.0


def weighted_sum(
    parts: Mapping[str, Reward], weights: Mapping[str, float], *, missing: Literal["mask", "renormalise"] = "mask"
) -> Reward:
    """One reward of several, by name: the sum of weight times reward. `missing`: of `HybridEnvironmentConfig`.

    Components and reasons carry the name of the part that they come from.
    """
    components, error = _components(parts), _errors(parts)
    values = {name: part.value for name, part in parts.items() if part.value is not None}
    if not values or (error and missing == "mask"):
        return Reward(None, components=components, error=error)
    scale = sum(weights[name] for name in parts) / sum(weights[name] for name in values) if error else 1.0
    total = scale * sum(weights[name] * value for name, value in values.items())
    if not math.isfinite(total):
        return Reward(None, components=components, error="the weighted sum is not finite")
    return Reward(total, components=components)


def _last_word(parts: Mapping[str, Reward]) -> Reward:
    *_, last = parts.values()
    return replace(last, components=_components(parts), error=_errors(parts) if last.value is None else None)


def _weight(member: HybridMember) -> float:
    return 1.0 if member.weight is None else member.weight


def _components(parts: Mapping[str, Reward]) -> dict[str, float]:
    components: dict[str, float] = {}
    for name, part in parts.items():
        if part.value is not None:
            components[name] = part.value
        components |= {f"{name}/{key}": value for key, value in part.components.items()}
    return components


def _errors(parts: Mapping[str, Reward]) -> str | None:
    return "; ".join(f"{name}: {part.error}" for name, part in parts.items() if part.value is None) or None
