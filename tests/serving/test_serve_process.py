"""`treeward serve` as a process: when it listens, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
BODY = {"conversations": [CHAT]}

# In place of `treeward`: a model that takes its time.
SLOW = """
import sys, time
from treeward.cli.main import main
from treeward.serving.models import ServedModel

score = ServedModel.score

def score_slowly(self, items):
    time.sleep({seconds})
    return score(self, items)

ServedModel.score = score_slowly
sys.exit(main(sys.argv[1:]))
"""


class ServerProcess:
    """A server in a process of its own; `lines`: what it has logged."""

    def __init__(self, words: list[str], *, seconds: float = 0.0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SLOW.format(seconds=seconds), "serve", *words, "--port", "0", "log_format=json"],
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

    def tell(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        code = self.process.wait(60)
        self._reader.join(10)
        return code

    @property
    def num_queued(self) -> int:
        text = httpx.get(f"{self.url}/metrics").text
        return int(float(text.split("\ntreeward_queued_conversations ")[1].split()[0]))


@pytest.fixture
def start(served_folder: Path) -> Iterator[Callable[..., ServerProcess]]:
    """A function that starts a server; with no words it serves the tiny model."""
    servers: list[ServerProcess] = []

    def start(*words: str, **options: Any) -> ServerProcess:
        servers.append(ServerProcess([str(served_folder), *words], **options))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.wait()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_under_load(start: Callable[..., ServerProcess], number: int) -> None:
    """200 requests wait when it comes; others keep coming, on connections of their own and on those that are open."""
    server = start(seconds=0.25)  # no request is answered before all have come, on a busy machine too

    async def story() -> tuple[Counter[str], Counter[str]]:
        accepted: Counter[str] = Counter()
        later: Counter[str] = Counter()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        own = httpx.Limits(max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60) as client,
            httpx.AsyncClient(base_url=server.url, limits=own, timeout=60) as stranger,
        ):

            async def ask(counter: Counter[str], many: int, asker: httpx.AsyncClient = client) -> None:
                try:
                    response = await asker.post("/v1/rewards", json={"conversations": [CHAT] * many})
                    counter[str(response.status_code)] += 1
                except httpx.ConnectError:
                    counter["refused"] += 1
                except httpx.HTTPError as error:
                    counter[type(error).__name__] += 1

            tasks = [asyncio.create_task(ask(accepted, 40)) for _ in range(200)]
            async with asyncio.timeout(60):
                while await asyncio.to_thread(lambda: server.num_queued) < 6000:
                    await asyncio.sleep(0.01)
                while (await client.get("/metrics")).text.find("treeward_requests_in_flight 201.0") < 0:
                    await asyncio.sleep(0.01)
            server.tell(number)
            await asyncio.sleep(0.3)
            await ask(later, 1)  # on the connection of /metrics, long before the server closes it
            assert later == {"503": 1}
            while not later["refused"]:
                await ask(later, 1, stranger)
                if number == signal.SIGTERM:
                    server.tell(signal.SIGTERM)  # once more changes nothing
                await asyncio.sleep(0.01)
            await asyncio.gather(*tasks)
        return accepted, later

    accepted, later = asyncio.run(story())
    assert accepted == {"200": 200}
    assert later["503"] >= 2 and set(later) <= {"503", "refused"}, later
    assert server.wait() == 0
    assert server.lines[-1]["message"] == "Shut down."


@pytest.mark.slow
def test_a_second_interrupt_waits_for_nothing(start: Callable[..., ServerProcess]) -> None:
    server = start(seconds=0.5)
    answers: list[int] = []

    def ask() -> None:
        try:
            response = httpx.post(f"{server.url}/v1/rewards", json={"conversations": [CHAT] * 4000}, timeout=60)
            answers.append(response.status_code)
        except httpx.HTTPError:
            answers.append(0)

    asking = threading.Thread(target=ask)
    asking.start()
    while server.num_queued < 1000:
        time.sleep(0.02)
    server.tell(signal.SIGINT)
    time.sleep(0.3)
    assert server.process.poll() is None
    server.tell(signal.SIGINT)
    assert server.wait() == 1
    asking.join(30)
    assert answers in ([503], [0])
    assert any("1 requests were not answered" in line["message"] for line in server.lines)


@pytest.mark.slow
def test_it_ends_in_time_whatever_a_thread_is_at(start: Callable[..., ServerProcess]) -> None:
    """A model that is busy for 40 seconds with what nobody waits for any more."""
    server = start("shutdown_seconds=1", seconds=40.0)
    late = httpx.post(f"{server.url}/v1/rewards", json=BODY, headers={"x-deadline-seconds": "0.5"}, timeout=30)
    assert late.status_code == 504
    began = time.monotonic()
    server.tell(signal.SIGTERM)
    assert server.wait() == 0
    assert time.monotonic() - began < 20
    messages = [line["message"] for line in server.lines]
    assert messages[-2] == "Shut down." and messages[-1].startswith("Left without waiting for treeward-")


@pytest.mark.slow
def test_it_listens_only_when_the_model_is_there(served_folder: Path) -> None:
    """Whoever waits for the port to answer finds a server that scores."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "treeward.cli.main", "serve", str(served_folder), "--port", str(port)],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        end = time.monotonic() + 60
        while True:
            assert time.monotonic() < end
            try:
                response = httpx.post(f"http://127.0.0.1:{port}/v1/rewards", json=BODY)
                break
            except httpx.ConnectError:
                time.sleep(0.02)
        assert response.status_code == 200
    finally:
        process.terminate()
        assert process.wait(30) == 0
