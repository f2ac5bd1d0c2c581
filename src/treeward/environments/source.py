"""`RewardSource`: rewards for loops that ask for one at a time; one source in a process, shared by
its threads.

    source = reward_source({"model": "results/rm/final"})
    source.submit(messages, {"ground_truth": "4"}).result().value

Requests that arrive during a step form the next step. So no request waits for a full batch, and
completions of one prompt from different threads share its computation.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple

from omegaconf import OmegaConf

from treeward.config.base import Strict
from treeward.config.load import load_section
from treeward.environments.interface import Environment, Reward
from treeward.environments.registry import make_environment

_WHERE = "reward_kwargs"


class RewardSourceConfig(Strict):
    """The source of rewards: `model` or `environment`."""

    model: str | None = None
    """A reward model: a folder or hub name, loaded once in this process, or the address of a
    `treeward serve`."""

    environment: dict[str, Any] | None = None
    """A section as under `env:`, made once in this process; `type` is its kind, by default
    `reward_model`."""

    on_failure: Literal["raise", "nan"] = "raise"
    """A completion without a reward stops the run with the reason (`raise`), or gets NaN
    (`nan`)."""

    def check(self) -> None:
        if (self.model is None) == (self.environment is None):
            raise self.error("model environment", "one source: model or environment")


class RewardSource:
    """Turns requests from any thread into steps of one environment. A step that raises fails its
    own requests only."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="treeward-rewards", daemon=True).start()

    def submit(
        self, messages: Sequence[Mapping[str, Any]], env_info: Mapping[str, Any]
    ) -> Future[Reward]:
        """Ask for the reward of one conversation. The future raises the exception of the step."""
        request = _Request(messages, env_info, Future())
        self._requests.put(request)
        return request.future

    def _serve(self) -> None:
        while True:
            requests = [self._requests.get()]
            while not self._requests.empty():  # no other thread reads it
                requests.append(self._requests.get())
            # Not those that their callers have cancelled meanwhile.
            requests = [
                request for request in requests if request.future.set_running_or_notify_cancel()
            ]
            logs = [request.messages for request in requests]
            infos = [request.env_info for request in requests]
            try:
                rewards = self._environment.reward(logs, infos)
            # The callers wait, and more requests will come: nothing may end the thread, `sys.exit` of
            # a reward function neither.
            except BaseException as error:
                for request in requests:
                    request.future.set_exception(error)
            else:
                for request, reward in zip(requests, rewards, strict=True):
                    request.future.set_result(reward)


class _Request(NamedTuple):
    messages: Sequence[Mapping[str, Any]]
    env_info: Mapping[str, Any]
    future: Future[Reward]


_SOURCES: dict[tuple[int, str], RewardSource] = {}
_LOCK = threading.Lock()


def reward_source(settings: Mapping[str, Any]) -> tuple[RewardSource, RewardSourceConfig]:
    """The source of `settings` (a `RewardSourceConfig`), the same at every call.

    Raises `ConfigError` for faulty settings.
    """
    config = load_section(RewardSourceConfig, OmegaConf.create(dict(settings)), where=_WHERE)
    described = config.model_dump(exclude={"on_failure"})
    # By process, because a forked one does not have the threads of its parent.
    key = (os.getpid(), json.dumps(described, sort_keys=True, default=str))
    # While a model is loaded other callers wait for it, and do not load it again.
    with _LOCK:
        if key not in _SOURCES:
            section = config.environment
            if section is None:
                section = {"model_name": config.model}
            where = f"{_WHERE}.environment"
            environment = make_environment("reward_model", section, where=where)
            _SOURCES[key] = RewardSource(environment)
        return _SOURCES[key], config
