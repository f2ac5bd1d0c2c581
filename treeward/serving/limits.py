"""`RequestLimits`: the middleware of every request.

It gives a request its id and its deadline, and checks the bearer token and the body's size.
"""

from __future__ import annotations

import hmac
import re
import secrets
import time
from typing import Any

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treeward.serving.api_error import APIError
from treeward.serving.playground import routes as playground
from treeward.serving.service import Service

_OPEN_PATHS = {"/health", "/ready", "/ping"} | playground.OPEN_PATHS
"""Paths that need no token."""
_TEI_KINDS = {429: "Overloaded", 500: "Backend", 503: "Unhealthy", 504: "Overloaded"}


class JSON(JSONResponse):
    """A response written by orjson; floats keep all their digits."""

    def render(self, content: Any) -> bytes:
        """The JSON of the content."""
        return orjson.dumps(content)


def error_response(error: APIError, scope: Scope, service: Service) -> JSON:
    """The response to a failed request, in the form of OpenAI or TEI. Counts the error."""
    service.metrics.errors.labels(error.code).inc()
    request_id = scope["state"]["request_id"]
    kind = "invalid_request_error" if error.status < 500 and error.status != 429 else "server_error"
    facts = {"code": error.code, "param": error.param, "request_id": request_id}
    body: dict[str, Any] = {"error": {"message": error.message, "type": kind, **facts}}
    if scope["path"] == "/predict":
        body = {"error": error.message, "error_type": _TEI_KINDS.get(error.status, "Validation"), **facts}
    headers = {"X-Request-ID": request_id} | ({"WWW-Authenticate": "Bearer"} if error.status == 401 else {})
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    return JSON(body, error.status, headers)


class RequestLimits:
    """ASGI middleware. `token`: the token of `Authorization: Bearer`; None requires none."""

    def __init__(self, app: ASGIApp, service: Service, token: str | None = None) -> None:
        self.app, self.service, self.config = app, service, service.config
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        client_id = headers.get("x-request-id", "")
        request_id = client_id if re.fullmatch(r"[\x21-\x7e]{1,128}", client_id) else secrets.token_hex(8)
        scope["state"] = {"request_id": request_id, "deadline": time.monotonic() + self.config.deadline_seconds}

        async def respond(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            self._check_headers(scope, headers)
        except APIError as error:
            await error_response(error, scope, self.service)(scope, receive, respond)
            return
        if scope["method"] == "POST":  # `curl -d` calls everything a form; every body here is JSON
            MutableHeaders(scope=scope)["content-type"] = "application/json"
        await self.app(scope, receive, respond)

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
        most = self.config.max_body_bytes
        if int(headers.get("content-length") or 0) > most:
            raise APIError(413, "body_too_large", f"the body is too large: at most {most} bytes")
