"""`SteppedEnvironment`: a class with NeMo RL's `step`, as an environment of treeward.

    env: {mine: {type: my_package.MyEnvironment, limit: 200}}
    # calls MyEnvironment({"limit": 200}).step(logs, env_infos)

The class is constructed with its section of the configuration, and its `step` returns NeMo RL's
`EnvironmentReturn`. `rewards` is a tensor (B,), or for several rewards
`{"reward/correct": (B,), "reward/format": (B,)}`: the reward is their sum, and each is a component
by its name without `reward/`. A class that `@ray.remote` decorates lives in its actor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from treeward.environments.interface import WHERE, Conversations, Environment, Infos, Reward
from treeward.errors import ConfigError
from treeward.parallel.ray_cluster import start_ray
from treeward.user_code import source_digest

_PREFIX = "reward/"


class SteppedEnvironment(Environment):
    """An object of `cls`, a class with NeMo RL's `step`, or such a class that `@ray.remote`
    decorates.

    `section`: its only argument. Raises `ConfigError` for a step that does not end every sample, or
    whose rewards are not one number for each.
    """

    def __init__(self, cls: Any, section: Mapping[str, Any]) -> None:
        self._path = f"{cls.__module__}.{getattr(cls, '__qualname__', '')}"
        self._source = source_digest(cls)
        self._ray: Any = None
        if isinstance(cls, type):
            self._object = cls(dict(section))
        else:  # what `@ray.remote` makes of a class is no class
            self._ray = start_ray()
            self._object = cls.remote(dict(section))

    @property
    def user_code(self) -> str:
        return self._source

    def rewards(self, conversations: Conversations, env_infos: Infos) -> list[Reward]:
        # Copies: NeMo RL's environments may write into them.
        logs = []
        for conversation in conversations:
            logs.append([dict(message) for message in conversation])
        infos = [dict(info) for info in env_infos]
        if self._ray is None:
            result = self._object.step(logs, infos)
        else:
            result = self._ray.get(self._object.step.remote(logs, infos))
        if not torch.as_tensor(result.terminateds).all():
            raise ConfigError(
                "a sample goes on after its first completion",
                where=WHERE,
                got=self._path,
                need="a step that ends every sample: a prompt is completed once",
            )
        if not isinstance(result.rewards, Mapping):
            return [_reward(value, {}) for value in self._numbers(result.rewards, len(logs))]
        if not result.rewards:
            raise ConfigError("the rewards are an empty mapping", where=WHERE, got=self._path)
        parts: list[dict[str, float]] = [{} for _ in logs]
        for name, tensor in result.rewards.items():
            component = str(name).removeprefix(_PREFIX)
            numbers = self._numbers(tensor, len(logs))
            for components, number in zip(parts, numbers, strict=True):
                components[component] = number
        rewards = []
        for components in parts:
            known = {name: number for name, number in components.items() if math.isfinite(number)}
            rewards.append(_reward(sum(components.values()), known))
        return rewards

    def _numbers(self, rewards: Any, count: int) -> list[float]:
        numbers = torch.as_tensor(rewards).double()
        if numbers.shape != (count,):
            need = f"one reward for each of {count} samples"
            raise ConfigError(
                "the rewards do not fit", where=WHERE, got=tuple(numbers.shape), need=need
            )
        return numbers.tolist()

    def shutdown(self) -> bool:
        if self._ray is not None:
            self._ray.kill(self._object)
        elif hasattr(self._object, "shutdown"):
            self._object.shutdown()
        return True


def _reward(value: float, components: Mapping[str, float]) -> Reward:
    if not math.isfinite(value):
        return Reward(None, components=components, error=f"the environment's step gave {value}")
    return Reward(value, components=components)
