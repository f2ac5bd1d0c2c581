"""Datasets by dotted path: classes that know nothing of this package.

    # my_module.py, and in the config `dataset_name: my_module.MyDataset`
    class MyDataset:
        def __init__(self, data_path):
            self.formatted_ds = {"train": [{"context": [...], "completions": [...]}, ...]}
            self.task_spec = TaskDataSpec(task_name="mine")

This is what NeMo RL's guide asks of a dataset; its newer form, `dataset` (the rows) and `task_name`, is taken too. The
constructor gets `kwargs` of the config, and those of `data_path` (or `train_data_path`), `split` (or `train_split`),
`subset`, `prompt_key`, `chosen_key`, `rejected_key`, `prompt_file` and `system_prompt_file` that its signature names
(the first three also by `**kwargs`). The prompt files are applied here, once, and not by the class.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from treeward.config.base import nearest_name
from treeward.config.data import DatasetConfig
from treeward.data.preference import Preference, preference_from_dict, preference_to_dict
from treeward.data.prompt_files import Prompts, completed
from treeward.errors import ConfigError, DataError

__all__ = ["ContractStream", "construct", "import_class", "open_contract", "rows_of"]


class ContractStream:
    """The rows in the rank format that a class by dotted path offers."""

    def __init__(self, rows: Iterable[Any], task_name: str, name: str, prompts: Prompts) -> None:
        self._rows, self._task_name, self.name, self._prompts = rows, task_name, name, prompts

    @cached_property
    def fingerprint(self) -> str:
        # Nothing is known of how the class came by its rows, so the rows themselves are what is compared.
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr(self._prompts).encode())
        for preference, _ in self._parse():
            digest.update(json.dumps(preference_to_dict(preference), sort_keys=True, default=repr).encode())
        return digest.hexdigest()

    def __iter__(self) -> Iterator[tuple[Preference, str]]:
        return completed(self._parse(), self._prompts, self.name)

    def _parse(self) -> Iterator[tuple[Preference, str]]:
        number = 0
        for number, row in enumerate(self._rows, 1):
            where = f"{self.name}:row {number}"
            yield preference_from_dict(row, where=where, task_name=self._task_name), where
        if not number:
            raise DataError("there are no rows", where=self.name, got="an empty dataset", need="at least one row")


def import_class(path: str) -> Any:
    """The class at a dotted path, as `my_module.MyDataset`; raises `ConfigError` if it cannot be imported."""
    module_name, _, attribute = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the module of the dataset cannot be imported: {error}",
            field="dataset_name",
            got=path,
            need="module.Class, where the module is on Python's path",
            fix="install it, or set PYTHONPATH to the folder that holds it",
        ) from error
    cls = getattr(module, attribute, None)
    if not isinstance(cls, type):
        near = nearest_name(attribute, vars(module))
        raise ConfigError(
            f"the module has no class {attribute}",
            field="dataset_name",
            got=path,
            need=f"a class in {getattr(module, '__file__', None) or module_name}",
            fix=f"did you mean {module_name}.{near}?" if near else None,
        )
    return cls


def construct(cls: Any, config: DatasetConfig) -> Any:
    """Call the class with `kwargs`, and with those values of the config that its signature names."""
    signature = inspect.signature(cls)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    arguments: dict[str, Any] = {}
    for names, value, is_source in (
        (("data_path", "train_data_path"), config.data_path, True),
        (("subset",), config.subset, True),
        (("split", "train_split"), config.split, True),
        (("prompt_key",), config.prompt_key, False),
        (("chosen_key",), config.chosen_key, False),
        (("rejected_key",), config.rejected_key, False),
        (("prompt_file",), config.prompt_file, False),
        (("system_prompt_file",), config.system_prompt_file, False),
    ):
        if value is None or set(names) & set(config.kwargs):
            continue
        accepted = next((name for name in names if name in signature.parameters), None)
        if accepted is not None or (is_source and takes_any):
            arguments[accepted or names[0]] = value
        elif is_source and names[0] != "split":  # a split may also be a key of formatted_ds
            raise ConfigError(
                f"{config.dataset_name} takes no {names[0]}",
                field=names[0],
                got=value,
                need=f"a value that {cls.__name__}{signature} can use",
                fix=f"remove {names[0]}, give it under another name in kwargs, or add the parameter to the class",
            )
    arguments |= config.kwargs
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{config.dataset_name} cannot be constructed: {error}",
            field="kwargs",
            got=", ".join(f"{key}={value!r}" for key, value in arguments.items()) or "no arguments",
            need=f"{cls.__name__}{signature}",
            fix="set the missing arguments in kwargs, or remove those that the class does not know",
        ) from error
    return cls(**arguments)


def open_contract(dataset: Any, config: DatasetConfig) -> ContractStream:
    """The rows that an object with `formatted_ds` and `task_spec`, or `dataset` and `task_name`, offers for `config`.

    Raises `ConfigError` for whatever is missing. The split that is read is `config.split` if `formatted_ds` has it,
    "validation" for a named set without a path of its own, else "train".
    """
    rows, label = rows_of(dataset, config)
    spec = getattr(dataset, "task_spec", None)
    prompts = Prompts.load(
        config.prompt_file or getattr(spec, "prompt_file", None),
        config.system_prompt_file or getattr(spec, "system_prompt_file", None),
    )
    return ContractStream(rows, _task_name_of(dataset, config.dataset_name), label, prompts)


def rows_of(dataset: Any, config: DatasetConfig) -> tuple[Iterable[Any], str]:
    """The rows of an object with `formatted_ds` or `dataset`, and what to call them; raises as `open_contract` does."""
    name, label = config.dataset_name, config.dataset_name
    parameters = inspect.signature(type(dataset)).parameters.values()
    read_split = any(each.name in ("split", "train_split") or each.kind is each.VAR_KEYWORD for each in parameters)
    if hasattr(dataset, "formatted_ds"):
        by_split = dataset.formatted_ds
        if not isinstance(by_split, Mapping):
            raise ConfigError(
                f"formatted_ds of {name} is not a dict", got=type(by_split).__name__, need='{"train": rows, ...}'
            )
        # A class that was given a path has read that one, as its training data.
        key = "validation" if config.name is not None and config.data_path is None else "train"
        if config.split is not None and (config.split in by_split or not read_split):
            key = config.split
        rows, label = by_split.get(key), f"{name}[{key}]"
        if rows is None:
            raise ConfigError(
                f"{name} has no rows for {key}",
                field="split",
                got=f"formatted_ds with {', '.join(str(each) for each in by_split if by_split[each] is not None)}",
                need=key,
                fix="set split to a key of formatted_ds",
            )
    elif hasattr(dataset, "dataset"):
        rows = dataset.dataset
        if config.split is not None and not read_split:
            raise ConfigError(
                f"{name} takes no split", field="split", got=config.split, need="a parameter split", fix="remove split"
            )
    else:
        raise ConfigError(
            f"{name} offers no rows",
            field="dataset_name",
            got=f"an object of {type(dataset).__name__} without formatted_ds and dataset",
            need='formatted_ds: {"train": rows, ...} and task_spec: TaskDataSpec',
            fix=f"set self.formatted_ds and self.task_spec in {type(dataset).__name__}.__init__",
        )
    if not isinstance(rows, Iterable) or isinstance(rows, Iterator | str | bytes | Mapping):
        raise ConfigError(
            f"the rows of {name} cannot be read again and again",
            field="dataset_name",
            got=type(rows).__name__,
            need="a list, a datasets.Dataset, or an object whose __iter__ starts over",
            fix="make a list of it",
        )
    return rows, label


def _task_name_of(dataset: Any, name: str) -> str:
    spec = getattr(dataset, "task_spec", None)
    task_name = getattr(spec, "task_name", None) or getattr(dataset, "task_name", None)
    if not isinstance(task_name, str):
        raise ConfigError(
            f"{name} has no task name",
            field="dataset_name",
            got="no task_spec" if spec is None else f"task_spec {spec!r}",
            need='task_spec = TaskDataSpec(task_name="..."), or an attribute task_name',
            fix=f"set self.task_spec in {type(dataset).__name__}.__init__",
        )
    return task_name
