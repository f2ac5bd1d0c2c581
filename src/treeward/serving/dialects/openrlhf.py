"""OpenRLHF's dialect, `POST /get_reward`: what `--reward.remote_url` calls.

    {"query": ["prompt and response as text"], "prompts": ["prompt"], "labels": ["4"]}
    -> {"rewards": [1.5], "scores": [1.5]}

A policy generated the query, so padding around it is removed, and the white space of the model's
template after the end of turn is added, as OpenRLHF's server makes every query end with EOS. The
completion follows the prompt; shaping measures its length. With shaping `extra_logs` has the
scores. `labels` are ignored. The model is the first, or the URL's: /get_reward?model=careful.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter

from treeward.scoring.score import Reward
from treeward.serving.api_error import APIError
from treeward.serving.models import ServedModel
from treeward.serving.rendered_text import RenderedText
from treeward.serving.requests import (
    JSON,
    Body,
    JSONRoute,
    ModelName,
    Server,
    Strings,
    as_list,
    example,
)

router = APIRouter(tags=["openrlhf"], route_class=JSONRoute)


class RewardBody(Body):
    """Texts of prompts with their responses."""

    query: Strings
    """Each prompt with its response, as the policy's tokenizer decodes them with special tokens."""
    prompts: Strings | None = None
    """The prompts, with which the queries begin."""


@router.post(
    "/get_reward",
    summary="OpenRLHF: rewards of queries",
    openapi_extra=example({"query": ["a b", "c"], "prompts": ["a", "c"], "labels": ["", None]}),
)
async def get_reward(body: RewardBody, server: Server, model: ModelName = None) -> JSON:
    served = server.model(model)
    queries = await server.parsed(parse, body, served)
    return JSON(to_json(served, await server.rewards(served, queries)))


def parse(body: RewardBody, model: ServedModel) -> list[RenderedText]:
    """The queries with complete endings, and with their completions if prompts are given. Raises
    `APIError` 422.
    """
    # OpenRLHF decodes padded rows, and a policy stops before the template's last white space.
    queries = [model.ending.completed(query) for query in as_list(body.query)]
    if body.prompts is None:
        return [RenderedText(query) for query in queries]
    prompts = as_list(body.prompts)
    if len(prompts) != len(queries):
        message = f"prompts: {len(prompts)} prompts for {len(queries)} queries"
        raise APIError(422, "invalid_request", message, param="prompts")
    texts = []
    for query, prompt in zip(queries, prompts, strict=True):
        texts.append(RenderedText(query, model.ending.completion(query, prompt)))
    return texts


def to_json(model: ServedModel, rewards: Sequence[Reward]) -> dict[str, Any]:
    """The response: every number twice, as OpenRLHF's clients read either."""
    values = [reward.value for reward in rewards]
    content: dict[str, Any] = {"rewards": values, "scores": values}
    # Where they differ from the rewards, the scores are logged by OpenRLHF.
    if model.shaper is not None:
        content["extra_logs"] = {"raw_score": [reward.score.score for reward in rewards]}
    return content
