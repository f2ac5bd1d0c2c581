"""`Strict`: the class of every section of the configuration, and the errors of a section that does
not validate.

    class HubConfig(Strict):
        push_to_hub: bool = False
        '''Upload the exported model when training ends.'''  # the documentation of the field

A section is frozen, refuses unknown keys, NaN and infinity, and documents each key once: the
docstring under the field appears in `docs/config.md` and in error messages:

    rm.yaml: there is no such key
      field: policy.train_global_batch_sise
      got:   128
      fix:   did you mean policy.train_global_batch_size?
"""

from __future__ import annotations

import os
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


# "Shao et al. 2024" does not end a sentence.
_END_OF_SENTENCE = re.compile(r"(?<!\bet al)\. ")
_WORDS_OF_PYDANTIC = re.compile(r"^\w+ should (be|have) |, unable to parse.*")
"""Around what a message of pydantic says is needed."""
_QUOTED = re.compile(r"'([^']*)'")

Location = tuple[str, ...]
"""The keys that lead to a value, as ("policy", "optimizer", "kwargs")."""


def instead_of(spelling: Any, value: Any) -> BeforeValidator:
    """A validator that reads `spelling`, another toolkit's or an older one, as `value`."""
    return BeforeValidator(lambda written: value if written == spelling else written)


def _without_period(value: Any) -> Any:
    # As text: false equals 0, and is a mistake here.
    return None if str(value) in ("0", "-1") else value


def _in_a_list(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _from_home(value: Any) -> Any:
    # YAML and overrides keep ~ as it is, and a folder of this name would be made.
    return os.path.expanduser(value) if isinstance(value, str) else value


FilePath = Annotated[str, BeforeValidator(_from_home)]
"""The path of a file or a folder, which may begin with `~`. A model's name stays as it is written:
what loads it expands `~` itself."""
Limit = Annotated[PositiveInt | None, instead_of(-1, None)]
"""The most that something may be. Other toolkits write -1 for no limit."""
Period = Annotated[PositiveInt | None, BeforeValidator(_without_period)]
"""Steps from one event to the next, or another number for which other toolkits write 0 or -1 for
none."""
OneIsAList = BeforeValidator(_in_a_list)
TextOrTexts = Annotated[tuple[str, ...], OneIsAList]
"""Texts; a single one needs no list."""


class _ReadableErrors(ModelMetaclass):
    """Makes a section that is constructed in Python fail with the same `ConfigError` as one in a
    file."""

    # Not by `__init__`: pydantic would then call that for files and inner sections too, and their
    # mistakes would become one, without places.
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
        # pydantic keeps names that begin with model_ for itself, and model_name is a key here.
        protected_namespaces=(),
        validate_default=True,
    )

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Raise `ConfigError` for keys that do not fit together; called when the section is
        made."""

    def error(self, keys: str, need: str, fix: str | None = None) -> ConfigError:
        """An error at the first of `keys` (names, with spaces between) that shows the values of
        all.

        `watch.max_kl` is a key of an inner section.
        """
        # By the names that a file has, which an alias may be.
        values: dict[str, str] = {}
        for key in keys.split():
            value: Any = self
            for part in key.split("."):
                value = getattr(value, part)
            field = type(self).model_fields.get(key)
            alias = None if field is None else field.alias
            values[alias or key] = as_yaml(value)
        first, *others = values
        summary = f"{first} cannot be {values[first]}"
        if others:
            summary = f"{' and '.join(values)} do not fit together"
        got = ", ".join(f"{key}: {value}" for key, value in values.items())
        return ConfigError(summary, field=first, got=got, need=need, fix=fix)


def as_yaml(value: Any) -> str:
    """A value as YAML spells it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, BaseModel):
        # An error shows what the file says, without the defaults.
        value = value.model_dump(exclude_unset=True)
    elif isinstance(value, tuple):
        value = list(value)
    return str(value)


def sections(annotation: Any) -> Iterator[type[Strict]]:
    """Every section class that an annotation mentions, as `DatasetConfig` in `tuple[DatasetConfig,
    ...]`; not those of a mapping's values, whose keys the user names."""
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        yield annotation
    elif get_origin(annotation) is Annotated:
        yield from sections(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType, tuple):
        for argument in get_args(annotation):
            yield from sections(argument)


def meaning(field: FieldInfo) -> str:
    """The documentation of a key: the docstring under it, or that of its section."""
    text = field.description or next(sections(field.annotation)).__doc__ or ""
    return " ".join(text.split())


def no_further_keys(section: type[Strict]) -> Iterable[str]:
    """A file has the section's own keys alone."""
    return ()


def problems_of(
    error: ValidationError,
    root: type[Strict],
    further_keys: Callable[[type[Strict]], Iterable[str]] = no_further_keys,
) -> list[ConfigError]:
    """Every problem of `error`, found for the section `root`, as an error of its own; `field`
    begins at the section.

    `further_keys`: keys that a file may have in a section beside the section's own.
    """
    problems: list[ConfigError] = []
    needs: set[str | None] = set()
    for details in error.errors(include_url=False):
        if details["type"] == "too_short" and details["input"]:
            continue  # its elements are wrong, and are reported themselves
        # Tags of a union, in angle brackets, are not part of the key.
        location = tuple(str(part) for part in details["loc"] if not str(part).startswith("<"))
        # pydantic wraps the `ConfigError` of a section's own check, and keeps it here.
        problem = details.get("ctx", {}).get("error")
        if not isinstance(problem, ConfigError):
            problem = _problem(details, location, root, further_keys)
        elif problem.field:
            # Its field begins at the section whose check raised it.
            location = (*location, *located(problem.field))
        problem = problem.but(field=key_path(location) or None)
        if details["type"] == "extra_forbidden":
            # The names of a section's keys are said once, at its first unknown one.
            if problem.need in needs:
                problem = problem.but(need=None)
            needs.add(problem.need)
        problems.append(problem)
    return problems


def one_error(problems: Sequence[ConfigError], where: str) -> ConfigError:
    """The only problem, or an error that lists all of them."""
    if len(problems) == 1:
        return problems[0]
    lines = [f"the configuration has {len(problems)} mistakes"]
    for problem in problems:
        lines += [f"  {line}" for line in str(problem).splitlines()]
    return ConfigError("\n".join(lines), where=where)


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
    documentation = keys.get(without_numbers(location), "")
    first_sentence = _END_OF_SENTENCE.split(documentation)[0].rstrip(".")
    if details["type"] == "missing":
        return ConfigError("a key is missing", need=f"{location[-1]}: {first_sentence}")
    # "Input should be greater than 0" becomes "greater than 0".
    need = _WORDS_OF_PYDANTIC.sub("", details["msg"])
    if first_sentence:
        need = f"{need} ({first_sentence})"
    # A Literal's options are in the context.
    options = _QUOTED.findall(str(details.get("ctx", {}).get("expected", "")))
    near: str | None = None
    if isinstance(got, str):
        # First by meaning: no spelling of ours is near "low_var_kl".
        near = VALUES_ELSEWHERE.get(got, got)
        if near not in options:
            near = nearest_name(near, options)
    if got is None or isinstance(got, bool):
        got = as_yaml(got)
    fix = f"did you mean {near}?" if near else None
    return ConfigError("the value is not valid", got=got, need=need, fix=fix)


def _unknown_key(
    location: Location, root: type[Strict], keys: Mapping[Location, str], got: Any
) -> ConfigError:
    *parents, key = location
    # `root` may also be a section alone, as that of an environment, which belongs to no command.
    is_of_run = "policy" in root.model_fields
    command = COMMANDS.get(".".join(location))
    if command is not None and is_of_run:
        return ConfigError(
            f"{key} belongs to `{command}`",
            got=got,
            need="a configuration of this command's run",
            fix=f"run `{command}`, or remove the key: ~{key_path(location)} on the command line",
        )
    siblings = [path[-1] for path in keys if path[:-1] == without_numbers(parents)]
    meant = _keys_meant(key, parents, siblings, root)
    if not meant:
        # It may stand in another section; the first such is named.
        meant = [key_path(path) for path in keys if path[-1] == key][:1]
    if not meant:
        return ConfigError("there is no such key", got=got, need=f"one of {', '.join(siblings)}")
    fix = f"did you mean {' and '.join(meant)}?"
    if key in KEY_NOTES:
        fix = f"{fix} {KEY_NOTES[key]}"
    return ConfigError("there is no such key", got=got, fix=fix)


def _keys_meant(
    key: str, parents: Sequence[str], siblings: Sequence[str], root: type[Strict]
) -> list[str]:
    """The paths of the keys that TRL or verl call so, or else of what is spelt nearly so among the
    `siblings` and the names that TRL and verl have for keys of the section at `parents`."""
    # A name such as num_train_epochs has a key in either kind of run: that of this run counts.
    run_paths: dict[str, list[str]] = {}
    section_names: list[str] = []
    within = "".join(f"{part}." for part in without_numbers(parents))
    for alias, paths in KEYS_ELSEWHERE.items():
        run_paths[alias] = [path for path in paths if path.split(".")[0] in root.model_fields]
        if any(path.startswith(within) for path in run_paths[alias]):
            section_names.append(alias)
    if run_paths.get(key):
        return run_paths[key]
    near = nearest_name(key, [*siblings, *section_names])
    if near is None:
        return []
    if near in siblings:
        return [key_path((*parents, near))]
    return run_paths[near]


def _keys(
    section: type[Strict], further_keys: Callable[[type[Strict]], Iterable[str]]
) -> Iterator[tuple[Location, str]]:
    """Every key that a file may have, with its documentation; keys of a list's elements have the
    path of the list."""
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
    """The location of which `key_path` has made a text."""
    return tuple(field.replace("[", ".").replace("]", "").split("."))
