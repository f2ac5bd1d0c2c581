"""What tests launch in processes of their own: `python launched.py FUNCTION CONFIG.yaml`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from treeward import processes
from treeward.config.load import load_config
from treeward.errors import ModelError, TreewardError
from treeward.parallel.launch import launch
from treeward.parallel.stopping import StopRequest


def mistake_after_a_stop(config: Any, *, show_progress: bool) -> None:
    text = steps(config, show_progress=show_progress)
    if processes.rank() == 1:
        raise ModelError(f"one makes a mistake after {text}")
    processes.gather(None)


def standstill(config: Any, *, show_progress: bool) -> None:
    with processes.patience() as group:  # for longer than the timeout
        processes.on_main(lambda: time.sleep(70 * config.cluster.timeout_minutes), group)
    processes.gather(None)
    if processes.rank() == 1:
        time.sleep(600)
    processes.gather(None)


def steps(config: Any, *, show_progress: bool) -> str:
    """Steps until one of the processes is asked to stop, which `go` in the folder of the logs tells the test to do."""
    folder = Path(config.logger.log_dir)
    with StopRequest() as stop:
        step = 0
        while not stop.agree():
            step += 1
            (folder / f"pid_{processes.rank()}").write_text(str(os.getpid()))
            time.sleep(0.01)
    (folder / f"last_step_{processes.rank()}").write_text(str(step))
    return f"{stop.reason} {stop.exit_code}"


if __name__ == "__main__":
    try:
        print(launch(globals()[sys.argv[1]], load_config(sys.argv[2])))  # noqa: T201
    except TreewardError as error:
        sys.exit(str(error))
