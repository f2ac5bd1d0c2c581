"""From a YAML file and command-line overrides to a checked configuration, and back.

    config = load_config("rm.yaml", ["policy.model_name=Qwen/Qwen2.5-0.5B-Instruct", "rm.seed=7"])
    save_config(config, "resolved.yaml")       # loading that gives an equal configuration
    config = load_grpo_config("grpo.yaml")     # what `treeward grpo` reads

OmegaConf reads the file, lays it over those that its `defaults:` names, applies the overrides and resolves `${...}`
references, to other keys or to the functions `mul`, `div`, `max`, `min` and `int`; pydantic checks the result. Every
mistake is a `ConfigError`. An override is one of these:

    rm.seed=7            set the key
    +rm.seed=7           add the key; an error if the configuration has it
    ++rm.seed=7          set the key, as the first
    ~logger.wandb        remove the key; an error if the configuration does not have it

A value is YAML, as in the file: `3`, `1e-5`, `true`, `null`, `[a, b]`, `{lr: 1e-5}`, `'quoted text'`. A mapping is
merged into the one that is there. `data.train.0.weight` and `data.train[0].weight` reach into a list.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from treeward.config.base import Location, Strict, config_error, nearest_name
from treeward.config.grpo_run import GRPORunConfig
from treeward.config.run import RewardModelRunConfig
from treeward.errors import ConfigError

__all__ = ["apply_override", "load_config", "load_file", "load_grpo_config", "load_section", "read_yaml", "save_config"]

logger = logging.getLogger(__name__)

_OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~|)(?P<key>\w[\w./-]*(?:\[\d+\][\w./-]*)*)(?P<value>=.*)?", re.DOTALL)
_Section = TypeVar("_Section", bound=Strict)
_Run = TypeVar("_Run", RewardModelRunConfig, GRPORunConfig)


def load_config(path: str | PathLike[str], overrides: Sequence[str] = ()) -> RewardModelRunConfig:
    """Read, override, resolve and check. Raises one `ConfigError` that lists every mistake found."""
    return _with_remarks(load_file(RewardModelRunConfig, path, overrides))


def load_grpo_config(path: str | PathLike[str], overrides: Sequence[str] = ()) -> GRPORunConfig:
    """A run of GRPO, as `load_config` reads one that trains a reward model."""
    return _with_remarks(load_file(GRPORunConfig, path, overrides))


def _with_remarks(config: _Run) -> _Run:
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
    """A whole configuration of any kind, read, overridden, resolved and checked as by `load_config`.

    `path`: None for a configuration without a file. `values`: laid over the file's values before the overrides, as a
    command's own options. Raises `ConfigError`.
    """
    _check_arguments(path, overrides)
    where = "command line" if path is None else str(path)
    config = OmegaConf.create() if path is None else OmegaConf.create(_read_with_defaults(Path(path), ()))
    config.merge_with(values or {})
    given: dict[Location, str] = {}
    for text in overrides:
        given[apply_override(config, text)] = text

    def origin(location: Location) -> str:
        found = [text for key, text in given.items() if location[: len(key)] == key]
        return f"command line, {found[-1]}" if found else where

    return _checked(section, config, where, origin)


def load_section(section: type[_Section], values: Mapping[str, Any], *, where: str) -> _Section:
    """Check one section that is given as a mapping, as `env_config` in Python. Raises `ConfigError`; `where` names it.

    `${...}` references within the mapping are resolved. OmegaConf's own mappings are accepted; their references may
    lead out of the section.
    """
    config = values if isinstance(values, DictConfig) else OmegaConf.create(dict(values))
    return _checked(section, config, where, lambda location: where)


def save_config(config: RewardModelRunConfig | GRPORunConfig, path: str | PathLike[str]) -> None:
    """Write every key, defaults included, as YAML that the config's own loader reads back to an equal configuration."""
    OmegaConf.save(OmegaConf.create(_escape(config.model_dump(mode="json", by_alias=True))), Path(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a file, with `${...}` references as they are. Raises `ConfigError` naming the file."""
    try:
        config = OmegaConf.load(path)
    except (OSError, UnicodeDecodeError) as error:
        need = "a YAML file in UTF-8"
        raise ConfigError("the configuration cannot be read", where=str(path), got=str(error), need=need) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = str(path) if mark is None else f"{path}:{mark.line + 1}"
        raise ConfigError(f"the YAML is not valid: {getattr(error, 'problem', None) or error}", where=where) from error
    if not isinstance(config, DictConfig):
        raise ConfigError("a configuration is not a mapping", where=str(path), got=config, need="policy: {...}")
    tree = OmegaConf.to_container(config)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def apply_override(config: DictConfig, text: str) -> Location:
    """Change `config` in place; returns the outermost key that the override set. Raises `ConfigError`."""
    match = _OVERRIDE.fullmatch(text)
    if match is None or (match["value"] in (None, "=")) != (match["sign"] == "~"):
        need = "key=value, +key=value, ++key=value or ~key, as policy.optimizer.kwargs.lr=1e-5; null for no value"
        fix = f"write {text.lstrip('-')}" if text.startswith("-") and "=" in text else None
        raise _bad_override("an override is not understood", text, need, fix)
    sign, key = match["sign"], re.sub(r"\[(\d+)\]", r".\1", match["key"])
    path = tuple(key.split("."))
    try:
        outermost = next((path[:i] for i in range(1, len(path)) if not _has(config, path[:i])), path)
        if sign == "~":
            _remove(config, path, text)
        elif sign == "+" and _has(config, path):
            need = f"a key that is not there; it is {OmegaConf.select(config, key)!r}"
            raise _bad_override("+ adds a key, and the configuration has it already", text, need, f"write {text[1:]}")
        else:
            parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value{match['value']}"]))
            value = parsed["value"]
            both = isinstance(value, dict) and isinstance(OmegaConf.select(config, key), DictConfig)
            OmegaConf.update(config, key, value, merge=both)
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        summary = f"an override cannot be applied: {str(getattr(error, 'problem', None) or error).splitlines()[0]}"
        need = "a key of a section or an element of a list, and a value in YAML"
        fix = "put a value with special characters in single quotes, and in double quotes for the shell"
        raise _bad_override(summary, text, need, fix) from None
    return outermost


def _bad_override(summary: str, text: str, need: str, fix: str | None) -> ConfigError:
    return ConfigError(summary, where="command line", got=text, need=need, fix=fix)


def _parent(config: DictConfig, path: Location) -> Any:
    return OmegaConf.select(config, ".".join(path[:-1])) if len(path) > 1 else config


def _has(config: DictConfig, path: Location) -> bool:
    parent = _parent(config, path)
    if isinstance(parent, ListConfig):
        return path[-1].isdecimal() and int(path[-1]) < len(parent)
    return isinstance(parent, DictConfig) and path[-1] in parent


def _remove(config: DictConfig, path: Location, text: str) -> None:
    parent = _parent(config, path)
    if not _has(config, path):
        names = [str(name) for name in parent] if isinstance(parent, DictConfig) else []
        near, need = nearest_name(path[-1], names), f"one of {', '.join(names)}" if names else "a key that is there"
        fix = f"did you mean {near}?" if near else None
        raise _bad_override("a key to be removed is not there", text, need, fix)
    del parent[int(path[-1]) if isinstance(parent, ListConfig) else path[-1]]


def _check_arguments(path: Any, overrides: Any) -> None:
    """Refuse what Python would take for something else: a text is a sequence of letters, a mapping one of keys."""
    if path is not None and not isinstance(path, str | PathLike):
        raise ConfigError("a configuration is read from a file", got=path, need="the path of a YAML file")
    if isinstance(overrides, str | Mapping) or not all(isinstance(one, str) for one in overrides):
        raise ConfigError("overrides are a list", got=overrides, need="a list of texts, as ['policy.model_name=...']")


def _read_with_defaults(file: Path, readers: tuple[Path, ...]) -> dict[str, Any]:
    """The file's tree over those of the files that it names; `readers` are the files that led to this one."""
    tree = read_yaml(file)
    names = tree.pop("defaults", None) or []
    names = [names] if isinstance(names, str) else names
    chain = (*readers, file.resolve())
    base: dict[str, Any] = {}
    for name in names:
        parent = file.parent / str(name)
        if not isinstance(names, list) or not parent.is_file() or parent.resolve() in chain:
            summary = "a file of defaults does not exist" if not parent.is_file() else "defaults go round in a circle"
            need = "a file, or a list of files, relative to the folder of this one"
            raise ConfigError(summary, where=str(file), field="defaults", got=name, need=need)
        base = _laid_over(base, _read_with_defaults(parent, chain))
    return _laid_over(base, tree)


def _laid_over(base: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    _replace_sections(base, tree)
    merged = OmegaConf.to_container(OmegaConf.merge(base, tree))
    assert isinstance(merged, dict)
    return {str(key): value for key, value in merged.items()}


def _replace_sections(base: dict[str, Any], tree: dict[str, Any]) -> None:
    """Drop from `base` the values that are replaced, not merged: NeMo RL's `_override_: true`, and lists."""
    for key, value in tree.items():
        old = base.get(key)
        if isinstance(value, dict) and value.get("_override_") is True:
            del value["_override_"]
            base.pop(key, None)
        elif isinstance(value, dict) and isinstance(old, dict):
            _replace_sections(old, value)
        else:
            base.pop(key, None)


def _checked(section: type[_Section], config: DictConfig, where: str, origin: Callable[[Location], str]) -> _Section:
    """Resolve references, validate, and log the keys without effect."""
    _register_functions()
    try:
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        field = error.full_key or ""
        raise ConfigError(
            f"a value cannot be resolved: {(error.msg or str(error)).splitlines()[0]}",
            where=origin(tuple(field.replace("[", ".").replace("]", "").split("."))),
            field=field or None,
            need="a value, or a ${reference} to a key or function that exists",
        ) from None
    ignored: dict[str, str] = {}
    try:
        checked = section.model_validate(resolved, context={"ignored": ignored})
    except ValidationError as error:
        raise config_error(error, section, resolved, where=where, origin=origin) from None
    if ignored:
        logger.info("keys that have no effect here: %s", ", ".join(ignored))
        for key, reason in ignored.items():
            logger.debug("%s has no effect: %s", key, reason)
    return checked


def _register_functions() -> None:
    # Resolvers belong to the whole process: one that another package has registered is left alone.
    functions: dict[str, Callable[..., Any]] = {
        "mul": lambda a, b: a * b,
        "div": _div,
        "max": lambda *numbers: max(numbers),
        "min": lambda *numbers: min(numbers),
        "int": lambda number: int(number),
    }
    for name, function in functions.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_resolver(name, function)


def _div(a: Any, b: Any) -> Any:
    """A whole number where there is no remainder: most keys are counts."""
    return a // b if isinstance(a, int) and isinstance(b, int) and a % b == 0 else a / b


def _escape(value: Any) -> Any:
    """`${` in a resolved value is text; the backslash keeps it so when the file is read again."""
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    return value.replace("${", r"\${") if isinstance(value, str) else value
