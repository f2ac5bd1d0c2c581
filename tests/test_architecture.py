"""The house: how many files a walk enters, and no two files that import each other, inside
functions included."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from conftest import REPOSITORY

import treeward

PACKAGE = Path(treeward.__file__).parent
PAGE = (REPOSITORY / "docs" / "architecture.md").read_text("utf-8")
WALKS = REPOSITORY / "docs" / "walks.py"
MOST_FILES = {
    "A row becomes a gradient": 20,
    "A request becomes a score": 20,
    "A prompt becomes an update": 28,
}
"""Each walk in docs/architecture.md is to be followed file by file. Lower a number when a walk
becomes shorter, and raise it only for work of its own that every row or request needs: what a
template drops (`unread_parts.py`), how long it may run (`template_bounds.py`), passes at the same
time (`side_by_side.py`)."""


@pytest.mark.slow
def test_walks_are_short() -> None:
    done = subprocess.run([sys.executable, WALKS], capture_output=True, text=True, check=True)
    titles = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    counts = {
        title: int(number.split()[0]) for title, number in (line.split(": ") for line in titles)
    }
    assert counts.keys() == MOST_FILES.keys() and min(counts.values()) > 10, (
        "the files that run are seen"
    )
    assert {
        title: max(count, MOST_FILES[title]) for title, count in counts.items()
    } == MOST_FILES, done.stdout
    assert all(f"## {title}" in PAGE for title in counts)


def test_no_files_import_each_other() -> None:
    modules = {_name(path): path for path in PACKAGE.rglob("*.py")}
    graph = {name: set(_imports(path, modules)) - {name} for name, path in modules.items()}
    assert graph["treeward.cli.main"] and graph["treeward.data.encoding"]
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, with the circle


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path, modules: Collection[str]) -> Iterator[str]:
    """Those of the modules that a file imports anywhere but for types alone."""
    tree = ast.parse(path.read_text("utf-8"))
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module in modules
            and id(node) not in for_types
        ):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)


def test_the_map_names_files_that_exist() -> None:
    """The first column of the table of a folder names files of that folder."""
    num_found = 0
    for folder in PACKAGE.iterdir():
        _, _, section = PAGE.partition(f"\n### {folder.name}\n")
        for line in section.partition("\n### ")[0].splitlines():
            if not line.startswith("| `"):
                continue
            for name in re.findall(r"`([\w/]+(?:\.py|/))`", line.split(" | ")[0]):
                num_found += 1
                assert (folder / name).exists(), f"the map names {folder.name}/{name}"
    assert num_found > 100


def test_the_page_names_files_that_exist() -> None:
    paths = set(re.findall(r"`(\w+/[\w/]+\.(?:py|html))`", PAGE))
    assert len(paths) > 60
    for path in paths:
        places = (PACKAGE / path, REPOSITORY / path)
        assert any(place.exists() for place in places), f"the page names {path}"
