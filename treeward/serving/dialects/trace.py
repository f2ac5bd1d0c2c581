"""`POST /v1/rewards/trace`: the score of a completion as it develops, as if it had ended after each of its tokens.

{"context": [{"role": "user", "content": "2 + 2?"}], "completion": "It is 4."}
-> {"object": "reward.trace", "model": "rm", "contract": "3f...", "text": "It is 4.", "end": "<|im_end|>\\n",
    "tokens": [{"text": "It", "start": 0, "end": 2}, {"text": " is", "start": 2, "end": 5}, ...],
    "points": [{"tokens": 1, "score": -0.5}, {"tokens": 2, "score": -0.25}, ...],
    "num_tokens": 21, "truncated": false, "usage": {"total_tokens": 21}}

A point is the score of the conversation up to there with the end of turn that the model's chat template writes (`end`):
the score that the model would give if the completion stopped. The last point is the score of the completion. Scores are
raw, whatever shaping the model is served with. A token has its place in `text` in code points; tokens that make up one
character are one. `truncated`: the context was cut, as for the completion's own score.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from fastapi import APIRouter
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from treeward.errors import TreewardError
from treeward.scoring.prefixes import CompletionPrefixes, completion_prefixes
from treeward.scoring.scorer import as_conversations
from treeward.serving.api_error import APIError, in_words
from treeward.serving.dialects.bodies import Chat, JSONRoute, ModelName, OwnBody, Server
from treeward.serving.limits import JSON
from treeward.serving.models import ServedModel, check_length
from treeward.serving.rendered_text import RenderedText

router = APIRouter(tags=["treeward"], route_class=JSONRoute)


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
    found = await run_in_threadpool(parse, body, model, config.max_conversation_characters)
    number = len(found.pieces)
    most = min(body.max_points, config.max_conversations, number)
    chosen = [int(n) for n in np.linspace(number, 1, most).round()]
    # Longest first, so that the others have their beginnings in common with it.
    texts = [RenderedText(found.until(n), prompt_length=len(found.prompt_ids)) for n in chosen]
    rewards = await server.rewards(model, texts, shaped=False)
    points = [{"tokens": n, "score": reward.value} for n, reward in zip(chosen, rewards, strict=True)]
    return JSON(
        {
            "object": "reward.trace",
            "model": model.name,
            "contract": model.contract_sha256,
            "text": found.text,
            "end": found.end,
            "tokens": [{"text": piece.text, "start": piece.start, "end": piece.end} for piece in found.pieces],
            "points": points[::-1],
            "num_tokens": found.num_tokens,
            "truncated": found.truncated,
            "usage": {"total_tokens": found.num_tokens},
        }
    )


def parse(body: TraceBody, model: ServedModel, max_characters: int) -> CompletionPrefixes:
    """The beginnings of the completion. Raises `APIError` 422 for one that cannot be scored, or has no tokens."""
    if not model.scorers:
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
        return completion_prefixes(model.scorer.renderer, conversation)
    except TreewardError as error:
        raise APIError(422, "cannot_be_scored", in_words(error), param="completion") from error
