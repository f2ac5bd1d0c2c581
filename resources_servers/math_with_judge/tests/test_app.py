"""The server rewards by the rule, and by the judge where the rule says no; the judge is a server on
loopback."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from starlette.testclient import TestClient

FOLDER = Path(__file__).parent.parent
APP = runpy.run_path(str(FOLDER / "app.py"))


class Judge(BaseHTTPRequestHandler):
    """OpenAI's API: equivalent is what has `half` in it."""

    asked: list[str] = []

    def do_POST(self) -> None:
        question = str(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"])
        self.asked.append(question)
        message = {
            "role": "assistant",
            "content": "So [[A=B]]" if "one half" in question else "So [[A!=B]]",
        }
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "length" if "mumble" in question else "stop",
        }
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"object": "chat.completion", "choices": [choice]}).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def judge_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    for name in (
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    Thread(target=server.serve_forever, daemon=True).start()
    Judge.asked.clear()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture
def client(judge_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TestClient]]:
    """A function: a client of the server as configured in the folder; keywords change its
    section."""
    merged = yaml.safe_load(
        (FOLDER / "configs" / "math_with_judge.yaml").read_text(encoding="utf-8")
    )
    merged["policy_model"] = {
        "responses_api_models": {"openai_model": {"host": "127.0.0.1", "port": judge_port}}
    }
    monkeypatch.setenv("NEMO_GYM_CONFIG_DICT", yaml.safe_dump(merged))
    made = []

    def make(**changes: Any) -> TestClient:
        section = merged["math_with_judge"]["resources_servers"]["math_with_judge"]
        made.append(
            APP["MathWithJudge"](config=section | {"library_verifier_max_concurrency": 1} | changes)
        )
        return TestClient(made[-1].setup_webserver())

    yield make
    for server in made:
        server.close()


def rollout(answer: str, **row: Any) -> dict[str, Any]:
    message = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": answer}],
    }
    params = {"input": [{"role": "user", "content": "What is 1/4 + 1/4?"}]}
    return {
        "responses_create_params": params,
        "response": {"output": [message]},
        "expected_answer": "1/2",
        **row,
    }


@pytest.mark.slow
def test_the_rule_first_and_the_judge_for_the_rest(client: Callable[..., TestClient]) -> None:
    server = client()
    right = server.post("/verify", json=rollout(r"So it is \boxed{0.5}.", note=[1])).json()
    assert (right["reward"], right["library_reward"], right["judge_reward"], right["note"]) == (
        1.0,
        1.0,
        None,
        [1],
    )
    assert Judge.asked == []
    in_words = server.post("/verify", json=rollout("It is one half, from 2 parts.")).json()
    assert (in_words["reward"], in_words["library_reward"], in_words["judge_reward"]) == (
        1.0,
        0.0,
        1.0,
    )
    assert len(Judge.asked) == 2 and in_words["reward_components"]["judge_inconsistent"] == 0.0
    for thought in (
        r"<think>It is one half, \boxed{0.5}",
        r"<think>It is one half, \boxed{0.5}</think>I do not know.",
    ):
        cut = server.post("/verify", json=rollout(thought)).json()
        assert (cut["reward"], cut["library_reward"], cut["judge_reward"]) == (0.0, 0.0, 0.0)
    assert (
        client(strip_reasoning=False)
        .post("/verify", json=rollout(thought))
        .json()["library_reward"]
        == 1.0
    )
    for row in (
        right,
        rollout(r"\boxed{0.5}", ground_truth="7"),
    ):  # verified again; a key that is not the answer's
        again = server.post("/verify", json=row).json()
        assert (again["reward"], again["library_reward"]) == (1.0, 1.0)
    wrong = server.post("/verify", json=rollout(r"\boxed{3}")).json()
    assert (wrong["reward"], wrong["library_reward"], wrong["judge_reward"]) == (0.0, 0.0, 0.0)
    unclear = server.post("/verify", json=rollout(r"\boxed{4} mumble")).json()
    assert unclear["mask_sample"] is True and "judge" in unclear["failure_reason"]
    assert server.post("/verify", json={**rollout("x"), "expected_answer": None}).status_code == 422
    metrics = server.post(
        "/aggregate_metrics", json={"verify_responses": [right, in_words, wrong, unclear]}
    ).json()
    assert metrics["key_metrics"]["mean/reward"] == pytest.approx(2 / 3)
    assert metrics["key_metrics"]["mean/library_reward"] == pytest.approx(1 / 3)


@pytest.mark.slow
def test_without_a_judge(client: Callable[..., TestClient]) -> None:
    got = client(should_use_judge=False).post("/verify", json=rollout("It is one half.")).json()
    assert (got["reward"], got["judge_reward"], Judge.asked) == (0.0, None, [])
    down = client(judge={"base_url": "http://127.0.0.1:9/v1", "max_retries": 0})
    assert down.post("/verify", json=rollout(r"\boxed{0.5}")).json()["reward"] == 1.0
    got = down.post("/verify", json=rollout("It is one half.")).json()
    assert got["mask_sample"] is True and "cannot be reached" in got["failure_reason"]
    with pytest.raises(ValidationError, match="shoud_use_judge"):
        client(shoud_use_judge=False)


@pytest.mark.slow
def test_the_examples_are_right_by_their_own_answers(client: Callable[..., TestClient]) -> None:
    server = client(should_use_judge=False)
    for line in (FOLDER / "data" / "example.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        message = {
            "type": "message",
            "role": "assistant",
            "content": rf"\boxed{{{row['expected_answer']}}}",
        }
        assert (
            server.post("/verify", json=row | {"response": {"output": [message]}}).json()["reward"]
            == 1.0
        )
