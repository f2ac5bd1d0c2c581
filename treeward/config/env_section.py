"""The `env` section of a run: environments by name, each checked by the schema of its kind.

    env:
      reward_model: {model_name: results/rm/final}
      math: {num_workers: 8}
      format: {type: rules, rule: regex, pattern: "</think>"}

A section's kind is its name unless it says `type`; a kind with a dot is the path of a class, which checks its own
keys. Sections are kept as they are written, for `treeward.environments.registry` to make environments of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from treeward.config.base import IgnoredKeys, Strict, nearest_name
from treeward.config.environment import RewardModelEnvironmentConfig
from treeward.config.problems import config_error
from treeward.config.reward_environments import (
    CustomEnvironmentConfig,
    HybridEnvironmentConfig,
    JudgeEnvironmentConfig,
    MathEnvironmentConfig,
    RuleEnvironmentConfig,
)
from treeward.errors import ConfigError

__all__ = ["ENVIRONMENT_SECTIONS", "check_environment", "is_enabled"]

ENVIRONMENT_SECTIONS: Mapping[str, type[Strict]] = {
    "reward_model": RewardModelEnvironmentConfig,
    "rules": RuleEnvironmentConfig,
    "math": MathEnvironmentConfig,
    "judge": JudgeEnvironmentConfig,
    "custom": CustomEnvironmentConfig,
    "hybrid": HybridEnvironmentConfig,
}
"""The kinds of environments -> the schema of their sections."""


def is_enabled(section: Any) -> bool:
    """Whether a section is to be made an environment of."""
    return not isinstance(section, Mapping) or section.get("enabled", True) is not False


def check_environment(name: str, section: Any, ignored: IgnoredKeys | None = None) -> None:
    """Raise `ConfigError`, its `field` relative to `env`, for a section that its environment would refuse.

    `ignored`: where keys without effect are noted. A section with `enabled: false` may hold anything. A kind that this
    module does not know may be registered in Python; only one that is nearly a known name is refused.
    """
    if not isinstance(section, Mapping):
        raise ConfigError("the section of an environment is not a mapping", field=name, got=section, need="its keys")
    if not is_enabled(section):
        return
    settings = {key: value for key, value in section.items() if key not in ("enabled", "type")}
    kind = str(section.get("type") or name)
    schema = ENVIRONMENT_SECTIONS.get(kind)
    if schema is None:
        near = None if "." in kind else nearest_name(kind, ENVIRONMENT_SECTIONS)
        if near is not None:
            raise ConfigError(
                "there is no such kind of environment",
                field=f"{name}.type" if "type" in section else name,
                got=kind,
                need=f"{', '.join(ENVIRONMENT_SECTIONS)}, or the dotted path of a class",
                fix=f"did you mean {near}? Say `type: {near}` where the name is meant to be another",
            )
        return
    try:
        checked = schema.model_validate(settings, context={"ignored": [] if ignored is None else ignored})
    except ValidationError as error:
        one = config_error(error, schema, settings, file=f"env.{name}", origin=lambda _: f"env.{name}")
        field = ".".join(part for part in (name, one.field) if part)
        optional = {} if one.got is None else {"got": one.got}
        raise ConfigError(one.summary, field=field, need=one.need, fix=one.fix, **optional) from None
    if isinstance(checked, HybridEnvironmentConfig):
        for member, given in checked.members.items():
            typed = {"type": given.type} if given.type else {}
            try:
                check_environment(member, {**given.settings, **typed}, ignored)
            except ConfigError as error:
                optional = {} if error.got is None else {"got": error.got}
                raise ConfigError(
                    error.summary, field=f"{name}.members.{error.field}", need=error.need, fix=error.fix, **optional
                ) from None
