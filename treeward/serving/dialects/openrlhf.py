"""OpenRLHF's dialect, `POST /get_reward`: what `--remote_rm_url` calls.

{"query": ["prompt and response as text"], "prompts": ["prompt"], "labels": ["4"]}
-> {"rewards": [1.5], "scores": [1.5]}

A query is what a policy generated, so padding around it is taken away, and white space that the model's template writes
after the end of turn is added, as OpenRLHF's own server makes every query end with EOS. What follows the prompt is the
completion, by which shaping measures length. Where shaping makes other rewards of the scores, `extra_logs` has these.
`labels` are ignored. The model is the first, or that of the URL: /get_reward?model=careful.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired

from fastapi import APIRouter
from typing_extensions import TypedDict

from treeward.scoring.score import Reward
from treeward.serving.api_error import APIError
from treeward.serving.dialects.bodies import Body, JSONRoute, ModelName, Server, Strings, as_list
from treeward.serving.limits import JSON
from treeward.serving.models import ServedModel
from treeward.serving.rendered_text import RenderedText

router = APIRouter(tags=["openrlhf"], route_class=JSONRoute)


class RewardBody(Body):
    """Texts of prompts with their responses."""

    query: Strings
    """Each prompt with its response, as the policy's tokenizer decodes them with special tokens."""
    prompts: Strings | None = None
    """The prompts, with which the queries begin."""


class RewardResponse(TypedDict):
    """A reward for each query, in order. `extra_logs`: where shaping makes the rewards."""

    rewards: list[float | None]
    scores: list[float | None]
    extra_logs: NotRequired[dict[str, list[float | None]]]


@router.post("/get_reward", summary="OpenRLHF: rewards of queries", response_model=RewardResponse)
async def get_reward(body: RewardBody, server: Server, model: ModelName = None) -> JSON:
    served = server.model(model)
    return await server.respond(served, parse(body, served), lambda rewards: to_json(served, rewards))


def parse(body: RewardBody, model: ServedModel) -> list[RenderedText]:
    """The queries with their whole endings, and their completions where the prompts tell. Raises `APIError` 422."""
    queries = [model.ending.completed(query) for query in as_list(body.query)]
    if body.prompts is None:
        return [RenderedText(query) for query in queries]
    prompts = as_list(body.prompts)
    if len(prompts) != len(queries):
        message = f"prompts: {len(prompts)} of them for {len(queries)} queries"
        raise APIError(422, "invalid_request", message, param="prompts")
    pairs = zip(queries, prompts, strict=True)
    return [RenderedText(query, model.ending.completion(query, prompt)) for query, prompt in pairs]


def to_json(model: ServedModel, rewards: Sequence[Reward]) -> RewardResponse:
    """The response: every number twice, as OpenRLHF's clients read either."""
    values = [reward.value for reward in rewards]
    content = RewardResponse(rewards=values, scores=values)
    if model.shaper is not None:
        content["extra_logs"] = {"raw_score": [reward.score.score for reward in rewards]}
    return content
