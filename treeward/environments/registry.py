"""Environments by name: from the `env:` section of a configuration to environments.

    make_environment("rules", {"rule": "math"})
    make_environments({"reward_model": {...}, "format": {"type": "rules", "rule": "regex", "pattern": "</think>"}})
    register_environment("mine", MyEnvironment)          # or `type: my_package.MyEnvironment` in the section

A class is imported when an environment of its kind is made.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from treeward.config.base import nearest_name
from treeward.environments.actors import NO_RESTARTS, RayActor
from treeward.environments.interface import Environment
from treeward.errors import ConfigError

__all__ = ["actor_options", "environment_class", "make_environment", "make_environments", "make_named"]
__all__ += ["register_environment", "sections_of"]

_CLASSES: dict[str, type[Environment] | str] = {
    "reward_model": "treeward.environments.reward_model.RewardModelEnvironment",
    "rules": "treeward.environments.rules.RuleEnvironment",
    "math": "treeward.environments.rules.MathEnvironment",
    "judge": "treeward.environments.judge.JudgeEnvironment",
    "custom": "treeward.environments.custom.CustomEnvironment",
    "hybrid": "treeward.environments.hybrid.HybridEnvironment",
}


def register_environment(name: str, cls: type[Environment]) -> None:
    """Make a class known by `name`; it is constructed with the section's mapping.

    If its constructor has the keyword `where`, it is told what its errors should call the section. Raises `ConfigError`
    for a name that is taken by another class, or something that is no `Environment`.
    """
    if not (isinstance(cls, type) and issubclass(cls, Environment)):
        raise ConfigError("not an environment", field=name, got=cls, need="a subclass of Environment")
    known = _CLASSES.get(name)
    if known is not None and known is not cls:
        raise ConfigError("the name is taken", field=name, got=cls.__name__, need=f"another name; this one is {known}")
    _CLASSES[name] = cls


def environment_class(kind: str, *, where: str | None = None) -> type[Environment]:
    """The class of a kind: a registered name, or a dotted path. Raises `ConfigError` with the nearest name."""
    known = _CLASSES.get(kind)
    if isinstance(known, type):
        return known
    path = known or kind
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        near = nearest_name(kind, _CLASSES)
        raise ConfigError(
            "there is no such kind of environment",
            where=where,
            field="type",
            got=kind,
            need=f"{', '.join(sorted(_CLASSES))}, or the dotted path of a subclass of Environment",
            fix=f"did you mean {near}?" if near else "say with `type` which kind it is",
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the module of the environment cannot be imported: {error}",
            where=where,
            field="type",
            got=kind,
            need="module.Class, where the module is on Python's path",
            fix="install it, or set PYTHONPATH to the folder that holds it",
        ) from error
    cls = getattr(module, attribute, None)
    if not (isinstance(cls, type) and issubclass(cls, Environment)) or inspect.isabstract(cls):
        near = nearest_name(attribute, vars(module)) if cls is None else None
        raise ConfigError(
            f"{module_name} has no environment {attribute}",
            where=where,
            field="type",
            got=kind,
            need="a subclass of treeward.environments.interface.Environment that implements rewards",
            fix=f"did you mean {module_name}.{near}?" if near else None,
        )
    return cls


def make_environment(name: str, config: Mapping[str, Any], *, where: str | None = None) -> Environment:
    """One environment, in this process. `name`: its kind, unless `config` has a key `type`; `config`: its section.

    `where`: what errors call the section. Raises `ConfigError` for a kind that does not exist, or a section that is
    wrong.
    """
    section = dict(config)
    kind = section.pop("type", None) or name
    made: Any = environment_class(str(kind), where=where)
    environment: Environment = made(section, **_told(made, where))
    return environment


def actor_options(cls: type[Environment], section: Mapping[str, Any], *, where: str | None = None) -> dict[str, Any]:
    """Ray options of an actor in which an environment is made of `section`; runs where the actor is asked for.

    Raises `ConfigError` for a section that is wrong.
    """
    if issubclass(cls, RayActor):
        return cls.prepare_remote((section,), _told(cls, where))[2]
    return {} if cls.state_dict is Environment.state_dict else dict(NO_RESTARTS)


def _told(cls: type[Environment], where: str | None) -> dict[str, Any]:
    return {"where": where} if where is not None and "where" in inspect.signature(cls).parameters else {}


def make_named(name: str, section: Mapping[str, Any], *, on_ray: bool = False) -> Environment | Any:
    """The environment `env.<name>`, whose kind is its name unless the section says `type`.

    `on_ray`: the handle of a Ray actor that holds it. Where the name is no kind, its metrics begin with `<name>_env/`.
    """
    where = f"env.{name}"
    if not on_ray:
        environment = make_environment(name, section, where=where)
        if name not in _CLASSES:
            environment.name = f"{name}_env"
        return environment
    settings = dict(section)
    cls = environment_class(str(settings.pop("type", None) or name), where=where)
    if not issubclass(cls, RayActor):
        raise ConfigError(
            "this environment cannot be a Ray actor",
            where=where,
            field="type",
            got=cls.__name__,
            need="a class that is a RayActor too",
            fix=f"class {cls.__name__}(RayActor, Environment), or leave it in this process",
        )
    return cls.remote(settings, **_told(cls, where))


def sections_of(env_section: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections of an `env:` section by name, resolved; those with `enabled: false` are left out.

    Raises `ConfigError` for one that is no mapping.
    """
    plain: Any = (
        OmegaConf.to_container(env_section, resolve=True) if isinstance(env_section, DictConfig) else env_section
    )
    sections: dict[str, dict[str, Any]] = {}
    for name, section in plain.items():
        if not isinstance(section, Mapping):
            raise ConfigError(
                "the section of an environment is not a mapping", where=f"env.{name}", got=section, need="its keys"
            )
        settings = dict(section)
        if settings.pop("enabled", True) is not False:
            sections[name] = settings
    return sections


def make_environments(env_section: Mapping[str, Any]) -> dict[str, Environment]:
    """The environments of an `env:` section, in this process, by name, as `sections_of` and `make_named` have them.

    If one of them cannot be made, those that were are shut down.
    """
    environments: dict[str, Environment] = {}
    try:
        for name, section in sections_of(env_section).items():
            environments[name] = make_named(name, section)
    except BaseException:
        for environment in environments.values():
            environment.shutdown()
        raise
    return environments
