"""`import_object`: classes and functions of the user, by their paths.

import_object("my_module.MyDataset", field="dataset_name")
import_object("rewards/brevity.py:brevity", field="function")
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from treeward.errors import ConfigError, nearest_name


def import_object(path: str, *, field: str, where: str | None = None) -> Any:
    """The object at `package.module.name`, `package.module:name` or `path/to/file.py:name`.

    Raises `ConfigError`, at `field` of `where`, for a module that cannot be imported and for a name that it lacks.
    """
    module_path, _, name = path.rpartition(":" if ":" in path else ".")
    at: dict[str, Any] = {"where": where, "field": field, "got": path}
    if not module_path or not name:
        need = "package.module.name, package.module:name or path/to/file.py:name"
        raise ConfigError("not the path of a class or function", **at, need=need)
    try:
        module = _run_file(Path(module_path)) if module_path.endswith(".py") else importlib.import_module(module_path)
    except (ImportError, FileNotFoundError) as error:
        raise ConfigError(
            f"{module_path} cannot be imported: {error}",
            **at,
            need="a module on Python's path, or path/to/file.py:name",
            fix="install the module, or set PYTHONPATH to the folder that holds it",
        ) from error
    if not hasattr(module, name):
        near, need = nearest_name(name, vars(module)), f"a name in {getattr(module, '__file__', None) or module_path}"
        fix = f"did you mean {module_path}{path[len(module_path)]}{near}?" if near else None
        raise ConfigError(f"{module_path} has no {name}", **at, need=need, fix=fix)
    return getattr(module, name)


def _run_file(file: Path) -> Any:
    resolved = file.expanduser().resolve()
    if not resolved.is_file():
        raise FileNotFoundError(f"{resolved} does not exist")
    spec = importlib.util.spec_from_file_location(f"treeward_custom_{resolved.stem}", resolved)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look it up there
    spec.loader.exec_module(module)
    return module
