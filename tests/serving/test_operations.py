"""The server at a real address: slow, large and broken clients, metrics, logs and TLS."""

from __future__ import annotations

import datetime
import json
import logging
import re
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from raw_http import BODY, CHAT, answer, chunked, code, connect, head, is_closed, until

from treeward.errors import ConfigError
from treeward.serving import gate, logs
from treeward.serving.models import ServedModel
from treeward.serving.protocol import MOST_HEADER_BYTES
from treeward.serving.service import Service


def samples(url: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_an_answer_to_head_ends_with_its_headers(service: Service, serve_on_loopback: Any) -> None:
    connection = connect(serve_on_loopback(service))
    for path in ("/", "/nothing", "/health"):
        connection.sendall(f"HEAD {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    received = b"".join(iter(lambda: connection.recv(2**16), b""))
    *heads, body = received.split(b"\r\n\r\n")
    assert [one.split()[:2] for one in heads] == [[b"HTTP/1.1", status] for status in (b"200", b"404", b"200", b"200")]
    assert json.loads(body) == {"status": "ok"} and b"content-length: 0" not in received


def test_health_and_readiness(service: Service, serve_on_loopback: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url = serve_on_loopback(service)
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    ready = httpx.get(f"{url}/ready")
    assert ready.status_code == 200 and ready.json() == {"status": "ready", "models": ["tiny"]}
    for path in ("/health", "/ready"):
        answered = httpx.head(url + path)
        assert answered.status_code == 200 and answered.content == b""
    monkeypatch.setattr(service.engine, "_broken", {"tiny"})
    for path in ("/health", "/ready"):
        answered = httpx.get(url + path)
        assert answered.status_code == 503 and answered.json()["status"] == "failed"


def test_the_models(service: Service, serve_on_loopback: Any, loaded_model: ServedModel) -> None:
    [listed] = httpx.get(f"{serve_on_loopback(service)}/v1/models").json()["data"]
    assert listed["id"] == "tiny" and listed["max_model_len"] == 160
    assert listed["contract"] == loaded_model.contract_sha256


def test_what_is_counted(service: Service, serve_on_loopback: Any, conversations: Any, loaded_model: Any) -> None:
    url = serve_on_loopback(service)
    before = loaded_model.num_computed_tokens
    content = json.dumps({"conversations": conversations}).encode()
    scores = [row["score"] for row in httpx.post(f"{url}/v1/rewards", content=content).json()["data"]]
    httpx.post(f"{url}/v1/rewards", json={"conversations": [CHAT[:1]]})
    httpx.get(f"{url}/nothing")
    got = samples(url)
    tiny = (("model", "tiny"),)
    assert got["treeward_requests_total", (("route", "/v1/rewards"), ("status", "200"))] == 1
    assert got["treeward_requests_total", (("route", "/v1/rewards"), ("status", "422"))] == 1
    assert got["treeward_requests_total", (("route", "unknown"), ("status", "404"))] == 1
    assert got["treeward_refused_requests_total", (("code", "cannot_be_scored"),)] == 1
    assert got["treeward_conversations_total", tiny] == 8
    assert got["treeward_failures_total", (("fault", "request"), ("model", "tiny"))] == 1
    assert got["treeward_tokens_total", tiny] == sum(item.num_tokens for item in loaded_model.prepare(conversations))
    assert got["treeward_computed_tokens_total", tiny] == loaded_model.num_computed_tokens - before
    assert got["treeward_batches_total", tiny] == got["treeward_batch_fill_ratio_count", tiny] == 1
    assert got["treeward_score_mean", tiny] == pytest.approx(sum(scores) / 8, abs=1e-6)
    assert got["treeward_request_body_bytes_total", ()] > len(content)
    assert got["treeward_queued_conversations", ()] == got["treeward_held_bytes", ()] == 0
    assert got["treeward_requests_in_flight", ()] >= 1  # this one
    assert got["process_resident_memory_bytes", ()] > 0


def test_metrics_are_named_as_prometheus_has_it(service: Service, serve_on_loopback: Any) -> None:
    url = serve_on_loopback(service)
    httpx.post(f"{url}/v1/rewards", content=BODY)
    families = list(text_string_to_metric_families(httpx.get(f"{url}/metrics").text))
    for family in families:
        assert family.documentation.endswith("."), family.name
        for sample in family.samples:
            assert not sample.name.endswith("_created"), sample.name
            assert sample.name.endswith("_total") == (family.type == "counter"), sample.name
    assert {family.type for family in families} == {"counter", "gauge", "histogram"}


def test_a_slow_body(make_service: Callable[..., Service], serve_on_loopback: Any) -> None:
    url = serve_on_loopback(make_service(body_seconds=0.3))
    with connect(url) as slow, connect(url) as other:
        slow.sendall(head(1000))
        for _ in range(3):  # what comes in between does not help
            slow.sendall(b" ")
            time.sleep(0.05)
        other.sendall(head(len(BODY)) + BODY)
        assert answer(other)[0] == 200
        status, headers, body = answer(slow)
        assert (status, code(body)) == (408, "body_timeout")
        assert headers["connection"] == "close" and is_closed(slow)


def test_who_goes_on_sending_after_a_timeout_is_cut_off(
    make_service: Callable[..., Service], serve_on_loopback: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_LINGER_SECONDS", 0.2)
    with connect(serve_on_loopback(make_service(body_seconds=0.3))) as slow:
        slow.sendall(head(60_000))
        status, headers, body = answer(slow)
        assert (status, code(body), headers["connection"]) == (408, "body_timeout", "close")
        for _ in range(200):
            try:
                slow.sendall(b" ")
            except OSError:
                break
            time.sleep(0.02)
        else:
            pytest.fail("the connection is still open")


@pytest.mark.parametrize(
    "sent", [b"", b"P", b"POST /v1/rewards HTTP/1.1\r\nhost: localhost\r\nx-a: "], ids=["none", "P", "some"]
)
def test_slow_headers(make_service: Callable[..., Service], serve_on_loopback: Any, sent: bytes) -> None:
    service = make_service(body_seconds=0.3)
    with connect(serve_on_loopback(service)) as slow:
        slow.sendall(sent)
        if sent:
            time.sleep(0.1)
            slow.sendall(b"O" if sent == b"P" else b"a")
            status, headers, body = answer(slow)
            assert (status, code(body), headers["connection"]) == (408, "headers_timeout", "close")
        assert is_closed(slow)


def test_slow_headers_of_a_second_request(make_service: Callable[..., Service], serve_on_loopback: Any) -> None:
    with connect(serve_on_loopback(make_service(body_seconds=0.3))) as connection:
        connection.sendall(head(len(BODY)) + BODY)
        assert answer(connection)[0] == 200
        time.sleep(0.5)  # idle: this is no request that is slow
        connection.sendall(head(len(BODY)) + BODY)
        assert answer(connection)[0] == 200
        connection.sendall(b"POST /v1/re")
        status, _, body = answer(connection)
        assert (status, code(body)) == (408, "headers_timeout")


def test_headers_without_end(service: Service, serve_on_loopback: Any) -> None:
    with connect(serve_on_loopback(service)) as connection:
        connection.sendall(b"POST /v1/rewards HTTP/1.1\r\n")
        line = b"x-much: " + b"a" * 1000 + b"\r\n"
        sent = 0
        try:
            while sent < 20 * MOST_HEADER_BYTES:
                connection.sendall(line)
                sent += len(line)
                time.sleep(0.0002)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert sent < 10 * MOST_HEADER_BYTES
    until(lambda: 'code="headers_too_large"} 1.0' in service.metrics.exposition().decode())


def test_what_is_no_http(service: Service, serve_on_loopback: Any) -> None:
    url = serve_on_loopback(service)
    with connect(url) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        status, headers, body = answer(connection)
        assert (status, code(body), headers["connection"]) == (400, "invalid_http", "close")
        assert is_closed(connection)
    assert httpx.get(f"{url}/health").status_code == 200


def test_what_is_no_http_after_a_request(service: Service, serve_on_loopback: Any) -> None:
    """What was accepted is answered, and the connection ends after it."""
    with connect(serve_on_loopback(service)) as connection:
        connection.sendall((head(len(BODY)) + BODY) * 2 + b"GARBAGE\r\n\r\n")
        assert answer(connection)[0] == 200
        status, headers, body = answer(connection)
        assert status == 200 and len(json.loads(body)["data"]) == 1 and headers["connection"] == "close"
        assert is_closed(connection)
    until(lambda: 'code="invalid_http"} 1.0' in service.metrics.exposition().decode())


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(chunked(b"zz\r\n"), id="no length"),
        pytest.param(chunked(b"5\r\nabcdefgh\r\n"), id="wrong length"),
        pytest.param(head(None, "transfer-encoding: xchunked") + BODY, id="xchunked"),
    ],
)
def test_a_body_that_is_no_http(service: Service, serve_on_loopback: Any, sent: bytes) -> None:
    with connect(serve_on_loopback(service)) as connection:
        connection.sendall(sent)
        status, headers, body = answer(connection)
        assert (status, code(body), headers["connection"]) == (400, "invalid_http", "close")
        assert is_closed(connection)
    assert service.metrics.exposition().decode().count('code="invalid_http"} 1.0') == 1


def test_a_body_is_held_until_its_answer_is_sent(make_service: Callable[..., Service], serve_on_loopback: Any) -> None:
    """Who does not read is cut off; who does gets all of it."""
    service = make_service(body_seconds=3.0)
    url = serve_on_loopback(service)
    said = {"output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]}]}
    body = json.dumps(
        {"responses_create_params": {"input": "2 + 2?"}, "response": said, "echoed": "x" * (24 * 2**20)}
    ).encode()
    sent = head(len(body)).replace(b"/v1/rewards", b"/verify") + body
    with connect(url) as reads:
        reads.sendall(sent)
        status, _, verified = answer(reads)
        assert status == 200 and "reward" in json.loads(verified) and len(verified) > len(body)
    until(lambda: service.held_bytes == 0)
    with connect(url) as waits:  # not before: who sends nothing is cut off as well
        waits.sendall(sent)
        until(lambda: service.num_requests == 0 and service.held_bytes == len(body))
        until(lambda: service.held_bytes == 0)
        received = 0
        with pytest.raises((ConnectionResetError, AssertionError)):
            while part := waits.recv(2**20):
                received += len(part)
            assert received > len(body)


@pytest.mark.parametrize("chunked", [False, True], ids=["declared", "chunked"])
@pytest.mark.parametrize("path", ["/v1/rewards", "/nothing"])
def test_a_body_of_100_megabytes(service: Service, serve_on_loopback: Any, chunked: bool, path: str) -> None:
    url = serve_on_loopback(service)
    httpx.post(f"{url}/v1/rewards", content=BODY)
    memory = psutil.Process().memory_info().rss
    most = 0
    with connect(url) as connection:
        first = head(None, "transfer-encoding: chunked") if chunked else head(100 * 2**20)
        connection.sendall(first.replace(b"/v1/rewards", path.encode()))
        part = b" " * 2**20
        chunk = b"%x\r\n%s\r\n" % (len(part), part) if chunked else part
        try:
            for _ in range(100):
                connection.sendall(chunk)
                most = max(most, psutil.Process().memory_info().rss)
        except (BrokenPipeError, ConnectionResetError):
            pass
        status, headers, body = answer(connection)  # it is there to be read, whatever was sent
        expected = (404, "not_found") if chunked and path == "/nothing" else (413, "body_too_large")
        assert (status, code(body)) == expected
        assert headers["connection"] == "close"
    assert most - memory < 2 * service.config.max_body_bytes + 20 * 2**20
    assert httpx.post(f"{url}/v1/rewards", content=BODY).status_code == 200
    until(lambda: service.held_bytes == 0)


def test_who_is_refused_may_finish_what_it_sends(make_service: Callable[..., Service], serve_on_loopback: Any) -> None:
    """A client that sends first and reads then would be told of a broken connection, and not why."""
    with connect(serve_on_loopback(make_service(max_body_bytes=2**20))) as connection:
        connection.sendall(head(16 * 2**20))
        for _ in range(16):
            connection.sendall(b" " * 2**20)
            time.sleep(0.01)
        status, _, body = answer(connection)
        assert (status, code(body)) == (413, "body_too_large") and is_closed(connection)


def test_who_waits_to_be_asked_for_a_large_body_never_sends_it(service: Service, serve_on_loopback: Any) -> None:
    with connect(serve_on_loopback(service)) as connection:
        connection.sendall(head(100 * 2**20, "expect: 100-continue"))
        status, _, body = answer(connection)  # not 100
        assert (status, code(body)) == (413, "body_too_large")


def test_a_connection_is_kept_after_a_refusal_of_a_small_request(service: Service, serve_on_loopback: Any) -> None:
    with connect(serve_on_loopback(service)) as connection:
        for _ in range(3):
            connection.sendall(head(len(BODY)).replace(b"/v1/rewards", b"/nothing") + BODY)
            status, headers, _ = answer(connection)
            assert status == 404 and "connection" not in headers
        connection.sendall(head(len(BODY)) + BODY)
        assert answer(connection)[0] == 200


def test_requests_in_one_packet_are_answered_in_order(service: Service, serve_on_loopback: Any) -> None:
    with connect(serve_on_loopback(service)) as connection:
        request = head(len(BODY), "x-request-id: {}").decode() + BODY.decode()
        connection.sendall("".join(request.replace("{}", str(i), 1) for i in range(3)).encode())
        for i in range(3):
            status, headers, _ = answer(connection)
            assert (status, headers["x-request-id"]) == (200, str(i))


def test_a_client_that_leaves_is_forgotten(
    service: Service, serve_on_loopback: Any, held_model: threading.Event
) -> None:
    url = serve_on_loopback(service)
    stays, leaves = connect(url), [connect(url) for _ in range(10)]
    for connection in (stays, *leaves):
        connection.sendall(head(len(BODY)) + BODY)
    until(lambda: service.engine.num_queued == 11)
    with connect(url) as half:
        half.sendall(head(len(BODY)) + BODY[:10])
    for connection in leaves:
        connection.close()
    until(lambda: service.num_requests == 1)
    assert service.engine.num_queued == 1 and service.held_bytes == len(BODY)
    held_model.set()
    with stays:
        assert answer(stays)[0] == 200
    until(lambda: samples(url)["treeward_requests_total", (("route", "/v1/rewards"), ("status", "499"))] == 11)
    assert samples(url)["treeward_forgotten_conversations_total", (("model", "tiny"),)] == 10


def test_tls(make_service: Callable[..., Service], serve_on_loopback: Any, certificate: tuple[Path, Path]) -> None:
    chain, secret = certificate
    url = serve_on_loopback(make_service(tls_certificate=str(chain), tls_key=str(secret)))
    trusting = ssl.create_default_context(cafile=str(chain))
    with httpx.Client(verify=trusting) as client:
        assert client.post(f"{url}/v1/rewards", content=BODY).status_code == 200
        large = client.post(f"{url}/v1/rewards", content=b" " * (2**25 + 1))
        assert large.status_code == 413
    with pytest.raises(httpx.HTTPError):
        httpx.get(url.replace("https", "http") + "/health")
    with httpx.Client(verify=trusting) as client:
        assert client.get(f"{url}/health").status_code == 200


def test_tls_files_that_cannot_be_used(
    make_service: Callable[..., Service], certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    from treeward.serving.run import _check_tls

    chain, secret = map(str, certificate)
    config = make_service().config
    _check_tls(config.model_copy(update={"tls_certificate": chain, "tls_key": secret}))
    (tmp_path / "junk.pem").write_text("junk")
    for one, other in [(chain, "nowhere.pem"), (secret, chain), (chain, "junk.pem"), (chain, "locked.pem")]:
        wrong = config.model_copy(update={"tls_certificate": one, "tls_key": str(tmp_path / other)})
        with pytest.raises(ConfigError, match="TLS files cannot be used"):
            _check_tls(wrong)


@pytest.fixture
def log_lines(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[[Any], list[str]]]:
    """A function that sends the logs to standard error, in a form, does something, and gives their lines."""
    root, ours = logging.getLogger(), logging.getLogger("treeward")
    before = root.handlers[:], root.level, ours.level

    def lines(form: Any, do: Callable[[], Any]) -> list[str]:
        logs.configure(form)
        do()
        sys.stderr.flush()
        return capfd.readouterr().err.splitlines()

    yield lines
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])
    logging.captureWarnings(False)


def test_logs_as_json(client: Any, log_lines: Any) -> None:
    def ask() -> None:
        client.post("/v1/rewards", content=BODY, headers={"x-request-id": "mine"})
        client.post("/v1/rewards", content=b"{")
        client.get("/a%0Ab%1B[31m")
        logging.getLogger("treeward.serving").error("%s", "\ud800", extra={"large": 2**70, "odd": object})
        try:
            raise ValueError("the reason")
        except ValueError:
            logging.getLogger("treeward.serving").exception("It failed.")

    rows = [json.loads(line) for line in log_lines("json", ask)]
    first, second, third, odd, failed = rows
    assert first["request_id"] == "mine" and first["bytes"] == len(BODY) and first["level"] == "info"
    assert re.fullmatch(r"POST /v1/rewards 200 [\d.]+ ms", first["message"])
    assert second["refused"] == "invalid_json" and len(second["request_id"]) == 16
    assert third["message"].startswith("GET /a\nb") and "404" in third["message"]
    assert odd["large"] == 2**70
    assert "ValueError: the reason" in failed["exception"]
    assert all(datetime.datetime.fromisoformat(row["time"]).tzinfo for row in rows)


def test_logs_as_text_are_one_line_each(client: Any, log_lines: Any) -> None:
    def ask() -> None:
        client.post("/v1/rewards", content=BODY, headers={"x-request-id": "mine"})
        client.get("/a%0Ab%0D%1B[31mc")

    first, second = log_lines("text", ask)
    assert re.fullmatch(r"\d\d:\d\d:\d\d POST /v1/rewards 200 [\d.]+ ms request_id=mine bytes=\d+", first)
    assert r"GET /a\nb\r\x1b[31mc 404" in second


def test_what_libraries_attach_to_records_is_not_logged(client: Any, log_lines: Any) -> None:
    make = logging.getLogRecordFactory()

    def with_a_stamp(*arguments: Any, **options: Any) -> logging.LogRecord:
        record = make(*arguments, **options)
        record._stamp_of_a_library = 1
        return record

    logging.setLogRecordFactory(with_a_stamp)
    try:
        for form in ("text", "json"):
            (line,) = log_lines(form, lambda: client.post("/v1/rewards", content=BODY))
            assert "request_id" in line and "_stamp" not in line
    finally:
        logging.setLogRecordFactory(make)


def test_no_access_log(make_service: Callable[..., Service], asgi_client: Callable[..., Any], log_lines: Any) -> None:
    client = asgi_client(make_service(access_log=False))
    assert log_lines("json", lambda: client.post("/v1/rewards", content=BODY)) == []
