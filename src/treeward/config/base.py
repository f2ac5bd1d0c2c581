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

import fnmatch
import functools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, Union, cast, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, PositiveInt, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from treeward.config.foreign import COMMANDS, FOREIGN_KEYS, KEY_NOTES, KEYS_ELSEWHERE, VALUES_ELSEWHERE, Only, Rule
from treeward.errors import ConfigError, nearest_name

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)  # it has no public name


logger = logging.getLogger(__name__)

Location = tuple[str, ...]
"""The keys that lead to a value, as ("policy", "optimizer", "kwargs")."""

Limit = Annotated[PositiveInt | None, BeforeValidator(lambda value: None if value == -1 else value)]
"""The most that something may be. Other toolkits write -1 for no limit."""
Period = Annotated[PositiveInt | None, BeforeValidator(lambda value: None if str(value) in ("0", "-1") else value)]
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
            raise config_error(error, cast(type[Strict], cls), where=cls.__name__) from None


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

    other_names: ClassVar[Mapping[str, str]] = {}
    """Other names of keys -> the key. Two names with different values are an error."""

    other_forms: ClassVar[tuple[str, ...]] = ()
    """Keys that the section's own validators turn into its fields."""

    section_key: ClassVar[str] = ""
    """The key under which a file has the section: that of the field that holds it, unless the class says another."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Tell the sections that this one holds under which key they stand."""
        super().__pydantic_init_subclass__(**kwargs)
        for name, field in cls.model_fields.items():
            section = field.annotation
            if isinstance(section, type) and issubclass(section, Strict) and not section.section_key:
                section.section_key = name

    @classmethod
    def foreign_keys(cls) -> dict[str, Rule]:
        """Keys of NeMo RL that are accepted, each with its rule in `FOREIGN_KEYS`.

        A key may be a pattern, as `refit_*`.
        """
        entries = [FOREIGN_KEYS.get(base.__name__, {}).items() for base in reversed(cls.__mro__)]
        return {key: fix for entry in entries for key, fix in entry if key not in cls.model_fields}

    @model_validator(mode="before")
    @classmethod
    def _accept_keys_of_other_toolkits(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        accepted, ignored, rules = dict(raw), list[str](), cls.foreign_keys()
        for key in raw:
            pattern = next((pattern for pattern in rules if fnmatch.fnmatchcase(str(key), pattern)), None)
            if pattern is None or key in cls.model_fields:
                continue
            value, rule = accepted.pop(key), rules[pattern]
            if rule is None:
                ignored.append(str(key))
            values, fix = rule if isinstance(rule, Only) else ((), rule)
            if fix is None or _is_off(value) or value in values:
                continue
            is_section, need = isinstance(value, Mapping) and "enabled" in value, "null, false or no such key"
            need = f"{' or '.join(map(str, values))}, or no such key" if values else need
            field, got = (f"{key}.enabled", "true") if is_section else (key, _shown(value))
            raise ConfigError(f"{key} is not supported", field=field, got=got, need=need, fix=fix)
        if ignored:
            place = f"in {cls.section_key} " if cls.section_key else ""
            logger.info("These keys have no effect %shere: %s", place, ", ".join(ignored))
        for alias, name in cls.other_names.items():
            if alias in accepted and accepted.setdefault(name, accepted[alias]) != accepted[alias]:
                summary, got = f"{name} and {alias} contradict each other", f"{accepted[name]} and {accepted[alias]}"
                raise ConfigError(summary, field=name, got=got, need="one of the two", fix=f"remove {alias}")
            accepted.pop(alias, None)
            # Of a required key null is no value: it is missing, by all its names.
            if name in accepted and accepted[name] is None and cls.model_fields[name].is_required():
                del accepted[name]
        return accepted

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
        values = {spelt.get(key, key): _shown(functools.reduce(getattr, key.split("."), self)) for key in keys.split()}
        first, *others = values
        summary = f"{' and '.join(values)} do not fit together" if others else f"{first} cannot be {values[first]}"
        got = ", ".join(f"{key}: {value}" for key, value in values.items())
        return ConfigError(summary, field=first, got=got, need=need, fix=fix)


def _shown(value: Any) -> str:
    """A value as YAML spells it."""
    value = value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
    value = list(value) if isinstance(value, tuple) else value
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _is_off(value: Any) -> bool:
    if isinstance(value, Mapping):
        return _is_off(value["enabled"]) if "enabled" in value else all(map(_is_off, value.values()))
    return value in (None, False, 0, -1, "", [], ())


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


def config_error(
    error: ValidationError, root: type[Strict], *, where: str, origin: Callable[[Location], str] | None = None
) -> ConfigError:
    """Turn every problem of `error`, found for the section `root`, into one `ConfigError`.

    `origin` says where the value at a key comes from, if that is not always `where`.
    """
    problems = []
    needs = set[str | None]()
    for details in error.errors(include_url=False):
        if details["type"] == "too_short" and details["input"]:
            continue  # its elements are wrong, and are reported themselves
        # Tags of a union, in angle brackets, are not part of the key.
        location = tuple(str(part) for part in details["loc"] if not str(part).startswith("<"))
        problem = details.get("ctx", {}).get("error")
        if not isinstance(problem, ConfigError):
            problem = _problem(details, location, root)
        elif problem.field:
            location = (*location, *problem.field.replace("[", ".").replace("]", "").split("."))
        problem = problem.but(field=_joined(location) or None, where=origin(location) if origin else where)
        # The names of a section's keys are said once, at its first unknown one.
        problems.append(problem.but(need=None) if problem.need in needs else problem)
        needs |= {problem.need} if details["type"] == "extra_forbidden" else set()
    if len(problems) == 1:
        return problems[0]
    listed = "\n".join(f"  {line}" for problem in problems for line in str(problem).splitlines())
    return ConfigError(f"the configuration has {len(problems)} mistakes\n{listed}", where=where)


def _problem(details: ErrorDetails, location: Location, root: type[Strict]) -> ConfigError:
    got, keys = details["input"], dict(_keys(root))
    if details["type"] == "extra_forbidden":
        return _unknown_key(location, root, keys, got)
    meaning = re.split(r"(?<!\bet al)\. ", keys.get(without_numbers(location), ""))[0].rstrip(".")
    aliases = [alias for path, alias in _aliases(root) if path == without_numbers(location)]
    called = f", also called {', '.join(aliases)}" if aliases else ""
    if details["type"] == "missing":
        return ConfigError("a key is missing", need=f"{location[-1]}{called}: {meaning}")
    # The file may have the key under another name, which the location has not.
    meaning = f"{location[-1]}{called}: {meaning}" if called else meaning
    need = re.sub(r"^\w+ should (be|have) |, unable to parse.*", "", details["msg"])
    options = re.findall(r"'([^']*)'", str(details.get("ctx", {}).get("expected", "")))
    near = VALUES_ELSEWHERE.get(got, got) if isinstance(got, str) else ""
    near = near if near in options else nearest_name(near, options) or ""
    return ConfigError(
        "the value is not valid",
        got=_shown(got) if got is None or isinstance(got, bool) else got,
        need=f"{need} ({meaning})" if meaning else need,
        fix=f"did you mean {near}?" if near else None,
    )


def _unknown_key(location: Location, root: type[Strict], keys: Mapping[Location, str], got: Any) -> ConfigError:
    *parents, key = location
    command = COMMANDS.get(".".join(location)) if "policy" in root.model_fields else None
    if command is not None:
        need = "a configuration of this command's run"
        fix = f"run `{command}`, or remove the key: ~{_joined(location)} on the command line"
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
        section_names = [alias for alias, paths in run_paths.items() if any(path.startswith(within) for path in paths)]
        near = nearest_name(key, [*siblings, *section_names])
        meant = [_joined((*parents, near))] if near in siblings else run_paths.get(near or "", [])
    meant = meant or [_joined(path) for path in keys if path[-1] == key][:1]
    need, fix = f"one of {', '.join(siblings)}", f"did you mean {' and '.join(meant)}?"
    if key in KEY_NOTES:
        fix = f"{fix} {KEY_NOTES[key]}"
    return ConfigError("there is no such key", got=got, need=None if meant else need, fix=fix if meant else None)


def _keys(section: type[Strict]) -> Iterator[tuple[Location, str]]:
    """Every key that a file may have, with its documentation; keys of a list's elements have the path of the list."""
    for name, field in section.model_fields.items():
        key = field.alias or name
        yield (key,), meaning(field)
        for inner in sections(field.annotation):
            yield from (((key, *path), doc) for path, doc in _keys(inner))
    for other in (*section.other_forms, *section.other_names):
        yield (other,), ""


def _aliases(section: type[Strict]) -> Iterator[tuple[Location, str]]:
    """The path of each key that has other names, with each of these."""
    for alias, name in section.other_names.items():
        yield (section.model_fields[name].alias or name,), alias
    for name, field in section.model_fields.items():
        for inner in sections(field.annotation):
            for path, alias in _aliases(inner):
                yield (field.alias or name, *path), alias


def without_numbers(location: Iterable[str]) -> Location:
    """The keys of a location, without the numbers of elements of lists."""
    return tuple(part for part in location if not part.isdecimal())


def _joined(location: Iterable[str]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if part.isdecimal() else f".{part}" if text else part
    return text
