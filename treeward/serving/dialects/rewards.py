"""Our own dialect: `POST /v1/rewards` takes messages and gives scores, rewards and their components;
`POST /v1/rewards/trace` gives the score of a completion as it develops, as if it ended after each of its tokens.

{"context": [{"role": "user", "content": "2 + 2?"}], "completions": ["4", "5"]}
-> {"object": "list", "model": "rm", "contract": "3f...",
    "data": [{"index": 0, "reward": 1.5, "score": 1.5, "num_tokens": 21, "truncated": false, "error": null}, ...],
    "usage": {"total_tokens": 42}}

{"context": [{"role": "user", "content": "2 + 2?"}], "completion": "It is 4."}
-> {"object": "reward.trace", "text": "It is 4.", "tokens": [{"text": "It", "start": 0, "end": 2}, ...],
    "points": [{"tokens": 1, "score": -0.5}, ...], "end": "<|im_end|>\\n", "num_tokens": 21, "truncated": false, ...}

A point is the raw score of the conversation up to that token with the chat template's end of turn (`end`): the score if
the completion stopped there. Tokens have their places in `text` in code points.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NotRequired

import numpy as np
from fastapi import APIRouter
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from typing_extensions import TypedDict

from treeward.data.formats import as_conversations, conversations_of, literally
from treeward.errors import DataError, TreewardError
from treeward.scoring.prefixes import CompletionPrefixes, completion_prefixes
from treeward.scoring.score import Reward
from treeward.serving.api_error import APIError, in_words
from treeward.serving.dialects.bodies import Chat, JSONRoute, List, ModelName, OwnBody, Server
from treeward.serving.limits import JSON
from treeward.serving.models import ServedModel
from treeward.serving.rendered_text import RenderedText
from treeward.serving.service import check_length

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
    reference_answers: List[str | list[Any] | None] | None = None
    """For shaping with references: a text, or a list of texts and message lists, for each conversation."""
    shaped: bool = True
    """Whether `reward` is what the model's shaping makes of the score, where it is served with shaping."""
    on_error: Literal["refuse", "mask"] = "refuse"
    """What becomes of a conversation that cannot be scored: 422 for the request, or null with its `error`."""


class RewardRow(TypedDict):
    """`heads`, `members`: the value of each head, of each member of an ensemble. `spread`: of heads that estimate one
    score.
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
    prompts = [key for key in _PROMPTS if getattr(body, key) is not None]
    ends = [key for key in _ENDS if getattr(body, key) is not None]
    if (body.conversations is None) != bool(prompts or ends):
        message = "give either conversations, or completions with their context ([] where they continue nothing)"
        raise APIError(422, "invalid_request", message, param="context")
    conversations: list[Any] = list(body.conversations or ())
    try:
        if body.conversations is None:
            conversations = conversations_of(_row(body, prompts, ends), "the request")
    except DataError as error:
        param = (error.field or "context").split("[")[0]
        raise APIError(422, "invalid_request", in_words(error), param=param) from error
    references = body.reference_answers
    if references is not None and len(references) != len(conversations):
        message = f"reference_answers: {len(references)} of them for {len(conversations)} conversations"
        raise APIError(422, "invalid_request", message, param="reference_answers")
    return conversations


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
        rows.append(row)
    total = sum(row["num_tokens"] for row in rows)
    return RewardsResponse(
        object="list", model=model.name, contract=model.contract_sha256, data=rows, usage={"total_tokens": total}
    )


class TraceBody(OwnBody):
    """One completion of one context."""

    context: Chat
    """What the completion continues; [] for one that continues nothing."""
    completion: Chat | str
    """The text of an assistant's message, or messages of which the last is gone through."""
    model: ModelName = None
    """Which of the served models; the first where none is named."""
    max_points: int = Field(default=64, ge=1, le=512)
    """Most points; of more tokens as many are chosen, at equal distances, the last always among them."""


@router.post("/v1/rewards/trace", summary="The score of a completion as it develops", response_model=dict[str, Any])
async def trace(body: TraceBody, server: Server) -> JSON:
    model, config = server.model(body.model), server.service.config
    prefixes = await run_in_threadpool(parse_trace, body, model, config.max_conversation_characters)
    number = len(prefixes.pieces)
    most = min(body.max_points, config.max_conversations, number)
    lengths = [int(n) for n in np.linspace(number, 1, most).round()]
    # Longest first, so that the others share their beginnings with it.
    texts = [RenderedText(prefixes.until(n)) for n in lengths]
    rewards = await server.rewards(model, texts, shaped=False)
    points = [{"tokens": n, "score": reward.value} for n, reward in zip(lengths, rewards, strict=True)]
    return JSON(
        {
            "object": "reward.trace",
            "model": model.name,
            "contract": model.contract_sha256,
            "text": prefixes.text,
            "end": prefixes.end,
            "tokens": [{"text": piece.text, "start": piece.start, "end": piece.end} for piece in prefixes.pieces],
            "points": points[::-1],
            "num_tokens": prefixes.num_tokens,
            "truncated": prefixes.truncated,
            "usage": {"total_tokens": prefixes.num_tokens},
        }
    )


def parse_trace(body: TraceBody, model: ServedModel, max_characters: int) -> CompletionPrefixes:
    """The prefixes of the completion. Raises `APIError` 422 if it cannot be scored or has no tokens."""
    if model.renderer is None:
        raise APIError(422, "no_tokens", f"{model.name} reads whole messages, not tokens", param="model")
    if not model.reads_text:
        message = f"the models of {model.name} cut a completion into different tokens"
        raise APIError(422, "no_common_tokens", message, param="model")
    context: list[Any] = list(body.context)
    completion: Any = body.completion
    try:
        conversation = as_conversations(context, [completion])[0]
        if too_long := check_length(conversation, max_characters):
            raise APIError(422, "cannot_be_scored", too_long, param="completion")
        return completion_prefixes(model.renderer, conversation)
    except TreewardError as error:
        raise APIError(422, "cannot_be_scored", in_words(error), param="completion") from error
