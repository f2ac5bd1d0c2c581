"""SGLang's dialect: `POST /classify` of its reward models, and `POST /v1/embeddings`, which verl calls.

{"text": ["rendered text"]}
-> [{"embedding": [1.5], "meta_info": {"id": "3f...", "prompt_tokens": 21}}]
{"model": "rm", "input": "rendered text"}
-> {"object": "list", "model": "rm", "data": [{"object": "embedding", "index": 0, "embedding": [1.5]}], "usage": {...}}

An embedding here has one number, the score. SGLang ignores `model`; so does a server of one model here, while a server
of several answers 404 to a name that is none of theirs. The route `/classify` is in `classify.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal
from uuid import uuid4

from fastapi import APIRouter
from typing_extensions import TypedDict

from treeward.scoring.score import Reward
from treeward.serving.api_error import APIError
from treeward.serving.dialects.bodies import (
    Body,
    JSONRoute,
    ModelName,
    Strings,
    Texts,
    TokenIds,
    as_list,
    base64_floats,
    warning_headers,
)
from treeward.serving.limits import JSON
from treeward.serving.models import ServedModel
from treeward.serving.operations import Deadline, TheService
from treeward.serving.rendered_text import RenderedText
from treeward.serving.service import Service

__all__ = ["ClassifiedTexts", "SglangBody", "classify_json", "model_of", "parse", "router"]

router = APIRouter(tags=["sglang"], route_class=JSONRoute)


class SglangBody(Body):
    """Rendered texts (`text`) or their token ids (`input_ids`)."""

    text: Strings | None = None
    """Texts as the model's chat template renders them. A BOS (or CLS and SEP) is neither doubled nor missing."""
    input_ids: TokenIds | None = None
    """Token ids of a text, or a list of them; they are taken as they are."""
    model: ModelName = None
    """Which of the served models."""


class EmbeddingsBody(Body):
    """Rendered texts or token ids."""

    input: Texts
    """Texts as the model's chat template renders them, or their token ids."""
    model: ModelName = None
    """Which of the served models."""
    encoding_format: Literal["float", "base64"] = "float"
    """Numbers, or base64 of their float32 values."""


class MetaInfo(TypedDict):
    """An id, and the tokens of the text."""

    id: str
    prompt_tokens: int


class ClassifiedText(TypedDict):
    """`embedding`: the score."""

    embedding: list[float]
    meta_info: MetaInfo


ClassifiedTexts = list[ClassifiedText] | ClassifiedText
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


class EmbeddingsResponse(TypedDict):
    """One row for each text, in order."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


@router.post("/v1/embeddings", summary="SGLang: scores as embeddings of one number", response_model=EmbeddingsResponse)
async def embeddings(body: EmbeddingsBody, service: TheService, deadline: Deadline) -> JSON:
    model = model_of(service, body.model)
    asked = parse(body)
    rewards = await service.rewards(model, asked, deadline=deadline)
    return JSON(embeddings_json(body, model, rewards), headers=warning_headers(service, model, asked))


def model_of(service: Service, name: str | None) -> ServedModel:
    """The model of a name; the first for "default", and for any name where there is no other."""
    try:
        return service.model(name)
    except APIError:
        if name == "default" or len(service.models) == 1:
            return service.model(None)
        raise


def parse(body: SglangBody | EmbeddingsBody) -> list[RenderedText]:
    """The texts of a body. Raises `APIError` 422 for both of text and input_ids."""
    if isinstance(body, EmbeddingsBody):
        return [RenderedText(text) for text in as_list(body.input)]
    if (body.text is None) == (body.input_ids is None):
        raise APIError(422, "invalid_request", "give either text or input_ids")
    return [RenderedText(text) for text in as_list(_given(body))]


def classify_json(body: SglangBody, rewards: Sequence[Reward]) -> Any:
    """The response of `/classify`: a list for a list of texts, one object for one text."""
    request_id = uuid4().hex
    rows = [
        {"embedding": [reward.value], "meta_info": {"id": request_id, "prompt_tokens": reward.score.num_tokens}}
        for reward in rewards
    ]
    given = _given(body)
    is_one = isinstance(given, str) or isinstance(given[0] if given else None, int)
    return rows[0] if is_one else rows


def embeddings_json(body: EmbeddingsBody, model: ServedModel, rewards: Sequence[Reward]) -> dict[str, Any]:
    """The response of `/v1/embeddings`."""
    values = [reward.value for reward in rewards if reward.value is not None]
    as_text = body.encoding_format == "base64"
    rows = [
        {"object": "embedding", "index": i, "embedding": base64_floats([value]) if as_text else [value]}
        for i, value in enumerate(values)
    ]
    tokens = sum(reward.score.num_tokens for reward in rewards)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": model.name, "data": rows, "usage": usage}


def _given(body: SglangBody) -> Any:
    return body.text if body.text is not None else body.input_ids
