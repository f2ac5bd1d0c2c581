"""Datasets by name or by dotted path: the one way from `dataset_name` in a config to rows.

    datasets = Registry("datasets", example="my_module.MyDataset")

    @datasets.register("HelpSteer3", "HelpSteer3Dataset")
    class HelpSteer3(RowSource): ...

    datasets.find("HelpSteer3")                   # or the dotted path of any class

A class by dotted path needs to know nothing of this package:

    # my_module.py, and in the config `dataset_name: my_module.MyDataset`
    class MyDataset:
        def __init__(self, data_path):
            self.formatted_ds = {"train": [{"context": [...], "completions": [...]}, ...]}
            self.task_spec = TaskDataSpec(task_name="mine")

NeMo RL's guide describes this contract; its newer form, `dataset` (the rows) and `task_name`, works too. The
constructor gets `kwargs` of the config, and those of its other keys that its signature names: `data_path` (or
`train_data_path`), `split` (or `train_split`), `subset`, `prompt_key`, `chosen_key`, `rejected_key` (for prompts
`input_key`, `output_key`), `prompt_file`, `system_prompt_file`. The prompt files are applied here, not by the class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from treeward.config.data import SetConfig
from treeward.data.sources import Row, read_rows
from treeward.errors import ConfigError, nearest_name
from treeward.user_code import import_object

__all__ = ["Registry", "RowSource", "construct", "rows_of"]

_OTHER_ARGUMENTS = (
    *("prompt_key", "chosen_key", "rejected_key", "input_key", "output_key"),
    *("prompt_file", "system_prompt_file"),
)
_Class = TypeVar("_Class", bound=type[Any])


class RowSource:
    """What every dataset of rows has: the rows of a file, a folder or a hub dataset, as a config names them.

    A subclass may bring its own data: `hub_path` is read where the config has no `data_path`.
    """

    hub_path: ClassVar[str | None] = None
    hub_subset: ClassVar[str | None] = None
    hub_split: ClassVar[str | None] = "train"

    def __init__(self, config: SetConfig) -> None:
        self.config: Any = config
        path = config.data_path or self.hub_path
        if path is None:
            summary, need = f"{config.dataset_name} needs a path", "a file, a folder or a hub name"
            raise ConfigError(summary, field="data_path", need=need)
        self.path: str = path
        self.split, self.subset = config.split, config.subset
        if config.data_path is None:
            if config.name is not None and config.split is None and getattr(config, "part", None) is None:
                summary = f"a named set of {config.dataset_name} does not say its split"
                raise ConfigError(summary, field="split", got="null", need="a split of the dataset")
            self.split, self.subset = config.split or self.hub_split, config.subset or self.hub_subset

    @property
    def name(self) -> str:
        """For messages: the path and split."""
        return self.path if self.split is None else f"{self.path}[{self.split}]"

    def rows(self) -> Iterator[Row]:
        """The rows, from the beginning."""
        return read_rows(self.path, split=self.split, subset=self.subset)


class Registry:
    """`what`: the plural that errors use. `example`: a dotted path. `classes`: by name and alias."""

    def __init__(self, what: str, *, example: str) -> None:
        self._what, self._example = what, example
        self.classes: dict[str, type[Any]] = {}

    def register(self, name: str, *aliases: str) -> Callable[[_Class], _Class]:
        """Class decorator: `dataset_name: <name>` (or an alias) in a config means this class.

        A class that is defined again, as by reloading its module, takes its own place. Raises `ConfigError` where
        another class has the name.
        """

        def register(cls: _Class) -> _Class:
            for each in (name, *aliases):
                known = self.classes.get(each, cls)
                if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                    summary, need = f"two {self._what} have the same name", "another name for one"
                    raise ConfigError(summary, field="dataset_name", got=each, need=need)
                self.classes[each] = cls
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
        near = nearest_name(name, self.classes)
        need = f"one of {', '.join(self.classes)}, or the dotted path of a class, as {self._example}"
        summary, fix = f"there is no such name among the {self._what}", f"did you mean {near}?" if near else None
        raise ConfigError(summary, field="dataset_name", got=name, need=need, fix=fix)


def construct(cls: Any, config: SetConfig) -> Any:
    """Call the class with `kwargs`, and with those values of the config that its signature names.

    Raises `ConfigError` for arguments that are missing, unknown, or of no use to the class.
    """
    signature = inspect.signature(cls)
    arguments: dict[str, Any] = {}
    for names in (("data_path", "train_data_path"), ("subset",), ("split", "train_split")):
        value = getattr(config, names[0])
        if value is None or set(names) & set(config.kwargs):
            continue
        first = names[0] if _takes_any(signature) else None
        accepted = next((name for name in names if name in signature.parameters), first)
        if accepted is not None:
            arguments[accepted] = value
        elif names[0] != "split":  # a split may also be a key of formatted_ds
            summary, need = f"{config.dataset_name} takes no {names[0]}", f"an argument of {cls.__name__}{signature}"
            fix = f"remove {names[0]}, give it under another name in kwargs, or add the parameter to the class"
            raise ConfigError(summary, field=names[0], got=value, need=need, fix=fix)
    for name in _OTHER_ARGUMENTS:
        if name in signature.parameters and getattr(config, name, None) is not None:
            arguments[name] = getattr(config, name)
    arguments |= config.kwargs
    try:
        signature.bind(**arguments)
    except TypeError as error:
        summary, need = f"{config.dataset_name} cannot be constructed: {error}", f"{cls.__name__}{signature}"
        raise ConfigError(summary, field="kwargs", got=arguments, need=need) from error
    return cls(**arguments)


def rows_of(dataset: Any, config: SetConfig) -> tuple[Iterable[Any], str]:
    """The rows of an object with `formatted_ds` or `dataset`, and their name in errors.

    The split is `config.split` if `formatted_ds` has it, "validation" for a named set without a path of its own, else
    "train". Raises `ConfigError` where there are no such rows, or they can be read only once.
    """
    name = label = config.dataset_name
    signature = inspect.signature(type(dataset))
    reads_split = _takes_any(signature) or bool({"split", "train_split"} & signature.parameters.keys())
    rows: Any = getattr(dataset, "formatted_ds", None)
    if isinstance(rows, Mapping):
        # A class that was given a path has read that one, as its training data.
        # Prompts that are held out of the training data are read from there too.
        is_part = getattr(config, "part", None) is not None
        key = "validation" if config.name is not None and config.data_path is None and not is_part else "train"
        if config.split is not None and (config.split in rows or not reads_split):
            key = config.split
        splits = [str(each) for each in rows if rows[each] is not None]
        rows, label = rows.get(key), f"{name}[{key}]"
        if rows is None:
            got, need = f"formatted_ds with {', '.join(splits)}", f"{key}, or split: a key of formatted_ds"
            raise ConfigError(f"{name} has no rows for {key}", field="split", got=got, need=need)
    else:
        rows = getattr(dataset, "dataset", None) if rows is None else None
        if config.split is not None and not reads_split:
            need = "a parameter split of the class, or no split"
            raise ConfigError(f"{name} takes no split", field="split", got=config.split, need=need)
    if not isinstance(rows, Iterable) or isinstance(rows, Iterator | str | bytes | Mapping):
        need = 'formatted_ds: {"train": rows, ...} or dataset: rows, where rows can be read again and again'
        raise ConfigError(f"{name} offers no rows", field="dataset_name", got=type(rows).__name__, need=need)
    return rows, label


def _takes_any(signature: inspect.Signature) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
