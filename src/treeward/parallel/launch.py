"""`launch`: a run on as many processes as its configuration asks for, or as a launcher has started.

    outcome = launch(train, config)     # of train(config), on the main process; None elsewhere

Under `torchrun` and Ray Train this process is one of them; else Ray Train starts them where
`cluster` asks for several. An error comes to the user once, from the process that met it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from treeward import processes
from treeward.errors import ConfigError, LostProcessError, TreewardError, pip_install
from treeward.parallel.mesh import mesh_shape
from treeward.progress import show_logs

_T = TypeVar("_T")
_OF_COLLECTIVES = re.compile(
    r"gloo|nccl|process ?group|connection (closed|reset|refused)|broken pipe|timed out",
    re.IGNORECASE,
)
"""What the errors of collective calls say; they have no type of their own."""


def launch(function: Callable[..., _T], config: Any) -> _T | None:
    """`function(config, show_progress=...)` on each process of the run; its result on the main one,
    None elsewhere. Raises what it raises, `ConfigError` where the processes cannot be had, and
    `LostProcessError` where one of them is lost."""
    if os.environ.get("WORLD_SIZE"):  # an empty one is none
        with processes.joined(timeout=timedelta(minutes=config.cluster.timeout_minutes)):
            try:
                return run_here(function, config)
            except (TreewardError, OSError) as error:
                # Of several failing processes only one reports its error. Where it is the main
                # one, the command line shows it, in its own form and with its exit code.
                is_first = processes.fails_first()
                if is_first and processes.is_main():
                    raise
                if is_first:
                    sys.stderr.write(f"{error}\n")
                raise SystemExit(2) from error
    num_processes = config.training_cluster.num_processes
    if num_processes == 1:
        # A task of srun that has others beside it, without a launcher. They would all write the
        # same folders.
        if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
            raise ConfigError(
                "each of these processes would be a run of its own",
                got="several tasks of srun",
                need="a launcher",
                fix="srun starts torchrun on each node: examples/slurm.sub",
            )
        return function(config, show_progress=True)
    mesh_shape(config.policy.dtensor_cfg, num_processes)  # raises before Ray starts
    try:
        from treeward.parallel import ray_workers
    except ImportError as error:
        fix = f"{pip_install('ray')}, or start the command by torchrun"
        raise ConfigError(
            "several processes need Ray", field="cluster", got=str(error), fix=fix
        ) from error
    return ray_workers.run(partial(run_here, function, config), config)


def run_here(function: Callable[..., _T], config: Any) -> _T | None:
    """`function(config)` in this process, one of the run's; the result on the main one, None
    elsewhere. An error of a collective call becomes a `LostProcessError`."""
    if processes.size() == 1:
        return function(config, show_progress=True)
    limit = f"cluster.timeout_minutes={config.cluster.timeout_minutes:g}"
    folder = config.logger.log_dir
    with _own_log(Path(folder) / "ranks"):
        try:
            result = function(config, show_progress=processes.is_main())
        except RuntimeError as error:
            if not _OF_COLLECTIVES.search(str(error)):
                raise
            raise LostProcessError(
                f"rank {processes.rank()} waits in vain for another process in {processes.work}",
                got=str(error).strip().splitlines()[0],
                need=f"all {processes.size()} at the same point within {limit}",
                fix=f"read {folder}/ranks; the same command goes on from the last checkpoint",
            ) from error
    if processes.is_main():
        return result
    return None


@contextlib.contextmanager
def _own_log(folder: Path) -> Iterator[None]:
    """Keep this process's log in `rank_N.log` of a folder, with the error that ends it. Standard
    error shows the main process's."""
    root = logging.getLogger()
    ours = logging.getLogger("treeward")
    folder.mkdir(parents=True, exist_ok=True)
    if processes.is_main():
        show_logs()
    else:
        for handler in (*root.handlers, *ours.handlers):
            handler.setLevel(logging.CRITICAL)
    path = folder / f"rank_{processes.rank()}.log"
    # Appended to: a restarted process keeps the error that ended the one before it. An error may
    # hold half a surrogate pair of a completion: that of its encoding would hide it.
    file = path.open("a", encoding="utf-8", errors="backslashreplace")
    kept = logging.StreamHandler(file)
    kept.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.addHandler(kept)
    # A level of 0 means none, so that the root's would decide: WARNING, where nobody has set it.
    ours.setLevel(min(ours.level or logging.INFO, logging.INFO))
    try:
        yield
    except BaseException:
        file.write(traceback.format_exc())
        raise
    finally:
        root.removeHandler(kept)
        file.close()
