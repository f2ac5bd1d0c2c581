"""Bodies: reading a request's JSON once, checked against what the dialect documents, and writing answers.

    body = await read(request, RewardsBody)      # a pydantic model; raises Refusal 400 or 422
    return json_response({"rewards": [1.25]})

What a model of a body declares is what the OpenAPI description shows (`describe`): nothing is validated twice, and
nothing is documented that is not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, NotRequired, TypeVar

import orjson
from fastapi import FastAPI
from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from typing_extensions import TypedDict

from treeward.config.server import ServerConfig
from treeward.serving.models import MESSAGE_CHARACTERS
from treeward.serving.refusals import Refusal

__all__ = [
    "Body",
    "Chat",
    "MessageBody",
    "Refused",
    "apart",
    "checked",
    "describe",
    "describe_app",
    "json_response",
    "limits_of",
    "parse",
    "read",
    "read_as",
    "read_bytes",
]

_LARGE_BODY = 2**18
"""Bytes beyond which a body is not read in the event loop: others would wait."""
_OF_CONVERSATIONS = frozenset(
    {
        *("conversations", "completions", "reference_answers"),
        *("input", "input_ids", "inputs", "prompts", "query", "text"),
    }
)
_OF_TOKEN_IDS = frozenset({"input", "input_ids"})
"""A list of numbers there is one text."""
_OF_MESSAGES = frozenset({"completion", "context", "messages", "prompt"})


def _stop_at_the_first_mistake(schema: Any) -> None:
    """In every list of a schema: a body of a few megabytes may hold a million mistakes, and each would be kept."""
    if isinstance(schema, list | tuple):
        for part in schema:
            _stop_at_the_first_mistake(part)
    elif isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple", "set", "frozenset"):
            schema["fail_fast"] = True
        for key, part in schema.items():
            if key != "metadata":
                _stop_at_the_first_mistake(part)


class Body(BaseModel):
    """What a client sends, in the types that are documented; keys that a dialect does not know are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True, protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_at_the_first_mistake(schema)
        return schema


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


def _let_others_run(chat: list[Any]) -> list[Any]:
    """Nothing: but as it is Python, other threads get their turn here, which pydantic alone gives them at the end."""
    return chat


Chat = Annotated[list[MessageBody], AfterValidator(_let_others_run)]


class RefusedError(TypedDict):
    """Why not: `code` is one word for programs, `param` the field that is wrong, `type` as OpenAI's clients read it."""

    message: str
    type: str
    code: str
    param: str | None
    request_id: str


class Refused(TypedDict):
    """A request that is not answered with scores."""

    error: RefusedError


_Body = TypeVar("_Body", bound=BaseModel)
_Made = TypeVar("_Made")


async def read_bytes(request: Request) -> bytes:
    """The body. Raises `Refusal` 408, 413 or 429 for one that the gate does not let in."""
    try:
        return b"".join([chunk async for chunk in request.stream()])
    except ClientDisconnect as error:
        raise Refusal(499, "client_disconnected", "the client went away") from error


async def read(request: Request, body: type[_Body]) -> _Body:
    """The body as one of the dialect's. Raises `Refusal`: 400 for what is no JSON, 422 for what it should not hold."""
    limits = limits_of(request)
    return await read_as(request, lambda content: checked(parse(content), body, limits))


async def read_as(request: Request, make: Callable[[bytes], _Made]) -> _Made:
    """What `make` makes of the body, as `apart`."""
    content = await read_bytes(request)
    return await apart(request, len(content), lambda: make(content))


async def apart(request: Request, num_bytes: int, work: Callable[[], _Made]) -> _Made:
    """What `work` gives; in a thread if it is about so many bytes that others would wait for the event loop."""
    if num_bytes <= _LARGE_BODY:
        return work()
    pool = request.app.state.service.bodies
    made, refusal = await asyncio.get_running_loop().run_in_executor(pool, _made_or_refused, work)
    if refusal is not None:
        raise refusal
    assert made is not None
    return made[0]


def _made_or_refused(work: Callable[[], _Made]) -> tuple[tuple[_Made] | None, Refusal | None]:
    """A refusal without its frames, which hold a large body: it is let go of here, not in the event loop."""
    try:
        with _uncollected():  # until what is not kept of a body is gone
            return (work(),), None
    except Refusal as error:
        refusal = error
    refusal.__cause__ = refusal.__context__ = None
    return None, refusal.with_traceback(None)


def limits_of(request: Request) -> ServerConfig:
    """How much the server accepts."""
    config: ServerConfig = request.app.state.service.config
    return config


def parse(content: bytes) -> Any:
    """JSON, strictly: no NaN, no lone surrogates. Raises `Refusal` 400."""
    try:
        with _uncollected():
            return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise Refusal(400, "invalid_json", f"the body is no JSON: {error}") from error


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without looking for garbage: of millions of new lists none is, and to look takes seven times as long as to read
    them, while all others wait.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def checked(value: Any, body: type[_Body], limits: ServerConfig) -> _Body:
    """The parsed body, if it is what the dialect documents. Raises `Refusal` 422 naming the first field that is not,
    and 413 for too many conversations or messages, before anything is done with each of them.
    """
    if isinstance(value, dict):
        for name in value.keys() & body.model_fields.keys():
            _check_count(name, value[name], limits)
    try:
        return body.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
        got = orjson.dumps(first["input"], default=str, option=orjson.OPT_NON_STR_KEYS).decode()
        shown = got if len(got) <= 200 else f"{got[:200]}... ({len(got)} characters)"
        where = field or "the body"
        raise Refusal(422, "invalid_request", f"{where}: {first['msg']}; got {shown}", param=field or None) from error


def _check_count(name: str, given: Any, limits: ServerConfig) -> None:
    if not isinstance(given, list):
        return
    is_one = name in _OF_TOKEN_IDS and len(given) > 0 and isinstance(given[0], int)
    if name in _OF_CONVERSATIONS and not is_one and len(given) > limits.max_conversations:
        message = f"{name}: {len(given)} in one request; at most {limits.max_conversations}"
        raise Refusal(413, "too_many_conversations", message, param=name)
    most = limits.max_conversation_characters // MESSAGE_CHARACTERS
    if name in _OF_MESSAGES and len(given) > max(most, 1):
        message = f"{name}: {len(given)} messages in one conversation; at most {max(most, 1)}"
        raise Refusal(413, "conversation_too_long", message, param=name)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """The answer. Numbers are finite: whatever is not a number says so in words."""
    return Response(orjson.dumps(value), status, headers=headers, media_type="application/json")


def describe(body: Any, *, answer: Any = None, refusal: Any = Refused, **more: Any) -> dict[str, Any]:
    """For a route's `openapi_extra`: the body that it reads, its answer, and the refusals that every route may give.

    `body`, `answer` and `refusal` are types that pydantic knows, as a model or a union of models; `describe_app` puts
    their schemas among the components. `more`: further keys of the operation; its `responses` add to those given here.
    """
    refused = _json_content(refusal, "serialization")
    responses: dict[str, Any] = {
        str(status): {"description": what, "content": refused} for status, what in _REFUSALS.items()
    }
    for status in (429, 503, 504):
        responses[str(status)]["headers"] = {"Retry-After": {"description": "Seconds.", "schema": {"type": "string"}}}
    responses["200"] = {"description": "The answer."}
    if answer is not None:
        responses["200"]["content"] = _json_content(answer, "serialization")
    for status, own in more.pop("responses", {}).items():
        responses[status] = responses.get(status, {}) | own
    request = {"required": True, "content": _json_content(body, "validation")}
    return {"requestBody": request, "responses": responses, **more}


def describe_app(app: FastAPI) -> None:
    """Let the app's OpenAPI description hold the schemas that `describe` refers to among its components."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        _hoist(document, document.setdefault("components", {}).setdefault("schemas", {}))
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI documents it


_REFERENCE = "#/components/schemas/{model}"
_REFUSALS = {
    400: "The body is no JSON, or a header is wrong.",
    401: "The server asks for a bearer token.",
    404: "No model has this name.",
    408: "The body did not arrive in time.",
    413: "The body is too large, or holds too many conversations.",
    415: "The body is compressed.",
    421: "The header Host has a name that is not this server's.",
    422: "The body is not as described, or a conversation cannot be scored.",
    429: "Too much is waiting already; come back after `Retry-After`.",
    500: "The server failed to score a conversation.",
    503: "The server is shutting down, or has failed.",
    504: "Not answered within the request's time.",
}


def _json_content(kind: Any, mode: Literal["validation", "serialization"]) -> dict[str, Any]:
    schema = TypeAdapter(kind).json_schema(ref_template=_REFERENCE, mode=mode)
    if isinstance(kind, type) and "properties" in schema:
        own = {kind.__name__: {key: value for key, value in schema.items() if key != "$defs"}}
        schema = {"$ref": _REFERENCE.format(model=kind.__name__), "$defs": schema.get("$defs", {}) | own}
    return {"application/json": {"schema": schema}}


def _hoist(node: Any, schemas: dict[str, Any]) -> None:
    if isinstance(node, dict):
        for name, schema in node.pop("$defs", {}).items():
            _hoist(schema, schemas)
            assert schemas.setdefault(name, schema) == schema, f"two schemas are called {name}"
        for value in node.values():
            _hoist(value, schemas)
    elif isinstance(node, list):
        for value in node:
            _hoist(value, schemas)
