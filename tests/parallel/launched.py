"""Waits for the other processes of a run, again and again: `python launched.py CONFIG.yaml`, as
torchrun starts it."""

from __future__ import annotations

import sys
from typing import Any

from treeward import processes
from treeward.config.load import load_config
from treeward.parallel.launch import launch


def wait(config: Any, *, show_progress: bool) -> None:
    processes.gather(None)
    print("together", flush=True)  # noqa: T201
    while True:
        processes.gather(None)


if __name__ == "__main__":
    launch(wait, load_config(sys.argv[1]))
