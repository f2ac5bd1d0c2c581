"""What the bodies of the dialects are made of, and what their routes share.

class MyBody(Body):
    texts: Strings

router = APIRouter(route_class=JSONRoute)
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any, NotRequired

import numpy as np
import orjson
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from treeward.scoring.score import Conversation, Reward
from treeward.serving.limits import JSON
from treeward.serving.models import ServedModel
from treeward.serving.rendered_text import RenderedText
from treeward.serving.service import Service

__all__ = ["Body", "Chat", "JSONRoute", "ModelName", "OwnBody", "Strings", "Texts", "TokenIds", "answer", "as_list"]
__all__ += ["base64_floats", "described", "sigmoid"]


class JSONRoute(APIRoute):
    """A route whose bodies are read by orjson: strictly, without NaN or lone surrogates."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, which is given a request of ours."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_Request(request.scope, request.receive))

        return handle_json


class _Request(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = orjson.loads(await self.body())
        return self._json


async def answer(
    service: Service,
    model: ServedModel,
    asked: Sequence[Conversation | RenderedText],
    deadline: float,
    to_json: Callable[[list[Reward]], Any],
) -> JSON:
    """The response to a request for the rewards of all that is asked, in the form that `to_json` gives them.

    The header `X-Treeward-Warning` says which rendered texts end otherwise than the model's conversations.
    """
    rewards = await service.rewards(model, asked, deadline=deadline)
    warning = model.ending.warning([one.text for one in asked if isinstance(one, RenderedText)])
    return JSON(to_json(rewards), headers={"X-Treeward-Warning": warning} if warning else None)


class Body(BaseModel):
    """What a client sends, in the types that are documented; keys that a dialect does not know are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True, protected_namespaces=())


class OwnBody(Body):
    """What a client of our own dialect sends: an ignored key would be a conversation scored without a part of it."""

    model_config = ConfigDict(extra="forbid")


class ContentPart(TypedDict):
    """A part of a message's content."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    type: str
    text: NotRequired[str]


class MessageBody(TypedDict):
    """A message; what else it has (tool calls, names) reaches the chat template."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    role: str
    content: NotRequired[str | list[ContentPart] | None]


Chat = Annotated[list[MessageBody], Field(fail_fast=True)]
"""A conversation, or a part of one."""


def described(words: str) -> WrapValidator:
    """One message in place of one for each form that the value may have."""

    def check(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            raise PydanticCustomError("texts", "Input should be {words}", {"words": words}) from error

    return WrapValidator(check)


Strings = Annotated[str | Annotated[list[str], Field(fail_fast=True)], described("a text or a list of texts")]
"""A text, or a list of texts."""

_Ids = Annotated[list[int], Field(min_length=1, fail_fast=True)]

TokenIds = Annotated[
    _Ids | Annotated[list[_Ids], Field(fail_fast=True)], described("a list of token ids, or a list of such lists")
]
"""The token ids of a text, or of several."""

Texts = Annotated[
    Annotated[str, Field(min_length=1)] | _Ids | Annotated[list[str | _Ids], Field(min_length=1, fail_fast=True)],
    described("a text to score, a list of token ids, or a list of either"),
]
"""A text, the token ids of one, or a list of either."""

ModelName = str | None
"""Which of the served models; the first where none is named."""


def as_list(texts: str | Sequence[Any]) -> list[Any]:
    """Each text, or token ids, of what a client sent."""
    is_one = isinstance(texts, str) or (len(texts) > 0 and isinstance(texts[0], int))
    return [texts] if is_one else list(texts)


def sigmoid(value: float) -> float:
    """Without overflow."""
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


def base64_floats(values: Sequence[float], byte_order: str = "<") -> str:
    """Base64 of float32 values."""
    return base64.b64encode(np.asarray(values, dtype=f"{byte_order}f4").tobytes()).decode()
