"""`POST /v1/rewards/trace`: the score of an answer as it develops, as if it had ended after each of its tokens.

{"context": [{"role": "user", "content": "2 + 2?"}], "completion": "It is 4."}
-> {"object": "reward.trace", "model": "rm", "contract": "3f...", "text": "It is 4.", "end": "<|im_end|>\\n",
    "tokens": [{"text": "It", "start": 0, "end": 2}, {"text": " is", "start": 2, "end": 5}, ...],
    "points": [{"tokens": 1, "score": -0.5}, {"tokens": 2, "score": -0.25}, ...],
    "num_tokens": 21, "truncated": false, "usage": {"total_tokens": 21}}

A point is the score of the conversation up to there with the end of turn that the model's chat template writes: the
score that the model would give if the answer stopped. The last point is the score of the answer. Scores are raw,
whatever shaping the model is served with.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from treeward.errors import TreewardError
from treeward.scoring.ensemble import EnsembleScorer
from treeward.scoring.prefixes import AnswerPrefixes, answer_prefixes
from treeward.scoring.scorer import as_conversations
from treeward.serving.bodies import Chat, describe, json_response
from treeward.serving.dialects.known_keys import OwnBody, read_known
from treeward.serving.models import RenderedText, ServedModel, Stem, too_long, weight
from treeward.serving.refusals import Refusal, in_words
from treeward.serving.service import Service

__all__ = ["router"]


class TraceBody(OwnBody):
    """One answer to one context."""

    context: Chat
    """What the completion continues; [] for one that continues nothing."""
    completion: Chat | str
    """The answer: the text of an assistant's message, or messages of which the last is gone through."""
    model: str | None = None
    """Which of the served models; the first where none is named."""
    max_points: int = Field(default=64, ge=1, le=512)
    """Most points; of more tokens as many are chosen, at equal distances, the last always among them."""


class TraceToken(TypedDict):
    """A token of the answer, or the few that make up one character: `text[start:end]`, in code points."""

    text: str
    start: int
    end: int


class TracePoint(TypedDict):
    """The score if the answer ended after so many of `tokens`."""

    tokens: int
    score: float


class TraceUsage(TypedDict):
    """Tokens of the whole conversation."""

    total_tokens: int


class Trace(TypedDict):
    """The answer as the chat template writes it, what the template writes after it (`end`), and the scores.

    `num_tokens`: of the whole conversation. `truncated`: the context was cut, as for the answer's own score.
    """

    object: str
    model: str
    contract: str | None
    text: str
    end: str
    tokens: list[TraceToken]
    points: list[TracePoint]
    num_tokens: int
    truncated: bool
    usage: TraceUsage


def router(service: Service) -> APIRouter:
    """The route of this dialect."""
    routes = APIRouter(tags=["treeward"])
    # What waits for it and is not wanted any more, as its time is over or its client has gone, is never begun.
    threads = service.pool("trace")

    @routes.post(
        "/v1/rewards/trace",
        summary="The score of an answer as it develops over its tokens",
        openapi_extra=describe(TraceBody, answer=Trace),
    )
    async def trace(request: Request) -> Response:
        body = await read_known(request, TraceBody)
        deadline: float = request.scope["treeward"].deadline
        model = _traceable(service, body.model)
        _check_length(service, body)
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
                prefixes = await asyncio.get_running_loop().run_in_executor(threads, _prefixes, model, body)
        except TimeoutError as error:
            raise Refusal(504, "deadline_exceeded", "the answer was not cut into tokens in time") from error
        chosen = _evenly(len(prefixes.pieces), min(body.max_points, service.config.max_conversations))
        # Longest first: the others are its branches, and cost the engine only their ends.
        answers = await service.answer(
            model.name, _asked(prefixes, list(reversed(chosen))), deadline=deadline, shaped=False
        )
        service.refuse_failures(answers)
        scores = [answer.value for answer in reversed(answers)]
        return json_response(
            {
                "object": "reward.trace",
                "model": model.name,
                "contract": model.contract_sha256,
                "text": prefixes.text,
                "end": prefixes.end,
                "tokens": [{"text": p.text, "start": p.start, "end": p.end} for p in prefixes.pieces],
                "points": [{"tokens": n, "score": score} for n, score in zip(chosen, scores, strict=True)],
                "num_tokens": prefixes.num_tokens,
                "truncated": prefixes.truncated,
                "usage": {"total_tokens": prefixes.num_tokens},
            }
        )

    return routes


def _traceable(service: Service, name: str | None) -> ServedModel:
    model = service.engine.model(name)
    if not model.scorers:
        raise Refusal(422, "no_tokens", f"{model.name} reads whole messages, not tokens", param="model")
    if isinstance(model.scorer, EnsembleScorer) and not model.scorer.render_alike:
        words = f"the models of {model.name} cut an answer into different tokens"
        raise Refusal(422, "no_common_tokens", words, param="model")
    return model


def _check_length(service: Service, body: TraceBody) -> None:
    limit = service.config.max_conversation_characters
    context: list[Any] = list(body.context)
    completion: list[Any] = [{"content": body.completion}] if isinstance(body.completion, str) else [*body.completion]
    if weight(context + completion, limit) > limit:
        raise Refusal(422, "cannot_be_scored", too_long(limit).error or "", param="completion")


def _prefixes(model: ServedModel, body: TraceBody) -> AnswerPrefixes:
    context: list[Any] = list(body.context)
    completion: Any = body.completion
    try:
        return answer_prefixes(model.scorer.renderer, as_conversations(context, [completion])[0])
    except TreewardError as error:
        raise Refusal(422, "cannot_be_scored", in_words(error), param="completion") from error


def _evenly(num_pieces: int, most: int) -> list[int]:
    """At most `most` of 1 to `num_pieces`, ascending, with the last and, if there are several, the first."""
    if num_pieces <= most or most == 1:
        return list(range(1, num_pieces + 1)) if num_pieces <= most else [num_pieces]
    return [int(n) for n in np.linspace(1, num_pieces, most).round()]


def _asked(prefixes: AnswerPrefixes, chosen: list[int]) -> list[RenderedText]:
    family = hash((prefixes.prompt_ids, prefixes.answer_ids))
    prompt_length = len(prefixes.prompt_ids)
    asked = []
    for n in chosen:
        stem = Stem(family, prompt_length + prefixes.pieces[n - 1].num_tokens, prompt_length)
        until = prefixes.until(n)
        asked.append(RenderedText(until, stem=None if isinstance(until, str) else stem))
    return asked
