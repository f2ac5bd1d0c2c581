"""SGLang's dialect: `POST /classify` of its reward models, and `POST /v1/embeddings`, which verl calls.

{"text": ["rendered text"]}
-> [{"embedding": [1.5], "meta_info": {"id": "3f...", "prompt_tokens": 21}}]
{"model": "rm", "input": "rendered text"}
-> {"object": "list", "model": "rm", "data": [{"object": "embedding", "index": 0, "embedding": [1.5]}], "usage": {...}}

An embedding here has one number, the score. SGLang ignores `model`; so does a server of one model here, while a server
of several answers 404 to a name that is none of theirs. vLLM has a route `/classify` too: its bodies have `input` or
`messages`, SGLang's `text` or `input_ids`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal
from uuid import uuid4

from fastapi import APIRouter

from treeward.scoring.score import Reward
from treeward.serving.api_error import APIError
from treeward.serving.dialects import vllm
from treeward.serving.dialects.bodies import (
    Body,
    JSONRoute,
    ModelName,
    Strings,
    Texts,
    TokenIds,
    answer,
    as_list,
    base64_floats,
)
from treeward.serving.limits import JSON
from treeward.serving.models import ServedModel
from treeward.serving.operations import Deadline, TheService
from treeward.serving.rendered_text import RenderedText
from treeward.serving.service import Service

__all__ = ["router"]

router = APIRouter(tags=["sglang"], route_class=JSONRoute)


class ClassifyBody(vllm.VllmBody):
    """`input` or `messages` as vLLM reads them, or `text` or `input_ids` as SGLang does."""

    text: Strings | None = None
    """Texts as the model's chat template renders them. A BOS (or CLS and SEP) is neither doubled nor missing."""
    input_ids: TokenIds | None = None
    """Token ids of a text, or a list of them; they are taken as they are."""


class EmbeddingsBody(Body):
    """Rendered texts or token ids."""

    input: Texts
    """Texts as the model's chat template renders them, or their token ids."""
    model: ModelName = None
    """Which of the served models."""
    encoding_format: Literal["float", "base64"] = "float"
    """Numbers, or base64 of their float32 values."""


@router.post("/classify", summary="vLLM and SGLang: scores as classes", tags=["vllm"], response_model=None)
async def classify(body: ClassifyBody, service: TheService, deadline: Deadline) -> JSON:
    given = [key for key in ("input", "messages", "text", "input_ids") if getattr(body, key) is not None]
    if len(given) != 1:
        message = "the body must have one of input and messages (vLLM), text and input_ids (SGLang)"
        raise APIError(422, "invalid_request", message)
    if given[0] in ("input", "messages"):
        model = service.model(body.model)
        asked = vllm.parse(body, model)
        return await answer(service, model, asked, deadline, lambda found: vllm.classify_json(body, model, found))
    texts: Any = getattr(body, given[0])
    return await answer(
        service, _model(service, body.model), parse(texts), deadline, lambda found: classify_json(texts, found)
    )


@router.post("/v1/embeddings", summary="SGLang: scores as embeddings of one number", response_model=None)
async def embeddings(body: EmbeddingsBody, service: TheService, deadline: Deadline) -> JSON:
    model = _model(service, body.model)
    return await answer(
        service, model, parse(body.input), deadline, lambda rewards: embeddings_json(body, model, rewards)
    )


def _model(service: Service, name: str | None) -> ServedModel:
    """The model of a name; the first for "default", and for any name where there is no other."""
    is_any = name == "default" or len(service.models) == 1
    return service.model(None if is_any else name)


def parse(texts: str | Sequence[Any]) -> list[RenderedText]:
    """The texts, or token ids, of a body."""
    return [RenderedText(text) for text in as_list(texts)]


def classify_json(texts: str | Sequence[Any], rewards: Sequence[Reward]) -> Any:
    """The response of `/classify`: a list for a list of texts, one object for one text."""
    request_id = uuid4().hex
    rows = [
        {"embedding": [reward.value], "meta_info": {"id": request_id, "prompt_tokens": reward.score.num_tokens}}
        for reward in rewards
    ]
    is_one = isinstance(texts, str) or (len(texts) > 0 and isinstance(texts[0], int))
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
