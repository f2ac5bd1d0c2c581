"""`import_object`: classes and functions of the user, by their paths. `source_digest`: what their
code is.

    import_object("my_module.MyDataset", field="dataset_name")
    import_object("rewards/brevity.py:brevity", field="function")
    source_digest(brevity)      # changes with rewards/brevity.py, or a module of its project
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import uuid
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from treeward.errors import ConfigError, nearest_name


def import_object(path: str, *, field: str, where: str | None = None) -> Any:
    """The object at `package.module.name`, `package.module:name` or `path/to/file.py:name`.

    Raises `ConfigError`, at `field` of `where`, for a module that cannot be imported and for a name
    that it lacks.
    """
    separator = ":" if ":" in path else "."
    module_path, _, name = path.rpartition(separator)
    at: dict[str, Any] = {"where": where, "field": field, "got": path}
    is_file = module_path.endswith(".py")
    # A leading dot is a file without its .py, or a relative import, which has no package here.
    if not module_path or not name or (module_path.startswith(".") and not is_file):
        need = "package.module.name, package.module:name or path/to/file.py:name"
        raise ConfigError("not the path of a class or function", **at, need=need)
    try:
        if is_file:
            module = _run_file(Path(module_path))
        else:
            module = importlib.import_module(module_path)
    except (ImportError, FileNotFoundError) as error:
        raise ConfigError(
            f"{module_path} cannot be imported: {error}",
            **at,
            need="a module on Python's path, or path/to/file.py:name",
            fix="install the module, or set PYTHONPATH to the folder that holds it",
        ) from error
    if not hasattr(module, name):
        near = nearest_name(name, vars(module))
        fix = None
        if near is not None:
            fix = f"did you mean {module_path}{separator}{near}?"
        place = getattr(module, "__file__", None) or module_path
        raise ConfigError(f"{module_path} has no {name}", **at, need=f"a name in {place}", fix=fix)
    return getattr(module, name)


def _run_file(file: Path) -> Any:
    resolved = file.expanduser().resolve()
    if not resolved.is_file():
        raise FileNotFoundError(f"{resolved} does not exist")
    # Named by the whole path: of two files with one name, the second would take the first's place in
    # `sys.modules`, where `source_digest` looks for the code of both.
    path_hash = hashlib.sha256(str(resolved).encode()).hexdigest()[:8]
    name = f"treeward_custom_{resolved.stem}_{path_hash}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look it up there
    spec.loader.exec_module(module)
    return module


def source_digest(code: Any) -> str:
    """A digest of the source of a class or function, and of the modules of its project that it
    imports at their heads.

    Empty for what is installed, treeward's own code too. Code without a file, as of a notebook, has
    another digest in every process, so that nothing made with it is reused.
    """
    # Files below these are the standard library's, a package's, or treeward's own.
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = {sysconfig.get_path(name) for name in names}
    installed.add(str(Path(__file__).parent))
    # A partial says that it is of functools, which is installed.
    while isinstance(code, functools.partial):
        code = code.func
    first = sys.modules.get(getattr(code, "__module__", type(code).__module__))
    waiting = [] if first is None else [first]
    sources: dict[str, bytes] = {}
    while waiting:
        module = waiting.pop()
        file = getattr(module, "__file__", None)
        if file is None or file in sources:
            continue
        if any(Path(file).is_relative_to(folder) for folder in installed):
            continue
        sources[file] = Path(file).read_bytes()
        # A list, because importing in another thread may add names meanwhile.
        for value in list(vars(module).values()):
            if isinstance(value, ModuleType):
                waiting.append(value)
            elif isinstance(value, type | FunctionType) and value.__module__ in sys.modules:
                waiting.append(sys.modules[value.__module__])
    if not sources:
        has_file = first is not None and getattr(first, "__file__", None) is not None
        return "" if has_file else uuid.uuid4().hex
    digest = hashlib.sha256()
    for content in sorted(sources.values()):  # not by their names: a project may move
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()
