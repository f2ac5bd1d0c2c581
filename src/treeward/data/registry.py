"""From `dataset_name` in a config to a class: datasets by name or by dotted path.

    datasets = Registry("datasets", example="my_module.MyDataset")
    datasets.find("HelpSteer3")                   # or the dotted path of any class

A class by dotted path follows the contract of NeMo RL's guide (docs/data.md): `formatted_ds` and `task_spec`, or
`dataset` and `task_name`. Its constructor gets the section of the set: all of it where it takes any keyword, else the
keys that its signature names. `set_task_spec` gets the section too. The prompt files are applied here, not by the
class.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from treeward.config.data import SetConfig
from treeward.data.sources import PROMPT_FILES, PromptFiles, Row, RowSource
from treeward.errors import ConfigError, DataError
from treeward.user_code import import_object

_ARGUMENTS = ("data_path", "subset", "split", "prompt_key", "chosen_key", "rejected_key", "input_key", "output_key")
_Class = TypeVar("_Class", bound=type[Any])


class Registry:
    """`what`: the plural for errors. `example`: a dotted path. `classes`: by name and alias."""

    def __init__(self, what: str, *, example: str) -> None:
        self._what, self._example = what, example
        self.classes: dict[str, type[Any]] = {}

    def register(self, name: str, *aliases: str) -> Callable[[_Class], _Class]:
        """Class decorator: `dataset_name: <name>` (or an alias) in a config means this class."""

        def register(cls: _Class) -> _Class:
            self.classes |= dict.fromkeys((name, *aliases), cls)
            return cls

        return register

    def find(self, name: str) -> Any:
        """The class of a name or a dotted path. Raises `ConfigError` with the nearest name."""
        if name in self.classes:
            return self.classes[name]
        if "." in name:
            cls = import_object(name, field="dataset_name")
            if not isinstance(cls, type):
                raise ConfigError("this is not a class", field="dataset_name", got=name, need="the path of a class")
            return cls
        need = f"one of {', '.join(self.classes)}, or the dotted path of a class, as {self._example}"
        summary = f"there is no such name among the {self._what}"
        raise ConfigError.unknown(summary, name, self.classes, field="dataset_name", need=need)


class ObjectRows(RowSource):
    """The rows of an object of a class by dotted path. They must be iterable repeatedly. Raises `ConfigError` for
    missing, unknown or unused arguments, and for an object without rows."""

    def __init__(self, config: SetConfig, cls: Any) -> None:
        self.config, self.split = config, config.split
        self.dataset = _construct(cls, config)
        self._rows, self.name = _rows_of(self.dataset, config)
        self.spec = getattr(self.dataset, "task_spec", None)
        self.files = PromptFiles.load(*(getattr(config, f) or getattr(self.spec, f, None) for f in PROMPT_FILES))

    def rows(self) -> Iterator[Row]:
        """The rows, from the beginning. Raises `DataError` if there are none."""
        number = 0
        for number, values in enumerate(self._rows, 1):  # noqa: B007
            yield Row(values, f"{self.name}:row {number}")
        if not number:
            raise DataError("there are no rows", where=self.name, got="an empty dataset", need="at least one row")

    def content(self) -> str:
        """A digest of the rows themselves, as their source is unknown."""
        digest = hashlib.blake2b(digest_size=16)
        for row in self.rows():
            digest.update(repr(row.values).encode("utf-8", "replace"))
        return digest.hexdigest()


def _construct(cls: Any, config: SetConfig) -> Any:
    """The object of a class, which gets its section of the configuration.

    A class that takes any keyword gets the whole section, as in NeMo RL, another one what its signature names. Then
    `set_task_spec`, if there is one, gets the section.
    """
    signature = inspect.signature(cls)
    arguments = dict(config.section) if _takes_any(signature) else _named_arguments(signature, config)
    for key in ("data_path", "split"):  # the names of NeMo RL's first classes
        if f"train_{key}" in signature.parameters and key in arguments:
            arguments.setdefault(f"train_{key}", arguments.pop(key))
    for key in ("data_path", "subset"):  # a split may also be a key of formatted_ds
        if getattr(config, key) is not None and not {key, f"train_{key}"} & arguments.keys():
            summary, need = f"{config.dataset_name} takes no {key}", f"an argument of {cls.__name__}{signature}"
            raise ConfigError(summary, field=key, got=getattr(config, key), need=need)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        summary, need = f"{config.dataset_name} cannot be constructed: {error}", f"{cls.__name__}{signature}"
        raise ConfigError(summary, field="kwargs", got=arguments, need=need) from error
    made = cls(**arguments)
    if hasattr(made, "set_task_spec"):
        made.set_task_spec(dict(config.section))
    return made


def _named_arguments(signature: inspect.Signature, config: SetConfig) -> dict[str, Any]:
    """The values of the section that a signature names, and `kwargs`."""
    named: dict[str, Any] = {}
    for key in (*_ARGUMENTS, *PROMPT_FILES):
        value = getattr(config, key, None)
        if value is not None and {key, f"train_{key}"} & signature.parameters.keys():
            named[key] = value
    return named | config.kwargs


def _rows_of(dataset: Any, config: SetConfig) -> tuple[Iterable[Any], str]:
    """The rows of an object with `formatted_ds` or `dataset`, and their name in errors. The split is `config.split` if
    `formatted_ds` has it, "validation" for a named set without a path, else "train"."""
    name, signature = config.dataset_name, inspect.signature(type(dataset))
    reads_split = _takes_any(signature) or bool({"split", "train_split"} & signature.parameters.keys())
    formatted = getattr(dataset, "formatted_ds", None)
    splits = formatted if isinstance(formatted, Mapping) else {"train": getattr(dataset, "dataset", None)}
    # A class with a path has read that file as its training data; held-out prompts are read from there too.
    is_part = getattr(config, "part", None) is not None
    is_validation = config.name is not None and config.data_path is None and not is_part
    key = "validation" if is_validation and splits is formatted else "train"
    if config.split is not None and (config.split in splits or not reads_split):
        key = config.split
    rows = splits.get(key)
    if not isinstance(rows, Iterable) or isinstance(rows, Iterator | str | bytes | Mapping):
        got = f"{type(rows).__name__}; splits with rows: {', '.join(s for s in splits if splits[s] is not None)}"
        need = 'formatted_ds: {"train": rows, ...} or dataset: rows, where rows can be read again and again'
        raise ConfigError(f"{name} offers no rows for {key}", field="dataset_name", got=got, need=need)
    return rows, f"{name}[{key}]"


def _takes_any(signature: inspect.Signature) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
