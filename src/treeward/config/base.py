"""`Strict`: the class of every section of the configuration, and the errors of a section that does not validate.

    class HubConfig(Strict):
        push_to_hub: bool = False
        '''Upload the exported model when training ends.'''     # a field's docstring is its documentation

A section is frozen, refuses unknown keys, NaN and infinity, and documents each key once: the docstring under the field
appears in `docs/config.md` and in error messages:

    rm.yaml: there is no such key
      field: policy.train_global_batch_sise
      got:   128
      fix:   did you mean policy.train_global_batch_size?
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Self, Union, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from treeward.config.hints import COMMANDS, KEY_NOTES, KEYS_ELSEWHERE, VALUES_ELSEWHERE
from treeward.errors import ConfigError, nearest_name

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)  # it has no public name


Location = tuple[str, ...]
"""The keys that lead to a value, as ("policy", "optimizer", "kwargs")."""

Limit = Annotated[PositiveInt | None, BeforeValidator(lambda value: None if value == -1 else value)]
"""The most that something may be. Other toolkits write -1 for no limit."""
Period = Annotated[
    PositiveInt | None, BeforeValidator(lambda value: None if str(value) in ("0", "-1") else value)
]
"""Steps from one event to the next, or another number for which other toolkits write 0 or -1 for none."""
OneIsAList = BeforeValidator(lambda text: (text,) if isinstance(text, str) else text)
TextOrTexts = Annotated[tuple[str, ...], OneIsAList]
"""Texts; a single one needs no list."""


class _ReadableErrors(ModelMetaclass):
    """Makes a section that is constructed in Python fail with the same `ConfigError` as one in a file."""

    def __call__(cls, /, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            problems = problems_of(error, cast(type[Strict], cls))
            raise one_error(
                [problem.but(where=cls.__name__) for problem in problems], cls.__name__
            ) from None


class Strict(BaseModel, metaclass=_ReadableErrors):
    """A section of the configuration: frozen, no unknown keys, no NaN."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        validate_default=True,
    )

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Raise `ConfigError` for keys that do not fit together; called when the section is made."""

    def error(self, keys: str, need: str, fix: str | None = None) -> ConfigError:
        """An error at the first of `keys` (names, with spaces between) that shows the values of all.

        `watch.max_kl` is a key of an inner section.
        """
        spelt = {name: field.alias or name for name, field in type(self).model_fields.items()}
        values = {
            spelt.get(key, key): as_yaml(functools.reduce(getattr, key.split("."), self))
            for key in keys.split()
        }
        first, *others = values
        summary = (
            f"{' and '.join(values)} do not fit together"
            if others
            else f"{first} cannot be {values[first]}"
        )
        got = ", ".join(f"{key}: {value}" for key, value in values.items())
        return ConfigError(summary, field=first, got=got, need=need, fix=fix)


def as_yaml(value: Any) -> str:
    """A value as YAML spells it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_unset=True)
    elif isinstance(value, tuple):
        value = list(value)
    return str(value)


def sections(annotation: Any) -> Iterator[type[Strict]]:
    """Every section class that an annotation mentions, as `DatasetConfig` in `tuple[DatasetConfig, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        yield annotation
    elif get_origin(annotation) is Annotated:
        yield from sections(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType, tuple):
        for argument in get_args(annotation):
            yield from sections(argument)


def meaning(field: FieldInfo) -> str:
    """The documentation of a key: the docstring under it, or that of its section."""
    return " ".join((field.description or next(sections(field.annotation)).__doc__ or "").split())


def problems_of(
    error: ValidationError,
    root: type[Strict],
    further_keys: Callable[[type[Strict]], Iterable[str]] = lambda section: (),
) -> list[ConfigError]:
    """Every problem of `error`, found for the section `root`, as an error of its own; `field` begins at the section.

    `further_keys`: keys that a file may have in a section beside the section's own.
    """
    problems = list[ConfigError]()
    needs = set[str | None]()
    for details in error.errors(include_url=False):
        if details["type"] == "too_short" and details["input"]:
            continue  # its elements are wrong, and are reported themselves
        # Tags of a union, in angle brackets, are not part of the key.
        location = tuple(str(part) for part in details["loc"] if not str(part).startswith("<"))
        problem = details.get("ctx", {}).get("error")
        if not isinstance(problem, ConfigError):
            problem = _problem(details, location, root, further_keys)
        elif problem.field:
            location = (*location, *located(problem.field))
        problem = problem.but(field=key_path(location) or None)
        if details["type"] == "extra_forbidden":
            # The names of a section's keys are said once, at its first unknown one.
            is_said = problem.need in needs
            needs.add(problem.need)
            problem = problem.but(need=None) if is_said else problem
        problems.append(problem)
    return problems


def one_error(problems: Sequence[ConfigError], where: str) -> ConfigError:
    """The only problem, or an error that lists all of them."""
    if len(problems) == 1:
        return problems[0]
    listed = "\n".join(f"  {line}" for problem in problems for line in str(problem).splitlines())
    return ConfigError(f"the configuration has {len(problems)} mistakes\n{listed}", where=where)


def _problem(
    details: ErrorDetails,
    location: Location,
    root: type[Strict],
    further_keys: Callable[[type[Strict]], Iterable[str]],
) -> ConfigError:
    got = details["input"]
    keys = dict(_keys(root, further_keys))
    if details["type"] == "extra_forbidden":
        return _unknown_key(location, root, keys, got)
    meaning = re.split(r"(?<!\bet al)\. ", keys.get(without_numbers(location), ""))[0].rstrip(".")
    if details["type"] == "missing":
        return ConfigError("a key is missing", need=f"{location[-1]}: {meaning}")
    need = re.sub(r"^\w+ should (be|have) |, unable to parse.*", "", details["msg"])
    options = re.findall(r"'([^']*)'", str(details.get("ctx", {}).get("expected", "")))
    near = VALUES_ELSEWHERE.get(got, got) if isinstance(got, str) else ""
    near = near if near in options else nearest_name(near, options) or ""
    return ConfigError(
        "the value is not valid",
        got=as_yaml(got) if got is None or isinstance(got, bool) else got,
        need=f"{need} ({meaning})" if meaning else need,
        fix=f"did you mean {near}?" if near else None,
    )


def _unknown_key(
    location: Location, root: type[Strict], keys: Mapping[Location, str], got: Any
) -> ConfigError:
    *parents, key = location
    command = COMMANDS.get(".".join(location)) if "policy" in root.model_fields else None
    if command is not None:
        need = "a configuration of this command's run"
        fix = f"run `{command}`, or remove the key: ~{key_path(location)} on the command line"
        return ConfigError(f"{key} belongs to `{command}`", got=got, need=need, fix=fix)
    siblings = [path[-1] for path in keys if path[:-1] == without_numbers(parents)]
    # The names of TRL and verl that mean keys of this run; a misspelt one is known in the section of ours.
    run_paths = {
        alias: [path for path in paths if path.split(".")[0] in root.model_fields]
        for alias, paths in KEYS_ELSEWHERE.items()
    }
    within = "".join(f"{part}." for part in without_numbers(parents))
    meant = run_paths.get(key, [])
    if not meant:
        section_names = [
            alias
            for alias, paths in run_paths.items()
            if any(path.startswith(within) for path in paths)
        ]
        near = nearest_name(key, [*siblings, *section_names])
        meant = [key_path((*parents, near))] if near in siblings else run_paths.get(near or "", [])
    meant = meant or [key_path(path) for path in keys if path[-1] == key][:1]
    need, fix = f"one of {', '.join(siblings)}", f"did you mean {' and '.join(meant)}?"
    if key in KEY_NOTES:
        fix = f"{fix} {KEY_NOTES[key]}"
    return ConfigError(
        "there is no such key", got=got, need=None if meant else need, fix=fix if meant else None
    )


def _keys(
    section: type[Strict], further_keys: Callable[[type[Strict]], Iterable[str]]
) -> Iterator[tuple[Location, str]]:
    """Every key that a file may have, with its documentation; keys of a list's elements have the path of the list."""
    for name, field in section.model_fields.items():
        key = field.alias or name
        yield (key,), meaning(field)
        for inner in sections(field.annotation):
            for path, documentation in _keys(inner, further_keys):
                yield (key, *path), documentation
    for further in further_keys(section):
        yield (further,), ""


def without_numbers(location: Iterable[str]) -> Location:
    """The keys of a location, without the numbers of elements of lists."""
    return tuple(part for part in location if not part.isdecimal())


def key_path(location: Iterable[str]) -> str:
    """A location as text: `train[0].data_path`."""
    text = ""
    for part in location:
        if part.isdecimal():
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def located(field: str) -> Location:
    """The location that `joined` has made a text."""
    return tuple(field.replace("[", ".").replace("]", "").split("."))
