"""Reading and writing YAML with the meaning that a configuration needs.

    tree, lines = read_yaml(Path("rm.yaml"))       # {"rm": {"seed": 42}}, {("rm",): 3, ("rm", "seed"): 4}

PyYAML follows YAML 1.1, where `1e-5` is text, `1:00:00:00` is 216000 and the second of two equal keys wins silently.
Here `1e-5` is a number, a duration is text, equal keys are an error, and every key remembers its line.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from treeward.errors import ConfigError

__all__ = ["Lines", "Tree", "parse_scalar", "parse_value", "read_yaml", "write_yaml"]

Tree = dict[str, Any]
Lines = dict[tuple[str, ...], int]

_RESOLVERS = (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF", "tTfFyYnNoO"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+\.?[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own interface

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if self._key(key) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value} is given twice", key.start_mark
                )
            seen.add(key.value)
        self.flatten_mapping(node)
        return {self._key(key): self.construct_object(value, deep=True) for key, value in node.value}

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, "a key is not a word", node.start_mark)
        return str(node.value)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own interface

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        # The empty text is null too; PyYAML looks that up under the key "".
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_name}", re.compile(f"(?:{_pattern})$"), [*_first, *([""] if _name == "null" else [])]
        )


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    # PyYAML's own would read 010 as 8.
    return int(loader.construct_scalar(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def read_yaml(path: Path) -> tuple[Tree, Lines]:
    """Read a file: its content, and the line (from 1) of every key. Raises `ConfigError` naming file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "the configuration cannot be read", where=str(path), got=error.strerror, need="a YAML file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError("the configuration is not UTF-8 text", where=str(path), got=error.reason) from error
    try:
        tree, node = _compose(text)
    except yaml.YAMLError as error:
        raise _syntax_error(error, str(path)) from error
    if not isinstance(tree, dict):
        raise ConfigError("a configuration is not a mapping", where=str(path), got=tree, need="policy: {...}")
    lines: Lines = {}
    if node is not None:
        _collect_lines(node, (), lines)
    return tree, lines


def write_yaml(tree: Tree, path: Path) -> None:
    """Write a tree of plain values; `read_yaml` gives it back."""
    text = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    path.write_text(text, encoding="utf-8")


def parse_value(text: str) -> Any:
    """Read a whole YAML value in flow style, as `[1, 2]`, `{a: 1}` or a quoted string. Raises `yaml.YAMLError`."""
    value, node = _compose(text)
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    for key, item in pairs:
        # YAML reads {lr:1} as the key `lr:1` with no value, which nobody means.
        if key.style is None and ":" in key.value and item.value == "" and item.style is None:
            problem = "a colon without a space does not separate"
            raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
    return value


def parse_scalar(text: str) -> Any:
    """Read a bare word as a file would: a number, a boolean, null, or else the text itself, whatever is in it."""
    loader = _Loader("")
    try:
        tag = loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        return loader.construct_object(yaml.ScalarNode(tag, text))
    finally:
        loader.dispose()


def _compose(text: str) -> tuple[Any, yaml.Node | None]:
    """The content of a document, and its syntax tree. Empty text is an empty mapping."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return ({} if node is None else loader.construct_document(node)), node
    finally:
        loader.dispose()


def _collect_lines(node: yaml.Node, path: tuple[str, ...], lines: Lines) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            lines[*path, key.value] = key.start_mark.line + 1
            _collect_lines(value, (*path, key.value), lines)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            lines[*path, str(i)] = value.start_mark.line + 1
            _collect_lines(value, (*path, str(i)), lines)


def _syntax_error(error: yaml.YAMLError, path: str) -> ConfigError:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}"
        got = mark.get_snippet(indent=0, max_length=80)
        line = got.splitlines()[0].strip() if got else None
        return ConfigError(f"the YAML is not valid: {error.problem}", where=where, got=line or "the end of the file")
    return ConfigError("the YAML is not valid", where=path, got=" ".join(str(error).split()))
