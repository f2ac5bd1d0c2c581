"""What the command line says: `treeward("score", folder, "--data", file)`, a fixture of tests/cli,
gives an `Ended`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Ended(NamedTuple):
    """The exit code of a command, and what it wrote."""

    code: int
    out: str
    err: str


Command = Callable[..., Ended]
