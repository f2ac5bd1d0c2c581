"""From `dataset_name` in a config to a data set: an entry of the table, or a class by its name or
dotted path.

    datasets = Registry("datasets", COMPARISON_SETS, example="my_module.MyDataset")
    datasets.find("HelpSteer3")                   # its entry; or the class of any dotted path

A class by dotted path follows the contract of NeMo RL's guide (docs/data.md): `formatted_ds` and
`task_spec`, or `dataset` and `task_name`. Its constructor gets the section of the set: all of it
where it takes any keyword, else the keys that its signature names. `set_task_spec` gets the section
too. The prompt files are applied here, not by the class.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from treeward.config.data import SetConfig
from treeward.config.dataset_table import KnownDataset
from treeward.data.sources import PROMPT_FILES, PromptFiles, Row, RowSource
from treeward.errors import ConfigError, DataError
from treeward.user_code import import_object

_ARGUMENTS = (
    "data_path",
    "subset",
    "split",
    "prompt_key",
    "chosen_key",
    "rejected_key",
    "input_key",
    "output_key",
)
_Class = TypeVar("_Class", bound=type[Any])


class Registry:
    """The data sets that a configuration can name. `what`: they in the plural, for errors. `known`:
    the entries of the table. `example`: a dotted path, for errors too."""

    def __init__(self, what: str, known: Mapping[str, KnownDataset], *, example: str) -> None:
        self._what = what
        self._known = known
        self._example = example
        self._classes: dict[str, type[Any]] = {}

    def register(self, name: str, *aliases: str) -> Callable[[_Class], _Class]:
        """Class decorator: `dataset_name: <name>` (or an alias) in a config means this class."""

        def register(cls: _Class) -> _Class:
            for key in (name, *aliases):
                self._classes[key] = cls
            return cls

        return register

    def find(self, name: str) -> Any:
        """The entry or the class of a name, or the class of a dotted path. A registered class comes
        before an entry. Raises `ConfigError` with the nearest name."""
        # A class of the user may have the name of an entry.
        if name in self._classes:
            return self._classes[name]
        if name in self._known:
            return self._known[name]
        if "." in name:
            cls = import_object(name, field="dataset_name")
            if not isinstance(cls, type):
                need = "the path of a class"
                raise ConfigError("this is not a class", field="dataset_name", got=name, need=need)
            return cls
        names = [*self._known, *self._classes]
        need = f"one of {', '.join(names)}, or the dotted path of a class, as {self._example}"
        summary = f"there is no such name among the {self._what}"
        raise ConfigError.unknown(summary, name, names, field="dataset_name", need=need)


def function_of(path: str) -> Callable[..., Any]:
    """The function that an entry of the table names, imported with its first use."""
    function: Callable[..., Any] = import_object(f"treeward.data.{path}", field="dataset_name")
    return function


def arguments_of(known: KnownDataset, config: SetConfig) -> dict[str, Any]:
    """The arguments of an entry's parser: its own, and those that the configuration gives."""
    arguments = dict(known.arguments)
    for option in known.options:
        value = getattr(config, option)
        if value is not None:
            arguments[option] = value
    return arguments


class ObjectRows(RowSource):
    """The rows of an object of a class by dotted path. They must be iterable repeatedly. Raises
    `ConfigError` for missing, unknown or unused arguments, and for an object without rows."""

    def __init__(self, config: SetConfig, cls: Any) -> None:
        self.config = config
        self.split = config.split
        self.dataset = _construct(cls, config)
        self._rows, self.name = _rows_of(self.dataset, config)
        self.spec = getattr(self.dataset, "task_spec", None)
        # The configuration goes first; NeMo RL's classes name files in their `task_spec` too.
        paths = []
        for field in PROMPT_FILES:
            paths.append(getattr(config, field) or getattr(self.spec, field, None))
        self.files = PromptFiles.load(*paths)

    def rows(self) -> Iterator[Row]:
        """The rows, from the beginning. Raises `DataError` if there are none."""
        number = 0
        for values in self._rows:
            number += 1
            yield Row(values, f"{self.name}:row {number}")
        if number == 0:
            need = "at least one row"
            raise DataError("there are no rows", where=self.name, got="an empty dataset", need=need)

    def content(self) -> str:
        """A digest of the rows themselves, as their source is unknown."""
        digest = hashlib.blake2b(digest_size=16)
        for row in self.rows():
            digest.update(repr(row.values).encode("utf-8", "replace"))
        return digest.hexdigest()


def _construct(cls: Any, config: SetConfig) -> Any:
    """The object of a class, which gets its section of the configuration."""
    signature = inspect.signature(cls)
    arguments = _constructor_arguments(signature, config)
    # A key that no argument takes would be without effect. A split may be a key of formatted_ds.
    for key in ("data_path", "subset"):
        is_taken = key in arguments or f"train_{key}" in arguments
        value = getattr(config, key)
        if value is not None and not is_taken:
            summary = f"{config.dataset_name} takes no {key}"
            need = f"an argument of {cls.__name__}{signature}"
            raise ConfigError(summary, field=key, got=value, need=need)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        summary = f"{config.dataset_name} cannot be constructed: {error}"
        need = f"{cls.__name__}{signature}"
        raise ConfigError(summary, field="kwargs", got=arguments, need=need) from error
    made = cls(**arguments)
    # NeMo RL calls it after the constructor, and its own base class makes `task_spec` there.
    if hasattr(made, "set_task_spec"):
        made.set_task_spec(dict(config.section))
    return made


def _constructor_arguments(signature: inspect.Signature, config: SetConfig) -> dict[str, Any]:
    """The whole section for a constructor that takes any keyword, as in NeMo RL; else the keys that
    its signature names."""
    if _takes_any(signature):
        arguments = dict(config.section)
    else:
        arguments = {}
        for key in (*_ARGUMENTS, *PROMPT_FILES):
            value = getattr(config, key, None)
            is_named = key in signature.parameters or f"train_{key}" in signature.parameters
            if value is not None and is_named:
                arguments[key] = value
        # Without a look at the signature, so that the caller refuses a key that it does not name.
        arguments |= config.kwargs
    # NeMo RL's first classes call the path `train_data_path`, and the split `train_split`.
    for key in ("data_path", "split"):
        old_name = f"train_{key}"
        if key in arguments and old_name in signature.parameters:
            value = arguments.pop(key)
            arguments.setdefault(old_name, value)  # a `train_data_path` of `kwargs` wins
    return arguments


def _rows_of(dataset: Any, config: SetConfig) -> tuple[Iterable[Any], str]:
    """The rows of an object with `formatted_ds`, a mapping of splits, or `dataset`, a single split;
    and their name in errors."""
    splits: Any = getattr(dataset, "formatted_ds", None)
    has_splits = isinstance(splits, Mapping)
    if not has_splits:
        splits = {"train": getattr(dataset, "dataset", None)}
    split = _chosen_split(config, splits, type(dataset), has_splits=has_splits)

    rows = splits.get(split)
    # A generator could be read only once, and text or an object is no list of rows.
    if not isinstance(rows, Iterable) or isinstance(rows, Iterator | str | bytes | Mapping):
        # Only the splits that hold rows can be what was meant.
        filled = [name for name, split_rows in splits.items() if split_rows is not None]
        raise ConfigError(
            f"{config.dataset_name} offers no rows for {split}",
            field="dataset_name",
            got=f"{type(rows).__name__}; splits with rows: {', '.join(filled)}",
            need='formatted_ds: {"train": rows, ...} or dataset: rows, which can be read again',
        )
    return rows, f"{config.dataset_name}[{split}]"


def _chosen_split(
    config: SetConfig, splits: Mapping[str, Any], cls: type[Any], *, has_splits: bool
) -> str:
    """The key of `splits` to read: `config.split`, unless the constructor has already chosen by it;
    else "validation" for a validation set, and "train"."""
    signature = inspect.signature(cls)
    parameters = signature.parameters
    reads_split = _takes_any(signature) or "split" in parameters or "train_split" in parameters
    if config.split is not None and (config.split in splits or not reads_split):
        return config.split
    # A name is that of a validation set. One with a path was read from that file, as the class's
    # training data, and a `part` is held out of the training data.
    is_validation = config.name is not None and config.data_path is None and config.part is None
    return "validation" if is_validation and has_splits else "train"


def _takes_any(signature: inspect.Signature) -> bool:
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds
