"""Requests that are large in one way or another: how they are refused, and that nobody else waits for them."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import orjson
import pytest

from treeward.config.reward_shaping import RewardShapingConfig
from treeward.scoring.rewarding import Rewarder
from treeward.scoring.shaping import Shaper
from treeward.serving import bodies
from treeward.serving.dialects import nemo_gym, openrlhf
from treeward.serving.dialects.openrlhf import RewardBody
from treeward.serving.dialects.texts import Ending
from treeward.serving.models import Item, RenderedText, ServedModel, weight
from treeward.serving.service import Service

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


def rollout(text: str, **more: Any) -> dict[str, Any]:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    return {"responses_create_params": {"input": "2 + 2?"}, "response": {"output": [said]}, **more}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rewards", {"conversations": [7, 7, 7, 7]}),
        ("/v1/rewards", {"context": [], "completions": [{}] * 4}),
        ("/v1/rewards", {"conversations": [CHAT], "reference_answers": [{}] * 4}),
        ("/get_reward", {"query": [{}] * 4}),
        ("/get_reward", {"query": "a", "prompts": [{}] * 4}),
        ("/classify", {"text": [{}] * 4}),
        ("/classify", {"input": [{}] * 4}),
        ("/classify", {"input_ids": [{}] * 4}),
        ("/pooling", {"input": [{}] * 4}),
        ("/v1/embeddings", {"input": [{}] * 4}),
        ("/predict", {"inputs": [{}] * 4}),
    ],
    ids=lambda given: given if isinstance(given, str) else next(reversed(given)),
)
def test_too_many_are_refused_before_anything_is_done_with_each(
    make_service: Callable[..., Service], asgi_client: Callable[..., Any], path: str, body: Any
) -> None:
    """None of them is what it should be, which would be a 422."""
    answered = asgi_client(make_service(max_conversations=3)).post(path, json=body)
    assert answered.status_code == 413
    told = answered.json()
    assert (told if path == "/predict" else told["error"])["code"] == "too_many_conversations"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rewards", {"completions": ["4"], "context": [{}] * 4}),
        ("/v1/rewards/trace", {"context": [], "completion": [{}] * 4}),
        ("/classify", {"messages": [{}] * 4}),
        ("/slime", {"response": "4", "prompt": [{}] * 4}),
    ],
)
def test_too_many_messages(
    make_service: Callable[..., Service], asgi_client: Callable[..., Any], path: str, body: Any
) -> None:
    answered = asgi_client(make_service(max_conversation_characters=3 * 64 + 1)).post(path, json=body)
    assert answered.status_code == 413 and answered.json()["error"]["code"] == "conversation_too_long"


def test_a_context_with_many_completions(client: Any) -> None:
    body = {"context": [{"role": "user"}] * 15_000, "completions": [""] * 4_000}
    answered = client.post("/v1/rewards", json=body)
    assert answered.status_code == 413 and answered.json()["error"]["code"] == "too_many_messages"


def test_one_text_of_many_token_ids_is_one_conversation(
    make_service: Callable[..., Service], asgi_client: Callable[..., Any]
) -> None:
    client = asgi_client(make_service(max_conversations=3))
    assert client.post("/classify", json={"input": [5, 6, 7, 8, 9]}).status_code == 200
    assert client.post("/classify", json={"input_ids": [5, 6, 7, 8, 9]}).status_code == 200


def test_a_large_body_is_read_in_a_thread(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    parse = bodies.parse

    def parse_and_note(content: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return parse(content)

    for module in (bodies, nemo_gym, openrlhf):
        monkeypatch.setattr(module, "parse", parse_and_note)
    padding = " " * 2**18
    for content in (json.dumps({"query": "a"}), json.dumps({"query": "a"}) + padding):
        assert client.post("/get_reward", content=content).status_code == 200
    for content in (json.dumps(rollout("4")), json.dumps(rollout("4", more=padding))):
        assert client.post("/verify", content=content).json()["reward"] != 0
    assert [name.startswith("treeward-bodies") for name in threads] == [False, True, False, True]
    refused = client.post("/get_reward", content=padding)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "invalid_json"


def test_nobody_looks_for_garbage_while_a_body_is_read(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    collecting: list[bool] = []
    check = RewardBody.model_validate

    def note(value: Any) -> Any:
        collecting.append(gc.isenabled())
        return check(value)

    monkeypatch.setattr(RewardBody, "model_validate", note)
    assert client.post("/get_reward", content=json.dumps({"query": "a"}) + " " * 2**18).status_code == 200
    assert client.post("/get_reward", content=json.dumps({"query": 5}) + " " * 2**18).status_code == 422
    assert collecting == [False, False] and gc.isenabled()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/get_reward", {"query": ["a"], "labels": " " * 2**18}),
        ("/slime", {"prompt": "a", "response": "b", "label": " " * 2**18}),
    ],
)
def test_long_texts_are_completed_in_a_thread(
    client: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    threads: set[str] = set()
    complete = Ending.completed

    def completed(ending: Ending, text: str) -> str:
        threads.add(threading.current_thread().name)
        return complete(ending, text)

    monkeypatch.setattr(Ending, "completed", completed)
    assert client.post(path, json=body).status_code == 200
    assert len(threads) == 1 and threads.pop().startswith("treeward-bodies")


def test_conversations_are_copied_for_their_references_in_a_thread(
    make_service: Callable[..., Service], asgi_client: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    plan = Rewarder.plan

    def noted(rewarder: Rewarder, *given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return plan(rewarder, *given)

    monkeypatch.setattr(Rewarder, "plan", noted)
    monkeypatch.setattr(Rewarder, "reference_key", "references")
    service = make_service()
    served = service.engine.model(None)
    shaper = Shaper(RewardShapingConfig(normalize_rewards=True, reward_mean=0.0, reward_std=1.0))
    monkeypatch.setattr(served, "shaper", shaper)
    client = asgi_client(service)
    for references in (["five"], None):
        client.post("/v1/rewards", json={"conversations": [CHAT], "reference_answers": references, "on_error": "mask"})
    assert [name.startswith("treeward-shaping") for name in threads] == [True, False]


@pytest.mark.parametrize(
    ("name", "most", "what"),
    [("_MOST_ROWS", 1, "rollouts"), ("_MOST_NAMES", 2, "names of numbers"), ("_MOST_VALUES", 4, "numbers")],
)
def test_too_many_rollouts_for_statistics(
    client: Any, monkeypatch: pytest.MonkeyPatch, name: str, most: int, what: str
) -> None:
    rows = [{"reward": 1.0, "length": 3, "response": {"usage": {"tokens": 1}}}, {"reward": 0.0, "length": 2}]
    assert client.post("/aggregate_metrics", json={"verify_responses": rows}).status_code == 200
    monkeypatch.setattr(nemo_gym, name, most)
    answered = client.post("/aggregate_metrics", json={"verify_responses": rows})
    assert answered.status_code == 413 and f"too many {what} " in answered.json()["error"]["message"]


def test_statistics_hold_up_nobody(service: Service, serve_on_loopback: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits behind them and whose time is over is never begun."""
    url = serve_on_loopback(service)
    gate, begun = threading.Event(), threading.Semaphore(0)
    calls: list[int] = []

    def wait(rows: Sequence[Any]) -> dict[str, Any]:
        calls.append(len(rows))
        begun.release()
        assert gate.wait(30)
        return {}

    monkeypatch.setattr(nemo_gym, "aggregate_metrics", wait)
    answers: list[int] = []
    body = {"verify_responses": [{"reward": 1.0}]}
    asking = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{url}/aggregate_metrics", json=body, timeout=30).status_code)
    )
    asking.start()
    assert begun.acquire(timeout=20)
    try:
        assert httpx.get(f"{url}/health", timeout=10).status_code == 200
        assert httpx.post(f"{url}/v1/rewards", json={"conversations": [CHAT]}, timeout=10).status_code == 200
        late = httpx.post(f"{url}/aggregate_metrics", json=body, headers={"x-deadline-seconds": "0.1"}, timeout=10)
        assert late.status_code == 504
    finally:
        gate.set()
    asking.join(30)
    assert answers == [200] and calls == [1]


@pytest.mark.slow
def test_health_while_ten_million_lists_arrive(service: Service, serve_on_loopback: Any) -> None:
    url = serve_on_loopback(service)
    body = b'{"conversations": [' + b"[]," * 10_000_000 + b"[]]}"
    answers: list[int] = []
    asking = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{url}/v1/rewards", content=body, timeout=60).status_code)
    )
    asking.start()
    slowest = 0.0
    while asking.is_alive():
        began = time.monotonic()
        assert httpx.get(f"{url}/health", timeout=30).status_code == 200
        slowest = max(slowest, time.monotonic() - began)
    assert answers == [413] and slowest < 5.0


@pytest.fixture
def prepared(loaded_model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """What the model was asked to make tokens of, call by call."""
    calls: list[list[Any]] = []
    prepare = loaded_model.prepare

    def prepare_and_note(asked: Sequence[Any]) -> list[Item]:
        calls.append(list(asked))
        return prepare(asked)

    monkeypatch.setattr(loaded_model, "prepare", prepare_and_note)
    return calls


def test_a_long_conversation_is_refused_before_tokens_are_made_of_it(
    make_service: Callable[..., Service], asgi_client: Callable[..., Any], prepared: list[list[Any]]
) -> None:
    client = asgi_client(make_service(max_conversation_characters=300))
    # 2 messages count 128, their 4 values 64, "user", "assistant" and "2 + 2?" 19: there are 89 left.
    fits, long = ([CHAT[0], {"role": "assistant", "content": "4" * number}] for number in (89, 90))
    assert client.post("/v1/rewards", json={"conversations": [long, fits]}).status_code == 422
    prepared.clear()
    body = {"conversations": [long, fits, [{"role": "user", "content": ""}] * 5], "on_error": "mask"}
    rows = client.post("/v1/rewards", json=body).json()["data"]
    assert [row["score"] is None for row in rows] == [True, False, True]
    assert "too long: at most 300 characters" in rows[0]["error"]
    assert prepared == [[fits]]
    for path, key in (("/get_reward", "query"), ("/predict", "inputs"), ("/classify", "text")):
        answered = client.post(path, json={key: "a" * 301})
        assert answered.status_code == 422 and "too long" in answered.text
    for key in ("input", "input_ids"):
        assert client.post("/classify", json={key: [5] * 301}).status_code == 422
    trace = client.post("/v1/rewards/trace", json={"context": [], "completion": "a" * 301})
    assert trace.status_code == 422 and trace.json()["error"]["code"] == "cannot_be_scored"
    assert trace.json()["error"]["param"] == "completion"  # not the engine's, which would be too late
    for verified in (rollout("a" * 301), {**rollout("a"), "response": {"output": [{}] * 5}}):
        row = client.post("/verify", json=verified).json()
        assert row["mask_sample"] is True and "too long" in row["failure_reason"]
    assert prepared == [[fits]]


def test_what_a_conversation_weighs() -> None:
    assert weight(RenderedText("abc"), 10) == weight(RenderedText([1, 2, 3]), 10) == 3
    assert weight([{"role": "user", "content": "abc"}], 1000) == 64 + 2 * 16 + 7
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "abc"}, {"type": "text", "text": ""}]}]
    assert weight(parts, 1000) == 64 + 2 * 16 + 4 + 2 * 16 + 4 * 16 + 4 + 3 + 4
    deep: Any = {}
    for _ in range(5000):
        deep = [deep]
    assert weight([{"role": "user", "content": deep}], 10**6) > 5000 * 16
    assert weight([{"role": "", "content": ["a"] * 10**6}], 1000) > 1000


def test_tokens_are_made_of_so_much_text_at_a_time(
    service: Service, loaded_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[list[int]] = []

    def note(asked: Sequence[Any]) -> list[Item]:
        sizes.append([len(one.text) for one in asked])
        return [Item(None, 0, error="noted") for _ in asked]

    monkeypatch.setattr(loaded_model, "prepare", note)

    async def story() -> None:
        asked = [RenderedText("a" * size) for size in (300_000, 300_000, 900_000, 100_000, 100_000)]
        outcomes = await service.engine.score(loaded_model, asked)
        assert [outcome.by_request for outcome in outcomes] == [True] * 5

    asyncio.run(story())
    assert sizes == [[300_000], [300_000], [900_000], [100_000, 100_000]]


def test_a_refusal_from_a_thread_holds_no_body() -> None:
    def fail() -> Any:
        return bodies.parse(b"{" + b" " * 100)

    made, refusal = bodies._made_or_refused(fail)
    assert made is None and refusal is not None and refusal.code == "invalid_json"
    assert refusal.__traceback__ is None and refusal.__cause__ is None and refusal.__context__ is None
    assert orjson.loads(b"[]") == []
