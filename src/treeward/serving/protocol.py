"""`BoundedProtocol`: uvicorn's HTTP protocol with bounds on what a client sends before a request
begins.

    uvicorn.Config(app, http=BoundedProtocol)

httptools keeps a header until its end is here, however long it is: one of 96 MB held everybody up
for 87 seconds. h11 has a bound of its own, but reads in Python: chunks of one byte hold others up
six times as long as with httptools.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 2**16
"""Bytes after which a head (or a chunk's size, or a trailer) that has not ended is refused."""
HEAD_SECONDS = 20.0
"""Seconds in which a head has to be here, from the connection or from its first byte."""
_FED_AT_ONCE = 2**14
"""Bytes that are parsed at once; a longer head within one packet would be complete before it is
counted."""


class BoundedProtocol(HttpToolsProtocol):
    """A connection. Bytes that complete neither a head, a part of a body nor a request count until
    the next does.
    """

    _num_pending = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give the client its time for the first head."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
        self._advance()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, unless the client sends a head without an end."""
        # A packet may hold many heads, or one that is far too long.
        for start in range(0, len(data), _FED_AT_ONCE):
            part = data[start : start + _FED_AT_ONCE]
            self._num_pending += len(part)
            super().data_received(part)
            # uvicorn has refused the part, which is no HTTP, and has ended the connection.
            if self.transport.is_closing():
                return
            # The parser resets the number when something is complete.
            if self._num_pending > HEAD_BYTES:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
                return
        # A head that has begun must end in time, on a kept connection too.
        if self._num_pending > 0:
            self._start_timer()

    def on_headers_complete(self) -> None:
        """A request begins."""
        self._advance()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of a body is here."""
        self._advance()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is whole."""
        self._advance()
        super().on_message_complete()

    def _start_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(
                HEAD_SECONDS,
                self._refuse,
                HTTPStatus.REQUEST_TIMEOUT,
            )

    def _advance(self) -> None:
        self._num_pending = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: HTTPStatus) -> None:
        """Answer, unless an earlier request is being answered, and end the connection."""
        if self.transport.is_closing():
            return
        self.logger.warning("%s: the head of a request did not end.", status.phrase)
        # The refusal would stand within the response to the earlier request.
        if self.cycle is None or self.cycle.response_complete:
            line = f"HTTP/1.1 {status.value} {status.phrase}"
            head = f"{line}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            self.transport.write(head.encode())
        self.transport.close()
