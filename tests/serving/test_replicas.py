"""Several replicas behind one front: the scores of one server, prompts that stay where they are cached, and deaths."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from loopback import wait_until
from messages import chat
from prometheus_client.parser import text_string_to_metric_families
from serving.dialects.clients import CLIENTS
from serving.dialects.conftest import CHATS
from serving.dialects.test_scores import CLOSE

from treeward.scoring.scorer import Scorer
from treeward.tree.token_tree import common_prefix_length

pytest.importorskip("ray.serve")  # it needs grpcio-reflection

from treeward.serving.prompt_router import ranked

pytestmark = pytest.mark.slow  # Ray, Serve and two replicas take half a minute on two cores
SECONDS = 240.0


class Server:
    """A front at `url` in a process of its own, and what it counts."""

    def __init__(self, process: subprocess.Popen[str], url: str, scorer: Scorer) -> None:
        self.process, self.url, self.scorer = process, url, scorer

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=SECONDS)

    def scores(self, chats: list[Any]) -> list[float]:
        response = self.post("/v1/rewards", {"conversations": chats})
        assert response.status_code == 200, response.text
        return [row["score"] for row in response.json()["data"]]

    def counted(self, name: str) -> dict[str, float]:
        """The values of a metric by replica; "" is the front."""
        text = httpx.get(f"{self.url}/metrics", timeout=SECONDS).text
        families = text_string_to_metric_families(text)
        samples = (sample for family in families for sample in family.samples if sample.name == f"treeward_{name}")
        return {sample.labels.get("replica", ""): sample.value for sample in samples}

    def replicas(self) -> list[psutil.Process]:
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in below if "ServeReplica" in " ".join(one.cmdline())]


@pytest.fixture(scope="module")
def server(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two replicas of a model that requests may call by its folder, which is relative."""
    folder = tmp_path_factory.mktemp("replicas")
    shutil.copytree(served_folder, folder / "models" / "rm")
    words = ["serve", "models/rm", "--port", "0", "--replicas", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    log = folder / "log"
    with log.open("w") as stderr:
        command = [sys.executable, "-m", "treeward.cli.main", *words]
        process = subprocess.Popen(command, stderr=stderr, cwd=folder, env=environment)
    try:
        result = wait_until(lambda: process.poll() or re.search(r"at (http://\S+)", log.read_text()))
        assert isinstance(result, re.Match), log.read_text()
        yield Server(process, result[1], Scorer.load(served_folder, device="cpu"))
    finally:
        process.terminate()
        process.wait(60)


def chats_of(prompt: str, number: int = 4) -> list[Any]:
    return [chat(prompt, f"{n}.") for n in range(number)]


def test_the_front_is_one_server(server: Server) -> None:
    """Scores in every dialect, models, and what is no score."""
    want = [score.score for score in server.scorer.score(CHATS)]
    texts = [server.scorer.renderer.render(chat) for chat in CHATS]
    ids = [server.scorer.renderer.encode(chat) for chat in CHATS]
    forms = {"messages": CHATS, "ids": ids, "texts": texts, "texts_without_bos": texts}
    for client in CLIENTS:
        items: Any = forms[client.form]
        groups = [items] if client.at_once else [[item] for item in items]
        responses = [server.post(client.route, client.body(group)) for group in groups]
        assert all(response.status_code == 200 for response in responses), (client.name, responses[0].text)
        result = [score for response in responses for score in client.read(response.json())]
        assert result == pytest.approx(want, abs=CLOSE), client.name
    assert httpx.get(f"{server.url}/ready").json() == {"status": "ready", "models": ["rm"]}
    (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert model["root"] == "models/rm" and model["contract"] == server.scorer.contract.scores_sha256  # type: ignore
    long = [CHATS[0][0], {"role": "assistant", "content": "word " * 1000}]
    refused = server.post("/v1/rewards", {"conversations": [*CHATS, long]})
    assert refused.status_code == 422 and refused.json()["error"]["code"] == "cannot_be_scored"
    late = httpx.post(
        f"{server.url}/v1/rewards", json={"conversations": CHATS}, headers={"x-deadline-seconds": "0"}, timeout=SECONDS
    )
    assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"


def test_a_prompt_is_computed_by_one_replica(server: Server) -> None:
    """Its completions come one by one: each but the first finds it in the cache. Prompts go to both replicas."""
    prompts = [f"{n} and {n}: {' '.join(f'what is {n} plus {m}?' for m in range(7))}" for n in range(20)]
    before, tokens = server.counted("prefix_cache_reused"), server.counted("tokens_total")
    for one in (one for prompt in prompts for one in chats_of(prompt)):
        server.scores([one])
    reused = {name: value - before[name] for name, value in server.counted("prefix_cache_reused").items()}
    rows = [[server.scorer.renderer.encode(one) for one in chats_of(prompt)[:2]] for prompt in prompts]
    lengths = [common_prefix_length(*map(np.asarray, row)) for row in rows]
    assert min(lengths) > 64 and sum(reused.values()) >= 3 * sum(lengths)
    took = [value - tokens[name] for name, value in server.counted("tokens_total").items()]
    assert min(took) > 0.1 * sum(took)


def test_a_replica_that_is_killed_loses_nothing(server: Server) -> None:
    chats = [one for n in range(64) for one in chats_of(f"What is {n} plus {n}?", 8)]
    want = [score.score for score in server.scorer.score(chats)]
    groups = [range(start, start + 4) for start in range(0, len(chats), 4)]
    old, killed = server.counted("prefix_cache_bytes"), threading.Event()

    def ask(group: Any) -> int:
        assert server.scores([chats[i] for i in group]) == pytest.approx([want[i] for i in group], abs=CLOSE)
        return not killed.is_set()

    with ThreadPoolExecutor(16) as threads:
        asked = [threads.submit(ask, group) for _ in range(3) for group in groups]
        wait_until(lambda: sum(one.done() for one in asked) > 40)
        first, _ = server.replicas()
        first.suspend()
        while_one_hangs = httpx.get(f"{server.url}/health", timeout=SECONDS).status_code
        silent, heard = server.counted("silent_replicas"), server.counted("prefix_cache_bytes")
        first.kill()
        killed.set()
        before = sum(one.result() for one in asked)
    assert 40 < before < len(asked) and while_one_hangs == 200
    assert silent == {"": 1} and len(heard) == 1 and heard.keys() < old.keys()
    assert httpx.get(f"{server.url}/health").status_code == 200
    wait_until(lambda: len(new := server.counted("prefix_cache_bytes")) == 2 and len(set(new) - set(old)) == 1)


def test_a_signal_lets_the_replicas_finish(server: Server) -> None:
    """Of a front that has accepted eight requests all are answered, and no process is left."""
    bodies = [{"conversations": [one for n in range(16) for one in chats_of(f"{k} and {n}?")]} for k in range(8)]
    below = psutil.Process(server.process.pid).children(recursive=True)
    for replica in server.replicas():
        replica.suspend()
    with ThreadPoolExecutor(8) as threads:
        accepted = [threads.submit(server.post, "/v1/rewards", body) for body in bodies]
        wait_until(lambda: server.counted("queued_conversations")[""] == 8 * 64)
        server.process.send_signal(signal.SIGTERM)
        for replica in server.replicas():
            replica.resume()
        assert [one.result().status_code for one in accepted] == [200] * 8
    assert server.process.wait(60) == 0
    assert not psutil.wait_procs(below, timeout=30)[1]


@pytest.fixture
def serve_app(ray: Any, served_folder: Path) -> Iterator[str]:
    from ray import serve

    from treeward.serving.ray_app import app

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app({"model": str(served_folder), "replicas": "2", "ray_actor_options": {"num_cpus": 0.5}}))
    wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)  # Serve's proxy may be later than the app
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def test_as_an_application_of_ray_serve(serve_app: str, served_folder: Path) -> None:
    chats = [*CHATS, *(one for n in range(32) for one in chats_of(f"{n}?", 2))]  # calls of one request to both
    response = httpx.post(f"{serve_app}/v1/rewards", json={"conversations": chats}, timeout=SECONDS)
    want = [score.score for score in Scorer.load(served_folder, device="cpu").score(chats)]
    assert [row["score"] for row in response.json()["data"]] == pytest.approx(want, abs=CLOSE)
    refused = httpx.post(f"{serve_app}/v1/rewards", json={"conversations": [[]]}, timeout=SECONDS)
    ids = set(refused.headers.get_list("x-request-id"))  # Serve's proxy adds its own, which is the same
    assert refused.status_code == 422 and {refused.json()["error"]["request_id"]} == ids
    assert 'treeward_tokens_total{model="tiny",replica=' in httpx.get(f"{serve_app}/metrics", timeout=SECONDS).text
    assert httpx.get(f"{serve_app}/ready").status_code == 200 and "playground" in httpx.get(serve_app).text


def test_the_order_of_replicas() -> None:
    names = ["a", "b", "c", "d"]
    keys = [str(key) for key in range(400)]
    orders = {key: ranked(key, dict.fromkeys(names, 0)) for key in keys}
    firsts = [sum(order[0] == name for order in orders.values()) for name in names]
    assert min(firsts) > 60
    for key, order in orders.items():  # a replica that goes moves only its own keys
        assert ranked(key, dict.fromkeys("abd", 0)) == [name for name in order if name != "c"]
    busy = ranked("7", dict.fromkeys(names, 30) | {orders["7"][0]: 31})
    assert busy == orders["7"]  # a few calls are no overload
    overloaded = ranked("7", dict.fromkeys(names, 30) | {orders["7"][0]: 60})
    assert overloaded == [*orders["7"][1:], orders["7"][0]]
