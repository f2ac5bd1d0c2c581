"""The tables of `docs/config.md`, generated from the schema; a test holds the page to it.

python -m treeward.config.reference docs/config.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from treeward.config.base import Strict, sections
from treeward.config.grpo_run import GRPORunConfig
from treeward.config.reward_environments import ENVIRONMENT_SECTIONS
from treeward.config.run import RewardModelRunConfig

__all__ = ["config_reference"]


def config_reference(page: str) -> str:
    """The page with its tables, between `<!-- begin NAME -->` and `<!-- end NAME -->`, generated anew."""
    train, grpo = list(_tables(RewardModelRunConfig, "")), list(_tables(GRPORunConfig, ""))
    known = {path for path, _ in train}
    parts = {
        "train": [(path, "", section) for path, section in train],
        "grpo": [(path, " of GRPO" if path in known else "", one) for path, one in grpo if (path, one) not in train],
        "environments": [
            (path, "", section)
            for kind, schema in ENVIRONMENT_SECTIONS.items()
            for path, section in _tables(schema, f"env.{kind}")
        ],
    }
    for name, tables in parts.items():
        text = "\n".join(line for table in tables for line in _section(*table))
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        head, rest = page.split(begin, 1)
        page = f"{head}{begin}\n\n{text}\n{end}{rest.split(end, 1)[1]}"
    return page


def _tables(section: type[Strict], path: str) -> Iterator[tuple[str, type[Strict]]]:
    """A section and those inside it, each with its path."""
    yield path, section
    for name, field in section.model_fields.items():
        for child in sections(field.annotation):
            suffix = "[]" if get_origin(field.annotation) is tuple else ""
            if path == "data" and name == "validation":
                continue  # the same class as train
            yield from _tables(child, f"{path}.{field.alias or name}".lstrip(".") + suffix)


def _section(path: str, of: str, section: type[Strict]) -> Iterator[str]:
    if path:
        yield f"## `{path}`{of}\n"
        yield f"{' '.join((section.__doc__ or '').split())}\n"
    yield "| Key | Type | Default | Meaning |\n|---|---|---|---|"
    for name, field in section.model_fields.items():
        key = field.alias or name
        doc = re.sub(r"\bNone\b", "`null`", " ".join((field.description or "").split()))
        yield f"| `{key}` | {_cell(_type_name(field.annotation))} | {_cell(_default(field))} | {_cell(doc)} |"
    yield ""
    foreign = section.foreign_keys()
    if keys := [f"`{key}`" for key, fix in foreign.items() if fix is None]:
        yield f"Accepted, without effect: {', '.join(keys)}.\n"
    if keys := [f"`{key}` ({fix})" for key, fix in foreign.items() if fix is not None]:
        yield f"Accepted while switched off: {'; '.join(keys)}.\n"


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        names = [_type_name(argument) for argument in arguments if argument is not NoneType]
        return " or ".join([*dict.fromkeys(names), *(["null"] if NoneType in arguments else [])])
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}s"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        return "section"
    return {str: "text", int: "whole number", float: "number", bool: "true or false"}[annotation]


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True) if not field.is_required() else PydanticUndefined
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, Strict):
        return "below"
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")
    return f"`{text}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(config_reference(file.read_text("utf-8")), "utf-8")
