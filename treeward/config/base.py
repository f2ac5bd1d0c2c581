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

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Union, cast, get_args, get_origin

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
from treeward.errors import ConfigError

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)  # it has no public name

__all__ = [
    "Limit",
    "Location",
    "OneIsAList",
    "Period",
    "Strict",
    "TextOrTexts",
    "at_field",
    "config_error",
    "nearest_name",
]
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
                raise ConfigError(
                    f"{key} is not supported", field=key, got=raw[key], need="null, false or no such key", fix=remedy
                )
        kept = {key: value for key, value in raw.items() if key not in ignored and key not in cls.switched_off_keys}
        for theirs, ours in cls.other_names.items():
            if theirs not in kept:
                continue
            value = kept.pop(theirs)
            if kept.setdefault(ours, value) != value:
                raise ConfigError(
                    f"{ours} and {theirs} contradict each other",
                    field=ours,
                    got=f"{ours}: {kept[ours]}, {theirs}: {value}",
                    need="one of the two",
                    fix=f"remove {theirs}",
                )
        return kept

    def conflict(self, summary: str, *keys: str, need: str, fix: str | None = None) -> ConfigError:
        """The error of `keys` that do not fit together, at the first of them; `watch.max_kl` is in an inner section."""

        def shown(key: str) -> str:
            value: Any = functools.reduce(getattr, key.split("."), self)
            return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

        got = ", ".join(f"{key}: {shown(key)}" for key in keys)
        return ConfigError(summary, field=keys[0], got=got, need=need, fix=fix)

    @classmethod
    def key_names(cls) -> tuple[str, ...]:
        """The names of this section's keys as a file spells them."""
        return tuple(field.alias or name for name, field in cls.model_fields.items())


def _is_off(value: Any) -> bool:
    if isinstance(value, Mapping):
        return _is_off(value["enabled"]) if "enabled" in value else all(map(_is_off, value.values()))
    return value in (None, False, 0, -1, "", [], ())


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that `name` was probably meant to be, or None if nothing comes close."""
    by_lower_case = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=0.6)
    return by_lower_case[close[0]] if close else None


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
    meaning = _first_sentence(_doc(root, location))
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
    shown = str(got).lower() if isinstance(got, bool) else got
    return {"field": _joined(location) or None} | ({} if got is None else {"got": shown})


def _unknown_key(location: Location, root: type[Strict]) -> dict[str, Any]:
    *parents, key = location
    command = command_of(location) if "policy" in root.model_fields else None
    if command is not None:
        return {
            "summary": f"{key} belongs to `{command}`",
            "need": "a configuration of this command's run",
            "fix": f"run `{command}`, or remove the key: ~{_joined(location)} on the command line",
        }
    candidates = [
        name
        for section in _sections_at(root, parents)
        for name in (*section.key_names(), *section.other_forms, *section.other_names)
    ]
    elsewhere = {theirs: _keys_of(root, keys) for theirs, keys in KEYS_ELSEWHERE.items()}
    # A misspelt name of another toolkit is nearer to that name than to any of ours.
    here = [theirs for theirs, keys in elsewhere.items() if any(ours.split(".")[:-1] == parents for ours in keys)]
    near = nearest_name(key, [*candidates, *here])
    if elsewhere.get(key):
        suggestion = " and ".join(elsewhere[key])
    elif near in here and near not in candidates:
        suggestion = " and ".join(elsewhere[near])
    else:
        suggestion = (_joined((*parents, near)) if near else _key_elsewhere(key, root)) or ""
    return {
        "summary": "there is no such key",
        "need": None if suggestion else f"one of {', '.join(candidates)}",
        "fix": f"did you mean {suggestion}?" if suggestion else None,
    }


def _keys_of(root: type[Strict], paths: Iterable[str]) -> list[str]:
    """Those of the full keys that `root` has; of a section that is made in Python, the ends of the keys."""
    ends = [[path.split(".")[start:] for start in range(path.count(".") + 1)] for path in paths]
    found = [next((end for end in each if _has_key(root, end)), None) for each in ends]
    return [_joined(end) for end in found if end]


def _has_key(section: type[Strict], path: list[str]) -> bool:
    """Whether a section has the key at `path`; a key without a schema of its own may hold any."""
    field = next((field for name, field in section.model_fields.items() if path[0] in (field.alias, name)), None)
    if field is None:
        return False
    inner = list(sections(field.annotation))
    return len(path) == 1 or not inner or any(_has_key(one, path[1:]) for one in inner)


def _key_elsewhere(key: str, root: type[Strict], prefix: Location = ()) -> str | None:
    """The full name of a key that is spelt exactly so in another section."""
    for name, field in root.model_fields.items():
        path = (*prefix, field.alias or name)
        if path[-1] == key:
            return _joined(path)
        if get_origin(field.annotation) is tuple:
            continue
        for section in sections(field.annotation):
            if (found := _key_elsewhere(key, section, path)) is not None:
                return found
    return None


def _sections_at(root: type[Strict], path: Iterable[str]) -> list[type[Strict]]:
    """The sections that a key may lead to; numbers of list elements are skipped."""
    current = [root]
    for part in path:
        if not part.isdecimal():
            current = [
                section
                for parent in current
                for name, field in parent.model_fields.items()
                if part in (field.alias, name)
                for section in sections(field.annotation)
            ]
    return current


def _doc(root: type[Strict], location: Location) -> str:
    *parents, key = [part for part in location if not part.isdecimal()] or [""]
    for section in _sections_at(root, parents):
        for name, field in section.model_fields.items():
            if key in (field.alias, name):
                return field.description or ""
    return ""


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
