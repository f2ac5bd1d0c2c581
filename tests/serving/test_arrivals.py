"""A client that sends too much, too slowly or too many items: what it gets, and what the others
notice.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest
from fastapi.exceptions import RequestValidationError
from hypothesis import given
from hypothesis import strategies as st
from messages import chat

from treeward.config.server import ServedModelConfig, ServerConfig
from treeward.serving.api_error import APIError
from treeward.serving.arrivals import BODIES_AT_ONCE, Arrivals, num_items
from treeward.serving.service import Service

CHAT = chat("2 + 2?", "4")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a",[]{}:\\\n'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='b"[,\\'), inner),
)


def error(response: Any) -> tuple[int, str]:
    """The status and the code of an error."""
    return response.status_code, response.json()["error"]["code"]


def counted_by_walking(value: Any) -> int:
    """The values of parsed JSON, itself included."""
    if isinstance(value, list):
        return 1 + sum(map(counted_by_walking, value))
    if isinstance(value, dict):
        return 1 + sum(map(counted_by_walking, value.values()))
    return 1


@given(value=VALUES, most=st.integers(1, 20))
def test_items_are_counted_without_parsing(value: Any, most: int) -> None:
    """No body is refused that has no more items than it may, and none is taken that has twice as
    many.
    """
    number = num_items(json.dumps(value).encode(), most)
    actual = counted_by_walking(value)
    if actual <= most // 2:
        assert number <= most
    if actual > most:
        assert number > most


def test_too_many_items_are_refused_before_they_are_parsed(
    make_service: Callable[..., Service],
    asgi_client: Callable[..., Any],
) -> None:
    client = asgi_client(make_service(max_body_items=100))
    broken = b'{"conversations": [' + b"1," * 100  # no JSON: its parser would say so
    assert error(client.post("/v1/rewards", content=broken)) == (413, "too_many_items")
    commas = chat("a, b, c" * 100, "[{" * 100)
    body = {"conversations": [commas], "on_error": "mask"}
    assert client.post("/v1/rewards", json=body).status_code == 200


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/rewards", {"conversations": [1] * 500}),
        ("/v1/rewards", {"conversations": [[1] * 500]}),
        (
            "/v1/rewards",
            {"conversations": [{"messages": CHAT, **dict.fromkeys(map(str, range(500)), 1)}]},
        ),
        ("/v1/rewards", {"context": "", "completions": [1] * 500}),
        ("/v1/rewards", dict.fromkeys(map(str, range(500)), 1)),
        ("/v1/rewards", {"conversations": [CHAT], "tools": [1] * 500}),
        ("/classify", {"input": [None] * 500}),
        ("/classify", {"input": [[None] * 500]}),
        ("/pooling", {"messages": [1] * 500}),
        ("/v1/embeddings", {"input": [None] * 500}),
        ("/get_reward", {"query": [1] * 500}),
        ("/predict", {"inputs": [1] * 500}),
        ("/slime", {"prompt": [1] * 500, "response": "a"}),
        (
            "/verify",
            {"responses_create_params": {"input": [1] * 500}, "response": {"output": [1] * 500}},
        ),
        ("/aggregate_metrics", {"verify_responses": [1] * 500}),
    ],
)
def test_only_the_first_of_many_mistakes_is_made_an_error(
    client: Any,
    route: str,
    body: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A million errors, of which the client sees one, took the server seconds."""
    counts: list[int] = []
    make = RequestValidationError.__init__

    def count_and_make(self: RequestValidationError, errors: Any, **options: Any) -> None:
        counts.append(len(errors))
        make(self, errors, **options)

    monkeypatch.setattr(RequestValidationError, "__init__", count_and_make)
    assert client.post(route, json=body).status_code == 422
    assert 1 <= counts[0] <= 5  # one for each form that an item may have


def test_a_body_without_a_length_is_counted_as_it_arrives(
    make_service: Callable[..., Service],
    serve_on_loopback: Any,
) -> None:
    """The client goes on without an end, as `curl -T -` does; the server answers in between."""
    url = httpx.URL(serve_on_loopback(make_service(max_body_bytes=100_000)))
    with opened(url, b"transfer-encoding: chunked") as connection:
        for _ in range(11):
            connection.sendall(b"2710\r\n" + b" " * 10_000 + b"\r\n")
        assert answer(connection) == (413, "body_too_large")


def test_a_body_that_stops_arriving(
    make_service: Callable[..., Service],
    serve_on_loopback: Any,
) -> None:
    url = httpx.URL(serve_on_loopback(make_service(deadline_seconds=0.2)))
    with opened(url, b"content-length: 5") as connection:
        connection.sendall(b"{")
        assert answer(connection) == (504, "deadline_exceeded")


def test_stalled_bodies_leave_room_for_others(
    make_service: Callable[..., Service],
    serve_on_loopback: Any,
) -> None:
    """More stalled uploads than there is room for: the largest of them is dropped, and small
    requests go on.
    """
    url = httpx.URL(serve_on_loopback(make_service(max_body_bytes=10_000)))
    with ExitStack() as connections:
        largest = connections.enter_context(opened(url, b"content-length: 10000"))
        largest.sendall(b" " * 9_990)
        for _ in range(BODIES_AT_ONCE):  # with them 161,990 bytes, and 160,000 may be held
            stalled = connections.enter_context(opened(url, b"content-length: 10000"))
            stalled.sendall(b" " * 9_500)
        assert answer(largest) == (429, "server_full")
        assert httpx.post(f"{url}/v1/rewards", json={"conversations": [CHAT]}).status_code == 200


def test_a_part_that_comes_while_another_body_is_dropped() -> None:
    """Between the choice of the largest body and the end of its request there are rounds of the
    event loop: who sends a part in them is no part of the problem.
    """
    config = ServerConfig(models=(ServedModelConfig(models=("m",)),), max_body_bytes=100)

    async def codes() -> list[str | None]:
        arrivals = Arrivals(config)
        deadline = time.monotonic() + 60
        requests = []

        def begin(size: int) -> asyncio.Queue[Any]:
            queue: asyncio.Queue[Any] = asyncio.Queue()
            queue.put_nowait(part_of(size))
            requests.append(asyncio.create_task(arrivals.read(queue.get, deadline)))
            return queue

        for size in (99, *[90] * 16):  # 1,539 bytes, and 1,600 may be held
            begin(size)
        first = begin(50)
        second = begin(0)
        await asyncio.sleep(0)
        # The first is too much. The second comes in the next round, when the largest is cancelled.
        first.put_nowait(part_of(20))
        await asyncio.sleep(0)
        second.put_nowait(part_of(20))
        await asyncio.sleep(0.1)
        for request in requests:
            request.cancel()
        ends = await asyncio.gather(*requests, return_exceptions=True)
        return [end.code if isinstance(end, APIError) else type(end).__name__ for end in ends]

    assert asyncio.run(codes()) == ["server_full", *["CancelledError"] * 18]


def part_of(size: int) -> dict[str, Any]:
    """A part of a body, which is not the last."""
    return {"type": "http.request", "body": b" " * size, "more_body": True}


@contextmanager
def opened(url: httpx.URL, header: bytes) -> Iterator[socket.socket]:
    """A connection that has sent the head of a request."""
    with socket.create_connection((url.host, url.port or 0), timeout=600) as connection:
        connection.sendall(
            b"POST /v1/rewards HTTP/1.1\r\nhost: localhost\r\n" + header + b"\r\n\r\n",
        )
        yield connection


def answer(connection: socket.socket) -> tuple[int, str]:
    """The status and the code of the error that comes."""
    response = HTTPResponse(connection)
    response.begin()
    return response.status, json.loads(response.read())["error"]["code"]
