"""`CustomEnvironment`: any Python function, or class with a `score`, as a reward.

    # my_rewards.py, and in the config {type: custom, function: "my_rewards:brevity", kwargs: {limit: 200}}
    def brevity(conversations, env_infos, limit):
        return [min(0.0, limit - len(conversation[-1]["content"])) for conversation in conversations]

The names of its parameters decide how it is called: `_CONVENTIONS`, and docs/environments.md.

A prompt as text is the user's single message unchanged, or `role: text` per message. A reward is a
number, True or False, None (no reward), or a mapping with `reward` or `score`, whose other numbers
are its components and whose `error` is the reason for no reward. An exception costs the sample, or
all samples of the call, their reward. Functions may be async.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from treeward.config.reward_environments import CustomEnvironmentConfig
from treeward.data.conversation import Message
from treeward.environments.interface import (
    WHERE,
    ConfiguredEnvironment,
    Conversations,
    Infos,
    Reward,
)
from treeward.errors import ConfigError
from treeward.http import run_async
from treeward.scoring.score import NO_COMPLETION, completion_text, prompt_text
from treeward.user_code import import_object, source_digest

logger = logging.getLogger(__name__)

_METHODS = ("score", "predict", "__call__")
_OWN_FAILURES = (Exception, SystemExit, asyncio.CancelledError)
"""Exceptions of a function that cost its samples their rewards but do not end the step."""


class _Sample(NamedTuple):
    conversation: list[Message]
    info: dict[str, Any]
    completion: str


class _Convention(NamedTuple):
    """A function with the parameter `sign` takes those of `arguments` of a sample that it names.

    `batched`: one call takes all samples of a step, each argument as a list.
    """

    sign: str
    batched: bool
    arguments: Callable[[_Sample], dict[str, Any]]


def _verl(sample: _Sample, plural: str = "") -> dict[str, Any]:
    values = {"data_source": sample.info.get("data_source"), "solution_str": sample.completion}
    values |= {"ground_truth": sample.info.get("ground_truth"), "extra_info": sample.info}
    return {f"{name}{plural}": value for name, value in values.items()}


_CONVENTIONS = (
    _Convention(
        "conversations", True, lambda s: {"conversations": s.conversation, "env_infos": s.info}
    ),
    _Convention(
        "conversation", False, lambda s: {"conversation": s.conversation, "env_info": s.info}
    ),
    _Convention(
        "response",
        False,
        lambda s: {"prompt": prompt_text(s.conversation[:-1]), "response": s.completion},
    ),
    _Convention(
        "responses",
        True,
        lambda s: {"prompts": prompt_text(s.conversation[:-1]), "responses": s.completion},
    ),
    _Convention(  # TRL's
        "completions",
        True,
        lambda s: s.info | {"prompts": s.conversation[:-1], "completions": s.conversation[-1:]},
    ),
    _Convention("solution_str", False, _verl),
    _Convention("solution_strs", True, lambda s: _verl(s, "s")),
)


class CustomEnvironment(ConfiguredEnvironment[CustomEnvironmentConfig]):
    """A function by its path. Raises `ConfigError` if it cannot be imported or called, or if a
    batch's rewards are not one per sample.
    """

    name = "custom_env"
    section = CustomEnvironmentConfig

    def __init__(self, env_config: Mapping[str, Any] | CustomEnvironmentConfig) -> None:
        super().__init__(env_config)
        function = import_object(self.config.function, field="function", where=WHERE)
        self._function = function
        self._kwargs = dict(self.config.kwargs)
        if isinstance(self._function, type):
            self._function, self._kwargs = self._method(self._function), {}
        if not callable(self._function):
            raise ConfigError(
                "not a function or class", where=WHERE, field="function", got=self.config.function
            )
        self._source = source_digest(function)
        signature = inspect.signature(self._function)
        self._parameters = signature.parameters
        at: dict[str, Any] = {"where": WHERE, "got": f"{self.config.function}{signature}"}
        conventions = [
            convention for convention in _CONVENTIONS if convention.sign in self._parameters
        ]
        if not conventions:
            need = (
                f"one of the parameters {', '.join(convention.sign for convention in _CONVENTIONS)}"
            )
            summary = "the parameters of the function fit no known signature"
            raise ConfigError(
                summary, field="function", **at, need=need, fix="rename the parameters"
            )
        self._convention = conventions[0]
        # whose other parameters are columns of the data
        is_trl = self._convention.sign == "completions"
        try:
            bind = signature.bind_partial if is_trl else signature.bind
            bind(**self._accepted(self._convention.arguments(_Sample([], {}, ""))))
        except TypeError as error:
            raise ConfigError(
                f"the function cannot be called: {error}", field="kwargs", **at
            ) from None

    @property
    def user_code(self) -> str:
        return self._source

    def rewards(self, conversations: Conversations, env_infos: Infos) -> list[Reward]:
        texts = [completion_text(conversation) for conversation in conversations]
        samples = [  # copies: the function may change them
            _Sample([dict(message) for message in conversation], dict(info), text)
            for conversation, info, text in zip(conversations, env_infos, texts, strict=True)
            if text is not None
        ]
        rewards = iter(self._found(samples) if samples else [])
        return [
            Reward(None, error=NO_COMPLETION) if text is None else next(rewards) for text in texts
        ]

    def _found(self, samples: Sequence[_Sample]) -> list[Reward]:
        arguments = [self._convention.arguments(sample) for sample in samples]
        if not self._convention.batched:
            return [_reward(value) for value in self._called(arguments)]
        names = dict.fromkeys(name for values in arguments for name in values)
        [value] = self._called(
            [{name: [values.get(name) for values in arguments] for name in names}]
        )
        if isinstance(value, Reward) and value.value is None:
            return [value] * len(samples)
        rewards = value.tolist() if hasattr(value, "tolist") else value
        if (
            not isinstance(rewards, Sequence)
            or isinstance(rewards, str | bytes)
            or len(rewards) != len(samples)
        ):
            summary = f"the function does not return one reward per sample: {len(samples)}"
            raise ConfigError(summary, where=WHERE, got=f"{rewards!r:.100}")
        return [_reward(reward) for reward in rewards]

    def _called(self, calls: Sequence[Mapping[str, Any]]) -> list[Any]:
        """What the function returns for each call; a `Reward` without a value where it raises."""
        values = []
        for arguments in calls:
            try:
                values.append(self._function(**self._accepted(arguments)))
            except _OWN_FAILURES as error:
                values.append(self._failed(error))
        if any(map(inspect.isawaitable, values)):  # also of functions that are not declared async
            return run_async(self._awaited(values))
        return values

    def _accepted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        takes_any = any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in self._parameters.values()
        )
        return {
            k: v for k, v in arguments.items() if takes_any or k in self._parameters
        } | self._kwargs

    async def _awaited(self, values: Sequence[Any]) -> list[Any]:
        async def one(value: Any) -> Any:
            try:
                return await value if inspect.isawaitable(value) else value
            except _OWN_FAILURES as error:
                return self._failed(error)

        return await asyncio.gather(*map(one, values))

    def _failed(self, error: BaseException) -> Reward:
        logger.debug("%s raised an exception.", self.config.function, exc_info=error)
        text = f"{type(error).__name__}: {error}"
        return Reward(None, error=text.splitlines()[0] if str(error) else type(error).__name__)

    def _method(self, cls: type) -> Any:
        """The scoring method of a new object of `cls`."""
        at: dict[str, Any] = {"where": WHERE, "got": self.config.function}
        try:
            instance = cls(**self._kwargs)
        except TypeError as error:
            raise ConfigError(
                f"the class cannot be constructed: {error}", field="kwargs", **at
            ) from error
        for name in _METHODS:
            if callable(getattr(instance, name, None)):
                return getattr(instance, name)
        need = f"one of {', '.join(_METHODS)}"
        raise ConfigError("the class has no method that scores", field="function", **at, need=need)


def _reward(value: Any) -> Reward:
    """A returned value as a `Reward`; its value is None, with a reason, unless it is a finite
    number."""
    if isinstance(value, Reward):
        finite = value.value is None or _number(value.value) is not None
        return (
            value
            if finite
            else Reward(None, error=f"the reward is {value.value!r:.100}, no finite number")
        )
    components: dict[str, float] = {}
    if isinstance(value, Mapping):
        components = {
            str(key): number
            for key, item in value.items()
            if key not in ("reward", "score", "error") and (number := _number(item)) is not None
        }
        if value.get("error"):
            return Reward(None, components=components, error=str(value["error"]))
        value = value.get("reward", value.get("score"))
    number = _number(value)
    if number is not None:
        return Reward(number, components=components)
    error = (
        "the function gave no reward"
        if value is None
        else f"the function gave {value!r:.100}, no finite number"
    )
    return Reward(None, components=components, error=error)


def _number(value: Any) -> float | None:
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:  # a scalar of numpy or torch
        value = value.item()
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return None
    return number if math.isfinite(number) else None
