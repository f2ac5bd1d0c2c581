"""From a YAML file and command-line overrides to a checked configuration, and back.

    config = load_config("rm", ["policy.model_name=Qwen/Qwen2.5-0.5B-Instruct", "rm.seed=7"])
    save_config(config, "resolved.yaml")       # loading that gives an equal configuration

OmegaConf reads the file, lays it over those that its `defaults:` names, applies the overrides
(`key=value`, `+key=value`, `~key`) and resolves `${...}` references, to other keys or to the
functions `mul`, `div`, `max`, `min` and `int`; pydantic checks the result. Every mistake is a
`ConfigError`. docs/config.md has the rules.

A configuration is named by its path, or as a recipe, like this one: a file of the folder `recipes/`
beside this module.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import omegaconf
import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from treeward.config.base import (
    Location,
    Strict,
    key_path,
    located,
    one_error,
    problems_of,
    without_numbers,
)
from treeward.config.grpo_run import GRPORunConfig
from treeward.config.nemo_rl import further_keys, to_native
from treeward.config.run import RewardModelRunConfig
from treeward.errors import ConfigError, nearest_name, nearest_path

logger = logging.getLogger(__name__)

_RECIPES = Path(__file__).parent / "recipes"
_IN_REPOSITORY = Path("examples/configs")
"""The recipes' folder in treeward's repository, by whose path guides and scripts name them."""
_FILE_KEYS = ("prompt_file", "system_prompt_file", "chat_template")
"""Keys of files that a configuration may have beside it."""
_RATE = "optimizer.kwargs.lr"
_ABSENT = object()
# Hydra's syntax, which NeMo RL's guides use: + only adds, ++ and no sign set, ~ removes.
_OVERRIDE = re.compile(
    r"(?P<sign>\+\+|\+|~|)(?P<key>\w[\w./-]*(?:\[\d+\][\w./-]*)*)(?P<value>=.+)?", re.DOTALL
)


def _div(a: Any, b: Any) -> Any:
    # A whole number where there is no remainder: most keys are counts.
    if isinstance(a, int) and isinstance(b, int) and a % b == 0:
        return a // b
    return a / b


# OmegaConf warns of a function without a signature, as the built-in max, min and int are.
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "mul": lambda a, b: a * b,
    "div": _div,
    "max": lambda a, b: max(a, b),
    "min": lambda a, b: min(a, b),
    "int": lambda a: int(a),
}
_Section = TypeVar("_Section", bound=Strict)


def recipe_names() -> list[str]:
    """The configurations that the package has, by the names that stand for their paths."""
    return sorted(path.stem for path in _RECIPES.glob("*.yaml"))


def load_config(path: str | PathLike[str], overrides: Sequence[str] = ()) -> RewardModelRunConfig:
    """Read, override, resolve and check a file, or a recipe by its name.

    Raises one `ConfigError` that lists every mistake found.
    """
    return load_file(RewardModelRunConfig, path, overrides)


def load_grpo_config(path: str | PathLike[str], overrides: Sequence[str] = ()) -> GRPORunConfig:
    """A run of GRPO, as `load_config` reads one that trains a reward model; its remarks are
    logged."""
    config = load_file(GRPORunConfig, path, overrides)
    for remark in config.remarks:
        logger.warning("%s", remark)
    return config


def load_run(
    path: str | PathLike[str], overrides: Sequence[str] = ()
) -> RewardModelRunConfig | GRPORunConfig:
    """A run of either kind, without remarks: one with environments is a run of GRPO."""
    if any("env" in tree for _, tree in _layers(_find(path), ())):
        return load_file(GRPORunConfig, path, overrides)
    return load_file(RewardModelRunConfig, path, overrides)


def load_file(
    section: type[_Section],
    path: str | PathLike[str] | None,
    overrides: Sequence[str] = (),
    *,
    values: Mapping[str, Any] | None = None,
) -> _Section:
    """A whole configuration of any kind, read, overridden, resolved and checked as by
    `load_config`.

    `path`: None for a configuration without a file. `values`: laid over the file's values before
    the overrides, as a command's own options. Raises `ConfigError`.
    """
    where = "command line"
    layers: list[tuple[Path, dict[str, Any]]] = []
    if path is not None:
        file = _find(path)
        where = str(file)
        layers = _layers(file, ())
    trees: list[Mapping[str, Any]] = [layer for _, layer in layers]
    trees.append(values or {})
    tree: dict[str, Any] = {}
    for layer in trees:
        # Most files have no defaults below them, and OmegaConf is slow to make.
        if tree:
            # A file that names a pretrained model takes the architecture of its defaults away.
            value_of = partial(_value, OmegaConf.create(dict(layer)))
            tree = _without_other_model(tree, value_of)
        tree = _laid_over(tree, layer)
    tree = _without_other_model(tree, partial(_overriding_value, overrides))
    config = OmegaConf.create(tree)
    # A list: in a mapping a key that is overridden twice would keep its first place.
    overridden = [(_apply_override(config, text), text) for text in overrides]

    def origin(location: Location) -> str:
        # An element of a list may come from an override of its key without the number. Of two
        # overrides the later one counts, and of two files the one laid over the other.
        for at in (location, without_numbers(location)):
            for key, text in reversed(overridden):
                # Either may lie in the other: the override of a section, or a key in a section
                # that is wrong as a whole.
                if at[: len(key)] == key[: len(at)]:
                    return f"command line, {text}"
        # A missing key, and one of another form of `data`, are in no file: the section is.
        for end in range(len(location), 0, -1):
            for layer_file, layer in reversed(layers):
                if _value(OmegaConf.create(layer), ".".join(location[:end])) is not _ABSENT:
                    return str(layer_file)
        return where

    return _checked(section, config, where, origin)


def load_section(section: type[_Section], values: Mapping[str, Any], *, where: str) -> _Section:
    """Check one section that is given as a mapping, as `env_config` in Python. Raises
    `ConfigError`; `where` names it.

    `${...}` references within the mapping are resolved. OmegaConf's own mappings are accepted;
    their references may lead out of the section.
    """
    config = values if isinstance(values, DictConfig) else OmegaConf.create(dict(values))
    return _checked(section, config, where, lambda location: where)


def config_yaml(config: RewardModelRunConfig | GRPORunConfig) -> str:
    """Every key, defaults included, as YAML that the config's own loader reads back to an equal
    configuration."""
    # By alias, which is the name in a file: `architecture` is `model_config` there.
    values = config.model_dump(mode="json", by_alias=True)
    return OmegaConf.to_yaml(OmegaConf.create(_escape(values)))


def save_config(config: RewardModelRunConfig | GRPORunConfig, path: str | PathLike[str]) -> None:
    """Write `config_yaml`."""
    Path(path).write_text(config_yaml(config), encoding="utf-8")


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a file, with `${...}` references as they are. Raises `ConfigError` naming the
    file."""
    try:
        # By a safe loader: a tag of YAML makes no object, and runs nothing.
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError as error:
        near = nearest_path(path) or nearest_name(path.stem, recipe_names())
        fix = f"correct the path; relative paths begin at {Path.cwd()}"
        if near:
            fix = f"did you mean {near}?"
        raise ConfigError(
            "there is no such file", where=str(path), need=_needed_file(), fix=fix
        ) from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        # A ValueError is a number with more digits than Python reads, or text that is not UTF-8.
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        summary = f"the YAML cannot be read: {' '.join(reason.split())}"
        raise ConfigError(summary, where=str(path), need="a YAML file in UTF-8") from error
    if not isinstance(tree, dict):
        raise ConfigError(
            "the configuration is not a mapping", where=str(path), got=tree, need="policy: {...}"
        )
    return {str(key): value for key, value in tree.items()}


def _needed_file() -> str:
    return f"a YAML file, or a recipe: {', '.join(recipe_names())}"


def _find(name: str | PathLike[str], folder: Path = Path()) -> Path:
    """The file of a configuration: a path from `folder` that exists, or else a recipe by its name.

    The recipes' paths in treeward's repository are names of them too. Where nothing is found, the
    path.
    """
    path = folder / name
    if path.is_file():
        return path
    named = Path(name)
    if named.parent == _IN_REPOSITORY and named.suffix == ".yaml":
        named = Path(named.stem)
    if named.parent == Path() and named.name in recipe_names():
        return _RECIPES / f"{named}.yaml"
    return path


def _apply_override(config: DictConfig, text: str) -> Location:
    """Change `config` in place; returns the key that the override names. Raises `ConfigError`."""
    match = _OVERRIDE.fullmatch(text)
    if match is None or (match["value"] is None) != (match["sign"] == "~"):
        raise ConfigError(
            "an override is not understood",
            where="command line",
            got=text,
            need="key=value, +key=value, ++key=value or ~key, as "
            "policy.optimizer.kwargs.lr=1e-5; null for no value",
        )
    # train[0].name is the key `name` of the element 0 of `train`.
    key = re.sub(r"\[(\d+)\]", r".\1", match["key"])
    path = tuple(key.split("."))
    try:
        if match["sign"] == "~":
            _remove(config, path, text)
            return path
        # What the key refers to need not exist: it is replaced.
        old = _value(config, key)
        if match["sign"] == "+" and old is not _ABSENT:
            raise ConfigError(
                "+ adds a key, and it is there already",
                where="command line",
                got=text,
                fix=f"write {text[1:]}",
            )
        # OmegaConf reads the value as YAML.
        parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value{match['value']}"]))
        value = parsed["value"]
        are_mappings = isinstance(value, dict) and isinstance(old, DictConfig)
        OmegaConf.update(config, key, value, merge=are_mappings)
    except RecursionError:
        need = "a value that is nested less deep"
        raise ConfigError(
            "an override is nested too deep", where="command line", got=text, need=need
        ) from None
    except (OmegaConfBaseException, yaml.YAMLError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise  # it is a ValueError too
        # An error of YAML has its words in `problem`.
        reason = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise ConfigError(
            f"an override cannot be applied: {reason}",
            where="command line",
            got=text,
            need="a key, and a value in YAML",
            fix="put a value with special characters in single quotes, and in double quotes for "
            "the shell",
        ) from None
    return path


def _remove(config: DictConfig, path: Location, text: str) -> None:
    """Remove a key, or an element of a list; `text`: the override that says so."""
    *parents, key = path
    parent: Any = config
    if parents:
        parent = OmegaConf.select(config, ".".join(parents))
    if isinstance(parent, ListConfig):
        del parent[int(key)]
        return
    # What is no mapping makes the `del` below raise, and the caller says so.
    if isinstance(parent, DictConfig) and key not in parent:
        near = nearest_name(key, map(str, parent))
        fix = f"did you mean {near}?" if near else None
        raise ConfigError(
            "a key to be removed is not there", where="command line", got=text, fix=fix
        )
    del parent[key]


def _value(tree: DictConfig, key: str) -> Any:
    # null is a value, so a missing key has a mark of its own.
    return OmegaConf.select(tree, key, default=_ABSENT, throw_on_resolution_failure=False)


def _layers(file: Path, readers: tuple[Path, ...]) -> list[tuple[Path, dict[str, Any]]]:
    """The trees of the files that a file names, and its own, laid over theirs; `readers` have led
    to this file."""
    tree = _with_files_beside(read_yaml(file), file.parent)
    # Resolved, so that a circle through links, or through ".." in names, is seen too.
    chain = (*readers, file.resolve())
    layers: list[tuple[Path, dict[str, Any]]] = []
    names = tree.pop("defaults", None) or []
    if not isinstance(names, list):
        names = [names]
    for name in names:
        parent = _find(str(name), file.parent)
        if not parent.is_file():
            raise ConfigError(
                "a file of defaults does not exist",
                where=str(file),
                field="defaults",
                got=name,
                need=f"{_needed_file()}; or a list of these. Paths are relative to the folder of "
                "this file",
            )
        if parent.resolve() in chain:
            raise ConfigError(
                "defaults go round in a circle",
                where=str(file),
                field="defaults",
                got=name,
                need="a file that does not lead back to this one",
            )
        layers += _layers(parent, chain)
    return [*layers, (file, tree)]


def _with_files_beside(tree: Any, folder: Path) -> Any:
    """The tree of a file in `folder`, in which the prompt files and templates that lie there have
    its path.

    A file of the working directory comes first: NeMo RL's configurations name paths that begin
    there.
    """
    if isinstance(tree, list):
        return [_with_files_beside(item, folder) for item in tree]
    if not isinstance(tree, dict):
        return tree
    paths: dict[str, Any] = {}
    for key, value in tree.items():
        paths[key] = _with_files_beside(value, folder)
        # isfile: False, not an error, for a template, which is too long for a name.
        if key in _FILE_KEYS and isinstance(value, str) and not os.path.isfile(value):
            beside = os.path.join(folder, value)
            if os.path.isfile(beside):
                paths[key] = beside
    return paths


def _laid_over(base: dict[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings are merged; lists, and sections with NeMo RL's `_override_: true`, replace those of
    `base`."""
    merged = dict(base)
    for key, value in tree.items():
        old = merged.get(key)
        if isinstance(value, dict):
            section = dict(value)
            replaces = section.pop("_override_", None) is True
            if replaces or not isinstance(old, dict):
                old = {}
            # Over an empty mapping too: `_override_` of inner sections is taken off so.
            value = _laid_over(old, section)
        merged[key] = value
    return merged


def _without_other_model(base: dict[str, Any], value_of: Callable[[str], Any]) -> dict[str, Any]:
    """`base` without the model and its tokenizer, where what is laid over it names a model of the
    other kind.

    The kinds are a pretrained model (`model_name`) and one from scratch (`model_config`).
    `value_of`: the value that is laid over a key, or `_ABSENT`. A `base` whose other model is laid
    over too, as by null, stays.
    """
    policy = base.get("policy")
    for kind, other in (("model_name", "model_config"), ("model_config", "model_name")):
        is_named = value_of(f"policy.{kind}") not in (_ABSENT, None)
        if not is_named or not isinstance(policy, dict) or policy.get(other) is None:
            continue
        if value_of(f"policy.{other}") is not _ABSENT:
            continue
        # The other keys of `tokenizer`, as its chat template, are no model's.
        tokenizer = dict(policy.get("tokenizer") or {})
        for key in ("name", "vocab_size"):
            tokenizer.pop(key, None)
        kept = {key: value for key, value in policy.items() if key != other}
        rate = _value(OmegaConf.create(policy), _RATE)
        if kind == "model_name" and rate is not _ABSENT and value_of(f"policy.{_RATE}") is _ABSENT:
            logger.warning(
                "policy.%s=%s is the rate of a model from scratch; a pretrained model needs a "
                "lower one, which `treeward train --model NAME` chooses.",
                _RATE,
                rate,
            )
        # The tokenizer was that of the other model: one of a pretrained model comes with it.
        return base | {"policy": kept | {"tokenizer": tokenizer}}
    return base


def _overriding_value(overrides: Sequence[str], key: str) -> Any:
    """What overrides say of a key: text, None for null and for its removal, or `_ABSENT`."""
    for text in reversed(overrides):
        match = _OVERRIDE.fullmatch(text)
        if match is not None and match["key"] == key:
            is_null = match["value"] in (None, "=null")
            return None if is_null else match["value"]
    return _ABSENT


def _checked(
    section: type[_Section], config: DictConfig, where: str, origin: Callable[[Location], str]
) -> _Section:
    """Resolve references and validate."""
    # hydra-core 1.3, and so verl and NeMo RL, cannot have more than OmegaConf 2.3. There
    # `register_resolver` is an older function, which passes texts instead of numbers. 2.4 warns
    # at the name that 2.3 has for ours.
    register: Callable[..., None] = OmegaConf.register_resolver
    if omegaconf.__version__.startswith("2.3."):
        register = OmegaConf.register_new_resolver
    for name, function in _FUNCTIONS.items():
        if not OmegaConf.has_resolver(name):  # resolvers belong to the whole process
            register(name, function, replace=True)  # another thread may have just done it
    try:
        resolved: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        field = error.full_key or ""
        place = origin(tuple(field.replace("[", ".").replace("]", "").split(".")))
        summary = f"a value cannot be resolved: {(error.msg or str(error)).splitlines()[0]}"
        need = "a value, or a ${reference} to a key or function that exists"
        raise ConfigError(summary, where=place, field=field or None, need=need) from None
    native = to_native(section, resolved)
    if native.no_effect:
        logger.info("These keys have no effect here: %s", ", ".join(native.no_effect))
    problems = list(native.mistakes)
    try:
        checked = section.model_validate(native.tree)
    except ValidationError as error:
        for problem in problems_of(error, section, further_keys):
            location = native.spelt(_location(problem))
            # Nothing is known of a section whose form could not be read: that mistake is told.
            if not any(location[: len(place)] == place for place in native.untranslated):
                problems.append(problem.but(field=key_path(location) or None))
    if problems:
        placed = [problem.but(where=origin(_location(problem))) for problem in problems]
        raise one_error(placed, where)
    return checked


def _location(problem: ConfigError) -> Location:
    if not problem.field:
        return ()
    return located(problem.field)


def _escape(value: Any) -> Any:
    """`${` in a resolved value is text; the backslash keeps it so when the file is read again."""
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    return value.replace("${", r"\${") if isinstance(value, str) else value
