"""`CustomEnvironment`: any Python function, or class with a `score`, as a reward.

    # my_rewards.py, and in the config {type: custom, function: "my_rewards:brevity", kwargs: {limit: 200}}
    def brevity(conversations, env_infos, limit):
        return [min(0.0, limit - len(conversation[-1]["content"])) for conversation in conversations]

How it is called follows from the names of its parameters, or from `signature`:

| signature | called as | gives |
|---|---|---|
| conversations | f(conversations, env_infos, **kwargs), once per step | a list of rewards |
| conversation | f(conversation, env_info, **kwargs) | a reward |
| prompt_response | f(prompt, response, **kwargs), texts | a reward |
| trl | f(prompts=, completions=, **columns, **kwargs): message lists, the keys of env_infos as lists | a list |
| verl | compute_score(data_source=, solution_str=, ground_truth=, extra_info=, **kwargs) | a reward |
| verl | compute_score(data_sources=, solution_strs=, ground_truths=, extra_infos=, **kwargs) | a list |

The prompt as a text is a lone message of the user as it is, anything longer `role: text` per message. A reward is a
number, True or False, None (the sample has no reward), or a mapping with `reward` or `score`, whose other numbers are
its components and whose `error` says why there is none. An exception costs the sample its reward, or all samples of the
call. Functions may be async.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import logging
import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from treeward.config.base import nearest_name
from treeward.config.reward_environments import CustomEnvironmentConfig
from treeward.data.preference import Message
from treeward.environments.async_calls import run_async
from treeward.environments.configured import ConfiguredEnvironment, log_failures
from treeward.environments.interface import Reward
from treeward.environments.replies import NO_REPLY, prompt_text, reply_text
from treeward.errors import ConfigError

__all__ = ["CustomEnvironment"]

logger = logging.getLogger(__name__)

Convention = Literal["conversations", "conversation", "prompt_response", "trl", "verl", "verl_batch"]

_PARAMETERS: dict[Convention, tuple[str, ...]] = {
    "conversations": ("conversations", "env_infos"),
    "conversation": ("conversation", "env_info"),
    "prompt_response": ("prompt", "response"),
    "trl": ("prompts", "completions"),
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "verl_batch": ("data_sources", "solution_strs", "ground_truths", "extra_infos"),
}
_TELLING: dict[Convention, str] = {
    "conversations": "conversations",
    "conversation": "conversation",
    "prompt_response": "response",
    "trl": "completions",
    "verl": "solution_str",
    "verl_batch": "solution_strs",
}
_BY_NAME = (
    "trl",
    "verl",
    "verl_batch",
)  # as those loops call it; a function may leave what it does not need to **kwargs
_BATCHED = ("conversations", "trl", "verl_batch")
_METHODS = ("score", "predict", "__call__")
_OWN_FAILURES = (Exception, SystemExit, asyncio.CancelledError)
"""What a function may raise that costs its samples their rewards, and ends nobody else's work."""


class CustomEnvironment(ConfiguredEnvironment[CustomEnvironmentConfig]):
    """A function by its path; `CustomEnvironmentConfig` has the keys.

    Raises `ConfigError` if it cannot be imported or called as it would be, or if a batch's rewards are not one per
    sample.
    """

    name = "custom_env"
    _section = CustomEnvironmentConfig

    def __init__(self, env_config: Mapping[str, Any] | CustomEnvironmentConfig, *, where: str = "env_config") -> None:
        super().__init__(env_config, where=where)
        path = self.config.function
        found = _import(path, where)
        self._kwargs = dict(self.config.kwargs)
        if isinstance(found, type):
            found, self._kwargs = _method(_construct(found, self._kwargs, path, where), path, where), {}
        if not callable(found):
            raise ConfigError("not a function or class", where=self._where, field="function", got=path)
        self._function: Callable[..., Any] = found
        self._convention = _convention(found, self.config, where)
        self._check_call()
        self._logged = False

    def rewards(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        scored = [i for i, conversation in enumerate(conversations) if reply_text(conversation) is not None]
        samples = [([dict(message) for message in conversations[i]], dict(env_infos[i])) for i in scored]
        rewards = [Reward(None, error=NO_REPLY) for _ in conversations]
        if samples:
            found = self._batch(samples) if self._convention in _BATCHED else self._singles(samples)
            for i, reward in zip(scored, found, strict=True):
                rewards[i] = reward
        log_failures(self.name, rewards)
        return rewards

    def _batch(self, samples: _Samples) -> list[Reward]:
        try:
            result = self._call(samples)
            if inspect.isawaitable(result):
                result = run_async(_awaited(result))
        except _OWN_FAILURES as error:
            return [Reward(None, error=self._noted(error))] * len(samples)
        result = result.tolist() if hasattr(result, "tolist") else result
        if not isinstance(result, Sequence) or isinstance(result, str | bytes) or len(result) != len(samples):
            got = f"{len(result)} rewards" if isinstance(result, Sequence) else type(result).__name__
            raise ConfigError(
                "the function does not give one reward per sample",
                where=self._where,
                field="function",
                got=f"{got} from {self.config.function}",
                need=f"a list of {len(samples)}; None for a sample without a reward",
            )
        return [_reward(each) for each in result]

    def _singles(self, samples: _Samples) -> list[Reward]:
        if _is_async(self._function):
            return run_async(self._gather(samples))
        rewards = []
        for sample in samples:
            try:
                rewards.append(_reward(self._call([sample])))
            except _OWN_FAILURES as error:
                rewards.append(Reward(None, error=self._noted(error)))
        return rewards

    async def _gather(self, samples: _Samples) -> list[Reward]:
        slots = asyncio.Semaphore(self.config.max_concurrency)

        async def one(sample: tuple[list[Message], dict[str, Any]]) -> Reward:
            async with slots:
                try:
                    return _reward(await self._call([sample]))
                except _OWN_FAILURES as error:
                    task = asyncio.current_task()
                    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                        raise  # the step itself is given up
                    return Reward(None, error=self._noted(error))

        return await asyncio.gather(*(one(sample) for sample in samples))

    def _call(self, samples: _Samples) -> Any:
        """Call the function with a batch or, where it takes one sample, with the only one in `samples`."""
        conversations, infos = [conversation for conversation, _ in samples], [info for _, info in samples]
        replies = [reply_text(conversation) or "" for conversation in conversations]
        by_convention: dict[Convention, Callable[[], tuple[Any, ...]]] = {
            "conversations": lambda: (conversations, infos),
            "conversation": lambda: (conversations[0], infos[0]),
            "prompt_response": lambda: (prompt_text(conversations[0][:-1]), replies[0]),
            "trl": lambda: ([each[:-1] for each in conversations], [each[-1:] for each in conversations]),
            "verl": lambda: (infos[0].get("data_source"), replies[0], infos[0].get("ground_truth"), infos[0]),
            "verl_batch": lambda: (
                [info.get("data_source") for info in infos],
                replies,
                [info.get("ground_truth") for info in infos],
                infos,
            ),
        }
        arguments = by_convention[self._convention]()
        if self._convention not in _BY_NAME:
            return self._function(*arguments, **self._kwargs)
        named = dict(zip(_PARAMETERS[self._convention], arguments, strict=True))
        if self._convention == "trl":
            columns = dict.fromkeys(name for info in infos for name in info)
            named = {name: [info.get(name) for info in infos] for name in columns} | named
        return self._function(**(self._accepted(named) | self._kwargs))

    def _accepted(self, named: Mapping[str, Any]) -> dict[str, Any]:
        parameters = inspect.signature(self._function).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        return {name: value for name, value in named.items() if takes_any or name in parameters}

    def _check_call(self) -> None:
        """That the function takes what it would be given, columns of the data left aside."""
        signature = inspect.signature(self._function)
        names = _PARAMETERS[self._convention]
        try:
            if self._convention not in _BY_NAME:
                signature.bind(*names, **self._kwargs)
            else:
                bind = signature.bind_partial if self._convention == "trl" else signature.bind
                bind(**(self._accepted(dict.fromkeys(names)) | self._kwargs))
        except TypeError as error:
            raise ConfigError(
                f"the function cannot be called: {error}",
                where=self._where,
                field="kwargs",
                got=f"{self.config.function}{signature}",
                need=f"the parameters {', '.join((*names, *self._kwargs))}",
                fix="set the missing arguments in kwargs, or remove those that the function does not know",
            ) from None

    def _noted(self, error: BaseException) -> str:
        if not self._logged:
            self._logged = True
            logger.warning("%s raised %s: %s", self.config.function, type(error).__name__, error)
            logger.debug("the traceback of the first exception", exc_info=error)
        text = f"{type(error).__name__}: {error}"
        return text.splitlines()[0] if text else type(error).__name__


_Samples = Sequence[tuple[list[Message], dict[str, Any]]]


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _reward(value: Any) -> Reward:
    """One returned value as a `Reward`; what is no finite number has the reason why."""
    if isinstance(value, Reward):
        finite = value.value is None or math.isfinite(value.value)
        return value if finite else Reward(None, error=f"the reward is {value.value}")
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
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _import(path: str, where: str) -> Any:
    module_path, colon, name = path.rpartition(":")
    if not colon:
        module_path, _, name = path.rpartition(".")
    if not module_path or not name:
        raise ConfigError(
            "not the path of a function",
            where=where,
            field="function",
            got=path,
            need="package.module:name, package.module.name or path/to/file.py:name",
        )
    module = (_import_file if module_path.endswith(".py") else _import_module)(module_path, path, where)
    if not hasattr(module, name):
        near = nearest_name(name, vars(module))
        raise ConfigError(
            f"there is no {name} in {module_path}",
            where=where,
            field="function",
            got=path,
            fix=f"did you mean {near}?" if near else None,
        )
    return getattr(module, name)


def _import_file(file: str, path: str, where: str) -> Any:
    resolved = Path(file).expanduser().resolve()
    if not resolved.is_file():
        raise ConfigError(
            "the file of the function does not exist",
            where=where,
            field="function",
            got=path,
            need=f"a file {resolved}",
        )
    spec = importlib.util.spec_from_file_location(f"treeward_custom_{resolved.stem}", resolved)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look it up there
    spec.loader.exec_module(module)
    return module


def _import_module(name: str, path: str, where: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the module of the function cannot be imported: {error}",
            where=where,
            field="function",
            got=path,
            need="package.module:name, where the module is on Python's path, or path/to/file.py:name",
            fix="install it, or set PYTHONPATH to the folder that holds it",
        ) from error


def _construct(cls: type, kwargs: Mapping[str, Any], path: str, where: str) -> Any:
    signature = inspect.signature(cls)
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        raise ConfigError(
            f"the class cannot be constructed: {error}",
            where=where,
            field="kwargs",
            got=", ".join(f"{key}={value!r}" for key, value in kwargs.items()) or "no arguments",
            need=f"{path}{signature}",
            fix="set the missing arguments in kwargs, or remove those that the class does not know",
        ) from None
    return cls(**kwargs)


def _method(instance: Any, path: str, where: str) -> Callable[..., Any]:
    for name in _METHODS:
        if callable(getattr(instance, name, None)):
            method: Callable[..., Any] = getattr(instance, name)
            return method
    raise ConfigError(
        "the class has no method that scores",
        where=where,
        field="function",
        got=path,
        need=f"one of {', '.join(_METHODS)}",
    )


def _convention(function: Callable[..., Any], config: CustomEnvironmentConfig, where: str) -> Convention:
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:  # some functions written in C do not say
        raise ConfigError(
            "how the function is called cannot be told: it does not say what its parameters are",
            where=where,
            field="function",
            got=config.function,
            fix="call it in a function of your own",
        ) from None
    if config.signature == "verl":
        return "verl_batch" if "solution_strs" in names else "verl"
    if config.signature is not None:
        return config.signature
    for convention, parameter in _TELLING.items():
        if parameter in names:
            return convention
    raise ConfigError(
        "how the function is called cannot be told from its parameters",
        where=where,
        field="signature",
        got=f"{config.function}({', '.join(names)})",
        need="; ".join(f"{key}: ({', '.join(parameters)})" for key, parameters in _PARAMETERS.items()),
        fix="set signature, or name the parameters so",
    )
