"""Calls a verb's function as the command line does, and lets its errors through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer


def call(run: Callable[..., int], *words: str | Path) -> Any:
    app = typer.Typer(add_completion=False)
    app.command()(run)
    return typer.main.get_command(app).main([str(word) for word in words], standalone_mode=False)
