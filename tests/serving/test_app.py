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


def test_limits_on_what_a_request_holds(
    make_service: Callable[..., Service],
    asgi_client: Callable[..., Any],
) -> None:
    client = asgi_client(make_service(max_queued=3, max_body_bytes=1_100_000))
    assert error(ask(client, conversations=[CHAT] * 4)) == (413, "too_many_conversations")
    assert error(client.post("/v1/rewards", content=b" " * 1_100_001)) == (413, "body_too_large")
    long = [CHAT[0], {"role": "assistant", "content": "a" * 1_000_000}]
    assert "at most 160" in ask(client, conversations=[long]).text


def test_a_conversation_that_cannot_be_scored_is_refused_or_masked(client: Any) -> None:
    long = [*CHAT[:1], {"role": "assistant", "content": "word " * 1000}]
    response = ask(client, conversations=[CHAT, long])
    assert error(response) == (422, "cannot_be_scored")
    assert response.json()["error"]["param"] == "[1]"
    assert "at most 160" in response.text
    masked = ask(client, conversations=[CHAT, long], on_error="mask").json()["data"]
    assert masked[0]["score"] is not None
    assert masked[1]["score"] is None
    assert masked[1]["num_tokens"] > 1000


def test_the_deadline_of_a_request(
    make_service: Callable[..., Service],
    asgi_client: Callable[..., Any],
) -> None:
    response = ask(asgi_client(make_service(deadline_seconds=1e-6)))
    assert error(response) == (504, "deadline_exceeded")
    assert int(response.headers["retry-after"]) >= 1


def test_the_token(service: Service, asgi_client: Callable[..., Any]) -> None:
    client = asgi_client(service, token="s3cret")
    assert client.get("/health").status_code == client.get("/ready").status_code == 200
    for given in (None, "", "Bearer", "Bearer s3cre", "Basic s3cret", "s3cret", b"Bearer \xff\xff"):
        headers = {} if given is None else {"authorization": given}
        for path in ("/metrics", "/v1/models", "/openapi.json", "/nothing", "/playground"):
            response = client.get(path, headers=headers)
            assert error(response) == (401, "unauthorized")
            assert "s3cre" not in response.text
            assert response.headers["www-authenticate"] == "Bearer"
    right = {"authorization": "bearer  s3cret "}
    assert client.get("/metrics", headers=right).status_code == 200
    assert client.post("/v1/rewards", json={"conversations": [CHAT]}, headers=right).status_code == 200


REBOUND = [
    ({"host": "evil.example"}, 421, "misdirected_request"),
    ({"host": "evil.example:8000"}, 421, "misdirected_request"),
    ({"host": "127.0.0.1.evil.example"}, 421, "misdirected_request"),
    ({"sec-fetch-site": "cross-site"}, 403, "cross_site"),
]


@pytest.mark.parametrize(("headers", "status", "code"), REBOUND)
def test_a_web_page_cannot_ask_a_server_of_this_machine(
    service: Service,
    asgi_client: Callable[..., Any],
    headers: dict[str, str],
    status: int,
    code: str,
) -> None:
    client = asgi_client(service)
    body = {"conversations": [CHAT]}
    assert error(client.post("/v1/rewards", json=body, headers=headers)) == (status, code)
    guarded = asgi_client(service, token="s3cret")  # a page does not know it
    authorized = {**headers, "authorization": "Bearer s3cret"}
    assert guarded.post("/v1/rewards", json=body, headers=authorized).status_code == 200


def test_programs_and_our_own_page_ask_by_any_right_name(
    make_service: Callable[..., Service],
    asgi_client: Callable[..., Any],
) -> None:
    client = asgi_client(make_service(allowed_hosts=["scores.lan"]))
    for host in (
        "localhost:1",
        "127.0.0.1",
        "[::1]:8000",
        "10.0.0.7:80",
        "scores.lan",
        "Scores.LAN:80",
        "",
    ):
        assert client.get("/v1/models", headers={"host": host}).status_code == 200, host
    assert client.get("/v1/models", headers={"sec-fetch-site": "same-origin"}).status_code == 200
    assert client.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200
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


def test_the_page_has_a_strict_policy_and_needs_no_token(
    make_service: Callable[..., Any],
    asgi_client: Callable[..., Any],
) -> None:
    client = asgi_client(make_service(), token="open-sesame")
    for path in ("/", "/playground/page.css", "/playground/page.js", "/playground/trace.js"):
        got = client.get(path)
        assert got.status_code == 200
        assert got.content
        policy = got.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        assert "http://" not in got.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in got.text


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
            head = f"POST /v1/rewards HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
            leaving.sendall(head.encode() + content)
            wait_until(lambda: service.batcher.num_queued == 6)
        wait_until(lambda: service.batcher.num_queued == 3)
        held_model.set()
        assert stays.result().status_code == 200


def test_health_and_the_models(own_client: Any, service: Service, served_scorer: Scorer) -> None:
    for path in ("/health", "/ready"):
        assert own_client.get(path).json() == {"status": "ready", "models": ["tiny"]}
    [listed] = own_client.get("/v1/models").json()["data"]
    assert (listed["id"], listed["max_model_len"]) == ("tiny", 160)
    assert listed["contract"] == served_scorer.contract.scores_sha256
    service.batcher.close()  # its threads have ended
    for path in ("/health", "/ready"):
        got = own_client.get(path)
        assert got.status_code == 503
        assert got.json()["status"] == "failed"


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
    families = list(text_string_to_metric_families(own_client.get("/metrics").text))
    samples = {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}
    tiny = (("model", "tiny"),)
    for status in ("200", "422"):
        labels = (("handler", "/v1/rewards"), ("method", "POST"), ("status", status))
        assert samples["treeward_http_requests_total", labels] == 1
    assert samples["treeward_refused_requests_total", (("code", "cannot_be_scored"),)] == 1
    assert samples["treeward_scores_count", tiny] == 8
    assert samples["treeward_failures_total", (("fault", "request"), ("model", "tiny"))] == 1
    assert samples["treeward_tokens_total", tiny] == sum(i.num_tokens for i in served_scorer.prepare(conversations))
    assert samples["treeward_computed_tokens_total", tiny] == served_scorer.num_computed_tokens - before
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
