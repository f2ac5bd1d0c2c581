"""Servers on loopback: one that answers as a test says, and remembers what it was asked; and our
own.

with Loopback(lambda request: (200, {"data": []})) as server:
    client = RewardClient(server.url)
server.requests[0].json["model"]

with serving_on_loopback(service) as url: ...
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["Asked", "Loopback", "serving_on_loopback", "wait_until"]


def wait_until(condition: Callable[[], Any], *, seconds: float = 600.0) -> Any:
    """What the condition gives once it holds."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)
    return value


@dataclass(frozen=True)
class Asked:
    """A request as it came; `handler`: to answer it by hand."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    handler: BaseHTTPRequestHandler

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Loopback:
    """`answer` gives the status, the body (JSON unless it is bytes) and, if it likes, headers;
    None: no answer at all, the connection is closed.
    """

    def __init__(self, answer: Callable[[Asked], Any]) -> None:
        self.requests: list[Asked] = []
        self.num_connections = 0
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                asked = Asked(self.command, self.path, headers, body, self)
                with lock:
                    loopback.requests.append(asked)
                answered = answer(asked)
                if answered is None:
                    self.close_connection = True
                    return
                status, content, *more = answered
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in (more[0] if more else {}).items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 64

            def get_request(self) -> Any:
                loopback.num_connections += 1
                return super().get_request()

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # clients of these tests go away

        loopback = self
        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving_on_loopback(service: Any, *, token: str | None = None) -> Iterator[str]:
    """A service of ours at a real address, whose URL it gives; in a thread and event loop of its
    own."""
    from treeward.serving.run import make_server

    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    server = make_server(service, token=token)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(120)  # a request that hangs is given up after these seconds
        assert not thread.is_alive(), "the server does not end"
