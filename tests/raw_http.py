"""HTTP by hand, over a socket: what no client library would send, and exactly when.

with connect(url) as connection:
    connection.sendall(head(len(BODY)) + BODY)
    status, headers, body = answer(connection)
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable

__all__ = ["BODY", "CHAT", "answer", "chunked", "code", "connect", "head", "is_closed", "until"]

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
BODY = json.dumps({"conversations": [CHAT]}).encode()


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def head(length: int | None, *more: str) -> bytes:
    lines = ["POST /v1/rewards HTTP/1.1", "host: localhost", *more]
    lines += [] if length is None else [f"content-length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


def answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """The next answer on a connection: status, headers, body."""
    received = b""
    while not received.endswith(b"\r\n\r\n"):
        part = connection.recv(1)  # what comes after it may be the next answer
        assert part, f"the connection ended after {received!r}"
        received += part
    first, _, body = received.partition(b"\r\n\r\n")
    status, *lines = first.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers["content-length"]):
        part = connection.recv(min(2**20, int(headers["content-length"]) - len(body)))
        assert part, "the connection ended within an answer"
        body += part
    return int(status.split()[1]), headers, body


def code(body: bytes) -> str:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "code", "param", "request_id"}
    return str(error["code"])


def chunked(*parts: bytes) -> bytes:
    return head(None, "transfer-encoding: chunked") + b"".join(parts)


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has ended the connection, with nothing more to read."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)
