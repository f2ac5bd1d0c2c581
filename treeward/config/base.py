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
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
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

from treeward.config.elsewhere import KEYS_ELSEWHERE, VALUES_ELSEWHERE, command_of
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
            raise config_error(error, cast(type[Strict], cls), values, where=cls.__name__) from None


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

    ignored_keys: ClassVar[Mapping[str, str]] = {}
    """Keys of other toolkits that are accepted without effect, each with the reason why that is harmless."""

    switched_off_keys: ClassVar[Mapping[str, str]] = {}
    """Keys of features that treeward does not have, each with the alternative. They are accepted while they are off
    (null, false, 0, -1, empty, or a section in which nothing is on) and refused otherwise."""

    other_names: ClassVar[Mapping[str, str]] = {}
    """Other names of keys -> the key. Two names with different values are an error."""

    other_forms: ClassVar[tuple[str, ...]] = ()
    """Keys that the section's own validators turn into its fields."""

    @model_validator(mode="before")
    @classmethod
    def _accept_keys_of_other_toolkits(cls, raw: Any, info: ValidationInfo) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        ignored = [key for key in cls.ignored_keys if key in raw]
        (info.context or {}).get("ignored", {}).update({key: cls.ignored_keys[key] for key in ignored})
        for key, remedy in cls.switched_off_keys.items():
            if key in raw and not _is_off(raw[key]):
                summary, need = f"{key} is not supported", "null, false or no such key"
                raise ConfigError(summary, field=key, got=raw[key], need=need, fix=remedy)
        kept = {key: value for key, value in raw.items() if key not in ignored and key not in cls.switched_off_keys}
        for theirs, ours in cls.other_names.items():
            if theirs not in kept:
                continue
            value = kept.pop(theirs)
            if kept.setdefault(ours, value) != value:
                summary, got = f"{ours} and {theirs} contradict each other", f"{ours}: {kept[ours]}, {theirs}: {value}"
                raise ConfigError(summary, field=ours, got=got, need="one of the two", fix=f"remove {theirs}")
        return kept

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Raise `ConfigError` for keys that do not fit together; called when the section is made."""

    def conflict(self, summary: str, *keys: str, need: str, fix: str | None = None) -> ConfigError:
        """The error of `keys` that do not fit together, at the first of them; `watch.max_kl` is in an inner section."""
        got = ", ".join(f"{key}: {_shown(functools.reduce(getattr, key.split('.'), self))}" for key in keys)
        return ConfigError(summary, field=keys[0], got=got, need=need, fix=fix)

    def check_pair(self, one: str, other: str, *, need: str = "both of them, or neither") -> None:
        """Raise `ConfigError`, at the missing key, if only one of two keys is given."""
        if (getattr(self, one) is None) != (getattr(self, other) is None):
            keys = (one, other) if getattr(self, one) is None else (other, one)
            raise self.conflict(f"{one} and {other} belong together", *keys, need=need)

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
    error: ValidationError,
    root: type[Strict],
    tree: Any,
    *,
    where: str,
    origin: Callable[[Location], str] | None = None,
) -> ConfigError:
    """Turn every problem of `error`, found in `tree` for the section `root`, into one `ConfigError`.

    `origin` says where the value at a key comes from, if that is not always `where`.
    """
    problems = []
    for details in error.errors(include_url=False):
        location, problem = _problem(details, root, tree)
        problem["where"] = origin(location) if origin else where
        problems.append(ConfigError(**problem))
    if len(problems) == 1:
        return problems[0]
    listed = "\n".join(f"  {line}" for problem in problems for line in str(problem).splitlines())
    return ConfigError(f"the configuration has {len(problems)} mistakes\n{listed}", where=where)


def at_field(error: ConfigError, field: str, *, where: str | None = None) -> ConfigError:
    """The same error at another field, as one of a section is at a key of the section around it."""
    got = {} if error.got is None else {"got": error.got}
    return ConfigError(error.summary, where=where, field=field, need=error.need, fix=error.fix, **got)


def _problem(details: ErrorDetails, root: type[Strict], tree: Any) -> tuple[Location, dict[str, Any]]:
    """Where a problem is, and the arguments of the `ConfigError` that describes it."""
    # Tags of a union, in angle brackets, are not part of the key.
    parts = tuple(str(part) for part in details["loc"] if not str(part).startswith("<"))
    location, inner = _as_written(parts, tree), details.get("ctx", {}).get("error")
    if isinstance(inner, ConfigError):
        location = (*location, *_split(inner.field)) if inner.field else location
        found = {"summary": inner.summary, "need": inner.need, "fix": inner.fix}
        return location, found | _described(location, inner.got)
    if details["type"] == "extra_forbidden":
        return location, _unknown_key(location, root) | _described(location, details["input"])
    meaning = _first_sentence(dict(_keys(root)).get(_without_numbers(location), ""))
    if details["type"] == "missing":
        return location, {"summary": "a key is missing", "need": meaning} | _described(location, None)
    need = details["msg"].removeprefix("Input should be ").split(", unable to parse")[0]
    got = details["input"]
    options = re.findall(r"'([^']*)'", str(details.get("ctx", {}).get("expected", "")))
    near = None
    if isinstance(got, str) and options:
        same = VALUES_ELSEWHERE.get(got.lower())
        near = same if same in options else nearest_name(got, options)
    return location, {
        "summary": "the value is not valid",
        "need": f"{need} ({meaning})" if meaning else need,
        "fix": f"did you mean {near}?" if near else None,
    } | _described(location, "null" if got is None else got)


def _described(location: Location, got: Any) -> dict[str, Any]:
    shown = {} if got is None else {"got": _shown(got) if isinstance(got, bool) else got}
    return {"field": _joined(location) or None} | shown


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
    candidates = [path[-1] for path in keys if path[:-1] == _without_numbers(parents)]
    elsewhere = {theirs: _existing(ours, keys) for theirs, ours in KEYS_ELSEWHERE.items()}
    # A misspelt name of another toolkit is nearer to that name than to any of ours.
    here = [theirs for theirs, paths in elsewhere.items() if any(path[:-1] == tuple(parents) for path in paths)]
    near = nearest_name(key, [*candidates, *here])
    meant: list[Location] = []
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


def _existing(paths: Iterable[str], keys: Container[Location]) -> list[Location]:
    """Those of the full keys that a section has; a section that is made in Python has the ends of them.

    The last part may be a key of a mapping without a schema, as `lr` of `policy.optimizer.kwargs`.
    """
    ends = [[tuple(path.split(".")[start:]) for start in range(path.count(".") + 1)] for path in paths]
    found = (next((end for end in each if end in keys or end[:-1][1:] and end[:-1] in keys), None) for each in ends)
    return [end for end in found if end]


def _without_numbers(location: Iterable[str]) -> Location:
    return tuple(part for part in location if not part.isdecimal())


def _first_sentence(text: str) -> str:
    return re.split(r"(?<!\bet al)\. ", " ".join(text.split()))[0].rstrip(".")


def _as_written(location: Location, tree: Any) -> Location:
    """Without the number of a list's element where the file has a single block instead of a list."""
    written: list[str] = []
    for part in location:
        if isinstance(tree, dict) and part.isdecimal() and part not in tree:
            continue
        written.append(part)
        if isinstance(tree, list):
            tree = tree[int(part)] if part.isdecimal() and int(part) < len(tree) else None
        else:
            tree = tree.get(part) if isinstance(tree, dict) else None
    return tuple(written)


def _split(field: str) -> Location:
    return tuple(field.replace("[", ".").replace("]", "").split("."))


def _joined(location: Iterable[str]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if part.isdecimal() else f".{part}" if text else part
    return text
