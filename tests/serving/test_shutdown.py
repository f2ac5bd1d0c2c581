"""How the server ends: what was accepted is answered, what comes later refused, and nobody holds it up."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from raw_http import BODY, answer, code, connect, head, is_closed, until

from treeward.serving import protocol
from treeward.serving.service import Service


def test_draining(service: Service, make_service: Any, held_model: threading.Event) -> None:
    """What was accepted is answered, whatever comes after it is refused, and then the address is free."""
    from treeward.serving.run import make_server

    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = make_server(service)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    accepted, idle, sending, slow_headers = (connect(url) for _ in range(4))
    idle.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert answer(idle)[0] == 200
    accepted.sendall(head(len(BODY)) + BODY)
    sending.sendall(head(len(BODY)) + BODY[:5])
    slow_headers.sendall(b"POST /v1/rew")
    until(lambda: service.engine.num_queued == 1 and service.num_requests == 2)
    server.should_exit = True
    until(lambda: service.is_draining)

    ready = httpx.get(f"{url}/ready")
    assert ready.status_code == 503 and ready.json()["status"] == "shutting down"
    assert ready.headers["connection"] == "close"
    assert httpx.get(f"{url}/health").status_code == 200
    refused = httpx.post(f"{url}/v1/rewards", content=BODY)
    assert refused.status_code == 503 and code(refused.content) == "shutting_down"
    assert int(refused.headers["retry-after"]) >= 1 and refused.headers["connection"] == "close"
    idle.sendall(head(len(BODY)) + BODY)
    status, headers, _ = answer(idle)
    assert status == 503 and headers["connection"] == "close" and is_closed(idle)
    status, _, body = answer(sending)  # it has a second, not all of body_seconds
    assert (status, code(body)) == (503, "shutting_down")
    assert thread.is_alive()

    held_model.set()
    status, headers, body = answer(accepted)
    assert status == 200 and headers["connection"] == "close" and is_closed(accepted)
    status, _, body = answer(slow_headers)
    assert (status, code(body)) == (503, "shutting_down")
    thread.join(20)
    assert not thread.is_alive() and server.finished
    with pytest.raises(ConnectionRefusedError):
        connect(url)


def test_who_comes_as_the_server_closes_is_refused_and_not_cut_off(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that the system holds as the listener closes; a request that it holds as an idle one is closed."""
    from treeward.serving.run import make_server

    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = make_server(service)
    late: list[socket.socket] = []
    close, stop = server._close_listeners, server._stop_listening

    def close_as_one_connects(listeners: Any) -> Any:
        late.append(connect(url))
        late[0].sendall(head(len(BODY)) + BODY)
        return close(listeners)

    async def stop_as_one_asks(listeners: Any) -> None:
        await stop(listeners)
        idle.sendall(head(len(BODY)) + BODY)

    monkeypatch.setattr(server, "_close_listeners", close_as_one_connects)
    monkeypatch.setattr(server, "_stop_listening", stop_as_one_asks)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    idle = connect(url)
    idle.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert answer(idle)[0] == 200
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()
    for connection in (late[0], idle):
        status, headers, body = answer(connection)
        assert (status, code(body), headers["connection"]) == (503, "shutting_down", "close")
        assert is_closed(connection)


@contextmanager
def running(service: Service, loop_factory: Any = None, prepare: Any = None) -> Iterator[tuple[Any, str, Any]]:
    """A server at a real address: itself, its URL, and a function that waits for its end and says how long that took.

    `prepare(server)` is called before it starts.
    """
    from treeward.serving.run import make_server

    listener = socket.create_server(("127.0.0.1", 0))
    server = make_server(service)
    if prepare is not None:
        prepare(server)

    def run() -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(server.serve(sockets=[listener]))

    def end() -> float:
        started = time.monotonic()
        server.should_exit = True
        thread.join(25)
        assert not thread.is_alive()
        return time.monotonic() - started

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{listener.getsockname()[1]}", end
    finally:
        server.should_exit = server.force_exit = True
        thread.join(25)


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_factory(request: pytest.FixtureRequest) -> Any:
    """What makes an event loop: of asyncio, and of uvloop where it is installed."""
    return asyncio.new_event_loop if request.param == "asyncio" else pytest.importorskip("uvloop").new_event_loop


GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "sent", [pytest.param(b"\r\n", id="no request"), pytest.param(b"POST /v1/rew", id="some of one")]
)
def test_unread_bytes_that_are_no_whole_request_do_not_hold_the_shutdown(
    service: Service, loop_factory: Any, sent: bytes
) -> None:
    def prepare(server: Any) -> None:
        stop = server._stop_listening

        async def stop_as_one_sends(listeners: Any) -> None:
            await stop(listeners)
            idle.sendall(sent)

        server._stop_listening = stop_as_one_sends

    with running(service, loop_factory, prepare) as (_, url, end):
        idle = connect(url)
        idle.sendall(GET)
        assert answer(idle)[0] == 200
        assert end() < 5
        if sent.strip():
            status, _, body = answer(idle)
            assert (status, code(body)) == (503, "shutting_down")
        assert is_closed(idle)


class FakeTransport(asyncio.Transport):
    """A transport that never reads; what was called is in `calls`."""

    def __init__(self, connection: socket.socket | None, error: Exception | None = None) -> None:
        super().__init__({"socket": connection})
        self.calls: list[str] = []
        self.unsent, self._error, self._is_closing = 0, error, False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return super().get_extra_info(name, default) if name == "socket" else default

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self.calls.append("close")
        self._is_closing = True

    def abort(self) -> None:
        self.calls.append("abort")

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.calls.append("write_eof")
        if self._error is not None:
            raise self._error

    def get_write_buffer_size(self) -> int:
        return self.unsent


@asynccontextmanager
async def idle_connection(service: Service, transport: FakeTransport) -> AsyncIterator[Any]:
    from treeward.serving.run import make_server

    server = make_server(service)
    server.config.load()
    kind: Any = server.config.http_protocol_class
    connection = kind(config=server.config, server_state=server.server_state, app_state={})
    connection.connection_made(transport)
    yield connection
    connection.connection_lost(None)


@pytest.mark.parametrize("error", [None, OSError("not connected"), RuntimeError("closed")], ids=repr)
@pytest.mark.parametrize("is_there", [False, True], ids=["no socket", "closed socket"])
def test_an_idle_connection_whose_client_has_left_is_closed(
    service: Service, is_there: bool, error: Exception | None
) -> None:
    left = socket.socket()
    transport = FakeTransport(left if is_there else None, error)

    async def shut_down() -> None:
        async with idle_connection(service, transport) as connection:
            left.close()
            connection.shutdown()
            assert transport.calls == ["write_eof", "close"]

    asyncio.run(shut_down())


@pytest.mark.parametrize("has_poll", [True, False])
def test_an_idle_connection_whose_bytes_are_never_read_is_closed(
    service: Service, monkeypatch: pytest.MonkeyPatch, has_poll: bool
) -> None:
    monkeypatch.setattr(protocol, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(protocol, "_UNREAD_SECONDS", 0.2)
    if not has_poll:  # as on Windows
        monkeypatch.delattr(select, "poll")
    ours, theirs = socket.socketpair()
    theirs.sendall(b"GET")
    transport = FakeTransport(ours)

    async def shut_down() -> None:
        async with idle_connection(service, transport) as connection:
            connection.shutdown()
            assert transport.calls == ([] if has_poll else ["write_eof", "close"])
            await asyncio.sleep(0.5)
            assert transport.calls == ["write_eof", "close"]

    with ours, theirs:
        asyncio.run(shut_down())


@pytest.mark.parametrize("where", ["transport", "system"])
def test_a_closed_connection_is_cut_off_when_all_is_sent_and_not_before(
    service: Service, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(protocol, "_ABORT_SECONDS", 0.05)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    transport = FakeTransport(ours)
    if where == "transport":
        transport.unsent = 1
    else:  # over TLS the connection below may hold more, if the system takes no more
        with pytest.raises(BlockingIOError):
            while True:
                ours.send(b" " * 2**16)

    async def shut_down() -> None:
        async with idle_connection(service, transport) as connection:
            connection.shutdown()
            await asyncio.sleep(0.3)
            assert transport.calls == ["write_eof", "close"]
            transport.unsent = 0
            if where == "system":
                theirs.setblocking(False)
                with pytest.raises(BlockingIOError):
                    while True:
                        theirs.recv(2**20)
            await asyncio.sleep(0.3)
            assert transport.calls == ["write_eof", "close", "abort"]

    with ours, theirs:
        asyncio.run(shut_down())


def test_a_connection_that_is_answered_after_the_shutdown_is_cut_off_too(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_ABORT_SECONDS", 0.05)
    transport = FakeTransport(None)

    async def shut_down() -> None:
        async with idle_connection(service, transport) as connection:
            connection.cycle = SimpleNamespace(response_complete=False, keep_alive=True, message_event=asyncio.Event())
            connection.shutdown()
            await asyncio.sleep(0.2)
            assert transport.calls == [] and not connection.cycle.keep_alive
            connection.cycle.response_complete = True
            transport.close()
            connection.on_response_complete()
            connection.data_received(b"GARBAGE\r\n\r\n")  # nothing is written to what is closed
            await asyncio.sleep(0.2)
            assert transport.calls == ["close", "abort"]

    asyncio.run(shut_down())


def test_a_client_that_left_before_it_was_taken_does_not_cost_the_others(service: Service) -> None:
    from treeward.serving.run import make_server

    ours, theirs = socket.socketpair()
    results: list[Any] = [ConnectionAbortedError(), ours, BlockingIOError(), AssertionError("asked again")]

    class Listener:
        def setblocking(self, flag: bool) -> None:
            assert not flag

        def accept(self) -> tuple[socket.socket, str]:
            result = results.pop(0)
            if isinstance(result, Exception):
                raise result
            return result, ""

    server, closed = make_server(service), []
    servers: Any = [type("Listening", (), {"close": lambda self: closed.append(self)})()]
    server.servers = servers
    listeners: Any = [Listener()]
    with ours, theirs:
        assert server._close_listeners(listeners) == [ours] and not ours.getblocking()
        results[:] = [OSError("no descriptor is left")]
        assert server._close_listeners(listeners) == [] and closed == servers * 2


def test_draining_ends_when_its_time_is_over(make_service: Callable[..., Service], held_model: threading.Event) -> None:
    from treeward.serving.run import make_server

    service = make_service(shutdown_seconds=0.2)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = make_server(service)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    with connect(url) as accepted:
        accepted.sendall(head(len(BODY)) + BODY)
        until(lambda: service.engine.num_queued == 1)
        server.should_exit = True
        time.sleep(0.5)
        held_model.set()
        status, _, body = answer(accepted)
        assert (status, code(body)) == (503, "shutting_down")
    thread.join(20)
    assert not thread.is_alive() and not server.finished


def connect_tls(url: str, chain: Path) -> ssl.SSLSocket:
    return ssl.create_default_context(cafile=str(chain)).wrap_socket(connect(url), server_hostname="127.0.0.1")


@pytest.mark.parametrize("state", ["idle", "in its headers", "answered"])
def test_a_tls_client_that_does_not_say_goodbye_does_not_hold_the_shutdown(
    make_service: Callable[..., Service],
    certificate: tuple[Path, Path],
    loop_factory: Any,
    held_model: threading.Event,
    state: str,
) -> None:
    chain, secret = certificate
    service = make_service(tls_certificate=str(chain), tls_key=str(secret))
    with running(service, loop_factory) as (server, url, end), connect_tls(url, chain) as connection:
        if state == "answered":
            connection.sendall(head(len(BODY)) + BODY)
            until(lambda: service.engine.num_queued == 1)
            server.should_exit = True
            until(lambda: service.is_draining)
            held_model.set()
        else:
            connection.sendall(GET)
            assert answer(connection)[0] == 200
        if state == "in its headers":
            connection.sendall(b"POST /v1/rew")
        assert end() < 6
        if state != "idle":
            assert answer(connection)[0] == (200 if state == "answered" else 503)


def test_an_answer_over_tls_that_is_read_slowly_is_not_cut_off_by_the_shutdown(
    make_service: Callable[..., Service], certificate: tuple[Path, Path], loop_factory: Any
) -> None:
    chain, secret = certificate
    service = make_service(tls_certificate=str(chain), tls_key=str(secret))
    said = {"output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]}]}
    body = json.dumps(
        {"responses_create_params": {"input": "2 + 2?"}, "response": said, "echoed": "x" * (24 * 2**20)}
    ).encode()
    with running(service, loop_factory) as (server, url, end), connect_tls(url, chain) as connection:
        connection.sendall(head(len(body)).replace(b"/v1/rewards", b"/verify") + body)
        until(lambda: b'route="/verify"' in service.metrics.exposition())
        server.should_exit = True
        time.sleep(3)
        status, _, verified = answer(connection)
        assert status == 200 and len(verified) > len(body)
        assert end() < 6


def test_who_comes_over_tls_as_the_server_closes_has_a_second_to_say_goodbye(
    make_service: Callable[..., Service], certificate: tuple[Path, Path]
) -> None:
    from treeward.serving.run import make_server

    chain, secret = certificate
    server = make_server(make_service(tls_certificate=str(chain), tls_key=str(secret)))
    server.config.load()
    given: list[dict[str, Any]] = []

    async def stop_listening() -> None:
        async def connect_accepted_socket(*_: Any, **options: Any) -> None:
            given.append(options)

        loop: Any = asyncio.get_running_loop()
        loop.connect_accepted_socket = connect_accepted_socket
        await server._stop_listening([])

    taken: Any = [None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "_close_listeners", lambda listeners: taken)
        asyncio.run(stop_listening())
    assert [options["ssl_shutdown_timeout"] for options in given] == [1.0]
