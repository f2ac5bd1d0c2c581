"""Several replicas behind one front: the scores of one server, and deaths."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from loopback import wait_until
from messages import chat
from prometheus_client.parser import text_string_to_metric_families
from serving.dialects.clients import CLIENTS, Client
from serving.dialects.conftest import CHATS
from serving.dialects.test_scores import CLOSE

from treeward.config.server import ServerConfig
from treeward.scoring.score import Score
from treeward.scoring.scorer import Scorer

pytest.importorskip("ray.serve")  # it needs grpcio-reflection

from treeward.serving.replicas import ReplicaBatcher

pytestmark = pytest.mark.slow  # Ray, Serve and two replicas take half a minute on two cores
SECONDS = 240.0


def title_of(process: psutil.Process) -> str:
    """What it says of itself; nothing once it has died."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


class Server:
    """A front at `url` in a process of its own, and what it counts."""

    def __init__(self, process: subprocess.Popen[str], url: str, scorer: Scorer) -> None:
        self.process = process
        self.url = url
        self.scorer = scorer

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=SECONDS)

    def scores(self, chats: list[Any]) -> list[float]:
        response = self.post("/v1/rewards", {"conversations": chats})
        assert response.status_code == 200, response.text
        return [row["score"] for row in response.json()["data"]]

    def counted(self, name: str) -> float | None:
        families = text_string_to_metric_families(
            httpx.get(f"{self.url}/metrics", timeout=SECONDS).text,
        )
        samples = (sample for family in families for sample in family.samples)
        return next((sample.value for sample in samples if sample.name == f"treeward_{name}"), None)

    def replicas(self, title: str = "ServeReplica") -> list[psutil.Process]:
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in below if title in title_of(one)]


@pytest.fixture(scope="module")
def server(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two replicas of a model that requests may call by its folder, which is relative."""
    folder = tmp_path_factory.mktemp("replicas")
    with serving(served_folder, folder, "--replicas", "2") as started:
        yield started


@contextlib.contextmanager
def serving(served_folder: Path, folder: Path, *options: str) -> Iterator[Server]:
    """`treeward serve` in `folder`, with these options."""
    shutil.copytree(served_folder, folder / "models" / "rm")
    words = ["serve", "models/rm", "--port", "0", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    log = folder / "log"
    with log.open("w") as stderr:
        command = [sys.executable, "-m", "treeward.cli.main", *words]
        process = subprocess.Popen(command, stderr=stderr, cwd=folder, env=environment)
    try:
        result = wait_until(
            lambda: process.poll() or re.search(r"at (http://\S+)", log.read_text()),
        )
        assert isinstance(result, re.Match), log.read_text()
        yield Server(process, result[1], Scorer.load(served_folder, device="cpu"))
    finally:
        process.terminate()
        process.wait(60)


def chats_of(prompt: str, number: int = 4) -> list[Any]:
    return [chat(prompt, f"{n}.") for n in range(number)]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_the_front_gives_the_scores_in_every_dialect(client: Client, server: Server) -> None:
    want = [score.score for score in server.scorer.score(CHATS)]
    items: list[Any] = CHATS
    if client.form == "ids":
        items = [server.scorer.renderer.encode(chat) for chat in CHATS]
    elif client.form != "messages":
        items = [server.scorer.renderer.render(chat) for chat in CHATS]
    groups = [items]
    if not client.at_once:
        groups = [[item] for item in items]
    scores = []
    for group in groups:
        response = server.post(client.route, client.body(group))
        assert response.status_code == 200, response.text
        scores += client.read(response.json())
    assert scores == pytest.approx(want, abs=CLOSE)


def test_the_front_lists_the_models(server: Server) -> None:
    assert httpx.get(f"{server.url}/ready").json() == {"status": "ready", "models": ["rm"]}
    (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert model["root"] == "models/rm"
    assert server.scorer.contract is not None
    assert model["contract"] == server.scorer.contract.scores_sha256


def test_the_front_refuses_what_cannot_be_scored(server: Server) -> None:
    long = [CHATS[0][0], {"role": "assistant", "content": "word " * 1000}]
    refused = server.post("/v1/rewards", {"conversations": [*CHATS, long]})
    assert refused.status_code == 422
    assert refused.json()["error"]["code"] == "cannot_be_scored"


def test_a_replica_that_is_killed_loses_nothing(server: Server) -> None:
    chats = []
    for n in range(64):
        chats += chats_of(f"What is {n} plus {n}?", 8)
    want = [score.score for score in server.scorer.score(chats)]
    groups = [range(start, start + 4) for start in range(0, len(chats), 4)]
    killed = threading.Event()

    def ask(group: Any) -> int:
        expected = [want[i] for i in group]
        assert server.scores([chats[i] for i in group]) == pytest.approx(expected, abs=CLOSE)
        return not killed.is_set()

    with ThreadPoolExecutor(16) as threads:
        # Three times, so that some are on their way when a replica dies.
        asked = [threads.submit(ask, group) for group in groups * 3]
        wait_until(lambda: sum(request.done() for request in asked) > 40)
        first, second = server.replicas()
        first.suspend()
        while_one_hangs = httpx.get(f"{server.url}/health", timeout=SECONDS).status_code
        first.kill()
        killed.set()
        before = sum(request.result() for request in asked)
    assert 40 < before < len(asked)
    assert while_one_hangs == 200
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.counted("scores_count") >= 3 * len(chats)
    wait_until(lambda: set(server.replicas()) - {first, second})


def test_a_divided_model_gives_the_scores_and_comes_back(
    spread_folder: Path, tmp_path: Path
) -> None:
    """A replica of two processes, each with a part of the model, of which one is killed."""
    with serving(spread_folder, tmp_path, "--tensor-parallel-size", "2") as server:
        scores = server.scorer.score(CHATS)
        want = [score.score for score in scores]
        assert server.scores(CHATS) == pytest.approx(want, abs=CLOSE)
        rows = server.post("/v1/rewards", {"conversations": CHATS}).json()["data"]
        spreads = [score.spread for score in scores]
        assert [row["spread"] for row in rows] == pytest.approx(spreads, rel=1e-4)
        [part] = server.replicas("ModelPart")
        part.kill()
        # The replica ends when it needs the part, and the front asks the one that Serve starts.
        assert server.scores(CHATS) == pytest.approx(want, abs=CLOSE)


class Recorded:
    """A handle of Serve that scores by the length, and keeps what each call was routed by."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def options(self, *, method_name: str, session_id: str) -> Any:
        async def score(model: str, inputs: list[Any]) -> list[Score]:
            self.calls.append((session_id, len(inputs)))
            return [Score(float(len(chat[-1]["content"]))) for chat in inputs]

        return SimpleNamespace(remote=score)


def test_conversations_of_one_prompt_are_one_call_to_one_replica() -> None:
    handle = Recorded()
    chats = [*chats_of("One?", 11), *chats_of("Two?", 3), *chats_of("One?", 2)]
    model: Any = SimpleNamespace(name="m", ending="")
    config = ServerConfig(models=({"models": "m"},))  # type: ignore[arg-type]
    batcher = ReplicaBatcher(handle, config, [model])
    scores = asyncio.run(batcher.score("m", chats, deadline=time.monotonic() + 60))
    assert [score.score for score in scores] == [2.0] * 10 + [3.0] + [2.0] * 5
    keys = {key for key, _ in handle.calls}
    numbers = [number for _, number in handle.calls]
    assert sorted(numbers) == [3, 13]
    assert len(keys) == 2
