"""From a YAML file and command-line overrides to a checked configuration, and back.

    config = load_config("rm.yaml", ["policy.model_name=Qwen/Qwen2.5-0.5B-Instruct", "rm.seed=7"])
    save_config(config, "resolved.yaml")       # loading that gives an equal configuration
    config = load_grpo_config("grpo.yaml")     # what `treeward grpo` reads

In this order: the file, laid over those that its `defaults:` names; the overrides; `${...}` references, to other keys
or to the functions `mul`, `div`, `max`, `min` and `int`; the schema. Every mistake is a `ConfigError`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from treeward.config.base import IgnoredKeys, Strict
from treeward.config.env_section import ENVIRONMENT_SECTIONS
from treeward.config.grpo_run import GRPORunConfig
from treeward.config.overrides import Override, apply_override, merge_trees, parse_override
from treeward.config.problems import Location, config_error, sections
from treeward.config.run import RewardModelRunConfig
from treeward.config.yaml_file import Tree, read_yaml, write_yaml
from treeward.errors import ConfigError

__all__ = ["load_config", "load_file", "load_grpo_config", "load_section", "save_config"]

logger = logging.getLogger(__name__)

Origins = dict[Location, str]
_Section = TypeVar("_Section", bound=Strict)


def load_config(path: str | PathLike[str], overrides: Sequence[str] = ()) -> RewardModelRunConfig:
    """Read, override, resolve and check. Raises one `ConfigError` that lists every mistake found."""
    return load_file(RewardModelRunConfig, path, overrides)


def load_grpo_config(path: str | PathLike[str], overrides: Sequence[str] = ()) -> GRPORunConfig:
    """A run of GRPO, as `load_config` reads one that trains a reward model; logs what is worth knowing about it."""
    config = load_file(GRPORunConfig, path, overrides)
    for remark in config.remarks:
        logger.warning("%s", remark)
    return config


def load_file(
    section: type[_Section],
    path: str | PathLike[str] | None,
    overrides: Sequence[str] = (),
    *,
    values: Mapping[str, Any] | None = None,
) -> _Section:
    """A whole configuration of another kind, read, overridden, resolved and checked as by `load_config`.

    `path`: None for one without a file. `values`: laid over the file's before the overrides, as a command's own
    options. Raises `ConfigError`.
    """
    _check_arguments(path, overrides)
    file = Path("command line") if path is None else Path(path)
    tree, origins = ({}, {}) if path is None else _read_with_defaults(file, ())
    tree = merge_trees(tree, dict(values or {}))
    for text in overrides:
        override = parse_override(text)
        apply_override(tree, override)
        _note_override(origins, override)
    resolved = _resolve(tree, file, origins)
    ignored: IgnoredKeys = []
    try:
        config = section.model_validate(resolved, context={"ignored": ignored})
    except ValidationError as error:
        raise config_error(
            error, section, resolved, file=str(file), origin=lambda key: _origin(origins, key, file)
        ) from None
    _log_ignored(ignored, section)
    return config


def load_section(section: type[_Section], values: Mapping[str, Any], *, where: str) -> _Section:
    """Check one section that is given as a mapping, as `env_config` in Python. Raises `ConfigError`; `where` names it.

    `${...}` references within the mapping are resolved. OmegaConf's own mappings are accepted.
    """
    plain = _resolve(values, Path(where), {})
    ignored: IgnoredKeys = []
    try:
        checked = section.model_validate(plain, context={"ignored": ignored})
    except ValidationError as error:
        raise config_error(error, section, plain, file=where, origin=lambda key: where) from None
    _log_ignored(ignored, section)
    return checked


def save_config(config: RewardModelRunConfig | GRPORunConfig, path: str | PathLike[str]) -> None:
    """Write every key, defaults included, as YAML that the config's own loader reads back to an equal configuration."""
    write_yaml(_escape(config.model_dump(mode="json", by_alias=True)), Path(path))


def _check_arguments(path: Any, overrides: Any) -> None:
    """What Python would take for something else: a text is a sequence of letters, a mapping one of keys."""
    if path is not None and not isinstance(path, str | PathLike):
        raise ConfigError(
            "a configuration is read from a file",
            got=path,
            need="the path of a YAML file",
            fix="write the keys to a YAML file",
        )
    if isinstance(overrides, str):
        raise ConfigError("overrides are a list", got=overrides, need="a list of texts", fix=f"write [{overrides!r}]")
    wrong = [overrides] if isinstance(overrides, Mapping) else [one for one in overrides if not isinstance(one, str)]
    if wrong:
        raise ConfigError("an override is not text", got=wrong[0], need="a list of texts, as ['policy.model_name=...']")


def _read_with_defaults(file: Path, readers: tuple[Path, ...]) -> tuple[Tree, Origins]:
    """The file's tree over those of the files that it names; `readers` are the files that led to this one."""
    tree, lines = read_yaml(file)
    origins: Origins = {key: f"{file}:{line}" for key, line in lines.items()}
    names = tree.pop("defaults", None)
    names = [] if names is None else [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            "defaults does not name files",
            where=origins[("defaults",)],
            field="defaults",
            got=names,
            need="a file, or a list of files, relative to this one",
        )
    base: Tree = {}
    base_origins: Origins = {}
    chain = (*readers, file.resolve())
    for name in names:
        parent = file.parent / name
        if parent.resolve() in chain:
            raise ConfigError("defaults go round in a circle", where=origins[("defaults",)], field="defaults", got=name)
        if not parent.is_file():
            raise ConfigError(
                "a file of defaults does not exist",
                where=origins[("defaults",)],
                field="defaults",
                got=str(parent),
                need="a path relative to the folder of this file",
            )
        parent_tree, parent_origins = _read_with_defaults(parent, chain)
        base = merge_trees(base, parent_tree)
        base_origins |= parent_origins
    return merge_trees(base, tree), base_origins | origins


def _resolve(tree: Mapping[Any, Any], file: Path, origins: Origins) -> Any:
    """The tree without references; those of a part of a larger OmegaConf configuration may lead out of it."""
    _register_functions()
    try:
        config = tree if isinstance(tree, DictConfig) else OmegaConf.create(dict(tree))
        assert isinstance(config, DictConfig)  # a dict makes no other
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        full_key = error.full_key or ""
        key = tuple(full_key.replace("[", ".").replace("]", "").split("."))
        reason = (error.msg or str(error)).splitlines()[0]
        raise ConfigError(
            f"a value cannot be resolved: {reason}",
            where=_origin(origins, key, file),
            field=full_key or None,
            got=_value_at(tree, key),
            need="a value, or a ${reference} to a key or function that exists",
        ) from None


def _value_at(tree: Any, key: Location) -> Any:
    for part in key:
        if isinstance(tree, list) and part.isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
        elif isinstance(tree, dict) and part in tree:
            tree = tree[part]
        else:
            return None
    return tree


def _register_functions() -> None:
    # Resolvers belong to the whole process: one that another package has registered is left alone.
    functions = {"mul": _mul, "div": _div, "max": _max, "min": _min, "int": _int}
    for name, function in functions.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_resolver(name, function)


# No annotations of number types: OmegaConf would check them, and refuse an int where it reads float.
def _mul(a: Any, b: Any) -> Any:
    return a * b


def _div(a: Any, b: Any) -> Any:
    """A whole number where there is no remainder: most keys are counts."""
    return a // b if isinstance(a, int) and isinstance(b, int) and a % b == 0 else a / b


def _max(*numbers: Any) -> Any:
    return max(numbers)


def _min(*numbers: Any) -> Any:
    return min(numbers)


def _int(number: Any) -> Any:
    return int(number)


def _note_override(origins: Origins, override: Override) -> None:
    where = f"command line, {override.text}"
    if not isinstance(override.value, dict):
        depth = len(override.path)
        for key in [key for key in origins if key[:depth] == override.path]:
            del origins[key]
    origins.update({key: where for key in _keys(override.value, override.path)})


def _keys(value: Any, path: Location) -> list[Location]:
    children = value.items() if isinstance(value, dict) else ()
    return [path, *(key for name, child in children for key in _keys(child, (*path, name)))]


def _origin(origins: Origins, key: Location, file: Path) -> str:
    """Where the value at `key` comes from: of the keys on the way to it, the innermost that a file or override gave.

    A section that was only made by an override of one of its keys comes from that override.
    """
    for length in range(len(key), 0, -1):
        if key[:length] in origins:
            return origins[key[:length]]
        inside = [where for other, where in origins.items() if other[:length] == key[:length]]
        if inside:
            return inside[-1]
    return str(file)


def _escape(value: Any) -> Any:
    """`${` in a resolved value is text; the backslash keeps it so when the file is read again."""
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    return value.replace("${", r"\${") if isinstance(value, str) else value


def _log_ignored(ignored: IgnoredKeys, root: type[Strict]) -> None:
    if not ignored:
        return
    paths = dict(
        pair for kind, schema in ENVIRONMENT_SECTIONS.items() for pair in _section_paths(schema, f"env.{kind}")
    )
    paths |= dict(_section_paths(root, ""))
    reasons = {f"{paths[section]}.{key}".lstrip("."): reason for section, key, reason in ignored}
    logger.info("keys that have no effect here: %s", ", ".join(reasons))
    for key, reason in reasons.items():
        logger.debug("%s has no effect: %s", key, reason)


def _section_paths(section: type[Strict], path: str) -> list[tuple[type[Strict], str]]:
    found = [(section, path)]
    for name, field in section.model_fields.items():
        for child in sections(field.annotation):
            found.extend(_section_paths(child, f"{path}.{field.alias or name}".lstrip(".")))
    return found
