"""`Strict`: what every section of the configuration is made of.

    class HubConfig(Strict):
        push_to_hub: bool = False
        '''Upload the exported model when training ends.'''     # a field's docstring is its documentation

A section is frozen, refuses keys that it does not know, refuses NaN and infinity, and documents each key once: the
docstring under the field is what `docs/config.md` and the error messages show.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator

from treeward.errors import ConfigError

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)  # it has no public name

__all__ = ["IgnoredKeys", "Strict", "nearest_name"]

IgnoredKeys = list[tuple[type["Strict"], str, str]]
"""Where the loader collects, under the validation context's key `ignored`: (section, key, reason)."""


class _Readable(ModelMetaclass):
    """What makes a section that is called in Python fail as one in a file does."""

    def __call__(cls, /, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            problems = importlib.import_module("treeward.config.problems")  # it needs sections itself
            name = cls.__name__
            raise problems.config_error(error, cls, values, file=name, origin=lambda _: name) from None


class Strict(BaseModel, metaclass=_Readable):
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
    """Keys of other toolkits that are accepted and have no effect here, each with the reason why that is harmless."""

    switched_off_keys: ClassVar[Mapping[str, str]] = {}
    """Keys of other toolkits for what treeward does not do, each with what to do instead: accepted while they are off
    (null, false, 0, -1, empty, or a section in which nothing is on), an error otherwise."""

    other_forms: ClassVar[tuple[str, ...]] = ()
    """Keys that are accepted, and turned into this section's own before they are checked."""

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored_keys(cls, raw: Any, info: ValidationInfo) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        found = [key for key in cls.ignored_keys if key in raw]
        collected: IgnoredKeys | None = (info.context or {}).get("ignored")
        if collected is not None:
            collected.extend((cls, key, cls.ignored_keys[key]) for key in found)
        for key, remedy in cls.switched_off_keys.items():
            if key in raw and not _is_off(raw[key]):
                raise ConfigError(
                    f"{key} is not supported", field=key, got=raw[key], need="null, false or no such key", fix=remedy
                )
        return {key: value for key, value in raw.items() if key not in found and key not in cls.switched_off_keys}

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
