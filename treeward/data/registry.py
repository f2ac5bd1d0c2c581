"""`Registry`: classes of datasets by the name that a configuration calls them.

datasets = Registry("datasets", example="my_module.MyDataset")

@datasets.register("HelpSteer3", "HelpSteer3Dataset")
class HelpSteer3: ...

datasets.find("HelpSteer3")                   # or the dotted path of any class
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from treeward.config.base import nearest_name
from treeward.data.custom import import_class
from treeward.errors import ConfigError

__all__ = ["Registry"]

_Class = TypeVar("_Class", bound=type[Any])


class Registry:
    """`what`: the datasets, as errors call them. `example`: a dotted path. `classes`: by name and alias."""

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
                known = self.classes.get(each)
                if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                    raise ConfigError(
                        f"two {self._what} have the same name",
                        field="dataset_name",
                        got=each,
                        need="another name for one",
                    )
                self.classes[each] = cls
            return cls

        return register

    def find(self, name: str) -> Any:
        """The class of a name or a dotted path. Raises `ConfigError` with the nearest name."""
        if name in self.classes:
            return self.classes[name]
        if "." in name.strip("."):
            return import_class(name)
        near = nearest_name(name, self.classes)
        raise ConfigError(
            f"there is no such name among the {self._what}",
            field="dataset_name",
            got=name,
            need=f"one of {', '.join(self.classes)}, or the dotted path of a class, as {self._example}",
            fix=f"did you mean {near}?" if near else None,
        )
