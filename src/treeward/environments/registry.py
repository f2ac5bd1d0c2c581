"""Environments by name: from the `env:` section of a configuration to environments.

    make_environment("rules", {"rule": "math"})
    rule = {"type": "rules", "rule": "regex", "pattern": "</think>"}
    make_environments({"reward_model": {...}, "format": rule})
    make_environment("mine", {"type": "my_package.MyEnvironment"})

The kinds are `ENVIRONMENTS` of `config/reward_environments.py`. A class is imported with its first
environment.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from treeward.config.reward_environments import ENVIRONMENTS, is_enabled
from treeward.environments.interface import WHERE, Environment
from treeward.environments.stepped import SteppedEnvironment
from treeward.errors import ConfigError
from treeward.user_code import import_object


def environment_class(kind: str) -> Callable[[Mapping[str, Any]], Environment]:
    """What makes an environment of a kind from its section: a class of `ENVIRONMENTS` or at a
    dotted path, which has our `rewards` or NeMo RL's `step`. Raises `ConfigError` with the nearest
    name."""
    path = ENVIRONMENTS[kind].path if kind in ENVIRONMENTS else kind
    if "." not in path:
        need = f"one of {', '.join(ENVIRONMENTS)}, or the dotted path of a class"
        raise ConfigError.unknown(
            "there is no such kind of environment", kind, ENVIRONMENTS, field="type", need=need
        )
    cls = import_object(path, field="type")
    if inspect.isabstract(cls):
        need = f"a class that implements {', '.join(sorted(cls.__abstractmethods__))}"
        raise ConfigError("this environment lacks a method", field="type", got=kind, need=need)
    if isinstance(cls, type) and issubclass(cls, Environment):
        return cls
    if isinstance(cls, type) and hasattr(cls, "step"):
        return partial(SteppedEnvironment, cls)
    if hasattr(cls, "remote") and hasattr(cls, "options"):  # of @ray.remote
        return partial(SteppedEnvironment, cls)
    need = (
        "a subclass of treeward.environments.interface.Environment, or a class with NeMo RL's step"
    )
    raise ConfigError("this is not an environment", field="type", got=kind, need=need)


def make_environment(name: str, config: Mapping[str, Any], *, where: str = WHERE) -> Environment:
    """One environment, in this process. `name`: its kind, unless its section `config` has a key
    `type`.

    `where`: the section's name in errors. Raises `ConfigError` for an unknown kind, or a faulty
    section.
    """
    section = dict(config)
    kind = str(section.pop("type", None) or name)
    try:
        environment = environment_class(kind)(section)
    except ConfigError as error:
        # An environment does not know its place in the file, which the user looks for.
        inner = error.where or WHERE
        if where == WHERE or not inner.startswith(WHERE):
            raise
        raise error.but(where=where + inner.removeprefix(WHERE)) from error.__cause__
    return environment


def make_environments(env_section: Mapping[str, Any]) -> dict[str, Environment]:
    """The environments of an `env:` section, in this process, by name, without disabled ones
    (`enabled: false`).

    The kind of an environment is its name unless its section has a `type`; if the name is not a
    kind, its metrics begin with `<name>_env/`. Raises `ConfigError` for a faulty section, after it
    has shut the others down.
    """
    plain: Any = env_section
    if isinstance(env_section, DictConfig):
        plain = OmegaConf.to_container(env_section, resolve=True)
    environments: dict[str, Environment] = {}
    try:
        for name, section in plain.items():
            if not isinstance(section, Mapping):
                summary = "the section of an environment is not a mapping"
                raise ConfigError(summary, where=f"env.{name}", got=section, need="its keys")
            if not is_enabled(section):
                continue
            keys = {key: value for key, value in section.items() if key != "enabled"}
            environments[name] = make_environment(name, keys, where=f"env.{name}")
            if name not in ENVIRONMENTS:
                environments[name].name = f"{name}_env"
    except BaseException:
        for environment in environments.values():
            environment.shutdown()
        raise
    return environments
