"""Our own dialect: `POST /v1/rewards` takes messages and gives scores, rewards and their components.

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

from treeward.data.formats import conversations_of, literally
from treeward.errors import DataError
from treeward.scoring.score import Reward
from treeward.serving.api_error import APIError, in_words
from treeward.serving.dialects.bodies import Chat, JSONRoute, List, ModelName, OwnBody, Server
from treeward.serving.limits import JSON
from treeward.serving.models import ServedModel

_MOST_MESSAGES = 2**20
_PROMPTS = ("context", "prompt", "instruction")
_LISTS = ("completions", "responses")
_ENDS = (*_LISTS, "completion", "response", "chosen", "rejected", "messages")
_End = Chat | str | dict[str, Any]

router = APIRouter(tags=["treeward"], route_class=JSONRoute)


class RewardsBody(OwnBody):
    """Whole conversations, or completions of one prompt, under the keys that rows of files have."""

    model: ModelName = None
    """Which of the served models; the first where none is named."""
    conversations: List[Chat] | None = None
    """Conversations that end with an assistant's message."""
    context: Chat | str | None = None
    """What the completions continue; [] for completions that continue nothing."""
    prompt: Chat | str | None = None
    """Another name of `context`."""
    instruction: Chat | str | None = None
    """Another name of `context`."""
    completions: List[_End] | None = Field(default=None, min_length=1)
    """Messages, the text of an assistant's message, or an object with either as its `completion` or `response`."""
    responses: List[_End] | None = Field(default=None, min_length=1)
    """Another name of `completions`."""
    chosen: Chat | str | None = None
    """A completion, or a whole conversation, with `rejected`."""
    rejected: Chat | str | None = None
    """The other one."""
    completion: Chat | str | None = None
    """One completion."""
    response: Chat | str | None = None
    """Another name of `completion`."""
    messages: Chat | None = None
    """One whole conversation."""
    shaped: bool = True
    """Whether `reward` is what the model's shaping makes of the score, where it is served with shaping."""
    on_error: Literal["refuse", "mask"] = "refuse"
    """What becomes of a conversation that cannot be scored: 422 for the request, or null with its `error`."""


class RewardRow(TypedDict):
    """`heads`, `members`: the value of each head, of each member of an ensemble. `spread`: of heads that estimate one
    score. `steps`: of a process reward model, the probability of each step.
    """

    index: int
    reward: float | None
    score: float | None
    num_tokens: int
    truncated: bool
    error: str | None
    heads: NotRequired[list[float]]
    spread: NotRequired[float]
    members: NotRequired[list[float]]
    steps: NotRequired[list[float]]


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
    """The conversations of a body. Raises `APIError` 422 for too few keys or too many, and 413."""
    prompts = [key for key in _PROMPTS if getattr(body, key) is not None]
    ends = [key for key in _ENDS if getattr(body, key) is not None]
    if (body.conversations is None) != bool(prompts or ends):
        message = "give either conversations, or completions with their context ([] where they continue nothing)"
        raise APIError(422, "invalid_request", message, param="context")
    if body.conversations is not None:
        return list(body.conversations)
    try:
        return conversations_of(_row(body, prompts, ends), "the request")
    except DataError as error:
        param = (error.field or "context").split("[")[0]
        raise APIError(422, "invalid_request", in_words(error), param=param) from error


def _row(body: RewardsBody, prompts: Sequence[str], ends: Sequence[str]) -> dict[str, Any]:
    """The body as a row of a file, with every text as a message, never parsed."""
    row = {key: literally(getattr(body, key), "user") for key in prompts}
    length = sum(map(len, row.values())) + 1
    for key in ends:
        value = getattr(body, key)
        if key not in _LISTS:
            row[key] = literally(value, "assistant")
            continue
        if not prompts:
            raise DataError("completions need their context, which may be []", field="context", got="none")
        if length * len(value) > _MOST_MESSAGES:  # a small body would need much memory
            message = f"{len(value)} completions of {length - 1} messages; at most {_MOST_MESSAGES} in all"
            raise APIError(413, "too_many_messages", message, param=key)
        row[key] = [literally(completion, "assistant") for completion in value]
    return row


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
