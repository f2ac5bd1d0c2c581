"""One process of a run that `run_processes` starts, forked from one that has imported what takes
long."""

from __future__ import annotations

import gc
import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PRELOADED = ["treeward.parallel.tensor", "treeward.training.train", "treeward.rl.grpo"]


def join(
    function: str, arguments: tuple[Any, ...], folder: Path, environment: Mapping[str, str]
) -> None:
    """Call the function in this environment; its result is in `RANK.json`, and what it prints in
    `RANK.log`."""
    gc.freeze()  # what was imported is not looked at again and again
    os.environ.clear()
    os.environ.update(environment)
    rank = environment["RANK"]
    with (folder / f"{rank}.log").open("w") as log:
        for standard in (1, 2):
            os.dup2(log.fileno(), standard)
    from treeward.processes import joined

    module, _, name = function.partition(":")
    with joined():
        found = getattr(importlib.import_module(module), name)(*arguments)
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
