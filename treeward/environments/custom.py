"""`CustomEnvironment`: any Python function, or class with a `score`, as a reward.

    # my_rewards.py, and in the config {type: custom, function: "my_rewards:brevity", kwargs: {limit: 200}}
    def brevity(conversations, env_infos, limit):
        return [min(0.0, limit - len(conversation[-1]["content"])) for conversation in conversations]

The names of its parameters, or `signature`, decide how it is called: `_CONVENTIONS`, and docs/environments.md.

A prompt as text is the user's single message unchanged, or `role: text` per message. A reward is a number, True or
False, None (no reward), or a mapping with `reward` or `score`, whose other numbers are its components and whose `error`
is the reason for no reward. An exception costs the sample, or all samples of the call, their reward. Functions may be
async.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from treeward.config.reward_environments import CustomEnvironmentConfig
from treeward.data.preference import Message
from treeward.environments.interface import (
    NO_COMPLETION,
    WHERE,
    ConfiguredEnvironment,
    Conversations,
    Infos,
    Reward,
    completion_text,
    prompt_text,
)
from treeward.errors import ConfigError
from treeward.http import run_async
from treeward.user_code import import_object

logger = logging.getLogger(__name__)

_METHODS = ("score_batch", "score", "predict", "__call__")
_OWN_FAILURES = (Exception, SystemExit, asyncio.CancelledError)
"""Exceptions of a function that cost its samples their rewards but do not end the step."""


class _Sample(NamedTuple):
    conversation: list[Message]
    info: dict[str, Any]
    completion: str


class _Convention(NamedTuple):
    """How a function is called: with `arguments` of a sample, in the order of `parameters`.

    `sign`: the parameter that only this convention has. `batched`: one call takes all samples of a step, each argument
    as a list. `by_name`: with keyword arguments, of which the function may take some.
    """

    name: str
    sign: str
    parameters: tuple[str, ...]
    arguments: Callable[[_Sample], tuple[Any, ...]]
    batched: bool = False
    by_name: bool = False


def _texts(sample: _Sample) -> tuple[Any, ...]:
    return prompt_text(sample.conversation[:-1]), sample.completion


def _verl(sample: _Sample) -> tuple[Any, ...]:
    return sample.info.get("data_source"), sample.completion, sample.info.get("ground_truth"), sample.info


_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_CONVENTIONS = (
    _Convention("conversations", "conversations", ("conversations", "env_infos"), lambda s: s[:2], batched=True),
    _Convention("conversation", "conversation", ("conversation", "env_info"), lambda s: s[:2]),
    _Convention("prompt_response", "response", ("prompt", "response"), _texts),
    _Convention("prompt_response", "responses", ("prompts", "responses"), _texts, batched=True),
    _Convention(
        "trl",
        "completions",
        ("prompts", "completions"),
        lambda s: (s.conversation[:-1], s.conversation[-1:]),
        batched=True,
        by_name=True,
    ),
    _Convention("verl", "solution_str", _VERL, _verl, by_name=True),
    _Convention("verl", "solution_strs", tuple(f"{name}s" for name in _VERL), _verl, batched=True, by_name=True),
)


class CustomEnvironment(ConfiguredEnvironment[CustomEnvironmentConfig]):
    """A function by its path. Raises `ConfigError` if it cannot be imported or called, or if a batch's rewards are not
    one per sample.
    """

    name = "custom_env"
    section = CustomEnvironmentConfig

    def __init__(self, env_config: Mapping[str, Any] | CustomEnvironmentConfig) -> None:
        super().__init__(env_config)
        self._function = import_object(self.config.function, field="function", where=WHERE)
        self._kwargs = dict(self.config.kwargs)
        if isinstance(self._function, type):
            self._function, self._kwargs = self._method(self._function), {}
        if not callable(self._function):
            raise ConfigError("not a function or class", where=WHERE, field="function", got=self.config.function)
        self._parameters = inspect.signature(self._function).parameters
        self._convention = self._find_convention()
        self._check_call()

    def rewards(self, conversations: Conversations, env_infos: Infos) -> list[Reward]:
        texts = [completion_text(conversation) for conversation in conversations]
        samples = [  # copies: the function may change them
            _Sample([dict(message) for message in conversation], dict(info), text)
            for conversation, info, text in zip(conversations, env_infos, texts, strict=True)
            if text is not None
        ]
        rewards = iter(self._found(samples) if samples else [])
        return [Reward(None, error=NO_COMPLETION) if text is None else next(rewards) for text in texts]

    def _found(self, samples: Sequence[_Sample]) -> list[Reward]:
        calls = [samples] if self._convention.batched else [[sample] for sample in samples]
        values = [self._value(call) for call in calls]
        if any(map(inspect.isawaitable, values)):  # also of functions that are not declared async
            values = run_async(self._awaited(values))
        has_failed = isinstance(values[0], Reward) and values[0].value is None
        if not self._convention.batched or has_failed:
            return [_reward(value) for value in values] * (len(samples) // len(values))
        result = values[0].tolist() if hasattr(values[0], "tolist") else values[0]
        if not isinstance(result, Sequence) or isinstance(result, str | bytes) or len(result) != len(samples):
            raise ConfigError(
                f"the function does not return one reward per sample: {len(samples)}",
                where=WHERE,
                got=f"{result!r:.100}",
            )
        return [_reward(value) for value in result]

    def _value(self, samples: Sequence[_Sample]) -> Any:
        try:
            return self._call(samples)
        except _OWN_FAILURES as error:
            return self._failed(error)

    async def _awaited(self, values: Sequence[Any]) -> list[Any]:
        slots = asyncio.Semaphore(self.config.max_concurrency)

        async def one(value: Any) -> Any:
            if not inspect.isawaitable(value):
                return value
            async with slots:
                try:
                    return await value
                except _OWN_FAILURES as error:
                    return self._failed(error)

        return await asyncio.gather(*map(one, values))

    def _call(self, samples: Sequence[_Sample]) -> Any:
        """Call the function with a batch, or with the single sample in `samples`."""
        rows = [self._convention.arguments(sample) for sample in samples]
        arguments = list(map(list, zip(*rows, strict=True))) if self._convention.batched else rows[0]
        if not self._convention.by_name:
            return self._function(*arguments, **self._kwargs)
        named = dict(zip(self._convention.parameters, arguments, strict=True))
        if self._convention.name == "trl":
            columns = dict.fromkeys(name for sample in samples for name in sample.info)
            named = {name: [sample.info.get(name) for sample in samples] for name in columns} | named
        return self._function(**(self._accepted(named) | self._kwargs))

    def _accepted(self, named: Mapping[str, Any]) -> dict[str, Any]:
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in self._parameters.values())
        return {name: value for name, value in named.items() if takes_any or name in self._parameters}

    def _check_call(self) -> None:
        """Raise `ConfigError` if the function does not take its arguments, without columns of the data."""
        signature = inspect.signature(self._function)
        names = self._convention.parameters
        try:
            if not self._convention.by_name:
                signature.bind(*names, **self._kwargs)
            else:
                bind = signature.bind_partial if self._convention.name == "trl" else signature.bind
                bind(**(self._accepted(dict.fromkeys(names)) | self._kwargs))
        except TypeError as error:
            raise ConfigError(
                f"the function cannot be called: {error}",
                where=WHERE,
                field="kwargs",
                got=f"{self.config.function}{signature}",
            ) from None

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
            raise ConfigError(f"the class cannot be constructed: {error}", field="kwargs", **at) from error
        for name in _METHODS:
            if callable(getattr(instance, name, None)):
                return getattr(instance, name)
        need = f"one of {', '.join(_METHODS)}"
        raise ConfigError("the class has no method that scores", field="function", **at, need=need)

    def _find_convention(self) -> _Convention:
        wanted = self.config.signature
        candidates = [convention for convention in _CONVENTIONS if wanted in (None, convention.name)]
        for convention in candidates:
            if convention.sign in self._parameters:
                return convention
        if wanted is not None:
            return candidates[0]
        raise ConfigError(
            "the parameters of the function fit no known signature",
            where=WHERE,
            field="signature",
            got=f"{self.config.function}({', '.join(self._parameters)})",
            fix="set signature, or rename the parameters",
        )


def _reward(value: Any) -> Reward:
    """A returned value as a `Reward`; its value is None, with a reason, unless it is a finite number."""
    if isinstance(value, Reward):
        finite = value.value is None or _number(value.value) is not None
        return value if finite else Reward(None, error=f"the reward is {value.value!r:.100}, no finite number")
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
    error = "the function gave no reward" if value is None else f"the function gave {value!r:.100}, no finite number"
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
