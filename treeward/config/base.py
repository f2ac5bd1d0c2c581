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
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, Union, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails

from treeward.config.foreign import KEYS_ELSEWHERE, MUST_BE_OFF, VALUES_ELSEWHERE, WITHOUT_EFFECT, command_of
from treeward.errors import ConfigError, nearest_name

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)  # it has no public name

__all__ = ["Limit", "Location", "OneIsAList", "Period", "Strict", "TextOrTexts", "at_field", "config_error"]
__all__ += ["nearest_name", "sections"]

Location = tuple[str, ...]
"""The keys that lead to a value, as ("policy", "optimizer", "kwargs")."""

Limit = Annotated[PositiveInt | None, BeforeValidator(lambda value: None if value == -1 else value)]
"""The most that something may be. Other toolkits write -1 for no limit."""
Period = Annotated[PositiveInt | None, BeforeValidator(lambda value: None if str(value) in ("0", "-1") else value)]
"""Steps from one event to the next. Other toolkits write 0 or -1 for never."""
OneIsAList = BeforeValidator(lambda texts: (texts,) if isinstance(texts, str) else texts)
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

    @classmethod
    def keys_without_effect(cls) -> tuple[str, ...]:
        """Keys of NeMo RL that are accepted in any state: see `treeward.config.foreign`."""
        return tuple(key for base in cls.__mro__ for key in WITHOUT_EFFECT.get(base.__name__, "").split())

    @classmethod
    def keys_that_must_be_off(cls) -> dict[str, str]:
        """Keys of features that treeward does not have, each with the alternative."""
        return {key: fix for base in cls.__mro__ for key, fix in MUST_BE_OFF.get(base.__name__, {}).items()}

    @model_validator(mode="before")
    @classmethod
    def _accept_keys_of_other_toolkits(cls, raw: Any, info: ValidationInfo) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        must_be_off, given = cls.keys_that_must_be_off(), dict(raw)
        for key in must_be_off.keys() & given.keys() - cls.model_fields.keys():
            value = given.pop(key)
            if not _is_off(value):
                field = key
                if isinstance(value, Mapping) and "enabled" in value:
                    field, value = f"{key}.enabled", value["enabled"]
                need, fix = "null, false or no such key", must_be_off[key]
                raise ConfigError(f"{key} is not supported", field=field, got=_shown(value), need=need, fix=fix)
        for key in set(cls.keys_without_effect()) & given.keys() - cls.model_fields.keys():
            del given[key]
            (info.context or {}).get("ignored", []).append(key)
        for theirs, ours in cls.other_names.items():
            if theirs not in given:
                continue
            value = given.pop(theirs)
            if given.setdefault(ours, value) != value:
                summary, got = f"{ours} and {theirs} contradict each other", f"{ours}: {given[ours]}, {theirs}: {value}"
                raise ConfigError(summary, field=ours, got=got, need="one of the two", fix=f"remove {theirs}")
        return given

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Raise `ConfigError` for keys that do not fit together; called when the section is made."""

    def refuse(self, wrong: Any, summary: str, keys: str, *, need: str, fix: str | None = None) -> None:
        """Raise `ConfigError` if `wrong`: `keys` (names, with spaces between) do not fit together.

        The error is at the first of them and shows the values of all; `watch.max_kl` is in an inner section.
        """
        if wrong:
            values = {key: functools.reduce(getattr, key.split("."), self) for key in keys.split()}
            got = ", ".join(f"{key}: {_shown(value)}" for key, value in values.items())
            raise ConfigError(summary, field=keys.split()[0], got=got, need=need, fix=fix)

    def check_pair(self, one: str, other: str, *, need: str = "both of them, or neither") -> None:
        """Raise `ConfigError`, at the missing key, if only one of two keys is given."""
        given = [getattr(self, key) is not None for key in (one, other)]
        keys = f"{other} {one}" if given[0] else f"{one} {other}"
        self.refuse(given[0] != given[1], f"{one} and {other} belong together", keys, need=need)

    @classmethod
    def key_names(cls) -> tuple[str, ...]:
        """The names of this section's keys as a file spells them."""
        return tuple(field.alias or name for name, field in cls.model_fields.items())


def _shown(value: Any) -> str:
    """A value as YAML spells it."""
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


def config_error(
    error: ValidationError, root: type[Strict], *, where: str, origin: Callable[[Location], str] | None = None
) -> ConfigError:
    """Turn every problem of `error`, found for the section `root`, into one `ConfigError`.

    `origin` says where the value at a key comes from, if that is not always `where`.
    """
    problems = []
    for details in error.errors(include_url=False):
        location, problem = _problem(details, root)
        place = origin(location) if origin else where
        problems.append(ConfigError(**problem, where=place, field=_joined(location) or None))
    if len(problems) == 1:
        return problems[0]
    listed = "\n".join(f"  {line}" for problem in problems for line in str(problem).splitlines())
    return ConfigError(f"the configuration has {len(problems)} mistakes\n{listed}", where=where)


def at_field(error: ConfigError, field: str, *, where: str | None = None) -> ConfigError:
    """The same error at another field, as one of a section is at a key of the section around it."""
    got = {} if error.got is None else {"got": error.got}
    return ConfigError(error.summary, where=where, field=field, need=error.need, fix=error.fix, **got)


def _problem(details: ErrorDetails, root: type[Strict]) -> tuple[Location, dict[str, Any]]:
    """Where a problem is, and the arguments of the `ConfigError` that describes it."""
    # Tags of a union, in angle brackets, are not part of the key.
    location = tuple(str(part) for part in details["loc"] if not str(part).startswith("<"))
    inner, got = details.get("ctx", {}).get("error"), details["input"]
    if isinstance(inner, ConfigError):
        if inner.field:
            location = (*location, *inner.field.replace("[", ".").replace("]", "").split("."))
        shown = {} if inner.got is None else {"got": inner.got}
        return location, {"summary": inner.summary, "need": inner.need, "fix": inner.fix} | shown
    if details["type"] == "extra_forbidden":
        return location, _unknown_key(location, root) | {"got": got}
    meaning = _first_sentence(dict(_keys(root)).get(without_numbers(location), ""))
    if details["type"] == "missing":
        return location, {"summary": "a key is missing", "need": meaning}
    need = details["msg"].removeprefix("Input should be ").split(", unable to parse")[0]
    options = re.findall(r"'([^']*)'", str(details.get("ctx", {}).get("expected", "")))
    near = None
    if isinstance(got, str) and options:
        same = VALUES_ELSEWHERE.get(got.lower())
        near = same if same in options else nearest_name(got, options)
    return location, {
        "summary": "the value is not valid",
        "got": _shown(got) if got is None or isinstance(got, bool) else got,
        "need": f"{need} ({meaning})" if meaning else need,
        "fix": f"did you mean {near}?" if near else None,
    }


def _unknown_key(location: Location, root: type[Strict]) -> dict[str, Any]:
    *parents, key = location
    command = command_of(location) if "policy" in root.model_fields else None
    if command is not None:
        return {
            "summary": f"{key} belongs to `{command}`",
            "need": "a configuration of this command's run",
            "fix": f"run `{command}`, or remove the key: ~{_joined(location)} on the command line",
        }
    keys = dict(_keys(root))
    candidates = [path[-1] for path in keys if path[:-1] == without_numbers(parents)]
    elsewhere = {theirs: _existing(ours, keys) for theirs, ours in KEYS_ELSEWHERE.items()}
    # A misspelt name of another toolkit is nearer to that name than to any of ours.
    here = [theirs for theirs, paths in elsewhere.items() if any(path[:-1] == tuple(parents) for path in paths)]
    near = nearest_name(key, [*candidates, *here])
    if elsewhere.get(key):
        meant = elsewhere[key]
    elif near is not None:
        meant = [(*parents, near)] if near in candidates else elsewhere[near]
    else:
        meant = [path for path in keys if path[-1] == key][:1]
    return {
        "summary": "there is no such key",
        "need": None if meant else f"one of {', '.join(candidates)}",
        "fix": f"did you mean {' and '.join(map(_joined, meant))}?" if meant else None,
    }


def _keys(section: type[Strict]) -> Iterator[tuple[Location, str]]:
    """Every key that a file may have, with its documentation; keys of a list's elements have the path of the list."""
    for name, field in section.model_fields.items():
        key = field.alias or name
        yield (key,), field.description or ""
        for inner in sections(field.annotation):
            yield from (((key, *path), doc) for path, doc in _keys(inner))
    for other in (*section.other_forms, *section.other_names):
        yield (other,), ""


def _existing(paths: Iterable[str], keys: Mapping[Location, str]) -> list[Location]:
    """Those of the full keys that a section has; a section that is made in Python has the ends of them.

    The last part may be a key of a mapping without a schema, as `lr` of `policy.optimizer.kwargs`.
    """
    ends = [[tuple(path.split(".")[start:]) for start in range(path.count(".") + 1)] for path in paths]
    found = (next((end for end in each if end in keys or end[:-1][1:] and end[:-1] in keys), None) for each in ends)
    return [end for end in found if end]


def without_numbers(location: Iterable[str]) -> Location:
    """The keys of a location, without the numbers of elements of lists."""
    return tuple(part for part in location if not part.isdecimal())


def _first_sentence(text: str) -> str:
    return re.split(r"(?<!\bet al)\. ", " ".join(text.split()))[0].rstrip(".")


def _joined(location: Iterable[str]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if part.isdecimal() else f".{part}" if text else part
    return text
