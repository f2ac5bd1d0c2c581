"""vLLM's routes for pairs of texts, `POST /score` and `POST /rerank`: a prompt is the user's message, a document the
assistant's completion of it, rendered by the model's own template.

{"text_1": "2 + 2?", "text_2": ["4", "5"]}                          -> /score, also as `queries` and `documents`
-> {"id": "score-3f...", "object": "list", "data": [{"index": 0, "object": "score", "score": 1.5}, ...], ...}
{"query": "2 + 2?", "documents": ["5", "4"], "top_n": 1}            -> /rerank
-> {"id": "score-3f...", "results": [{"index": 1, "document": {"text": "4"}, "relevance_score": 1.5}], ...}

Also as /v1/score, /v1/rerank and /v2/rerank. One prompt goes with every document; lists of one length go pairwise.
vLLM itself joins the two texts without a template: its own `/score` is meaningless for an export.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from treeward.data.formats import as_conversations
from treeward.scoring.score import Conversation, Reward
from treeward.serving.api_error import APIError
from treeward.serving.dialects.bodies import JSONRoute, List, Server, Strings, as_list
from treeward.serving.dialects.vllm_sglang import ListResponse, VllmOptions, list_response, values_of
from treeward.serving.limits import JSON

router = APIRouter(tags=["vllm"], route_class=JSONRoute)


class ScoreBody(VllmOptions):
    """Prompts (`text_1` or `queries`) and completions (`text_2` or `documents`)."""

    text_1: Strings | None = None
    text_2: Strings | None = None
    queries: Strings | None = None
    documents: Strings | None = None


class RerankBody(VllmOptions):
    """A prompt and its completions."""

    query: str
    documents: Annotated[List[str], Field(min_length=1)]
    top_n: int = Field(default=0, ge=0)
    """How many of the best to return. 0: all."""


@router.post("/v1/score", include_in_schema=False)
@router.post("/score", summary="vLLM: scores of pairs of texts", response_model=ListResponse)
async def score(body: ScoreBody, server: Server) -> JSON:
    model = server.model(body.model)

    def to_json(rewards: Sequence[Reward]) -> ListResponse:
        rows = [{"object": "score", "score": value} for value in values_of(body, model, rewards)]
        return list_response(server, "score", model, rewards, rows, body.request_id)

    return await server.respond(model, parse(body), to_json)


@router.post("/v1/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/rerank", summary="vLLM: texts by their scores, the best first", response_model=dict[str, Any])
async def rerank(body: RerankBody, server: Server) -> JSON:
    model = server.model(body.model)

    def to_json(rewards: Sequence[Reward]) -> dict[str, Any]:
        texts = zip(body.documents, values_of(body, model, rewards), strict=True)
        rows = [{"document": {"text": text}, "relevance_score": value} for text, value in texts]
        response = list_response(server, "score", model, rewards, rows, body.request_id)
        ranked = sorted(response["data"], key=lambda row: -row["relevance_score"])[: body.top_n or None]
        return {"id": response["id"], "model": model.name, "usage": response["usage"], "results": ranked}

    return await server.respond(model, as_conversations(body.query, body.documents), to_json)


def parse(body: ScoreBody) -> list[Conversation]:
    """The pairs of a body. Raises `APIError` 422 for lists that do not fit together."""
    pairs = (body.text_1, body.text_2), (body.queries, body.documents)
    texts = [(as_list(a), as_list(b)) for a, b in pairs if a is not None and b is not None]
    if len(texts) != 1:
        raise APIError(422, "invalid_request", "give either text_1 and text_2, or queries and documents")
    [(prompts, completions)] = texts
    if not completions or len(prompts) not in (1, len(completions)):
        message = f"{len(prompts)} prompts for {len(completions)} completions: give one for all, or one for each"
        raise APIError(422, "invalid_request", message)
    prompts = prompts * len(completions) if len(prompts) == 1 else prompts
    return [as_conversations(prompt, [text])[0] for prompt, text in zip(prompts, completions, strict=True)]
