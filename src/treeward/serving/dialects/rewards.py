"""Our own dialect: `POST /v1/rewards` takes messages and gives scores, rewards and their
components.

    {"context": [{"role": "user", "content": "2 + 2?"}], "completions": ["4", "5"]}
    -> {"object": "list", "model": "rm", "contract": "3f...",
        "data": [{"index": 0, "reward": 1.5, "score": 1.5, "num_tokens": 21, "truncated": false,
                  "error": null}, ...],
        "usage": {"total_tokens": 42}}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field
from typing_extensions import TypedDict

from treeward.client.rewards import RewardRow
from treeward.data.conversation import Conversation, literally
from treeward.data.formats import conversations_of
from treeward.errors import DataError
from treeward.scoring.score import Reward
from treeward.serving.api_error import APIError
from treeward.serving.models import ServedModel
from treeward.serving.requests import (
    JSON,
    Chat,
    ChatBody,
    Items,
    JSONRoute,
    ModelName,
    OwnBody,
    Server,
    example,
)

router = APIRouter(tags=["treeward"], route_class=JSONRoute)


class RewardsBody(OwnBody):
    """Whole conversations, or completions of one context."""

    model: ModelName = None
    """Which of the served models; the first where none is named."""
    conversations: Items[Chat | ChatBody] | None = None
    """Conversations that end with an assistant's message: messages, or an object of `messages`,
    `tools` and `chat_template_kwargs`."""
    context: Chat | str | None = None
    """What the completions continue; [] for completions that continue nothing."""
    prompt: Chat | str | None = None
    """The same as `context`."""
    completions: Items[Chat | str] | None = Field(default=None, min_length=1)
    """Messages, or the text of an assistant's message."""
    tools: Items[dict[str, Any]] | None = None
    """What the assistant could call, as JSON schemas; of every conversation that has none of its
    own."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template, of every conversation that has none of its own."""
    shaped: bool = True
    """Whether `reward` is what the model's shaping makes of the score, where it is served with
    shaping."""
    on_error: Literal["refuse", "mask"] = "refuse"
    """What becomes of a conversation that cannot be scored: 422 for the request, or null with its
    `error`."""


class RewardsResponse(TypedDict):
    """One row for each conversation, in order. `contract`: the hash of the scoring contract that
    the scores keep, null for none and for other heads or another rendering than it has.

    `usage`: `total_tokens` of the conversations, as plain rows.
    """

    object: Literal["list"]
    model: str
    contract: str | None
    data: list[RewardRow]
    usage: dict[str, int]


_CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@router.post(
    "/v1/rewards",
    summary="Scores and rewards of conversations",
    response_model=RewardsResponse,
    openapi_extra=example({"conversations": [_CHAT]}),
)
async def rewards(body: RewardsBody, server: Server) -> JSON:
    model = server.model(body.model)
    conversations = await server.parsed(parse, body)
    rewarded = await server.rewards(
        model,
        conversations,
        shaped=body.shaped,
        on_error=body.on_error,
    )
    return JSON(to_json(model, rewarded))


def parse(body: RewardsBody) -> list[Any]:
    """The conversations of a body. Raises `APIError` 422."""
    context = body.context if body.prompt is None else body.prompt
    problem = APIError(
        422,
        "invalid_request",
        "give either conversations, or completions with their context ([] if there is none)",
        param="context",
    )
    if body.conversations is not None:
        if context is not None or body.completions is not None:
            raise problem
        # The body's template variables are of each conversation that has none of its own.
        shared = Conversation(tools=body.tools, chat_template_kwargs=body.chat_template_kwargs)
        conversations = []
        for item in body.conversations:
            messages: Any = item
            conversation = Conversation(messages)
            if isinstance(item, ChatBody):
                conversation = item.conversation()
            variables = {**shared.template_kwargs, **conversation.template_kwargs}
            conversations.append(Conversation(conversation, chat_template_kwargs=variables))
        return conversations
    has_two_contexts = body.context is not None and body.prompt is not None
    if context is None or body.completions is None or has_two_contexts:
        raise problem
    # Text is never parsed: a policy may have written what looks like messages.
    completions = [literally(completion, "assistant") for completion in body.completions]
    row = {
        "context": literally(context, "user"),
        "completions": completions,
        "tools": body.tools,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    try:
        # As a row of a file is read.
        return conversations_of(row, "the request")
    except DataError as error:
        # The field of the body, of a path such as completions[1].
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
        # Keys that only some models have are absent elsewhere, not null.
        if len(score.heads) > 1:
            row["heads"] = list(score.heads)
        if score.spread is not None:
            row["spread"] = score.spread
        if score.members:
            row["members"] = list(score.members)
        if score.steps:
            row["steps"] = list(score.steps)
        rows.append(row)
    # As OpenAI's clients read usage.
    total = sum(row["num_tokens"] for row in rows)
    return RewardsResponse(
        object="list",
        model=model.name,
        contract=model.contract_sha256,
        data=rows,
        usage={"total_tokens": total},
    )
