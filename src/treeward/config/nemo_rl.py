"""Other spellings of a configuration, NeMo RL's above all, turned into treeward's: mapping to
mapping.

    native = to_native(GRPORunConfig, {"loss_fn": {"use_kl_in_reward": True}, ...})
    native.tree        # {"loss_fn": {"kl_in_reward": True}, ...}: what the sections read
    native.no_effect   # keys that were left out because they change nothing here
    native.mistakes    # keys that ask for what is not there, each a `ConfigError` at the file's key
    native.spelt(("loss_fn", "kl_in_reward"))  # ("loss_fn", "use_kl_in_reward"), for later errors

The loader calls it once, before a configuration is checked. The sections have one form and know
nothing of this module. A section has the `Spelling` of its class, and those of the classes that it
derives from; `spellings` has the table.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_origin

from pydantic import ValidationError

from treeward.config import data_forms, reward_environments
from treeward.config.base import Location, Strict, as_yaml, key_path, sections
from treeward.config.grpo_run import GRPORunConfig
from treeward.config.spellings import Spelling, Values, spellings
from treeward.errors import ConfigError

_ENVIRONMENTS = ((GRPORunConfig, "env"), (reward_environments.HybridEnvironmentConfig, "members"))
"""The keys that hold environments by name."""


@dataclass(slots=True)
class Native:
    """A configuration in treeward's spelling; see the module."""

    tree: Values = field(default_factory=dict)
    no_effect: list[str] = field(default_factory=list)
    mistakes: list[ConfigError] = field(default_factory=list)
    paths: dict[Location, Location] = field(default_factory=dict)
    """Each key that was renamed -> its path in the file."""
    untranslated: list[Location] = field(default_factory=list)
    """Sections of a form that could not be read, so that nothing is known of what is in them."""

    def spelt(self, location: Location) -> Location:
        """The path in the file of a key of ours."""
        for end in range(len(location), 0, -1):
            if location[:end] in self.paths:
                return (*self.paths[location[:end]], *location[end:])
        return location


def to_native(section: type[Strict], values: Mapping[str, Any]) -> Native:
    """The configuration of a section, with the sections inside it, in treeward's spelling.

    Keys that nobody knows stay, for the section to refuse.
    """
    native = Native()
    native.tree = _Translation(native).section(section, values, ())
    return native


def further_keys(section: type[Strict]) -> list[str]:
    """Keys that a file may have in a section beside the section's own, as far as they have an
    effect."""
    keys: list[str] = []
    for spelling in spellings(section):
        keys += [*spelling.forms, *spelling.renamed]
        if spelling.sets is not None:
            keys += data_forms.form_keys(_keys_of_a_set(spelling.sets))
    return keys


def _keys_of_a_set(section: type[Strict]) -> list[str]:
    """The keys that the block of a set may have in a file."""
    keys = list(section.model_fields)
    for spelling in spellings(section):
        keys += [*spelling.unread.split(), *spelling.off, *spelling.fixed, *spelling.renamed]
    return keys


def _as_blocks(section: type[Strict], values: Values) -> Values:
    """The sets of a run, in any form, as lists of blocks; `section`: of one set."""

    def is_valid(block: Values) -> bool:
        native = to_native(section, block)
        try:
            section.model_validate(native.tree)
        except ValidationError:
            return False
        return not native.mistakes

    return data_forms.as_blocks(values, _keys_of_a_set(section), is_valid)


class _Translation:
    """One configuration on its way into `native`."""

    def __init__(self, native: Native) -> None:
        self.native = native

    def section(self, section: type[Strict], values: Any, path: Location) -> Any:
        """The values of a section in its own form. What is no mapping stays as it is, for the
        section to refuse."""
        if not isinstance(values, Mapping):
            return values
        tree = {str(key): value for key, value in values.items()}
        try:
            # A class may read a form of its own before its base does.
            for spelling in reversed(spellings(section)):
                if spelling.rewrite is not None:
                    tree = spelling.rewrite(tree)
                if spelling.sets is not None:
                    tree = _as_blocks(spelling.sets, tree)
        except ConfigError as error:
            self._add_mistake(error, path)
            self.native.untranslated.append(path)
            return tree
        # After the rewriting, which reads keys that are foreign to the section.
        for spelling in spellings(section):
            tree = self._without_foreign_keys(section, spelling, tree, path)
            tree = self._renamed(section, spelling, tree, path)
        return self._with_inner_sections(section, tree, path)

    def _without_foreign_keys(
        self, section: type[Strict], spelling: Spelling, tree: Values, path: Location
    ) -> Values:
        kept = Values()
        for key, value in tree.items():
            # A class may have a key that its base's entry leaves out.
            rule = None if key in section.model_fields else _rule_of(spelling, key)
            if rule is None:
                kept[key] = value
            elif rule.remedy is None:
                self.native.no_effect.append(key_path((*path, key)))
            elif not _is_off(value) and value not in rule.values:
                need = "null, false or no such key"
                if rule.values:
                    need = f"{' or '.join(map(str, rule.values))}, or no such key"
                place = key
                got = as_yaml(value)
                # What matters of a section is that it is on.
                if isinstance(value, Mapping) and "enabled" in value:
                    place = f"{key}.enabled"
                    got = "true"
                error = ConfigError(
                    f"{key} is not supported", field=place, got=got, need=need, fix=rule.remedy
                )
                self._add_mistake(error, path)
        return kept

    def _renamed(
        self, section: type[Strict], spelling: Spelling, tree: Values, path: Location
    ) -> Values:
        renamed = dict(tree)
        for alias, name in spelling.renamed.items():
            if alias not in tree:
                continue
            value = renamed.pop(alias)
            if name in renamed and renamed[name] != value:
                error = ConfigError(
                    f"{name} and {alias} contradict each other",
                    field=name,
                    got=f"{as_yaml(renamed[name])} and {as_yaml(value)}",
                    need="one of the two",
                    fix=f"remove {alias}",
                )
                self._add_mistake(error, path)
                continue
            if value is None and section.model_fields[name].is_required():
                continue  # null is no value of a required key: it is missing, by all its names
            renamed[name] = value
            self.native.paths[*path, name] = (*path, alias)
        return renamed

    def _with_inner_sections(self, section: type[Strict], tree: Values, path: Location) -> Values:
        tree = dict(tree)
        for name, model_field in section.model_fields.items():
            key = model_field.alias or name
            value = tree.get(key)
            if (section, name) in _ENVIRONMENTS:
                if value is not None:
                    tree[key] = self._environments(value, (*path, key))
                continue
            inner = next(sections(model_field.annotation), None)
            # null is no section: the field says whether it may be left out so.
            if inner is None or value is None:
                continue
            if get_origin(model_field.annotation) is tuple and isinstance(value, list):
                items = []
                for i, item in enumerate(value):
                    items.append(self.section(inner, item, (*path, key, str(i))))
                tree[key] = items
            else:
                tree[key] = self.section(inner, value, (*path, key))
        return tree

    def _environments(self, env: Any, path: Location) -> Any:
        """The sections of environments by name, of which each has the form of its kind."""
        if not isinstance(env, Mapping):
            return env
        translated = Values()
        for name, values in env.items():
            translated[name] = values
            if not isinstance(values, Mapping) or not reward_environments.is_enabled(values):
                continue  # one that is switched off may hold anything
            kind = str(values.get("type") or name)
            known = reward_environments.ENVIRONMENTS.get(kind)
            if known is not None:
                # Keys of the place where it stands: its kind, and its weight in a hybrid.
                place = {key: values[key] for key in ("type", "weight") if key in values}
                not_of_section = (*place, "enabled")
                own = {key: value for key, value in values.items() if key not in not_of_section}
                section = self.section(known.section, own, (*path, str(name)))
                translated[name] = {**place, **section}
        return translated

    def _add_mistake(self, error: ConfigError, path: Location) -> None:
        """Add an error whose `field` begins at the section at `path`."""
        parts = [part for part in (key_path(path), error.field) if part]
        self.native.mistakes.append(error.but(field=".".join(parts) or None))


@dataclass(frozen=True, slots=True)
class _Rule:
    """`remedy`: None for a key without effect."""

    remedy: str | None
    values: Sequence[Any] = ()


def _rule_of(spelling: Spelling, key: str) -> _Rule | None:
    """What becomes of a key that is not the section's; None for a key that is not known either."""

    def matching(patterns: Sequence[str]) -> str | None:
        return next((pattern for pattern in patterns if fnmatch.fnmatchcase(key, pattern)), None)

    if matching(spelling.unread.split()) is not None:
        return _Rule(remedy=None)
    pattern = matching(list(spelling.off))
    if pattern is not None:
        return _Rule(spelling.off[pattern])
    pattern = matching(list(spelling.fixed))
    if pattern is not None:
        values, remedy = spelling.fixed[pattern]
        return _Rule(remedy, values)
    return None


def _is_off(value: Any) -> bool:
    if isinstance(value, Mapping):
        if "enabled" in value:
            return _is_off(value["enabled"])
        return all(_is_off(item) for item in value.values())
    # 0 equals False, and -1 is how other toolkits write none.
    return value in (None, False, 0, -1, "", [], ())
