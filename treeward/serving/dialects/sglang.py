"""SGLang's dialect: `POST /classify` of its reward models, and `POST /v1/embeddings`, which verl calls.

{"text": ["rendered text"]}
-> [{"embedding": [1.5], "meta_info": {"id": "3f...", "prompt_tokens": 21}}]
{"model": "rm", "input": "rendered text"}
-> {"object": "list", "model": "rm", "data": [{"object": "embedding", "index": 0, "embedding": [1.5]}], "usage": {...}}

An embedding here has one number, the score. SGLang ignores `model`; so does a server of one model here, while a server
of several answers 404 to a name that is none of theirs. `/classify` is in `classify.py`, for vLLM has one too.
"""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from treeward.serving.bodies import Body, describe, json_response, read
from treeward.serving.dialects.texts import (
    WARNING_DOCS,
    Strings,
    Texts,
    TokenIds,
    answer_texts,
    as_list,
    base64_floats,
    model_or_path,
)
from treeward.serving.refusals import Refusal
from treeward.serving.service import Service

__all__ = ["ClassifyAnswers", "SglangBody", "classify", "router"]

_ANY_MODEL = "default"


class SglangBody(Body):
    """Rendered texts (`text`) or their token ids (`input_ids`)."""

    text: Strings | None = None
    """Texts as the model's chat template renders them. A BOS (or CLS and SEP) is neither doubled nor missing."""
    input_ids: TokenIds | None = None
    """Token ids of a text, or a list of them; they are taken as they are."""
    model: str | None = None
    """Which of the served models."""


class EmbeddingsBody(Body):
    """Rendered texts or token ids."""

    input: Texts
    """Texts as the model's chat template renders them, or their token ids."""
    model: str | None = None
    """Which of the served models."""
    encoding_format: Literal["float", "base64"] = "float"
    """Numbers, or base64 of their float32 values."""


class MetaInfo(TypedDict):
    """The id of the request, and the tokens of the text."""

    id: str
    prompt_tokens: int


class Classified(TypedDict):
    """`embedding`: the score."""

    embedding: list[float]
    meta_info: MetaInfo


ClassifyAnswers = list[Classified] | Classified
"""A list for a list, one for one text."""


class Embedding(TypedDict):
    """`embedding`: the score, or base64 of it."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """Tokens of the texts, as plain rows."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(TypedDict):
    """One row for each text, in order."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


def router(service: Service) -> APIRouter:
    """The route of this dialect that it has alone."""
    routes = APIRouter(tags=["sglang"])
    ok = {"200": {"description": "Scores in order.", "headers": WARNING_DOCS}}

    @routes.post(
        "/v1/embeddings",
        summary="SGLang: scores as embeddings of one number",
        openapi_extra=describe(EmbeddingsBody, answer=EmbeddingsAnswer, responses=ok),
    )
    async def embeddings(request: Request) -> Response:
        body = await read(request, EmbeddingsBody)
        model = _model(service, body.model)
        answers, headers = await answer_texts(service, request, model, as_list(body.input))
        values = [answer.value for answer in answers if answer.value is not None]
        as_text = body.encoding_format == "base64"
        rows = [
            {"object": "embedding", "index": i, "embedding": base64_floats([value]) if as_text else [value]}
            for i, value in enumerate(values)
        ]
        tokens = sum(answer.score.num_tokens for answer in answers)
        answer = {
            "object": "list",
            "model": service.engine.model(model).name,
            "data": rows,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        return json_response(answer, headers=headers)

    return routes


async def classify(service: Service, request: Request, body: SglangBody) -> Response:
    """Answer `/classify`: a list for a list of texts, one object for one text."""
    if (body.text is None) == (body.input_ids is None):
        raise Refusal(422, "invalid_request", "give either text or input_ids")
    given = body.text if body.text is not None else body.input_ids or []
    texts = as_list(given)
    answers, headers = await answer_texts(service, request, _model(service, body.model), texts)
    request_id = request.scope["treeward"].id
    rows = [
        {"embedding": [answer.value], "meta_info": {"id": request_id, "prompt_tokens": answer.score.num_tokens}}
        for answer in answers
    ]
    return json_response(rows if texts is given else rows[0], headers=headers)


def _model(service: Service, asked: str | None) -> str | None:
    name = model_or_path(service, asked)
    if asked == _ANY_MODEL or len(service.engine.models) == 1:
        return name if name in service.engine.models else None
    return name
