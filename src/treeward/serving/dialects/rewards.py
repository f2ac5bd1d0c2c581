"""Our own dialect: `POST /v1/rewards` takes messages and gives scores, rewards and their components.

{"context": [{"role": "user", "content": "2 + 2?"}], "completions": ["4", "5"]}
-> {"object": "list", "model": "rm", "contract": "3f...",
    "data": [{"index": 0, "reward": 1.5, "score": 1.5, "num_tokens": 21, "truncated": false, "error": null}, ...],
    "usage": {"total_tokens": 42}}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field
from typing_extensions import TypedDict

from treeward.client.rewards import RewardRow
from treeward.data.formats import conversations_of, literally
from treeward.errors import DataError
from treeward.scoring.score import Reward
from treeward.serving.api_error import APIError
from treeward.serving.models import ServedModel
from treeward.serving.requests import JSON, Chat, JSONRoute, ModelName, OwnBody, Server

router = APIRouter(tags=["treeward"], route_class=JSONRoute)


class RewardsBody(OwnBody):
    """Whole conversations, or completions of one context."""

    model: ModelName = None
    """Which of the served models; the first where none is named."""
    conversations: list[Chat] | None = None
    """Conversations that end with an assistant's message."""
    context: Chat | str | None = None
    """What the completions continue; [] for completions that continue nothing."""
    completions: list[Chat | str] | None = Field(default=None, min_length=1)
    """Messages, or the text of an assistant's message."""
    shaped: bool = True
    """Whether `reward` is what the model's shaping makes of the score, where it is served with shaping."""
    on_error: Literal["refuse", "mask"] = "refuse"
    """What becomes of a conversation that cannot be scored: 422 for the request, or null with its `error`."""


class RewardsResponse(TypedDict):
    """One row for each conversation, in order. `contract`: the hash of the model's scoring contract, if it has one.

    `usage`: `total_tokens` of the conversations, as plain rows.
    """

    object: Literal["list"]
    model: str
    contract: str | None
    data: list[RewardRow]
    usage: dict[str, int]


@router.post("/v1/rewards", summary="Scores and rewards of conversations", response_model=RewardsResponse)
async def rewards(body: RewardsBody, server: Server) -> JSON:
    model = server.model(body.model)
    return JSON(to_json(model, await server.rewards(model, parse(body), shaped=body.shaped, on_error=body.on_error)))


def parse(body: RewardsBody) -> list[Any]:
    """The conversations of a body. Raises `APIError` 422."""
    if body.conversations is not None and body.context is None and body.completions is None:
        return list(body.conversations)
    if body.conversations is not None or body.context is None or body.completions is None:
        message = "give either conversations, or completions with their context ([] where they continue nothing)"
        raise APIError(422, "invalid_request", message, param="context")
    # Text is never parsed: a policy may have written what looks like messages.
    completions = [literally(completion, "assistant") for completion in body.completions]
    try:
        return conversations_of({"context": literally(body.context, "user"), "completions": completions}, "the request")
    except DataError as error:
        param = (error.field or "context").split("[")[0]
        raise APIError(422, "invalid_request", error.in_one_line, param=param) from error


def to_json(model: ServedModel, rewarded: Sequence[Reward]) -> RewardsResponse:
    """The response of `/v1/rewards`."""
    rows = []
    for i, reward in enumerate(rewarded):
        score = reward.score
        row = RewardRow(
            index=i,
            reward=reward.value,
            score=score.score,
            num_tokens=score.num_tokens,
            truncated=score.truncated,
            error=reward.error,
        )
        if len(score.heads) > 1:
            row["heads"] = list(score.heads)
        if score.spread is not None:
            row["spread"] = score.spread
        if score.members:
            row["members"] = list(score.members)
        if score.steps:
            row["steps"] = list(score.steps)
        rows.append(row)
    total = sum(row["num_tokens"] for row in rows)
    return RewardsResponse(
        object="list", model=model.name, contract=model.contract_sha256, data=rows, usage={"total_tokens": total}
    )
