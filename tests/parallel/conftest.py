"""A function in several processes that are one run, as under torchrun."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

PATIENCE_SECONDS = 180
_HERE = Path(__file__).parent
# what the processes run lies beside this file; not first: `tests` has a conftest too
sys.path.append(str(_HERE))


@pytest.fixture(scope="session")
def forking() -> Any:
    """Forks processes from one that has imported what takes long, with one thread each."""
    from joining import PRELOADED

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()
    return context


@pytest.fixture
def run_processes(
    tmp_path_factory: pytest.TempPathFactory, forking: Any
) -> Callable[..., list[Any]]:
    """`run_processes("module:function", 2, *arguments)`: what the function returns in each process,
    by rank.

    The module is a file of `tests` or `tests/parallel`. Arguments and results are JSON. The
    function runs within `joined()`; with one process there is no process group. When one fails, the
    others are ended, and what it wrote is shown. `timeout`: in seconds.
    """

    def run(
        function: str, num_processes: int, *arguments: Any, timeout: float = PATIENCE_SECONDS
    ) -> list[Any]:
        from joining import join
        from torch.distributed import TCPStore

        folder = tmp_path_factory.mktemp("processes")
        # As torchrun does: the launcher holds the store, so that no process has to find a free
        # port.
        store = TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
        )
        paths = [
            str(_HERE.parent.parent),
            str(_HERE.parent),
            str(_HERE),
            os.environ.get("PYTHONPATH", ""),
        ]
        common = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "WORLD_SIZE": str(num_processes),
            "LOCAL_WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        processes = []
        for rank in range(num_processes):
            variables = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(
                forking.Process(target=join, args=(function, arguments, folder, variables))
            )
            processes[-1].start()
        try:
            why = _wait(processes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
        if why:
            logs = [
                (folder / f"{rank}.log").read_text(encoding="utf-8")[-5000:]
                for rank in range(num_processes)
            ]
            pytest.fail(
                "\n".join([why, *(f"--- rank {rank}\n{log}" for rank, log in enumerate(logs))])
            )
        return [
            json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
            for rank in range(num_processes)
        ]

    return run


@pytest.fixture(scope="session")
def as_torchrun() -> Iterator[Callable[[list[str]], list[subprocess.Popen[str]]]]:
    """Starts Python with these arguments in two processes that see what torchrun would say; pipes
    are text."""
    running: list[subprocess.Popen[str]] = []

    def start(arguments: list[str]) -> list[subprocess.Popen[str]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for rank in ("0", "1"):
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                **group,
                "RANK": rank,
                "LOCAL_RANK": rank,
            }
            words = [sys.executable, *arguments]
            pipe = subprocess.PIPE
            running.append(
                subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env=environment)
            )
        return running[-2:]

    yield start
    for process in running:
        process.kill()


def _wait(processes: list[Any], timeout: float) -> str | None:
    """Until all have ended well (None), one has failed, or the time is over: which it was."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        codes = [process.exitcode for process in processes]
        failed = [f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code]
        if failed:
            time.sleep(1)  # the others may still say why
            return ", ".join(failed)
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.02)
    return f"not done after {timeout} s"
