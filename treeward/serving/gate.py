"""`Gate`: what every request passes on its way to a route, and every answer on its way back.

    app.add_middleware(Gate, service=service, token=token)
    request.scope["treeward"].deadline      # for a route: a `RequestInfo`

It gives a request its id and its deadline, asks for the bearer token, refuses what is too large, too slow or one too
many before it is held in memory, ends the work when the client goes away, and writes the log and the counters. A
refusal has the same form wherever it comes from.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treeward.config.server import is_loopback
from treeward.serving.bodies import json_response
from treeward.serving.metrics import ServerMetrics
from treeward.serving.playground import routes as playground
from treeward.serving.refusals import Refusal
from treeward.serving.service import Service

__all__ = ["CONNECTION", "OPEN_PATHS", "Connection", "Gate", "RequestInfo", "error_body", "refusal_response"]

logger = logging.getLogger("treeward.requests")

OPEN_PATHS = {"/health", "/ready"} | playground.OPEN_PATHS
"""Paths that need no token, and are answered to the end."""

_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")
_SECONDS = re.compile(r"[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?|\.[0-9]+")
"""Of X-Deadline-Seconds: `float` would take 1_0, inf and nan as well."""
_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(:[0-9]*)?")
_LINGER_SECONDS = 2.0
"""For so long is read, and thrown away, what a client still sends after it was refused: a connection that is closed
before would be reset, and the refusal lost.
"""
_SMALL_BODY = 2**16


CONNECTION = "treeward.connection"
"""The key of a scope that has the `Connection`, where there is one."""


@dataclass(slots=True)
class Connection:
    """What a request knows of its connection. `when_written`: calls a function when what was answered has been sent, or
    never will be. `broken`: why no more of the body can be read.
    """

    when_written: Callable[[Callable[[], None]], None]
    broken: Refusal | None = None


@dataclass(slots=True)
class RequestInfo:
    """What is known of a request. `deadline`: of `time.monotonic`; `num_bytes`: of its body, as far as it was read."""

    id: str
    started: float
    deadline: float
    route: str = "unknown"
    status: int = 0
    num_bytes: int = 0
    details: dict[str, Any] = field(default_factory=dict)
    """What the request's line in the log has beside."""


def error_body(refusal: Refusal, request_id: str) -> dict[str, Any]:
    """A refusal as OpenAI's clients read it; `code` and `param` are for programs."""
    kind = "invalid_request_error" if refusal.status < 500 and refusal.status != 429 else "server_error"
    body = {"message": refusal.message, "type": kind, "code": refusal.code, "param": refusal.param}
    return {"error": body | {"request_id": request_id}}


def refusal_response(refusal: Refusal, info: RequestInfo, metrics: ServerMetrics) -> Response:
    """The answer to a request that is refused; it is counted, and in the log."""
    metrics.refused.labels(refusal.code).inc()
    info.details["refused"] = refusal.code
    headers = {}
    if refusal.retry_after is not None:
        headers["Retry-After"] = str(max(1, round(refusal.retry_after)))
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_body(refusal, info.id), refusal.status, headers)


class Gate:
    """ASGI middleware. `token`: what `Authorization: Bearer` must carry; None asks for none. `allowed_hosts`: the names
    besides loopback's that the header Host may have, in lower case and without a port; None allows any.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        token: str | None = None,
        allowed_hosts: Collection[str] | None = None,
    ) -> None:
        self.app, self.service = app, service
        self._token = None if token is None else token.encode()
        self._hosts = None if allowed_hosts is None else frozenset(allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        started = time.monotonic()
        asked = headers.get("x-request-id", "")
        info = RequestInfo(
            id=asked if _GOOD_ID.fullmatch(asked) else secrets.token_hex(8),
            started=started,
            deadline=started + self.service.config.deadline_seconds,
        )
        scope["treeward"] = info
        exchange = _Exchange(self.service, info, headers, receive, send, scope.get(CONNECTION))
        # Of an answer to HEAD the connection leaves out the body.
        asked_of = scope if scope["method"] != "HEAD" else {**scope, "method": "GET"}
        is_open = scope["path"] in OPEN_PATHS
        try:
            with contextlib.nullcontext() if is_open else self.service.request():
                refusal = self._wrong_host(headers)
                if refusal is None and not is_open:
                    refusal = self._refusal(headers, info)
                await exchange.run(self.app, asked_of, refusal)
        finally:
            info.route = getattr(asked_of.get("route"), "path", "unknown")
            self._account(scope, info)

    def _wrong_host(self, headers: Headers) -> Refusal | None:
        """A page of another site reaches this server if its name is made to mean this machine (DNS rebinding); but then
        its browser sends that name.
        """
        host = headers.get("host", "")
        if self._hosts is None or not host:  # every browser sends one
            return None
        match = _HOST.fullmatch(host)
        name = "" if match is None else match[1].lower().removesuffix(".")
        if is_loopback(name) or name in self._hosts:
            return None
        message = f"Host: got {host[:100]!r}, no name of this server; its key allowed_hosts may name others"
        return Refusal(421, "wrong_host", message, param="Host")

    def _refusal(self, headers: Headers, info: RequestInfo) -> Refusal | None:
        """What is wrong with a request by its headers."""
        config = self.service.config
        if (wrong := self._wrong_token(headers)) is not None:
            return wrong
        if self.service.is_draining:
            return Refusal(503, "shutting_down", "the server is shutting down", retry_after=5)
        if (asked := headers.get("x-deadline-seconds")) is not None:
            if not _SECONDS.fullmatch(asked):
                message = f"X-Deadline-Seconds: got {asked[:40]!r}, need a number of seconds, as 2.5"
                return Refusal(400, "invalid_header", message, param="X-Deadline-Seconds")
            info.deadline = info.started + min(float(asked), config.deadline_seconds)
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > config.max_body_bytes:
            return _too_large(config.max_body_bytes)
        if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
            return Refusal(415, "unsupported_encoding", "bodies are read as they are: send no Content-Encoding")
        return None

    def _wrong_token(self, headers: Headers) -> Refusal | None:
        if self._token is None:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            return Refusal(401, "unauthorized", "this server asks for a token: send Authorization: Bearer TOKEN")
        # in constant time: how long a wrong token takes says nothing of the right one
        if hmac.compare_digest(given.strip().encode("latin-1"), self._token):
            return None
        return Refusal(401, "unauthorized", "the bearer token that was sent is not this server's")

    def _account(self, scope: Scope, info: RequestInfo) -> None:
        seconds = time.monotonic() - info.started
        self.service.metrics.request(info.route, info.status or 500, seconds, info.num_bytes)
        if self.service.config.access_log:
            logger.info(
                "%s %s %s %.1f ms",
                scope["method"],
                scope["path"],
                info.status or 500,
                1000 * seconds,
                extra={"request_id": info.id, "bytes": info.num_bytes, **info.details},
            )


class _Exchange:
    """One request and its answer: what the routes receive from and send to."""

    def __init__(
        self,
        service: Service,
        info: RequestInfo,
        headers: Headers,
        receive: Receive,
        send: Send,
        connection: Connection | None,
    ) -> None:
        self.service, self.info, self._connection = service, info, connection
        self._receive, self._send = receive, send
        self._handler = asyncio.current_task()
        self._watcher: asyncio.Task[None] | None = None
        self._held_bytes = 0
        self._body_end = asyncio.get_running_loop().time() + service.config.body_seconds
        length = headers.get("content-length", "0")
        self._is_read = "transfer-encoding" not in headers and length == "0"
        self._is_large = "transfer-encoding" in headers or not length.isdecimal() or int(length) > _SMALL_BODY
        self._is_gone = self._has_started = self._is_answered = False

    async def run(self, app: ASGIApp, scope: Scope, refusal: Refusal | None) -> None:
        """Let the application answer, or answer with the refusal."""
        try:
            if refusal is None:
                await app(scope, self.receive, self.send)
            else:
                await self._refuse(scope, refusal)
        except asyncio.CancelledError:
            if not self._is_gone or self._handler is None:
                raise  # not by us: the server ends
            self._handler.uncancel()
            self.info.status = 499
        except Exception:
            if self._has_started or self._is_gone:
                raise
            logger.exception("A request failed.", extra={"request_id": self.info.id})
            why = "the server failed; its log has the details, under the id of this request"
            await self._refuse(scope, Refusal(500, "internal_error", why))
        finally:
            self._is_answered = True
            if self._watcher is not None:
                self._watcher.cancel()
            release = partial(self.service.release, self._held_bytes)
            if self._connection is None:
                release()
            else:  # an answer may echo the body, and is as large: until it is sent it is held
                self._connection.when_written(release)

    async def receive(self) -> Message:
        """A part of the body. Raises `Refusal`: 408 where it is late, 413 too large, 429 one too many in memory."""
        if self._watcher is not None:  # the body is complete: whoever asks again waits for the end
            await asyncio.shield(self._watcher)
            return {"type": "http.disconnect"}
        try:
            async with asyncio.timeout_at(self._body_end) as patience:
                with self.service.reading(patience):
                    message = await self._receive()
        except TimeoutError as error:
            if self.service.is_draining:
                raise Refusal(503, "shutting_down", "the server is shutting down", retry_after=5) from error
            seconds = self.service.config.body_seconds
            raise Refusal(408, "body_timeout", f"the body did not arrive within {seconds:g} seconds") from error
        if self._is_broken:
            assert self._connection is not None and self._connection.broken is not None
            raise self._connection.broken
        if message["type"] == "http.disconnect":
            self._is_gone = True
            return message
        size = len(message.get("body", b""))
        self.info.num_bytes += size
        self._is_read = not message.get("more_body", False)
        if self.info.num_bytes > self.service.config.max_body_bytes:
            raise _too_large(self.service.config.max_body_bytes)
        self.service.hold(size)
        self._held_bytes += size
        if self._is_read:
            self._watcher = asyncio.create_task(self._watch())
        return message

    async def send(self, message: Message) -> None:
        """A part of the answer."""
        if message["type"] == "http.response.start":
            self._has_started = True
            self.info.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.info.id
            # What is late, or too large, may go on to come for ever.
            is_endless = self._is_large or message["status"] in (408, 413)
            if self.service.is_draining or (not self._is_read and is_endless):
                headers["connection"] = "close"
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if is_last and not self._is_read and not self._is_gone:
            await self._send({**message, "more_body": True})
            await self._linger()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        self._is_answered = self._is_answered or is_last
        await self._send(message)

    @property
    def _is_broken(self) -> bool:
        return self._connection is not None and self._connection.broken is not None

    async def _refuse(self, scope: Scope, refusal: Refusal) -> None:
        response = refusal_response(refusal, self.info, self.service.metrics)
        await response(scope, self.receive, self.send)

    async def _watch(self) -> None:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._is_answered and self._handler is not None:
            self._is_gone = True
            self._handler.cancel()

    async def _linger(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS if not self.service.is_draining else _LINGER_SECONDS / 10):
                while not self._is_broken:
                    message = await self._receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return


def _too_large(limit: int) -> Refusal:
    return Refusal(413, "body_too_large", f"the body is too large: at most {limit} bytes are read")
