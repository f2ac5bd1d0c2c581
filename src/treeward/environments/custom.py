"""`CustomEnvironment`: any Python function, or class with a `score`, as a reward.

    # In my_rewards.py. In the config:
    #   {type: custom, function: "my_rewards:brevity", kwargs: {limit: 200}}
    def brevity(response, limit):
        return min(0.0, limit - len(response))

The names of its parameters decide how it is called: `_CONVENTIONS`, and docs/environments.md.

A prompt as text is the user's single message unchanged, or `role: text` per message. A reward is a
number, True or False, None (no reward), or a mapping with `reward` or `score`, whose other numbers
are its components and whose `error` is the reason for no reward. A mapping of several rewards, as
{"reward/correct": 1.0, "reward/format": 0.5}, is their sum. An exception costs the sample, or all
samples of the call, their reward. Functions may be async.
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
from treeward.errors import ConfigError, DataError
from treeward.http import run_async
from treeward.scoring.score import NO_COMPLETION, completion_text, prompt_text
from treeward.user_code import import_object, source_digest

logger = logging.getLogger(__name__)

_METHODS = ("score", "predict", "__call__")
_PART = "reward/"
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


def _messages(sample: _Sample) -> dict[str, Any]:
    return {"conversation": sample.conversation, "env_info": sample.info}


def _texts(sample: _Sample) -> dict[str, Any]:
    return {"prompt": prompt_text(sample.conversation[:-1]), "response": sample.completion}


def _verl(sample: _Sample) -> dict[str, Any]:
    """The arguments of a `compute_score` for verl."""
    return {
        "data_source": sample.info.get("data_source"),
        "solution_str": sample.completion,
        "ground_truth": sample.info.get("ground_truth"),
        "extra_info": sample.info,
    }


def _trl(sample: _Sample) -> dict[str, Any]:
    """The arguments of a function for TRL's `reward_funcs`: columns of the data set by name."""
    messages = sample.conversation
    return {**sample.info, "prompts": messages[:-1], "completions": messages[-1:]}


def _plural(arguments: Callable[[_Sample], dict[str, Any]]) -> Callable[[_Sample], dict[str, Any]]:
    def arguments_of_batch(sample: _Sample) -> dict[str, Any]:
        return {f"{name}s": value for name, value in arguments(sample).items()}

    return arguments_of_batch


_CONVENTIONS = (
    _Convention("conversations", True, _plural(_messages)),
    _Convention("conversation", False, _messages),
    _Convention("response", False, _texts),
    _Convention("responses", True, _plural(_texts)),
    _Convention("completions", True, _trl),
    _Convention("solution_str", False, _verl),
    _Convention("solution_strs", True, _plural(_verl)),
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
            self._function = self._method(self._function)
            self._kwargs = {}  # its constructor has taken them
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
            signs = ", ".join(convention.sign for convention in _CONVENTIONS)
            raise ConfigError(
                "the parameters of the function fit no known signature",
                field="function",
                **at,
                need=f"one of the parameters {signs}",
                fix="rename the parameters",
            )
        self._convention = conventions[0]
        arguments = self._accepted(self._convention.arguments(_Sample([], {}, "")))
        try:
            if self._convention.arguments is _trl:
                # Its other parameters are columns of the data, which is not here yet.
                signature.bind_partial(**arguments)
            else:
                signature.bind(**arguments)
        except TypeError as error:
            raise ConfigError(
                f"the function cannot be called: {error}", field="kwargs", **at
            ) from None

    @property
    def user_code(self) -> str:
        return self._source

    def rewards(self, conversations: Conversations, env_infos: Infos) -> list[Reward]:
        rewards = [Reward(None, error=NO_COMPLETION)] * len(conversations)
        arguments: dict[int, dict[str, Any]] = {}
        for i, (messages, info) in enumerate(zip(conversations, env_infos, strict=True)):
            text = completion_text(messages)
            if text is None:
                continue
            # Copies: the function may change them.
            copies = [dict(message) for message in messages]
            try:
                arguments[i] = self._convention.arguments(_Sample(copies, dict(info), text))
            except DataError as error:  # of a prompt that has no text
                rewards[i] = Reward(None, error=error.in_one_line)
        if arguments:
            found = self._rewards_of(list(arguments.values()))
            for i, reward in zip(arguments, found, strict=True):
                rewards[i] = reward
        return rewards

    def _rewards_of(self, arguments: Sequence[Mapping[str, Any]]) -> list[Reward]:
        """The rewards of samples, by the arguments of each."""
        if not self._convention.batched:
            return [_reward(value) for value in self._called(arguments)]
        # With TRL's signature a sample may lack a column that others have.
        names: dict[str, None] = {}
        for values in arguments:
            names.update(dict.fromkeys(values))
        columns: dict[str, list[Any]] = {}
        for name in names:
            columns[name] = [values.get(name) for values in arguments]
        [value] = self._called([columns])
        if isinstance(value, Reward) and value.value is None:
            return [value] * len(arguments)  # the call of all of them has raised
        # A tensor or an array is a list of numbers too.
        rewards = value.tolist() if hasattr(value, "tolist") else value
        is_list = isinstance(rewards, Sequence) and not isinstance(rewards, str | bytes)
        if not is_list or len(rewards) != len(arguments):
            summary = f"the function does not return one reward per sample: {len(arguments)}"
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
        accepted = {}
        for name, value in arguments.items():
            if takes_any or name in self._parameters:
                accepted[name] = value
        return accepted | self._kwargs

    async def _awaited(self, values: Sequence[Any]) -> list[Any]:
        async def one(value: Any) -> Any:
            if not inspect.isawaitable(value):
                return value
            try:
                return await value
            except _OWN_FAILURES as error:
                return self._failed(error)

        return await asyncio.gather(*map(one, values))

    def _failed(self, error: BaseException) -> Reward:
        logger.debug("%s raised an exception.", self.config.function, exc_info=error)
        text = type(error).__name__
        if str(error):
            text = f"{text}: {error}".splitlines()[0]
        return Reward(None, error=text)

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
        if value.value is None or _number(value.value) is not None:
            return value
        return Reward(None, error=f"the reward is {value.value!r:.100}, no finite number")
    if isinstance(value, Mapping) and any(_is_part(key) for key in value):
        return _sum_of_parts(value)
    components: dict[str, float] = {}
    if isinstance(value, Mapping):
        for key, item in value.items():
            number = _number(item)
            if number is not None and key not in ("reward", "score", "error"):
                components[str(key)] = number
        if value.get("error"):
            return Reward(None, components=components, error=str(value["error"]))
        value = value.get("reward", value.get("score"))
    number = _number(value)
    if number is not None:
        return Reward(number, components=components)
    error = f"the function gave {value!r:.100}, no finite number"
    if value is None:
        error = "the function gave no reward"
    return Reward(None, components=components, error=error)


def _is_part(key: Any) -> bool:
    return isinstance(key, str) and key.startswith(_PART)


def _sum_of_parts(values: Mapping[Any, Any]) -> Reward:
    """The reward of a function that returns `reward/<name>` for each of several. Each is a
    component, and the reward is their sum. Without one of them there is no sum, and the others are
    components."""
    components = {}
    missing = []
    for key, value in values.items():
        if not _is_part(key):
            continue
        name = key.removeprefix(_PART)
        number = _number(value)
        if number is None:
            missing.append(name)
        else:
            components[name] = number
    error = values.get("error")
    if missing and error is None:
        error = f"the function gave no finite number for {', '.join(missing)}"
    if error is not None:
        return Reward(None, components=components, error=str(error))
    return Reward(sum(components.values()), components=components)


def _number(value: Any) -> float | None:
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:  # a scalar of numpy or torch
        value = value.item()
    if not isinstance(value, int | float):  # True and False are numbers: right and wrong
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return None
    return number if math.isfinite(number) else None
