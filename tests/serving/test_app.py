"""The gate and the routes: each as a hostile user would find them, without a socket where none is needed."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from treeward.config.server import ServerConfig
from treeward.errors import DataError
from treeward.scoring.score import Score
from treeward.serving.app import create_app
from treeward.serving.dialects.rewards import RewardsBody
from treeward.serving.models import Item, ServedModel
from treeward.serving.refusals import in_words
from treeward.serving.service import Service

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


@pytest.fixture
def held_model(loaded_model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The model scores nothing until this is set."""
    gate = threading.Event()
    score = loaded_model.score

    def wait_and_score(items: Any) -> list[Score]:
        assert gate.wait(30)
        return score(items)

    monkeypatch.setattr(loaded_model, "score", wait_and_score)
    yield gate  # type: ignore[misc]
    gate.set()


def ask(client: Any, **body: Any) -> Any:
    return client.post("/v1/rewards", json={"conversations": [CHAT], **body})


def refusal(response: Any) -> tuple[int, str]:
    """The status and the code of a refusal, whose form is that of all of them."""
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "code", "param", "request_id"}
    assert error["request_id"] == response.headers["x-request-id"]
    return response.status_code, error["code"]


def counted(service: Service, name: str) -> dict[str, float]:
    """The values of a metric, by its labels."""
    lines = service.metrics.exposition().decode().splitlines()
    found = [line.rsplit(" ", 1) for line in lines if line.startswith((f"treeward_{name}{{", f"treeward_{name} "))]
    return {key.partition("{")[2].rstrip("}"): float(value) for key, value in found}


def test_scores_through_http_are_those_of_the_scorer(
    client: Any, conversations: Any, loaded_model: ServedModel
) -> None:
    got = client.post("/v1/rewards", json={"conversations": conversations})
    assert got.status_code == 200, got.text
    want = [score.score for score in loaded_model.scorer.score(conversations)]
    assert [row["score"] for row in got.json()["data"]] == pytest.approx(want, abs=1e-5)
    assert got.json()["contract"] == loaded_model.contract_sha256


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b'{"conversations": ', 400, "invalid_json"),
        (b"", 400, "invalid_json"),
        (b"\xff\xfe{}", 400, "invalid_json"),
        (b'{"conversations": NaN}', 400, "invalid_json"),
        (b'{"conversations": [[{"role": "assistant", "content": Infinity}]]}', 400, "invalid_json"),
        (b'{"model": "\\ud800"}', 400, "invalid_json"),
        (b"[" * 100_000, 400, "invalid_json"),
        (b"[" * 100_000 + b"]" * 100_000, 400, "invalid_json"),
        (b"[]", 422, "invalid_request"),
        (b"null", 422, "invalid_request"),
        (b"{}", 422, "invalid_request"),
        (b'{"conversations": "abc"}', 422, "invalid_request"),
        (b'{"conversations": [[{"role": "assistant", "content": 5}]]}', 422, "invalid_request"),
        (b'{"conversations": [[{"content": "no role"}]]}', 422, "invalid_request"),
        (b'{"conversations": [[{"role": "user", "content": "no answer"}]]}', 422, "cannot_be_scored"),
        (b'{"conversations": [[]]}', 422, "cannot_be_scored"),
        (b'{"conversations": [], "model": "other"}', 404, "model_not_found"),
        (b'{"conversations": [], "model": 5}', 422, "invalid_request"),
    ],
)
def test_wrong_bodies(client: Any, content: bytes, status: int, code: str) -> None:
    response = client.post("/v1/rewards", content=content)
    assert refusal(response) == (status, code), response.text
    assert len(response.content) < 1000
    assert ask(client).status_code == 200


def test_a_wrong_body_of_millions_of_mistakes_is_refused_briefly(client: Any) -> None:
    many = b"0," * 1_000_000 + b"0"
    for content, expected in (
        (b'{"conversations": [[' + many + b"]]}", (422, "invalid_request")),
        (b'{"conversations": [' + many + b"]}", (413, "too_many_conversations")),
    ):
        response = client.post("/v1/rewards", content=content)
        assert refusal(response) == expected
        assert len(response.content) < 1000
    with pytest.raises(ValidationError) as invalid:
        RewardsBody.model_validate({"conversations": [0] * 100, "completions": [[0] * 100] * 100})
    assert len(invalid.value.errors()) <= 4  # of each form that a part may have, the first


def test_a_conversation_that_is_too_long(client: Any) -> None:
    chat = [*CHAT[:1], {"role": "assistant", "content": "word " * 1000}]
    response = ask(client, conversations=[CHAT, chat])
    assert refusal(response) == (422, "cannot_be_scored")
    assert response.json()["error"]["param"] == "[1]" and "at most 160" in response.text
    masked = ask(client, conversations=[CHAT, chat], on_error="mask").json()["data"]
    assert masked[0]["score"] is not None and masked[1]["score"] is None and masked[1]["num_tokens"] > 1000


def test_too_many_conversations(make_service: Callable[..., Service], asgi_client: Callable[..., Any]) -> None:
    client = asgi_client(make_service(max_conversations=3))
    assert ask(client, conversations=[CHAT] * 3).status_code == 200
    assert refusal(ask(client, conversations=[CHAT] * 4)) == (413, "too_many_conversations")


def test_routes_and_methods_that_are_not_there(client: Any, service: Service) -> None:
    assert refusal(client.get("/v2/rewards")) == (404, "not_found")
    assert refusal(client.post("/v1/rewards/", json={})) == (404, "not_found")
    response = client.get("/v1/rewards")
    assert refusal(response) == (405, "method_not_allowed") and response.headers["allow"] == "POST"
    assert refusal(client.post("/" + "x" * 5000))[0] == 404
    assert len(client.post("/" + "x" * 5000).content) < 500
    routes = counted(service, "requests_total")
    assert routes == {'route="unknown",status="404"': 4.0, 'route="/v1/rewards",status="405"': 1.0}


@pytest.mark.parametrize(
    "path", ["/", "/health", "/ready", "/metrics", "/v1/models", "/openapi.json", "/reverify_mode"]
)
def test_head_is_get_without_a_body(client: Any, service: Service, path: str) -> None:
    got, head = client.get(path), client.head(path)
    assert head.status_code == 200 and head.content == b""
    assert head.headers["content-type"] == got.headers["content-type"]
    if path != "/metrics":  # which has counted more by then
        assert head.headers["content-length"] == str(len(got.content)) != "0"
    name = path if path != "/openapi.json" else "unknown"
    assert counted(service, "requests_total")[f'route="{name}",status="200"'] == 2.0
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "FOO"):
        refused = client.request(method, path)
        assert refusal(refused) == (405, "method_not_allowed") and refused.headers["allow"] == "GET, HEAD"


def test_head_of_what_is_not_there(client: Any) -> None:
    posted, missing = client.head("/v1/rewards"), client.head("/nothing")
    assert (posted.status_code, posted.headers["allow"], posted.content) == (405, "POST", b"")
    assert (missing.status_code, missing.content) == (404, b"")


@pytest.mark.parametrize(
    ("host", "is_refused"),
    [
        *(
            (name, False)
            for name in ("localhost", "LocalHost:1", "localhost.", "127.0.0.1:8000", "127.8.9.1", "[::1]:5")
        ),
        *((name, False) for name in ("rm.lan", "RM.lan:8000", "")),
        *((name, True) for name in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "10.0.0.7")),
        *((name, True) for name in ("rm.lan.evil.example", "a:b:c", "[", "localhost:x", ":80", "\u00e9".encode())),
    ],
)
def test_names_that_a_server_may_be_called_by(service: Service, host: str | bytes, is_refused: bool) -> None:
    client = TestClient(create_app(service, token="s3cret", allowed_hosts=["rm.lan"]))
    for path in ("/health", "/", "/v1/models"):
        response = client.get(path, headers={"host": host, "authorization": "Bearer s3cret"})
        if is_refused:
            assert refusal(response) == (421, "wrong_host") and "allowed_hosts" in response.text
        else:
            assert response.status_code == 200


def test_a_server_on_loopback_is_called_by_loopbacks_names(
    make_service: Callable[..., Service], serve_on_loopback: Callable[..., str]
) -> None:
    """A page cannot reach it by a name of its own that means 127.0.0.1."""
    told: dict[Any, list[int]] = {}
    for allowed in (None, ["rm.lan"], ["*"]):
        url = serve_on_loopback(make_service(allowed_hosts=allowed))
        hosts = ({}, {"host": "localhost"}, {"host": "rm.lan"}, {"host": "evil.example"})
        told[str(allowed)] = [httpx.get(f"{url}/v1/models", headers=host).status_code for host in hosts]
    assert told == {"None": [200, 200, 421, 421], "['rm.lan']": [200, 200, 200, 421], "['*']": [200, 200, 200, 200]}


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ()),
        ({"host": "localhost"}, ()),
        ({"host": "::1"}, ()),
        ({"host": "0.0.0.0"}, None),
        ({"host": "rm.lan"}, None),
        ({"host": "0.0.0.0", "allowed_hosts": "rm.lan"}, ("rm.lan",)),
        ({"allowed_hosts": ["*", "rm.lan"]}, None),
    ],
)
def test_the_names_of_a_configuration(settings: Any, names: tuple[str, ...] | None) -> None:
    config = ServerConfig.model_validate({"models": [{"model": "rm"}], **settings})
    assert config.hosts_that_may_be_named == names


@pytest.mark.parametrize("name", ["https://rm.lan", "rm.lan:8000", "RM.lan", "", "rm.lan,other"])
def test_what_is_no_name_of_a_server(name: str) -> None:
    with pytest.raises(ValidationError, match="no name of a server"):
        ServerConfig.model_validate({"models": [{"model": "rm"}], "allowed_hosts": [name]})


def test_an_error_in_one_line_shows_what_is_empty() -> None:
    error = DataError("a message has no role", where="output[0]", field="role", got="", need="a name", fix="give one")
    assert in_words(error) == "output[0]: role: a message has no role; got ''; need a name; give one"
    assert in_words(DataError("too long")) == "too long"
    assert len(in_words(DataError("odd", got="x" * 10_000))) < 300


def test_an_error_in_a_route_has_the_same_form(
    client: Any, service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "answer", lambda *_, **__: 1 / 0)
    response = ask(client)
    assert refusal(response) == (500, "internal_error")
    assert "ZeroDivisionError" not in response.text and "ZeroDivisionError" in caplog.text
    assert counted(service, "requests_total") == {'route="/v1/rewards",status="500"': 1.0}


def test_a_model_that_gives_nan_for_one_conversation(
    client: Any, service: Service, loaded_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = loaded_model.score

    def nan_for_five(items: Any) -> list[Score]:
        return [
            Score(float("nan")) if item.num_tokens == five.num_tokens else one
            for item, one in zip(items, score(items), strict=True)
        ]

    long = [*CHAT[:1], {"role": "assistant", "content": "It is five, I think."}]
    five = loaded_model.prepare([long])[0]
    monkeypatch.setattr(loaded_model, "score", nan_for_five)
    response = ask(client, conversations=[CHAT, long])
    assert refusal(response) == (500, "scoring_failed") and "conversation 1" in response.text
    masked = ask(client, conversations=[CHAT, long], on_error="mask").json()["data"]
    assert masked[0]["score"] is not None and masked[1]["score"] is None and "nan" in masked[1]["error"]
    assert ask(client).status_code == 200
    assert counted(service, "failures_total") == {'fault="server",model="tiny"': 2.0}


def test_request_ids(client: Any) -> None:
    assert client.get("/health", headers={"x-request-id": "my-id:7"}).headers["x-request-id"] == "my-id:7"
    for wrong in ("", "a b", "x" * 129):
        got = client.get("/health", headers={"x-request-id": wrong}).headers["x-request-id"]
        assert got != wrong and len(got) == 16


@pytest.mark.parametrize(
    ("header", "status"),
    [
        *(("0", 504), ("0.000001", 504), (".000001", 504), ("60", 200), ("60.", 200), ("1e9", 200), ("1e999", 200)),
        *((wrong, 400) for wrong in ("-1", "+1", "nan", "inf", "soon", "", "1_0", "1e", ".", "0x1", "\u0661".encode())),
    ],
)
def test_the_deadline_of_a_request(client: Any, service: Service, header: str | bytes, status: int) -> None:
    response = client.post("/v1/rewards", json={"conversations": [CHAT]}, headers={"X-Deadline-Seconds": header})
    assert response.status_code == status
    if status == 504:
        assert refusal(response)[1] == "deadline_exceeded" and int(response.headers["retry-after"]) >= 1
    if status == 400:
        assert response.json()["error"]["param"] == "X-Deadline-Seconds"


def test_the_deadline_of_the_server(
    make_service: Callable[..., Service], asgi_client: Callable[..., Any], held_model: threading.Event
) -> None:
    service = make_service(deadline_seconds=0.1)
    client = asgi_client(service)
    assert refusal(ask(client, conversations=[CHAT] * 5)) == (504, "deadline_exceeded")
    assert service.engine.num_queued == 0
    assert counted(service, "forgotten_conversations_total") == {'model="tiny"': 5.0}
    held_model.set()
    assert ask(client).status_code in (200, 504)


def test_a_body_that_is_too_large(make_service: Callable[..., Service], asgi_client: Callable[..., Any]) -> None:
    client = asgi_client(make_service(max_body_bytes=1000))
    response = client.post("/v1/rewards", content=b" " * 1001)
    assert refusal(response) == (413, "body_too_large")

    def parts() -> Any:  # without a Content-Length
        yield from [b" " * 400] * 3

    assert refusal(client.post("/v1/rewards", content=parts())) == (413, "body_too_large")
    assert ask(client).status_code == 200


def test_compressed_bodies_are_refused(client: Any) -> None:
    response = client.post("/v1/rewards", content=b"abc", headers={"content-encoding": "gzip"})
    assert refusal(response) == (415, "unsupported_encoding")
    for none in ("identity", "Identity", "", " IDENTITY "):
        assert client.get("/v1/models", headers={"content-encoding": none}).status_code == 200
    assert client.get("/v1/models", headers={"content-encoding": "identity, gzip"}).status_code == 415


def test_the_token(service: Service, asgi_client: Callable[..., Any]) -> None:
    client = asgi_client(service, token="s3cret")
    assert client.get("/health").status_code == client.get("/ready").status_code == 200
    wrong = [None, "", "Bearer", "Bearer s3cre", "Bearer s3cret s3cret", "Basic s3cret", "s3cret", b"Bearer \xff\xff"]
    for given in wrong:
        headers = {} if given is None else {"authorization": given}
        for path in ("/metrics", "/v1/models", "/v1/rewards", "/openapi.json", "/nothing"):
            response = client.get(path, headers=headers)
            assert refusal(response) == (401, "unauthorized")
            assert response.headers["www-authenticate"] == "Bearer"
            is_wrong = given in ("Bearer s3cre", "Bearer s3cret s3cret", b"Bearer \xff\xff")
            told = "is not this server's" if is_wrong else "asks for a token"
            assert told in response.json()["error"]["message"] and "s3cre" not in response.text
    right = {"authorization": "bearer  s3cret "}
    assert client.get("/metrics", headers=right).status_code == 200
    assert client.post("/v1/rewards", json={"conversations": [CHAT]}, headers=right).status_code == 200
    assert client.get("/nothing", headers=right).status_code == 404


def test_cors_is_closed_by_default(client: Any) -> None:
    headers = {"origin": "https://example.org", "access-control-request-method": "POST"}
    assert client.options("/v1/rewards", headers=headers).status_code == 405
    response = client.get("/health", headers=headers)
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_cors_for_named_origins(make_service: Callable[..., Service], asgi_client: Callable[..., Any]) -> None:
    client = asgi_client(make_service(cors_origins=["https://example.org"]), token="secret")
    headers = {"origin": "https://example.org", "access-control-request-method": "POST"}
    asked = client.options("/v1/rewards", headers=headers | {"access-control-request-headers": "authorization"})
    assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == "https://example.org"
    refused = client.post("/v1/rewards", headers=headers)
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://example.org"
    other = client.get("/health", headers={"origin": "https://example.com"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("num_requests", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_bodies_are_held_within_their_limit(
    make_service: Callable[..., Service], held_model: threading.Event, num_requests: int
) -> None:
    """Bodies of 1 KB, of which the server holds 200 at a time; the others are refused, and nothing is left of them."""
    service = make_service(max_queued_bytes=200 * 1024, deadline_seconds=60)
    app = create_app(service)
    content = json.dumps({"conversations": [CHAT]}).encode().ljust(1024)
    most = 0

    async def story() -> list[int]:
        nonlocal most
        statuses: list[int] = []

        async def one() -> None:
            messages = [{"type": "http.request", "body": content, "more_body": False}]
            gone = asyncio.Event()

            async def receive() -> Any:
                if messages:
                    return messages.pop()
                await gone.wait()

            async def send(message: Any) -> None:
                nonlocal most
                most = max(most, service.held_bytes)
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])
                    if message["status"] == 429:
                        headers = dict(message["headers"])
                        assert int(headers[b"retry-after"]) >= 1

            await app(scope_of("/v1/rewards"), receive, send)

        tasks = [asyncio.create_task(one()) for _ in range(num_requests)]
        while len(statuses) < num_requests - 200:
            await asyncio.sleep(0.01)
        assert service.num_requests == 200 and service.held_bytes == 200 * 1024
        held_model.set()
        await asyncio.gather(*tasks)
        return statuses

    logging.getLogger("treeward.requests").setLevel(logging.ERROR)
    try:
        statuses = asyncio.run(story())
    finally:
        logging.getLogger("treeward.requests").setLevel(logging.NOTSET)
    assert (statuses.count(429), statuses.count(200)) == (num_requests - 200, 200)
    assert most == 200 * 1024 and service.held_bytes == 0
    assert counted(service, "refused_requests_total") == {'code="memory_full"': num_requests - 200.0}


def test_one_who_disconnects_is_forgotten_and_nobody_else(
    service: Service, held_model: threading.Event, loaded_model: ServedModel
) -> None:
    app = create_app(service)
    want = loaded_model.scorer.score([CHAT])[0].score

    async def story() -> tuple[list[int], list[Any]]:
        statuses: list[int] = []
        bodies: list[Any] = []
        leave = asyncio.Event()

        async def one(stays: bool) -> None:
            content = json.dumps({"conversations": [CHAT] * 3}).encode()
            messages = [{"type": "http.request", "body": content, "more_body": False}]

            async def receive() -> Any:
                if messages:
                    return messages.pop()
                await (asyncio.Event() if stays else leave).wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])
                elif message.get("body"):
                    bodies.append(json.loads(message["body"]))

            await app(scope_of("/v1/rewards"), receive, send)

        tasks = [asyncio.create_task(one(stays=i % 2 == 0)) for i in range(40)]
        while service.engine.num_queued < 120:
            await asyncio.sleep(0.005)
        leave.set()
        while service.num_requests > 20:
            await asyncio.sleep(0.005)
        assert service.engine.num_queued == 60
        held_model.set()
        await asyncio.gather(*tasks)
        return statuses, bodies

    statuses, bodies = asyncio.run(story())
    assert statuses == [200] * 20
    assert all(row["score"] == pytest.approx(want, abs=1e-5) for body in bodies for row in body["data"])
    assert counted(service, "forgotten_conversations_total") == {'model="tiny"': 60.0}
    routes = counted(service, "requests_total")
    assert routes == {'route="/v1/rewards",status="499"': 20.0, 'route="/v1/rewards",status="200"': 20.0}
    assert service.held_bytes == 0


def test_shaped_rewards_are_made_in_a_thread_of_their_own(
    served_folder: Any, make_service: Callable[..., Service], asgi_client: Callable[..., Any], loaded_model: ServedModel
) -> None:
    section = {"model": str(served_folder), "name": "shaped", "device": "cpu"}
    service = make_service(
        models=[section | {"shaping": {"normalize_rewards": True, "reward_mean": 1.0, "reward_std": 2.0}}]
    )
    score = loaded_model.scorer.score([CHAT])[0].score
    row = ask(asgi_client(service)).json()["data"][0]
    assert row["score"] == pytest.approx(score, abs=1e-5)
    assert row["reward"] == pytest.approx((score - 1.0) / 2.0, abs=1e-5)
    row = ask(asgi_client(service), shaped=False).json()["data"][0]
    assert row["reward"] == row["score"]


def test_an_error_of_memory_forgets_the_prompts(
    client: Any, loaded_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [{"role": "user", "content": "Why is the sky over the sea blue, and red at night? " * 3}]
    assert ask(client, conversations=[[*prompt, CHAT[1]]]).status_code == 200
    cache = loaded_model.scorers[0].prefix_cache
    assert cache is not None and cache.num_bytes > 0
    model, failures = loaded_model.scorers[0].model, [MemoryError(), MemoryError()]
    heads = model.heads

    def out_of_memory(batch: Any) -> Any:
        if failures:
            raise failures.pop()
        return heads(batch)

    monkeypatch.setattr(model, "heads", out_of_memory)
    # both together fail, then the first alone; the second finds the memory free
    response = ask(client, conversations=[CHAT, CHAT], on_error="mask").json()["data"]
    assert [row["score"] is None for row in response] == [True, False] and "MemoryError" in response[0]["error"]
    assert cache.num_bytes == 0


def scope_of(path: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-length", b"1024")],
        "client": ("127.0.0.1", 5),
        "server": ("127.0.0.1", 80),
    }


def test_items_of_one_prompt_cost_what_they_add(loaded_model: ServedModel) -> None:
    item = Item(None, 100, 80, prompt=12345)
    assert loaded_model.cost(item, set()) == 100
    assert loaded_model.cost(item, {12345}) == 20
