"""Clients whose heads do not end, and that nobody else notices them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from treeward.serving import protocol
from treeward.serving.service import Service

POST = b"POST /v1/rewards HTTP/1.1\r\nhost: localhost\r\n"


@contextmanager
def connected(url: httpx.URL) -> Iterator[socket.socket]:
    with socket.create_connection((url.host, url.port or 0), timeout=600) as connection:
        yield connection


def received(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(
    "start",
    [
        b"POST /",
        POST + b"x: ",
        POST + b"transfer-encoding: chunked\r\n\r\n5;",
        POST + b"transfer-encoding: chunked\r\n\r\n0\r\nx: ",
    ],
    ids=["path", "header", "chunk's extension", "trailer"],
)
def test_what_does_not_end_is_cut(start: bytes, service: Service, serve_on_loopback: Any) -> None:
    url = httpx.URL(serve_on_loopback(service))
    with connected(url) as connection:
        connection.sendall(start)
        with pytest.raises(OSError):
            for _ in range(10_000):  # 650 MB, if the server took them
                connection.sendall(b"a" * 65_000)
        assert httpx.get(f"{url}/health").status_code == 200


def test_many_headers_are_cut(service: Service, serve_on_loopback: Any) -> None:
    """In one packet, where the head is complete."""
    url = httpx.URL(serve_on_loopback(service))
    with connected(url) as connection:
        connection.sendall(POST + b"a: b\r\n" * 20_000 + b"\r\n")
        assert received_or_reset(connection)[:13] in (b"HTTP/1.1 431 ", b"")
    assert httpx.get(f"{url}/health", headers={"x": "a" * 50_000}).status_code == 200


def received_or_reset(connection: socket.socket) -> bytes:
    """As `received`; a server that closes while bytes are under way may reset the connection."""
    try:
        return received(connection)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("start", [b"", b"POST / HT", POST])
def test_a_head_that_does_not_arrive(
    start: bytes,
    service: Service,
    serve_on_loopback: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.1)
    with connected(httpx.URL(serve_on_loopback(service))) as connection:
        connection.sendall(start)
        assert received(connection).startswith(b"HTTP/1.1 408 ")


def test_a_second_head_that_does_not_arrive(
    service: Service,
    serve_on_loopback: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.1)
    with connected(httpx.URL(serve_on_loopback(service))) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"GET")
        assert b"HTTP/1.1 408 " in received(connection)
