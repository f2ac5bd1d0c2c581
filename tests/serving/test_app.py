"""The application as its clients and operators find it: bodies, limits, errors, metrics, logs and
shutdown.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from loopback import wait_until
from messages import chat
from prometheus_client.parser import text_string_to_metric_families

from treeward.scoring.scorer import Scorer
from treeward.serving.service import Service

CHAT = chat("2 + 2?", "4")


def ask(client: Any, **body: Any) -> Any:
    return client.post("/v1/rewards", json={"conversations": [CHAT], **body})


def error(response: Any) -> tuple[int, str]:
    """The status and the code of an error, whose form is that of all of them."""
    result = response.json()["error"]
    assert set(result) == {"message", "type", "code", "param", "request_id"}
    assert len(response.content) < 1000
    assert result["request_id"] == response.headers["x-request-id"]
    return response.status_code, result["code"]


def counted(service: Service, name: str, **labels: str) -> float | None:
    return service.metrics.registry.get_sample_value(f"treeward_{name}", labels)


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b'{"conversations": ', 422, "invalid_json"),
        (b"", 422, "invalid_request"),
        (b'{"conversations": [[{"role": "assistant", "content": Infinity}]]}', 422, "invalid_json"),
        (b'{"conversations": [[{"role": "assistant", "content": 5}]]}', 422, "invalid_request"),
        (
            b'{"conversations": [[{"role": "user", "content": "no completion"}]]}',
            422,
            "cannot_be_scored",
        ),
        (b'{"conversations": [], "model": "other"}', 404, "model_not_found"),
    ],
)
def test_wrong_bodies(client: Any, content: bytes, status: int, code: str) -> None:
    response = client.post("/v1/rewards", content=content)
    assert error(response) == (status, code), response.text
    assert ask(client).status_code == 200


def test_an_unknown_key_is_named_with_the_place_of_the_known_ones(client: Any) -> None:
    response = ask(client, conversation=[])
    assert error(response) == (422, "invalid_request")
    assert response.json()["error"]["param"] == "conversation"
    assert "GET /openapi.json has the keys" in response.json()["error"]["message"]


def test_too_many_conversations_are_refused(
    make_service: Callable[..., Service],
    asgi_client: Callable[..., Any],
) -> None:
    client = asgi_client(make_service(max_queued=3))
    assert error(ask(client, conversations=[CHAT] * 4)) == (413, "too_many_conversations")


def test_a_body_is_refused_by_its_bytes_and_not_by_the_length_of_a_text(
    make_service: Callable[..., Service],
    asgi_client: Callable[..., Any],
) -> None:
    client = asgi_client(make_service(max_body_bytes=1_100_000))
    large = client.post("/v1/rewards", content=b" " * 1_100_001)
    assert error(large) == (413, "body_too_large")
    long = [CHAT[0], {"role": "assistant", "content": "a" * 1_000_000}]
    assert "at most 160" in ask(client, conversations=[long]).text


LONG = [CHAT[0], {"role": "assistant", "content": "word " * 1000}]


def test_a_conversation_that_cannot_be_scored_is_refused(client: Any) -> None:
    response = ask(client, conversations=[CHAT, LONG])
    assert error(response) == (422, "cannot_be_scored")
    assert response.json()["error"]["param"] == "[1]"
    assert "at most 160" in response.text


def test_the_log_has_the_reason_of_an_error(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    # OpenRLHF's client shows the status alone, so its user reads the server's log.
    with caplog.at_level("INFO", logger="treeward"):
        response = ask(client, conversations=[CHAT, LONG])
    request_id = response.headers["X-Request-ID"]
    assert f"Request {request_id}: cannot_be_scored: 'conversation 1: too long" in caplog.text


def test_a_client_writes_no_line_of_its_own_into_the_log(
    client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="treeward"):
        assert ask(client, model="a\nb").status_code == 404
    assert "\\nb" in caplog.text
    assert len(caplog.text.splitlines()) == 1


def test_a_long_reason_is_cut_in_the_log(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="treeward"):
        assert ask(client, model="m" * 100_000).status_code == 404
        assert ask(client, conversations=[[{"role": "r" * 100_000, "content": "Hi"}]]).is_error
    assert "model_not_found" in caplog.text
    assert max(map(len, caplog.text.splitlines())) < 1000


def test_without_a_log_of_requests_no_error_is_logged(
    make_service: Callable[..., Service],
    asgi_client: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = asgi_client(make_service(access_log=False))
    with caplog.at_level("INFO", logger="treeward"):
        assert ask(client, conversations=[LONG]).status_code == 422
    assert "too long" not in caplog.text


def test_a_null_is_as_a_key_left_out(client: Any) -> None:
    # Parquet gives each message of a prompt the keys of all, and verl's example sends them on.
    padded = [{**CHAT[0], "name": None, "tool_calls": None, "tool_call_id": None}, CHAT[1]]
    whole, with_nulls = ask(client, conversations=[CHAT, padded]).json()["data"]
    assert with_nulls["score"] == whole["score"]


def test_a_conversation_that_cannot_be_scored_is_null_where_that_is_asked_for(client: Any) -> None:
    scored, masked = ask(client, conversations=[CHAT, LONG], on_error="mask").json()["data"]
    assert scored["score"] is not None
    assert masked["score"] is None
    assert masked["num_tokens"] > 1000


def test_the_deadline_of_a_request(
    make_service: Callable[..., Service],
    asgi_client: Callable[..., Any],
) -> None:
    response = ask(asgi_client(make_service(deadline_seconds=1e-6)))
    assert error(response) == (504, "deadline_exceeded")
    assert int(response.headers["retry-after"]) >= 1


@pytest.fixture
def guarded(service: Service, asgi_client: Callable[..., Any]) -> Any:
    """A client of a server that asks for a token."""
    return asgi_client(service, token="s3cret")


def test_health_needs_no_token(guarded: Any) -> None:
    assert guarded.get("/health").status_code == 200
    assert guarded.get("/ready").status_code == 200


@pytest.mark.parametrize(
    "given",
    [None, "", "Bearer", "Bearer s3cre", "Basic s3cret", "s3cret", b"Bearer \xff\xff"],
)
def test_without_the_token_nothing_else_is_told(guarded: Any, given: Any) -> None:
    headers = {} if given is None else {"authorization": given}
    for path in ("/metrics", "/v1/models", "/openapi.json", "/nothing", "/playground"):
        response = guarded.get(path, headers=headers)
        assert error(response) == (401, "unauthorized")
        assert "s3cre" not in response.text
        assert response.headers["www-authenticate"] == "Bearer"


def test_the_token_opens_every_route(guarded: Any) -> None:
    right = {"authorization": "bearer  s3cret "}
    assert guarded.get("/metrics", headers=right).status_code == 200
    body = {"conversations": [CHAT]}
    assert guarded.post("/v1/rewards", json=body, headers=right).status_code == 200


REBOUND = [
    ({"host": "evil.example"}, 421, "misdirected_request"),
    ({"host": "evil.example:8000"}, 421, "misdirected_request"),
    ({"host": "127.0.0.1.evil.example"}, 421, "misdirected_request"),
    ({"sec-fetch-site": "cross-site"}, 403, "cross_site"),
]


@pytest.mark.parametrize(("headers", "status", "code"), REBOUND)
def test_a_web_page_cannot_ask_a_server_of_this_machine(
    client: Any,
    headers: dict[str, str],
    status: int,
    code: str,
) -> None:
    response = client.post("/v1/rewards", json={"conversations": [CHAT]}, headers=headers)
    assert error(response) == (status, code)


@pytest.mark.parametrize(("headers", "status", "code"), REBOUND)
def test_with_a_token_any_page_may_ask_which_knows_it(
    guarded: Any,
    headers: dict[str, str],
    status: int,
    code: str,
) -> None:
    authorized = {**headers, "authorization": "Bearer s3cret"}
    body = {"conversations": [CHAT]}
    assert guarded.post("/v1/rewards", json=body, headers=authorized).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["localhost:1", "127.0.0.1", "[::1]:8000", "10.0.0.7:80", "scores.lan", "Scores.LAN:80", ""],
)
def test_programs_ask_by_any_right_name(
    host: str,
    make_service: Callable[..., Service],
    asgi_client: Callable[..., Any],
) -> None:
    client = asgi_client(make_service(allowed_hosts=["scores.lan"]))
    assert client.get("/v1/models", headers={"host": host}).status_code == 200


def test_our_own_page_asks_and_may_be_linked_to(client: Any) -> None:
    assert client.get("/v1/models", headers={"sec-fetch-site": "same-origin"}).status_code == 200
    assert client.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200


def test_a_server_of_all_addresses_has_any_name(
    make_service: Callable[..., Service],
    asgi_client: Callable[..., Any],
) -> None:
    public = asgi_client(make_service(host="0.0.0.0"))
    assert public.get("/v1/models", headers={"host": "scores.example"}).status_code == 200


def test_models_are_listed_without_their_paths(
    make_service: Callable[..., Service],
    asgi_client: Callable[..., Any],
    served_folder: Path,
) -> None:
    client = asgi_client(make_service(models=[{"model": str(served_folder), "device": "cpu"}]))
    [listed] = client.get("/v1/models").json()["data"]
    assert listed["root"] == "tiny"
    assert listed["members"] == ["tiny"]
    assert str(served_folder) not in client.get("/v1/models").text


@pytest.mark.parametrize(
    "path",
    ["/", "/playground/page.css", "/playground/page.js", "/playground/trace.js"],
)
def test_the_page_has_a_strict_policy_and_needs_no_token(path: str, guarded: Any) -> None:
    page = guarded.get(path)
    assert page.status_code == 200
    assert page.content
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    # The name of a format, which is no address.
    text = page.text.replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in text
    assert "https://" not in text


def test_a_client_that_leaves_is_forgotten_and_no_other(
    service: Service,
    serve_on_loopback: Any,
    held_model: threading.Event,
) -> None:
    url = httpx.URL(serve_on_loopback(service))
    body = {"conversations": [CHAT] * 3}
    content = json.dumps(body).encode()
    with ThreadPoolExecutor() as threads:
        stays = threads.submit(httpx.post, f"{url}/v1/rewards", json=body, timeout=600)
        wait_until(lambda: service.batcher.num_queued == 3)
        with socket.create_connection((url.host, url.port or 0)) as leaving:
            length = f"content-length: {len(content)}"
            head = f"POST /v1/rewards HTTP/1.1\r\nhost: localhost\r\n{length}\r\n\r\n"
            leaving.sendall(head.encode() + content)
            wait_until(lambda: service.batcher.num_queued == 6)
        wait_until(lambda: service.batcher.num_queued == 3)
        held_model.set()
        assert stays.result().status_code == 200


def test_health_names_the_models(client: Any) -> None:
    for path in ("/health", "/ready"):
        assert client.get(path).json() == {"status": "ready", "models": ["tiny"]}


def test_a_model_is_listed_with_its_limit_and_its_contract(
    client: Any,
    served_scorer: Scorer,
) -> None:
    [listed] = client.get("/v1/models").json()["data"]
    assert listed["id"] == "tiny"
    assert listed["max_model_len"] == 160
    assert listed["contract"] == served_scorer.contract.scores_sha256


def test_a_model_with_another_template_does_not_name_the_contract(
    make_service: Callable[..., Service], served_folder: Path
) -> None:
    words = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    for tokenizer, has_contract in (
        ({"name": str(served_folder), "chat_template": "default"}, True),
        ({"chat_template": words}, False),
    ):
        section = {"model": str(served_folder), "device": "cpu", "tokenizer": tokenizer}
        [model] = make_service(models=[section]).models.values()
        assert (model.contract_sha256 is not None) is has_contract


def test_a_server_whose_threads_have_ended_is_not_healthy(
    own_client: Any,
    service: Service,
) -> None:
    service.batcher.close()
    for path in ("/health", "/ready"):
        response = own_client.get(path)
        assert response.status_code == 503
        assert response.json()["status"] == "failed"


def test_metrics(
    own_client: Any,
    service: Service,
    conversations: Any,
    served_scorer: Scorer,
) -> None:
    before = served_scorer.num_computed_tokens
    body = {"conversations": conversations}
    scores = [row["score"] for row in own_client.post("/v1/rewards", json=body).json()["data"]]
    ask(own_client, conversations=[CHAT[:1]])
    samples = {}
    for family in text_string_to_metric_families(own_client.get("/metrics").text):
        for sample in family.samples:
            samples[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    tiny = (("model", "tiny"),)
    for status in ("200", "422"):
        labels = (("handler", "/v1/rewards"), ("method", "POST"), ("status", status))
        assert samples["treeward_http_requests_total", labels] == 1
    assert samples["treeward_refused_requests_total", (("code", "cannot_be_scored"),)] == 1
    assert samples["treeward_scores_count", tiny] == 8
    assert samples["treeward_failures_total", (("fault", "request"), ("model", "tiny"))] == 1
    num_tokens = sum(item.num_tokens for item in served_scorer.prepare(conversations))
    assert samples["treeward_tokens_total", tiny] == num_tokens
    num_computed = served_scorer.num_computed_tokens - before
    assert samples["treeward_computed_tokens_total", tiny] == num_computed
    assert samples["treeward_batch_seconds_count", tiny] == 1
    assert samples["treeward_scores_sum", tiny] == pytest.approx(sum(scores), abs=1e-5)
    assert samples["treeward_queued_conversations", ()] == 0
    assert samples["process_resident_memory_bytes", ()] > 0


def test_an_error_of_memory_forgets_the_prompts(
    own_client: Any,
    served_scorer: Scorer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = served_scorer.prefix_cache
    assert cache is not None
    long = [{"role": "user", "content": "Which of these two is right? " * 3}, CHAT[1]]
    assert ask(own_client, conversations=[long]).status_code == 200
    assert cache.num_bytes > 0

    def fail(*arguments: Any, **options: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(served_scorer, "score_prepared", fail)
    assert error(ask(own_client, conversations=[long])) == (500, "scoring_failed")
    assert cache.num_bytes == 0
