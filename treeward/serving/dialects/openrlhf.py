"""OpenRLHF's dialect, `POST /get_reward`: what `--remote_rm_url` calls.

{"query": ["prompt and response as text"], "prompts": ["prompt"], "labels": ["4"]}
-> {"rewards": [1.5], "scores": [1.5]}

A query is what a policy generated, so padding around it is taken away, and white space that the model's template writes
after the end of turn is added, as OpenRLHF's own server makes every query end with EOS. What follows the prompt is the
reply, by which shaping measures length. `labels` are ignored. The model is the first, or that of the URL:
/get_reward?model=careful.
"""

from __future__ import annotations

from typing import Any, NotRequired

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from treeward.config.server import ServerConfig
from treeward.serving.bodies import Body, checked, describe, json_response, parse, read_as
from treeward.serving.dialects.texts import MODEL_PARAMETER, WARNING_DOCS, Ending, Strings, answer_texts, model_of_url
from treeward.serving.models import ServedModel
from treeward.serving.refusals import Refusal
from treeward.serving.service import Service

__all__ = ["router"]


class RewardBody(Body):
    """Texts of prompts with their responses."""

    query: Strings
    """Each prompt with its response, as the policy's tokenizer decodes them with special tokens."""
    prompts: Strings | None = None
    """The prompts, with which the queries begin."""
    labels: Any = None
    """Reference answers, which are not read."""


class RewardAnswer(TypedDict):
    """One number for each query, in order. `extra_logs`: the raw scores, where shaping makes other rewards of them."""

    rewards: list[float]
    scores: list[float]
    extra_logs: NotRequired[dict[str, list[float]]]


def router(service: Service) -> APIRouter:
    """The route of this dialect."""
    routes = APIRouter(tags=["openrlhf"])
    ok = {"200": {"description": "Rewards in order.", "headers": WARNING_DOCS}}

    @routes.post(
        "/get_reward",
        summary="OpenRLHF: rewards of queries",
        openapi_extra=describe(RewardBody, answer=RewardAnswer, responses=ok, parameters=[MODEL_PARAMETER]),
    )
    async def get_reward(request: Request) -> Response:
        model = model_of_url(service, request)
        queries, replies = await read_as(request, lambda content: _asked(content, model, service.config))
        name = model.name
        answers, headers = await answer_texts(service, request, name, queries, replies=replies, reply_field="prompts")
        rewards = [answer.value for answer in answers]
        result: dict[str, Any] = {"rewards": rewards, "scores": rewards}
        if model.shaper is not None:
            result["extra_logs"] = {"raw_score": [answer.score.score for answer in answers]}
        return json_response(result, headers=headers)

    return routes


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _asked(content: bytes, model: ServedModel, limits: ServerConfig) -> tuple[list[str], list[str | None]]:
    """The queries with their whole endings, and their replies where these are known."""
    body = checked(parse(content), RewardBody, limits)
    ending = Ending.of(model)
    queries = [ending.completed(text) for text in _as_list(body.query)]
    return queries, _replies(ending, queries, body.prompts)


def _replies(ending: Ending, queries: list[str], prompts: str | list[str] | None) -> list[str | None]:
    if prompts is None:
        return [None] * len(queries)
    begins = _as_list(prompts)
    if len(begins) != len(queries):
        what = f"prompts: {len(begins)} of them for {len(queries)} queries"
        raise Refusal(422, "invalid_request", what, param="prompts")
    return [ending.reply(query, prompt) for query, prompt in zip(queries, begins, strict=True)]
