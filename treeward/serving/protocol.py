"""`http_protocol`: uvicorn's HTTP connections, with a limit on the time and the size of a request's headers.

    uvicorn.Config(app, http=http_protocol(service))

A connection that says nothing, or its headers a byte at a time, would be held for ever by uvicorn, and headers without
end in memory. What is no HTTP gets its refusal in the same form as everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import select
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Literal, cast

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from treeward.serving.gate import CONNECTION, Connection, error_body
from treeward.serving.refusals import Refusal
from treeward.serving.service import Service

__all__ = ["MOST_HEADER_BYTES", "http_protocol"]

logger = logging.getLogger(__name__)

MOST_HEADER_BYTES = 2**16
"""One more part of what arrives, at most 256 KB, may come on top."""


_LITTLE = 2**16
"""Bytes of an answer that the system may as well hold: what waits is not counted any more."""
_LOOK_SECONDS = 0.1
_UNREAD_SECONDS = 1.0
"""For so long an idle connection that is to end may have bytes that are not read yet."""
_ABORT_SECONDS = 1.0
"""So long after it was closed a connection with nothing left to send is cut off: over TLS it waits for the client."""


class _Protocol(HttpToolsProtocol):
    service: Service
    _writing: _Writing
    _header_timer: asyncio.TimerHandle | None = None
    _header_bytes = 0
    _in_headers = False
    _is_ending = False
    _shutdown_timer: asyncio.TimerHandle | None = None
    _unread_until: float | None = None
    _is_shut_down = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._writing = _Writing(transport, self.loop, self.service.config.body_seconds)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_shutdown_timer()
        self._writing.end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_ending:  # what comes after something that is no HTTP cannot be told apart
            return
        if self.transport.is_closing():  # TLS gives out what it holds as it closes, when nothing can be answered
            return
        super().data_received(data)
        if self._in_headers and not self.transport.is_closing():
            self._header_bytes += len(data)
            if self._header_bytes > MOST_HEADER_BYTES:
                message = f"the headers are too large: at most {MOST_HEADER_BYTES} bytes are read"
                self._refuse(Refusal(431, "headers_too_large", message))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)[CONNECTION] = Connection(self._writing.when_written)
        self._in_headers, self._header_bytes = True, 0
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refusal(400, "invalid_http", msg))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_shut_down and self.transport.is_closing():
            self._abort_later()

    def shutdown(self) -> None:
        """End once what was begun is answered; a connection that waits for a request is closed.

        What has just come to it is read, and refused, first. It may be no whole request, and is then looked at again.
        """
        self._is_shut_down = True
        self._stop_shutdown_timer()
        if self.transport.is_closing():
            self._abort_later()
        elif self._is_answering:
            super().shutdown()
        elif self._in_headers:  # a request whose headers are on their way is told so, rather than cut off
            self._refuse(Refusal(503, "shutting_down", "the server is shutting down", retry_after=5))
            self._abort_later()
        elif self._has_unread and self._may_be_read:
            self._shutdown_timer = self.loop.call_later(_LOOK_SECONDS, self.shutdown)
        else:
            if self.transport.can_write_eof():
                with contextlib.suppress(OSError, RuntimeError):  # of a client that has left
                    self.transport.write_eof()  # told at once: the transport itself closes after all others' turn
            super().shutdown()
            self._abort_later()

    @property
    def _has_unread(self) -> bool:
        return _is_ready(self.transport, "POLLIN", default=False)

    @property
    def _may_be_read(self) -> bool:
        """Not for ever: a client may go on sending what is no request, and reading may be paused."""
        if self._unread_until is None:
            self._unread_until = self.loop.time() + _UNREAD_SECONDS
        return self.loop.time() < self._unread_until

    def _abort_later(self) -> None:
        """Not before all is sent, which a client may read slowly."""
        self._stop_shutdown_timer()
        self._shutdown_timer = self.loop.call_later(_ABORT_SECONDS, self._abort_if_written)

    def _abort_if_written(self) -> None:
        # Over TLS the size is without what the connection below holds; while it holds something, the system takes
        # no more.
        if self.transport.get_write_buffer_size() or not _is_ready(self.transport, "POLLOUT", default=True):
            self._abort_later()
        else:
            self._shutdown_timer = None
            self.transport.abort()

    def _stop_shutdown_timer(self) -> None:
        if self._shutdown_timer is not None:
            self._shutdown_timer.cancel()
            self._shutdown_timer = None

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        if self._header_timer is None:
            seconds = self.service.config.body_seconds
            self._header_timer = self.loop.call_later(seconds, self._headers_are_late)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_are_late(self) -> None:
        self._header_timer = None
        if self.transport.is_closing():
            return
        if self._is_answering:  # the next request came before the answer to the last
            self._start_timer()
        elif self._in_headers:
            seconds = self.service.config.body_seconds
            message = f"the headers did not arrive within {seconds:g} seconds"
            self._refuse(Refusal(408, "headers_timeout", message))
        else:
            self.transport.close()

    def _refuse(self, refusal: Refusal) -> None:
        """Answer what has not become a request, and close the connection."""
        self._stop_timer()
        if self._is_answering:
            # A second answer would only confuse whoever reads the first, which is finished.
            self._is_ending = True
            self.cycle.keep_alive = False
            if self.cycle.more_body:  # it is the body of this request that is wrong: it waits for no more
                cast("dict[str, Any]", self.cycle.scope)[CONNECTION].broken = refusal
                self.cycle.message_event.set()
            else:
                self.service.metrics.refused.labels(refusal.code).inc()
            return
        self.service.metrics.refused.labels(refusal.code).inc()
        request_id = secrets.token_hex(8)
        body = orjson.dumps(error_body(refusal, request_id))
        head = [
            f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            f"x-request-id: {request_id}",
            "connection: close",
        ]
        if refusal.retry_after is not None:
            head.append(f"retry-after: {round(refusal.retry_after)}")
        self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self.transport.close()


class _Writing:
    """What a connection has still to send. One whose client reads nothing for `seconds` is cut off."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._transport, self._loop, self._seconds = transport, loop, seconds
        self._done: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self._size, self._since = 0, 0.0

    def when_written(self, done: Callable[[], None]) -> None:
        """Call this when nearly all that was given to the transport has been sent, or never will be."""
        size = self._transport.get_write_buffer_size() if not self._is_over else 0
        if size <= _LITTLE:
            done()
        else:
            self._done.append(done)
        if size and self._timer is None:
            self._size, self._since = size, self._loop.time()
            self._timer = self._loop.call_later(0.0, self._look)

    def end(self) -> None:
        """The connection is gone."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._tell()

    def _look(self) -> None:
        self._timer = None
        size, now = self._transport.get_write_buffer_size(), self._loop.time()
        if size < self._size:
            self._since = now
        self._size = size
        if size <= _LITTLE:
            self._tell()
        if not size:
            return
        if now - self._since > self._seconds:
            self._transport.abort()
            return
        self._timer = self._loop.call_later(min(_LOOK_SECONDS, self._seconds / 4), self._look)

    def _tell(self) -> None:
        done, self._done = self._done, []
        for one in done:
            one()


def _is_ready(transport: asyncio.Transport, what: Literal["POLLIN", "POLLOUT"], *, default: bool) -> bool:
    """Whether the system has bytes of a connection, or takes them; `default` where it cannot be asked."""
    connection = transport.get_extra_info("socket")
    if connection is None or connection.fileno() < 0 or not hasattr(select, "poll"):  # Windows has no poll
        return default
    event = getattr(select, what)
    poll = select.poll()
    poll.register(connection, event)
    return any(found & event for _, found in poll.poll(0))


def http_protocol(service: Service) -> type[asyncio.Protocol]:
    """The class of the connections of a server of this service."""
    return type("Protocol", (_Protocol,), {"service": service})
