"""Our own dialect, `POST /v1/rewards`: messages in; scores, rewards and what they were made of out.

{"context": [{"role": "user", "content": "2 + 2?"}], "completions": ["4", "5"]}
-> {"object": "list", "model": "rm", "contract": "3f...",
    "data": [{"index": 0, "reward": 1.5, "score": 1.5, "num_tokens": 21, "truncated": false, "error": null}, ...],
    "usage": {"total_tokens": 42}}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NotRequired

from fastapi import APIRouter
from pydantic import Field
from typing_extensions import TypedDict

from treeward.scoring.score import Reward
from treeward.serving.api_error import APIError
from treeward.serving.dialects.bodies import Chat, JSONRoute, ModelName, OwnBody, Server
from treeward.serving.limits import JSON
from treeward.serving.models import ServedModel

_MOST_MESSAGES = 2**20

router = APIRouter(tags=["treeward"], route_class=JSONRoute)


class RewardsBody(OwnBody):
    """Whole conversations, or several completions of one context."""

    model: ModelName = None
    """Which of the served models; the first where none is named."""
    conversations: list[Chat] | None = None
    """Conversations that end with an assistant's message."""
    context: Chat | None = None
    """What the completions continue; [] for completions that continue nothing."""
    completions: list[Chat | str] | None = Field(default=None, min_length=1)
    """Messages, or the text of an assistant's message."""
    reference_answers: list[str | list[Any] | None] | None = None
    """For shaping with references: a text, or a list of texts and message lists, for each conversation."""
    shaped: bool = True
    """Whether `reward` is what the model's shaping makes of the score, where it is served with shaping."""
    on_error: Literal["refuse", "mask"] = "refuse"
    """What becomes of a conversation that cannot be scored: 422 for the request, or null with its `error`."""


class RewardRow(TypedDict):
    """`heads`, `members`: of a model with several heads, and of an ensemble, the value of each."""

    index: int
    reward: float | None
    score: float | None
    num_tokens: int
    truncated: bool
    error: str | None
    heads: NotRequired[list[float]]
    members: NotRequired[list[float]]


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
    options = {"reference_answers": body.reference_answers, "shaped": body.shaped, "on_error": body.on_error}
    return JSON(to_json(model, await server.rewards(model, parse(body), **options)))


def parse(body: RewardsBody) -> list[Any]:
    """The conversations of a body. Raises `APIError` 422 for too few keys or too many, and 413."""
    given = (body.conversations is None, body.context is None, body.completions is None)
    if given not in ((False, True, True), (True, False, False)):
        message = "give either conversations, or completions with their context ([] where they continue nothing)"
        raise APIError(422, "invalid_request", message, param="context")
    conversations: list[Any] = list(body.conversations or ())
    context, completions = body.context or [], body.completions or []
    if (len(context) + 1) * len(completions) > _MOST_MESSAGES:  # a small body would become a large thing
        message = f"{len(completions)} completions of {len(context)} messages; at most {_MOST_MESSAGES} in all"
        raise APIError(413, "too_many_messages", message, param="completions")
    for one in completions:
        conversations.append([*context, *([{"role": "assistant", "content": one}] if isinstance(one, str) else one)])
    references = body.reference_answers
    if references is not None and len(references) != len(conversations):
        message = f"reference_answers: {len(references)} of them for {len(conversations)} conversations"
        raise APIError(422, "invalid_request", message, param="reference_answers")
    return conversations


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
        if score.members:
            row["members"] = list(score.members)
        rows.append(row)
    total = sum(row["num_tokens"] for row in rows)
    return RewardsResponse(
        object="list", model=model.name, contract=model.contract_sha256, data=rows, usage={"total_tokens": total}
    )
