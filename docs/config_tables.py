"""The tables of `docs/config.md`, generated from the schema; a test holds the page to it.

python docs/config_tables.py    # writes docs/config.md
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from treeward.config.base import Strict, meaning, sections
from treeward.config.grpo_run import GRPORunConfig
from treeward.config.reward_environments import ENVIRONMENTS
from treeward.config.run import RewardModelRunConfig
from treeward.config.served_judge import ServedJudgeConfig
from treeward.config.server import ServedModelConfig, ServerConfig
from treeward.config.spellings import SAMPLED_ALIKE, spellings


def config_reference(page: str) -> str:
    """The page with its tables, between `<!-- begin NAME -->` and `<!-- end NAME -->`, generated
    anew."""
    train, grpo = list(_tables(RewardModelRunConfig, "")), list(_tables(GRPORunConfig, ""))
    kinds = [
        table
        for name, kind in ENVIRONMENTS.items()
        for table in _tables(kind.section, f"env.{name}")
    ]
    parts = {
        "train": train,
        "grpo": [table for table in grpo if table not in train],
        "environments": kinds,
    }
    # their sections are those of environments
    parts["server"] = [
        ("", ServerConfig),
        ("models[]", ServedModelConfig),
        ("judge", ServedJudgeConfig),
    ]
    for part, tables in parts.items():
        known = {path for path, _ in train} if part == "grpo" else set()
        text = "".join(
            _section(path, " of GRPO" if path in known else "", section) for path, section in tables
        )
        begin, end = f"<!-- begin {part} -->", f"<!-- end {part} -->"
        head, rest = page.split(begin, 1)
        page = f"{head}{begin}\n\n{text}{end}{rest.split(end, 1)[1]}"
    return page


def _tables(section: type[Strict], path: str) -> Iterator[tuple[str, type[Strict]]]:
    """A section and those inside it, each with its path."""
    yield path, section
    for name, field in section.model_fields.items():
        if (path, name) == ("data", "validation"):
            continue  # the same as train
        annotation = field.annotation
        suffix = ""
        if get_origin(annotation) is tuple:
            suffix = "[]"
        elif get_origin(annotation) is dict:
            # A mapping whose keys the user names, as the members of a hybrid.
            _, annotation = get_args(annotation)
            suffix = ".NAME"
        for child in sections(annotation):
            yield from _tables(child, f"{path}.{field.alias or name}".lstrip(".") + suffix)


def _section(path: str, of: str, section: type[Strict]) -> str:
    lines = [f"## `{path}`{of}\n", f"{' '.join((section.__doc__ or '').split())}\n"] if path else []
    lines += ["| Key | Type | Default | Meaning |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        doc = re.sub(r"\bNone\b", "`null`", meaning(field))
        names = [field.alias or name]
        for spelling in spellings(section):
            names += [theirs for theirs, ours in spelling.renamed.items() if ours == name]
        cells = (
            " or ".join(f"`{one}`" for one in names),
            _type_name(field.annotation),
            _default(field),
            doc,
        )
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join([*lines, *_other_keys(section), "", ""])


def _other_keys(section: type[Strict]) -> Iterator[str]:
    """Paragraphs on the keys that a file may have in a section and that the section does not
    read."""
    unread = list[str]()
    off = dict[str, str]()
    fixed = dict[str, tuple[Sequence[Any], str]]()
    forms = list[str]()
    for spelling in spellings(section):
        unread += [key for key in spelling.unread.split() if key not in section.model_fields]
        off |= spelling.off
        fixed |= spelling.fixed
        forms += spelling.forms
    if unread:
        yield f"\nAccepted, without effect: {_quoted(unread)}."
    if any(key in SAMPLED_ALIKE for key in forms):
        yield f"\nAccepted only if equal to {_quoted(SAMPLED_ALIKE.values())}: {_quoted(SAMPLED_ALIKE)}."
    if off:
        remedies = [f"`{key}` ({remedy})" for key, remedy in off.items()]
        yield f"\nAccepted while switched off: {'; '.join(remedies)}."
    for key, (values, remedy) in fixed.items():
        yield f"\nAccepted: `{key}` as {' or '.join(map(str, values))} ({remedy})."


def _quoted(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


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
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Strict):
        return "below"
    value = list(value) if isinstance(value, tuple) else value
    text = (
        yaml.safe_dump(value, default_flow_style=True, width=1000)
        .removesuffix("\n")
        .removesuffix("\n...")
    )
    return f"`{text}`"


if __name__ == "__main__":
    file = Path(__file__).parent / "config.md"
    file.write_text(config_reference(file.read_text("utf-8")), "utf-8")
