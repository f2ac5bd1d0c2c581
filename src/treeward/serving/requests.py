"""What every request passes: `RequestLimits`, the middleware, then a `JSONRoute`, which validates a
typed body.

    class MyBody(Body):
        texts: Strings

    router = APIRouter(route_class=JSONRoute)

    @router.post("/mine", openapi_extra=example({"texts": ["a"]}))
    async def mine(body: MyBody, server: Server) -> JSON:
        texts = await server.parsed(parse, body)
        return JSON(to_json(await server.rewards(server.model(None), texts)))

The middleware gives a request its id and its deadline, checks the bearer token, and reads the body
(`Arrivals`). A body's lists are `Items`, so that only the first of many mistakes is made an error.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any, NotRequired, TypeVar

import orjson
from fastapi import Depends
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator, model_validator
from pydantic_core import PydanticCustomError
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import TypedDict

from treeward.data.conversation import AnyConversation, Conversation
from treeward.errors import shown
from treeward.scoring.score import Reward
from treeward.serving.api_error import APIError, ErrorBody, openai_error, shutting_down
from treeward.serving.arrivals import Arrivals, too_large
from treeward.serving.models import ServedModel
from treeward.serving.rendered_text import RenderedText
from treeward.serving.service import Service

logger = logging.getLogger(__name__)

_OPEN_PATHS = {"/", "/health", "/ready", "/ping"}
"""Paths that need no token, besides the playground's files."""
_LONGEST_REASON = 500
"""Characters of an error in the log."""
_LONG_BODY = 2**16
"""Bytes of a body from which on its Python work is done in a thread."""


class JSON(JSONResponse):
    """A response written by orjson; floats keep all their digits."""

    def render(self, content: Any) -> bytes:
        """The JSON of the content."""
        return orjson.dumps(content)


def error_response(error: APIError, scope: Scope, service: Service) -> JSON:
    """The response to a failed request, in the form of its dialect. Counts and logs the error."""
    service.metrics.errors.labels(error.code).inc()
    request_id = scope["state"]["request_id"]
    if service.config.access_log:
        # Clients such as OpenRLHF's show the status alone: the reason is nowhere but here. It may
        # hold a client's words. As its repr, because they could end the line and write one of their
        # own; and cut, because a template's own error may repeat all of them.
        reason = error.message[:_LONGEST_REASON]
        logger.info("Request %s: %s: %r", request_id, error.code, reason)
    error_body: ErrorBody = scope["app"].state.error_bodies.get(scope["path"], openai_error)
    body = error_body(error, {"code": error.code, "param": error.param, "request_id": request_id})
    headers = {"X-Request-ID": request_id}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    return JSON(body, error.status, headers)


class RequestLimits:
    """ASGI middleware. `token`: the token of `Authorization: Bearer`; None requires none."""

    def __init__(self, app: ASGIApp, service: Service, token: str | None = None) -> None:
        self.app = app
        self.service = service
        self.config = service.config
        self._token = None if token is None else token.encode()
        self._arrivals = Arrivals(service.config)
        # Another page in a browser on this machine could ask a server on loopback. At other
        # addresses it can be asked by anyone, and with a token a page lacks the token.
        self._is_for_this_machine = token is None and _is_loopback(service.config.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        # A client's id goes to its log and ours: printable, and no longer than ids are.
        request_id = headers.get("x-request-id", "")
        if re.fullmatch(r"[\x21-\x7e]{1,128}", request_id) is None:
            request_id = secrets.token_hex(8)
        deadline = time.monotonic() + self.config.deadline_seconds
        scope["state"] = {"request_id": request_id, "deadline": deadline}

        async def respond(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            self._check_headers(scope, headers)
            body = await self._arrivals.read(receive, deadline)
        except APIError as error:
            await error_response(error, scope, self.service)(scope, receive, respond)
            return
        scope["state"]["is_long"] = len(body) > _LONG_BODY
        # Every body here is JSON, and `curl -d` calls everything a form.
        if scope["method"] == "POST":
            MutableHeaders(scope=scope)["content-type"] = "application/json"
        await self.app(scope, _replayed(body, receive), respond)

    def _check_headers(self, scope: Scope, headers: Headers) -> None:
        """Refuse a request by its headers alone. Raises `APIError`."""
        path: str = scope["path"]
        is_open = path in _OPEN_PATHS or path.startswith("/playground/")
        if self._is_for_this_machine:
            self._check_origin(headers, is_open)
        if self._token is not None and not is_open:
            # Starlette decodes headers as latin-1, which keeps every byte.
            scheme, _, token = headers.get("authorization", "").partition(" ")
            # In constant time, so that the time of a wrong token says nothing about the right one.
            is_right = hmac.compare_digest(token.strip().encode("latin-1"), self._token)
            if scheme.lower() != "bearer" or not is_right:
                message = "this server needs its token: send Authorization: Bearer TOKEN"
                raise APIError(401, "unauthorized", message)
        # Refused before it is sent. What is sent without a length is counted as it comes. httptools
        # has refused a length that is no number.
        most = self.config.max_body_bytes
        if int(headers.get("content-length") or 0) > most:
            raise too_large(most)

    def _check_origin(self, headers: Headers, is_open: bool) -> None:
        """Refuse what a page of another site makes a browser on this machine ask. It cannot choose
        these headers.
        """
        # A page whose name resolves to this machine (DNS rebinding) still sends its own name.
        host = headers.get("host", "")
        if host.startswith("["):  # `[::1]:8000`
            name = host[1:].partition("]")[0]
        else:
            name = host.partition(":")[0].lower()
        if not (_is_this_machine(name) or name in self.config.allowed_hosts):
            fix = "call localhost, or add the name to allowed_hosts of the server"
            message = f"this server is not {shown(name)}: {fix}"
            raise APIError(421, "misdirected_request", message)
        # A link to the page itself is fine.
        if headers.get("sec-fetch-site") == "cross-site" and not is_open:
            message = "a page of another site sent this request: call the server from a program"
            raise APIError(403, "cross_site", message)


def _is_this_machine(name: str) -> bool:
    """Whether no web page can have this name: localhost and addresses. Without a name there is no
    browser.
    """
    # Browsers resolve localhost and what ends with it themselves.
    if name in ("", "localhost") or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Receives a body that was read, and then what `receive` does."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        if messages:
            return messages.pop()
        return await receive()

    return receive_again


class JSONRoute(APIRoute):
    """A route whose bodies are read by orjson: strictly, without NaN or lone surrogates."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, with our request class."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_Request(request.scope, request.receive))

        return handle_json


class _Request(Request):
    async def json(self) -> Any:
        # Starlette's name of the parsed body, which routes may ask for again.
        if not hasattr(self, "_json"):
            self._json = orjson.loads(await self.body())
        return self._json


_Result = TypeVar("_Result")


class _Server:
    """The application's service, with a request's deadline."""

    def __init__(self, request: Request) -> None:
        self.service: Service = request.app.state.service
        self.receive = request.receive
        self.deadline: float = request.state.deadline
        self.request_id: str = request.state.request_id
        self.model = self.service.model
        self._is_long: bool = request.state.is_long

    async def parsed(self, parse: Callable[..., _Result], *arguments: Any) -> _Result:
        """`parse(*arguments)`; of a long body in a thread, so that other requests go on
        meanwhile.
        """
        # Rendering and copying a long body takes so long that others would wait.
        if self._is_long:
            return await asyncio.to_thread(parse, *arguments)
        return parse(*arguments)

    async def rewards(
        self,
        model: ServedModel,
        inputs: Sequence[AnyConversation | RenderedText],
        **options: Any,
    ) -> list[Reward]:
        """As `Service.rewards`; given up when the client leaves."""
        rewards = self.service.rewards(model, inputs, deadline=self.deadline, **options)
        return await self.while_connected(rewards)

    async def while_connected(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """The result of a coroutine, which is cancelled when the client leaves."""
        work = asyncio.ensure_future(coroutine)
        # After the body only the client's end is left to receive.
        client = asyncio.ensure_future(self.receive())
        client.add_done_callback(lambda _: work.cancel())
        try:
            return await work
        except asyncio.CancelledError:
            if not client.done() or client.cancelled():
                # From outside: the server ends, and has waited long enough. The client may ask
                # again, which a plain 500 would not tell it.
                raise shutting_down() from None
            # Nobody receives it, but the counters have it.
            raise APIError(499, "client_disconnected", "the client went away") from None
        finally:
            # Its callback finds `work` done, and cancels nothing.
            client.cancel()


Server = Annotated[_Server, Depends()]
"""For a route's signature."""


class Body(BaseModel):
    """A client's body, in the documented types; unknown keys are ignored."""

    model_config = ConfigDict(
        strict=True,
        extra="ignore",
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class OwnBody(Body):
    """A part of our own dialect. Unknown keys are errors: an ignored one could be a part of the
    conversation.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _first_unknown_key(cls, values: Any) -> Any:
        """Leave one unknown key, because pydantic makes an error of each."""
        if not isinstance(values, dict) or len(values) <= len(cls.model_fields):
            return values
        kept = {}
        unknown: dict[Any, Any] = {}
        for key, value in values.items():
            if key in cls.model_fields:
                kept[key] = value
            elif not unknown:
                unknown[key] = value
        kept |= unknown
        return kept


_Item = TypeVar("_Item")
Items = Annotated[list[_Item], Field(fail_fast=True)]
"""A list of which only the first wrong item is made an error: a million errors take seconds, and a
gigabyte."""


class MessageBody(TypedDict):
    """A message; its other keys (tool calls, names) reach the chat template."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    role: str
    content: NotRequired[str | Items[str | dict[str, Any]] | None]


def described(words: str) -> WrapValidator:
    """One error message instead of one for each form of the value."""

    def check(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            # pydantic has an error for each form, of which none is the right one.
            raise PydanticCustomError(
                "texts",
                "Input should be {words}",
                {"words": words},
            ) from error

    return WrapValidator(check)


def example(body: dict[str, Any]) -> dict[str, Any]:
    """For `openapi_extra` of a route: a body, which its description shows and its tests begin
    with.
    """
    return {"requestBody": {"content": {"application/json": {"example": body}}}}


Chat = Items[MessageBody]
"""A conversation, or a part of one."""


class ChatBody(OwnBody):
    """A conversation with what its chat template reads beside the messages."""

    messages: Chat
    """Messages, the last of them the assistant's."""
    tools: Items[dict[str, Any]] | None = None
    """What the assistant could call, as JSON schemas."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""

    def conversation(self) -> Conversation:
        """The messages with their template variables."""
        messages: Any = self.messages
        return Conversation(
            messages,
            tools=self.tools,
            chat_template_kwargs=self.chat_template_kwargs,
        )


Strings = Annotated[str | Items[str], described("a text or a list of texts")]
"""A text, or a list of texts."""

_Ids = Annotated[Items[int], Field(min_length=1)]

Texts = Annotated[
    Annotated[str, Field(min_length=1)] | _Ids | Annotated[Items[str | _Ids], Field(min_length=1)],
    described("a text to score, a list of token ids, or a list of either"),
]
"""A text, the token ids of one, or a list of either."""

ModelName = str | None
"""Which of the served models; the first where none is named."""


def is_one(texts: str | Sequence[Any]) -> bool:
    """Whether a client sent one text, or the token ids of one."""
    return isinstance(texts, str) or (len(texts) > 0 and isinstance(texts[0], int))


def as_list(texts: str | Sequence[Any]) -> list[Any]:
    """Each text, or token ids, of what a client sent."""
    return [texts] if is_one(texts) else list(texts)
