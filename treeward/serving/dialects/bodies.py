"""The common parts of the dialects: types of bodies, and the server for a route.

class MyBody(Body):
    texts: Strings

router = APIRouter(route_class=JSONRoute)

@router.post("/mine")
async def mine(body: MyBody, server: Server) -> JSON:
    return await server.respond(server.model(None), parse(body), to_json)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any, NotRequired

import orjson
from fastapi import Depends
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from treeward.scoring.score import Conversation, Reward
from treeward.serving.api_error import APIError
from treeward.serving.limits import JSON
from treeward.serving.models import ServedModel
from treeward.serving.rendered_text import RenderedText
from treeward.serving.service import Service


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
        if not hasattr(self, "_json"):
            self._json = orjson.loads(await self.body())
        return self._json


class _Server:
    """The application's service, with a request's deadline."""

    def __init__(self, request: Request) -> None:
        self.service: Service = request.app.state.service
        self.receive = request.receive
        self.deadline: float = request.state.deadline
        self.request_id: str = request.state.request_id
        self.model = self.service.model

    async def rewards(
        self, model: ServedModel, inputs: Sequence[Conversation | RenderedText], **options: Any
    ) -> list[Reward]:
        """As `Service.rewards`; given up when the client leaves."""
        work = asyncio.ensure_future(self.service.rewards(model, inputs, deadline=self.deadline, **options))
        client = asyncio.ensure_future(self.receive())  # after the body only its end is left to receive
        client.add_done_callback(lambda _: work.cancel())
        try:
            return await work
        except asyncio.CancelledError:
            if not client.done():
                raise
            raise APIError(499, "client_disconnected", "the client went away") from None
        finally:
            client.cancel()

    async def respond(
        self,
        model: ServedModel,
        inputs: Sequence[Conversation | RenderedText],
        to_json: Callable[[list[Reward]], Any],
    ) -> JSON:
        """The response with the rewards of all inputs, in the form of `to_json`."""
        return JSON(to_json(await self.rewards(model, inputs)))


Server = Annotated[_Server, Depends()]
"""For a route's signature."""


class Body(BaseModel):
    """A client's body, in the documented types; unknown keys are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True, protected_namespaces=())


class OwnBody(Body):
    """A body of our own dialect. Unknown keys are errors: an ignored one could be a part of the conversation."""

    model_config = ConfigDict(extra="forbid")


class MessageBody(TypedDict):
    """A message; its other keys (tool calls, names) reach the chat template."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    role: str
    content: NotRequired[str | list[dict[str, Any]] | None]


def described(words: str) -> WrapValidator:
    """One error message instead of one for each form of the value."""

    def check(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            raise PydanticCustomError("texts", "Input should be {words}", {"words": words}) from error

    return WrapValidator(check)


Chat = list[MessageBody]
"""A conversation, or a part of one."""

Strings = Annotated[str | list[str], described("a text or a list of texts")]
"""A text, or a list of texts."""

_Ids = Annotated[list[int], Field(min_length=1)]

Texts = Annotated[
    Annotated[str, Field(min_length=1)] | _Ids | Annotated[list[str | _Ids], Field(min_length=1)],
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
