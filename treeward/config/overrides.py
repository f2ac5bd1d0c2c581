"""Command-line overrides: `key=value` and its relatives, applied to a tree of plain values.

    rm.seed=7                                set, whether or not the file has the key
    +rm.seed=7                               set; an error if the file has the key
    ++rm.seed=7                              set, as the first
    ~logger.wandb      ~rm.seed=42           remove; an error if it is not there, or has another value

The schema judges afterwards whether the key exists. A value means what it means in a file: `3`, `1e-5`, `true`,
`null`, `[a, b]`, `{lr: 1e-5}`, `'quoted'`; any other text is taken as it is, further `=` signs included. A mapping is
merged into the one that is there. `data.train.0.weight` and `data.train[0].weight` reach into a list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from treeward.config.base import nearest_name
from treeward.config.yaml_file import Tree, parse_scalar, parse_value
from treeward.errors import ConfigError

__all__ = ["Override", "apply_override", "merge_trees", "parse_override"]

_WHERE = "command line"
_OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=]*)(?P<assigned>=(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Override:
    """One parsed override. `value` means nothing if `has_value` is false, as in `~key`."""

    text: str
    action: Literal["set", "add", "remove"]
    path: tuple[str, ...]
    value: Any
    has_value: bool


def parse_override(text: str) -> Override:
    """Read one override. Raises `ConfigError` for anything else."""
    match = _OVERRIDE.fullmatch(text)
    assert match is not None  # the pattern matches any text
    sign, key, raw = match["sign"], match["key"].strip(), match["value"]
    path = tuple(re.sub(r"\[(\d+)\]", r".\1", key).split("."))
    if not all(re.fullmatch(r"[^\s\[\]{}+~]+", part) for part in path) or key.startswith("-"):
        raise ConfigError(
            "an override is not understood",
            where=_WHERE,
            got=text,
            need="key=value, +key=value, ++key=value or ~key, as policy.optimizer.kwargs.lr=1e-5",
            fix=f"write {text.lstrip('-')}" if text.startswith("-") and "=" in text else None,
        )
    if raw is None and sign != "~":
        raise ConfigError(
            "an override has no value",
            where=_WHERE,
            got=text,
            need=f"{key}=value",
            fix=f"to remove the key write ~{key}",
        )
    action: Literal["set", "add", "remove"] = "remove" if sign == "~" else "add" if sign == "+" else "set"
    return Override(text, action, path, None if raw is None else _parse_value(raw, text), raw is not None)


def apply_override(tree: Tree, override: Override) -> None:
    """Change `tree` in place. Raises `ConfigError` where the path leads through something that is not a section."""
    parent: Any = tree
    for i, part in enumerate(override.path[:-1]):
        parent = _child(parent, part, override, create=override.action != "remove", depth=i)
    last = override.path[-1]
    key: Any = last
    if isinstance(parent, list):
        key = _index(parent, last, override, allow_end=override.action != "remove")
        exists = key < len(parent)
        if not exists:
            parent.append(None)
    else:
        exists = last in parent
    if override.action == "remove":
        _remove(parent, key, exists, override)
    elif override.action == "add" and exists:
        raise ConfigError(
            "+ adds a key, and the configuration has it already",
            where=_WHERE,
            got=override.text,
            need=f"a key that is not there; it is {parent[key]!r}",
            fix=f"write {override.text[1:]}",
        )
    else:
        old = parent[key] if exists else None
        both = isinstance(old, Mapping) and isinstance(override.value, Mapping)
        parent[key] = merge_trees(dict(old), override.value) if both and isinstance(old, Mapping) else override.value


def merge_trees(base: Tree, other: Mapping[str, Any]) -> Tree:
    """`base` with `other` laid over it: mappings merge key by key, anything else replaces what was there.

    A mapping with NeMo RL's `_override_: true` replaces too.
    """
    merged = dict(base)
    for key, value in other.items():
        if not isinstance(value, Mapping):
            merged[key] = value
            continue
        old = merged.get(key)
        keeps = isinstance(old, dict) and value.get("_override_") is not True
        own = {name: item for name, item in value.items() if (name, item) != ("_override_", True)}
        merged[key] = merge_trees(old if keeps and isinstance(old, dict) else {}, own)
    return merged


def _parse_value(raw: str, text: str) -> Any:
    if raw == "":
        raise ConfigError(
            "an override has no value", where=_WHERE, got=text, need="null for nothing, '' for the empty text"
        )
    if raw[0] not in "[{\"'":
        return parse_scalar(raw)
    try:
        return parse_value(raw)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"the value of an override is not valid: {getattr(error, 'problem', None) or error}",
            where=_WHERE,
            got=text,
            need="[a, b], {a: 1} or 'text', complete",
            fix="to have it as text put it in single quotes, and in double quotes for the shell",
        ) from error


def _child(parent: Any, part: str, override: Override, *, create: bool, depth: int) -> Any:
    """The section that `part` names; made where there is none (or null) if `create`."""
    key: Any = part
    if isinstance(parent, list):
        key = _index(parent, part, override, allow_end=False)
    elif part not in parent and not create:
        raise _not_there(parent, part, override)
    child = parent[key] if isinstance(parent, list) else parent.get(key)
    if child is None and create:
        child = parent[key] = {}
    if not isinstance(child, dict | list):
        raise ConfigError(
            "an override reaches into something that is not a section",
            where=_WHERE,
            got=override.text,
            need=f"a section at {'.'.join(override.path[: depth + 1])}; it is {child!r}",
        )
    return child


def _index(items: list[Any], part: str, override: Override, *, allow_end: bool) -> int:
    limit = len(items) + (1 if allow_end else 0)
    if not part.isdecimal() or int(part) >= limit:
        raise ConfigError(
            "an override does not say which element of a list",
            where=_WHERE,
            got=override.text,
            need=f"a number below {limit} in the place of {part}",
        )
    return int(part)


def _remove(parent: Any, key: Any, exists: bool, override: Override) -> None:
    if not exists:
        raise _not_there(parent, key, override)
    if override.has_value and parent[key] != override.value:
        raise ConfigError(
            "a key to be removed has another value",
            where=_WHERE,
            got=override.text,
            need=f"the value that it has: {parent[key]!r}",
            fix=f"to remove it anyway write ~{'.'.join(override.path)}",
        )
    del parent[key]


def _not_there(parent: Mapping[str, Any], part: str, override: Override) -> ConfigError:
    near = nearest_name(part, parent)
    return ConfigError(
        "a key to be removed is not there",
        where=_WHERE,
        got=override.text,
        need=f"one of {', '.join(parent)}" if parent else "a key of the configuration",
        fix=f"did you mean {near}?" if near else None,
    )
