"""`RewardSource`: where a loop that asks for one reward at a time gets it; one in a process, shared by its threads.

    source = reward_source({"model": "results/rm/final"})
    source.submit(messages, {"ground_truth": "4"}).result().value

Whatever is asked for while a step runs is rewarded by the next step, all of it together: nobody waits for a batch to
fill up, and the completions of a prompt that are asked for by different threads still share it.
"""

from __future__ import annotations

import json
import math
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple

from omegaconf import OmegaConf
from pydantic import model_validator

from treeward.config.base import Strict
from treeward.config.load import load_section
from treeward.environments.actors import start_ray
from treeward.environments.interface import DETAILS, Environment, EnvironmentReturn, Reward, step_of
from treeward.environments.registry import make_environment
from treeward.errors import ConfigError, ModelError
from treeward.scoring.score import Score

__all__ = ["RewardSource", "RewardSourceConfig", "reward_source"]

MessageLog = Sequence[Mapping[str, Any]]


class RewardSourceConfig(Strict):
    """Where rewards come from: exactly one of `model`, `environment` and `actor`."""

    model: str | None = None
    """A reward model, by folder or hub name, loaded once in this process."""

    environment: dict[str, Any] | None = None
    """A section as under `env:`, made once in this process; `type` names its kind, or else it is `reward_model`."""

    actor: str | None = None
    """The name of a Ray actor that was made by an environment's `remote`: one for all the processes of a run."""

    namespace: str | None = None
    """The Ray namespace of `actor`; None is the one that this process is in."""

    on_failure: Literal["raise", "nan"] = "raise"
    """What a completion without a reward does: `raise` stops the run and says why; `nan` hands out NaN."""

    @model_validator(mode="after")
    def _one_source(self) -> RewardSourceConfig:
        given = [name for name in ("model", "environment", "actor") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                "rewards need one source",
                field=given[-1] if given else "model",
                got=" and ".join(given) or "none",
                need="model, environment or actor",
            )
        if self.namespace is not None and self.actor is None:
            raise ConfigError(
                "namespace is that of an actor, and there is none",
                field="namespace",
                got=self.namespace,
                need="actor, the name of one",
                fix="give actor too, or remove namespace",
            )
        return self


class RewardSource:
    """Turns requests from any thread into steps of one environment; made by `reward_source`.

    A step that raises fails those that asked for it, and no others. What is no error (`SystemExit`, a cancellation) is
    a `ModelError` to them: it must not end the threads and loops that they wait in.
    """

    def __init__(self, step: Callable[..., EnvironmentReturn]) -> None:
        self._step = step
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="treeward-rewards", daemon=True).start()

    def submit(self, messages: MessageLog, env_info: Mapping[str, Any]) -> Future[Reward]:
        """Ask for the reward of one conversation. What the step raises, the future raises."""
        request = _Request(messages, env_info, Future())
        self._requests.put(request)
        return request.future

    def _serve(self) -> None:
        while True:
            requests = [self._requests.get()]
            while not self._requests.empty():  # nobody else takes from it
                requests.append(self._requests.get())
            # Whoever gave up does not want it, and a future that was cancelled would refuse its result.
            requests = [request for request in requests if request.future.set_running_or_notify_cancel()]
            try:
                result = self._step([r.messages for r in requests], [r.env_info for r in requests])
                rewards = _rewards(result)
                assert len(rewards) == len(requests)
            except BaseException as error:  # whatever it is, who asked waits for it, and others will ask
                for request in requests:
                    request.future.set_exception(_as_error(error))
            else:
                for request, reward in zip(requests, rewards, strict=True):
                    request.future.set_result(reward)


class _Request(NamedTuple):
    messages: MessageLog
    env_info: Mapping[str, Any]
    future: Future[Reward]


_SOURCES: dict[tuple[int, str], RewardSource] = {}
_LOCK = threading.Lock()


def reward_source(settings: Mapping[str, Any]) -> tuple[RewardSource, RewardSourceConfig]:
    """The source that `settings` (a `RewardSourceConfig`) describe: made at the first call, then the same one.

    Raises `ConfigError` for settings that are wrong, or a Ray actor that does not exist.
    """
    plain = {key: _plain(value) for key, value in settings.items()}
    config = load_section(RewardSourceConfig, plain, where="reward_kwargs")
    # A forked process has no thread of its parent's.
    key = (os.getpid(), json.dumps(config.model_dump(exclude={"on_failure"}), sort_keys=True, default=str))
    with _LOCK:
        if key not in _SOURCES:
            _SOURCES[key] = RewardSource(step_of(_environment(config)))
        return _SOURCES[key], config


def _environment(config: RewardSourceConfig) -> Environment | Any:
    if config.actor is None:
        section = {"model_name": config.model} if config.environment is None else config.environment
        return _unshared(make_environment("reward_model", section, where="reward_kwargs.environment"))
    try:
        return start_ray().get_actor(config.actor, namespace=config.namespace)
    except ValueError:
        raise ConfigError(
            "there is no Ray actor of this name",
            where="reward_kwargs",
            field="actor",
            got=config.actor,
            need="an actor that lives, in this cluster and namespace",
            fix='start it with RewardModelEnvironment.options(name="...", lifetime="detached").remote(config)',
        ) from None


def _unshared(environment: Environment) -> Environment:
    if not environment.is_stateful:
        return environment
    environment.shutdown()
    raise ConfigError(
        "running statistics have to be those of the whole run, and each reward worker would have its own",
        where="reward_kwargs",
        field="environment",
        got="an environment with running statistics (reward_shaping.running)",
        need="actor: one environment that all reward workers share; or fixed reward_mean and reward_std",
        fix='start it with RewardModelEnvironment.options(name="...", lifetime="detached").remote(config), and give '
        "its name as actor",
    )


def _as_error(error: BaseException) -> Exception:
    if isinstance(error, Exception) and not isinstance(error, StopIteration):  # which no coroutine can be given
        return error
    raised = ModelError("the environment ended its step instead of rewarding it", got=repr(error), need="rewards")
    raised.__cause__ = error
    return raised


def _rewards(result: EnvironmentReturn) -> list[Reward]:
    details = [metadata[DETAILS] for metadata in result.metadata]
    values = [value if math.isfinite(value) else None for value in result.rewards.tolist()]
    return [
        Reward(value, Score(d["raw"]), d["components"], d["error"]) for value, d in zip(values, details, strict=True)
    ]


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
