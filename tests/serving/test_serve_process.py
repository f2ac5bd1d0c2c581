"""`treeward serve` as a process: when it listens, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]

# In place of `treeward`: a model that scores nothing until a file is there.
HELD = """
import os, sys, time
from treeward.cli.main import main
from treeward.serving.models import ServedModel

score = ServedModel.score

def score_later(self, items):
    while not os.path.exists({gate!r}):
        time.sleep(0.01)
    return score(self, items)

ServedModel.score = score_later
sys.exit(main(sys.argv[1:]))
"""


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


class ServerProcess:
    """A server in a process of its own; `lines`: what it has logged."""

    def __init__(self, words: list[str], gate: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HELD.format(gate=str(gate)), "serve", *words, "--port", "0", "log_format=json"],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.lines: list[dict[str, Any]] = []
        self._told = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self._told.wait(60), self.lines
        found = [re.search(r"at (https?://\S+)", line["message"]) for line in self.lines]
        self.url = next(match[1] for match in found if match)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(json.loads(line) if line.startswith("{") else {"message": line})
            if "Serving" in line:
                self._told.set()
        self._told.set()

    def wait(self) -> int:
        code = self.process.wait(60)
        self._reader.join(10)
        return code

    @property
    def listens(self) -> bool:
        try:
            httpx.get(f"{self.url}/health")
        except httpx.TransportError:
            return False
        return True

    @property
    def num_queued(self) -> int:
        text = httpx.get(f"{self.url}/metrics").text
        return int(float(text.split("\ntreeward_queued_conversations ")[1].split()[0]))


@pytest.fixture
def server(served_folder: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of the tiny model, which scores once the file `gate` is there."""
    server = ServerProcess([str(served_folder)], tmp_path / "gate")
    yield server
    server.process.kill()
    server.wait()


@pytest.mark.slow
def test_a_signal_under_load(server: ServerProcess, tmp_path: Path) -> None:
    """30 requests wait when it comes: all are answered, nothing new is accepted, and the exit code is 0."""

    def ask() -> int:
        return httpx.post(f"{server.url}/v1/rewards", json={"conversations": [CHAT] * 4}, timeout=120).status_code

    with ThreadPoolExecutor(30) as threads:
        accepted = [threads.submit(ask) for _ in range(30)]
        wait_until(lambda: server.num_queued == 120)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not server.listens)
        (tmp_path / "gate").touch()
        assert [one.result() for one in accepted] == [200] * 30
    assert server.wait() == 0
    assert server.lines[-1]["message"] == "Shut down."
