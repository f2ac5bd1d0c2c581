"""Our own dialect, `POST /v1/rewards`: messages in; scores, rewards and what they were made of out.

{"context": [{"role": "user", "content": "2 + 2?"}], "completions": ["4", "5"]}
-> {"object": "list", "model": "rm", "contract": "3f...",
    "data": [{"index": 0, "reward": 1.5, "score": 1.5, "num_tokens": 21, "truncated": false, "error": null}, ...],
    "usage": {"total_tokens": 42}}
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from treeward.serving.bodies import Chat, describe, json_response
from treeward.serving.dialects.known_keys import OwnBody, read_known
from treeward.serving.refusals import Refusal
from treeward.serving.service import MOST_MESSAGES, Answer, Service

__all__ = ["router"]


class RewardsBody(OwnBody):
    """Whole conversations, or several completions of one context."""

    model: str | None = None
    """Which of the served models; the first where none is named."""
    conversations: list[Chat] | None = None
    """Conversations that end with an assistant's message."""
    context: Chat | None = None
    """What the completions continue; [] for completions that continue nothing."""
    completions: list[Chat | str] | None = Field(default=None, min_length=1)
    """Messages, or the text of an assistant's message."""
    reference_answers: list[str | list[Any] | None] | None = None
    """For shaping that compares with references: of each conversation a text, or a list of texts and message lists."""
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


class RewardsUsage(TypedDict):
    """Tokens of the conversations, as plain rows."""

    total_tokens: int


class RewardsAnswer(TypedDict):
    """One row for each conversation, in order. `contract`: the hash of the model's scoring contract, if it has one."""

    object: Literal["list"]
    model: str
    contract: str | None
    data: list[RewardRow]
    usage: RewardsUsage


def router(service: Service) -> APIRouter:
    """The route of this dialect."""
    routes = APIRouter(tags=["treeward"])

    @routes.post(
        "/v1/rewards",
        summary="Scores and rewards of conversations",
        openapi_extra=describe(RewardsBody, answer=RewardsAnswer),
    )
    async def rewards(request: Request) -> Response:
        body = await read_known(request, RewardsBody)
        conversations = _conversations(body)
        if body.reference_answers is not None and len(body.reference_answers) != len(conversations):
            raise Refusal(
                422,
                "invalid_request",
                f"reference_answers: {len(body.reference_answers)} of them for {len(conversations)} conversations",
                param="reference_answers",
            )
        answers = await service.answer(
            body.model,
            conversations,
            deadline=request.scope["treeward"].deadline,
            reference_answers=body.reference_answers,
            shaped=body.shaped,
        )
        if body.on_error == "refuse":
            service.refuse_failures(answers)
        model = service.engine.model(body.model)
        return json_response(
            {
                "object": "list",
                "model": model.name,
                "contract": model.contract_sha256,
                "data": [_row(i, answer) for i, answer in enumerate(answers)],
                "usage": {"total_tokens": sum(answer.score.num_tokens for answer in answers)},
            }
        )

    return routes


def _conversations(body: RewardsBody) -> list[Any]:
    if (body.conversations is None) == (body.completions is None):
        raise Refusal(422, "invalid_request", "give either conversations, or completions with their context")
    if body.conversations is not None:
        if body.context is not None:
            what = "context: conversations are whole; a context is for completions"
            raise Refusal(422, "invalid_request", what, param="context")
        return list(body.conversations)
    if body.context is None:
        what = "context: give what the completions continue, or [] where they continue nothing"
        raise Refusal(422, "invalid_request", what, param="context")
    ends = [
        [{"role": "assistant", "content": one}] if isinstance(one, str) else list(one) for one in body.completions or ()
    ]
    num_messages = (len(body.context) + 1) * len(ends)
    if num_messages > MOST_MESSAGES:  # a small body would become a large thing
        message = f"{len(ends)} completions of {len(body.context)} messages; at most {MOST_MESSAGES} messages in all"
        raise Refusal(413, "too_many_messages", message, param="completions")
    return [[*body.context, *end] for end in ends]


def _row(index: int, answer: Answer) -> dict[str, Any]:
    row: dict[str, Any] = {
        "index": index,
        "reward": answer.value,
        "score": answer.score.score,
        "num_tokens": answer.score.num_tokens,
        "truncated": answer.score.truncated,
        "error": answer.error,
    }
    if len(answer.score.heads) > 1:
        row["heads"] = list(answer.score.heads)
    if answer.score.members:
        row["members"] = list(answer.score.members)
    return row
