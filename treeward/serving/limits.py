"""`RequestLimits`: the middleware of every request.

It gives a request its id and its deadline, checks the bearer token, limits the body's size and time, cancels the work
when the client disconnects, and writes the access log.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import time
from typing import Any
from urllib.parse import quote

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treeward.serving.api_error import APIError
from treeward.serving.playground import routes as playground
from treeward.serving.service import Service

logger = logging.getLogger("treeward.requests")

_OPEN_PATHS = {"/health", "/ready", "/ping"} | playground.OPEN_PATHS
"""Paths that need no token."""
_VLLM_PATHS = {"/classify", "/pooling"}
"""The paths with errors in vLLM's form."""
_VLLM_KINDS = {400: "BadRequestError", 404: "NotFoundError"}
_TEI_KINDS = {429: "Overloaded", 500: "Backend", 503: "Unhealthy", 504: "Overloaded"}


class JSON(JSONResponse):
    """A response written by orjson; floats keep all their digits."""

    def render(self, content: Any) -> bytes:
        """The JSON of the content."""
        return orjson.dumps(content)


def error_response(error: APIError, scope: Scope, service: Service) -> JSON:
    """The response to a failed request, in the form of OpenAI, vLLM or TEI. Counts the error."""
    service.metrics.errors.labels(error.code).inc()
    state = scope["state"]
    state["error"] = error.code
    kind = "invalid_request_error" if error.status < 500 and error.status != 429 else "server_error"
    facts = {"code": error.code, "param": error.param, "request_id": state["request_id"]}
    body: dict[str, Any] = {"error": {"message": error.message, "type": kind, **facts}}
    if scope["path"] == "/predict":
        body = {"error": error.message, "error_type": _TEI_KINDS.get(error.status, "Validation"), **facts}
    status = error.status
    if scope["path"] in _VLLM_PATHS:
        status = 400 if status == 422 else status
        kind = _VLLM_KINDS.get(status, "InternalServerError")
        body = {"error": {"message": error.message, "type": kind, **facts, "code": status}}
    headers = {"X-Request-ID": state["request_id"]} | ({"WWW-Authenticate": "Bearer"} if error.status == 401 else {})
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    return JSON(body, status, headers)


class RequestLimits:
    """ASGI middleware. `token`: the token of `Authorization: Bearer`; None requires none."""

    def __init__(self, app: ASGIApp, service: Service, token: str | None = None) -> None:
        self.app, self.service, self.config = app, service, service.config
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, started = Headers(scope=scope), time.monotonic()
        client_id = headers.get("x-request-id", "")
        request_id = client_id if re.fullmatch(r"[\x21-\x7e]{1,128}", client_id) else secrets.token_hex(8)
        deadline = started + self.config.deadline_seconds
        state: dict[str, Any] = {"request_id": request_id, "deadline": deadline, "num_bytes": 0}
        scope["state"] = state
        if scope["method"] == "HEAD":  # the connection leaves out the body of the response
            scope = {**scope, "method": "GET"}
        status = 499  # the client has gone, unless there is a response

        async def respond(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            self._check_headers(scope, headers)
            if scope["method"] == "POST":
                body = await self._read(receive, state)
                # `curl -d` calls everything a form; every body here is JSON.
                MutableHeaders(scope=scope)["content-type"] = "application/json"
                await self._work(scope, body, receive, respond)
            else:
                await self.app(scope, receive, respond)
        except APIError as error:
            await error_response(error, scope, self.service)(scope, receive, respond)
        except Exception:
            status = 500
            raise
        finally:
            if self.config.access_log:
                milliseconds = 1000 * (time.monotonic() - started)
                code = f" error={state['error']}" if "error" in state else ""
                words = "%s %s %s %.1f ms request_id=%s bytes=%d%s"
                path = quote(scope["path"])  # without line breaks and control characters
                logger.info(words, scope["method"], path, status, milliseconds, request_id, state["num_bytes"], code)

    def _check_headers(self, scope: Scope, headers: Headers) -> None:
        if self._token is not None and scope["path"] not in _OPEN_PATHS:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            # In constant time, so that the time of a wrong token says nothing about the right one.
            is_right = hmac.compare_digest(token.strip().encode("latin-1"), self._token)
            if scheme.lower() != "bearer" or not is_right:
                message = "this server asks for its token: send Authorization: Bearer TOKEN"
                raise APIError(401, "unauthorized", message)
        if (seconds := headers.get("x-deadline-seconds")) is not None:
            if not re.fullmatch(r"\d+(\.\d*)?", seconds, re.ASCII):
                message = f"X-Deadline-Seconds: got {seconds[:40]!r}, need a number of seconds, as 2.5"
                raise APIError(400, "invalid_header", message, param="X-Deadline-Seconds")
            state = scope["state"]
            state["deadline"] = min(state["deadline"], time.monotonic() + float(seconds))
        self._check_size(int(headers.get("content-length") or 0))

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > (most := self.config.max_body_bytes):
            raise APIError(413, "body_too_large", f"the body is too large: at most {most} bytes")

    async def _read(self, receive: Receive, state: dict[str, Any]) -> bytes:
        """The body. Raises `APIError`: 504 too slow, 413 too large."""
        body, is_whole = bytearray(), False
        try:
            async with asyncio.timeout(state["deadline"] - time.monotonic()):
                while not is_whole:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise APIError(499, "client_disconnected", "the client went away")
                    body += message.get("body", b"")
                    is_whole = not message.get("more_body", False)
                    state["num_bytes"] = len(body)
                    self._check_size(len(body))
        except TimeoutError as error:
            late, seconds = "the body did not arrive by the deadline", self.service.batcher.seconds_of_queue
            raise APIError(504, "deadline_exceeded", late, retry_after=seconds) from error
        return bytes(body)

    async def _work(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Let the application respond, and cancel it if the client disconnects before the response begins."""
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        has_begun = False

        async def replay() -> Message:
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def note_and_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        work = asyncio.ensure_future(self.app(scope, replay, note_and_send))
        client = asyncio.ensure_future(receive())  # ends when the client leaves, or has its response
        try:
            await asyncio.wait({work, client}, return_when=asyncio.FIRST_COMPLETED)
            if work.done() or has_begun:
                await work
        finally:
            work.cancel()
            client.cancel()
