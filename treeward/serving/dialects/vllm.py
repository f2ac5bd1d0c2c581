"""vLLM's dialect: `POST /classify` and `POST /pooling` of its pooling servers, which verl and others call.

{"model": "rm", "input": "rendered text", "use_activation": false}
-> {"id": "classify-3f...", "object": "list", "created": 1, "model": "rm",
    "data": [{"index": 0, "label": "LABEL_0", "probs": [1.5], "num_classes": 1}], "usage": {"prompt_tokens": 21, ...}}

Scores are raw unless the request says `use_activation: true` (or `activation` or `softmax`, as older versions call it):
then they are sigmoids, which are vLLM's own default for a classifier with one label. Nothing is cut here:
`truncate_prompt_tokens` is the most tokens that are accepted. The route `/classify` is in `sglang.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal
from uuid import uuid4

from fastapi import APIRouter
from pydantic import Field

from treeward.scoring.score import Conversation, Reward
from treeward.serving.api_error import APIError
from treeward.serving.dialects.bodies import (
    Body,
    Chat,
    JSONRoute,
    ModelName,
    Texts,
    answer,
    as_list,
    base64_floats,
    sigmoid,
)
from treeward.serving.limits import JSON
from treeward.serving.models import ServedModel
from treeward.serving.operations import Deadline, TheService
from treeward.serving.rendered_text import RenderedText

__all__ = ["VllmBody", "classify_json", "parse", "router"]

router = APIRouter(tags=["vllm"], route_class=JSONRoute)


class VllmBody(Body):
    """Rendered texts or token ids (`input`), or one conversation (`messages`)."""

    model: ModelName = None
    """Which of the served models, by its name or by the folder that it was loaded from."""
    input: Texts | None = None
    """Texts as the model's chat template renders them, or their token ids. A BOS (or CLS and SEP) of a text is neither
    doubled nor missing, whatever `add_special_tokens` says; token ids are taken as they are."""
    messages: Chat | None = Field(default=None, min_length=1)
    """A conversation that ends with an assistant's message."""
    use_activation: bool | None = None
    """True: the sigmoid of the score; otherwise the score itself."""
    activation: bool | None = None
    """An older name of `use_activation`."""
    softmax: bool | None = None
    """A still older name of `use_activation`."""
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    """Most tokens; a longer conversation is refused, as cutting it would change its score. -1: the model's limit."""
    add_generation_prompt: Literal[False] = False
    """Must be false: a score is read at the end of the completion."""
    continue_final_message: Literal[False] = False
    """Must be false: a score is read at the end of the completion."""
    chat_template: str | None = None
    """Must be the model's own; a conversation in another form has another score. Send text for that."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Must be those that the model is served with."""


class PoolingBody(VllmBody):
    """As of `/classify`."""

    task: Literal["classify"] | None = None
    """A reward model pools whole conversations."""
    encoding_format: Literal["float", "base64"] = "float"
    """Numbers, or base64 of their float32 values."""
    embed_dtype: Literal["float32"] = "float32"
    """Of base64."""
    endianness: Literal["native", "little", "big"] = "native"
    """Of base64; native is little."""


@router.post("/pooling", summary="vLLM: scores as pooled data", response_model=None)
async def pooling(body: PoolingBody, service: TheService, deadline: Deadline) -> JSON:
    model = service.model(body.model)
    return await answer(
        service, model, parse(body, model), deadline, lambda rewards: pooling_json(body, model, rewards)
    )


def parse(body: VllmBody, model: ServedModel) -> list[Conversation | RenderedText]:
    """The texts, or the one conversation, of a body. Raises `APIError` 422 where it would be rendered differently."""
    if (body.input is None) == (body.messages is None):
        raise APIError(422, "invalid_request", "give either input or messages")
    if body.messages is None:
        return [RenderedText(text) for text in as_list(body.input or [])]
    renderer = model.renderer
    own = [None] if renderer is None else [None, renderer.chat_template, renderer.tokenizer.chat_template]
    arguments = {} if renderer is None else renderer.chat_template_kwargs
    wrong = {
        "chat_template": body.chat_template not in own,
        "chat_template_kwargs": bool(body.chat_template_kwargs) and body.chat_template_kwargs != arguments,
    }
    for field, is_wrong in wrong.items():
        if is_wrong:
            why = "the conversation would not be scored as in training; leave it out, or send text as input"
            raise APIError(422, "invalid_request", f"{field}: {why}", param=field)
    conversation: list[Any] = list(body.messages)
    return [conversation]


def classify_json(body: VllmBody, model: ServedModel, rewards: Sequence[Reward]) -> dict[str, Any]:
    """The response of `/classify`."""
    values = _values(body, rewards)
    rows = [{"index": i, "label": "LABEL_0", "probs": [value], "num_classes": 1} for i, value in enumerate(values)]
    return _list("classify", model, rewards, rows)


def pooling_json(body: PoolingBody, model: ServedModel, rewards: Sequence[Reward]) -> dict[str, Any]:
    """The response of `/pooling`."""
    order = ">" if body.endianness == "big" else "<"
    as_text = body.encoding_format == "base64"
    rows = [
        {"index": i, "object": "pooling", "data": base64_floats([value], order) if as_text else [value]}
        for i, value in enumerate(_values(body, rewards))
    ]
    return _list("pool", model, rewards, rows)


def _values(body: VllmBody, rewards: Sequence[Reward]) -> list[float]:
    """Scores, or their sigmoids. Raises `APIError` 422 for a conversation beyond the body's own limit."""
    most = body.truncate_prompt_tokens
    for i, reward in enumerate(rewards):
        if most is not None and 0 <= most < reward.score.num_tokens:
            why = f"{reward.score.num_tokens} tokens, and cutting it to truncate_prompt_tokens would change its score"
            raise APIError(422, "cannot_be_scored", f"conversation {i}: {why}", param="truncate_prompt_tokens")
    values = [reward.value for reward in rewards if reward.value is not None]
    asked = (body.use_activation, body.activation, body.softmax)
    is_sigmoid = next((one for one in asked if one is not None), False)
    return [sigmoid(value) for value in values] if is_sigmoid else values


def _list(kind: str, model: ServedModel, rewards: Sequence[Reward], rows: list[dict[str, Any]]) -> dict[str, Any]:
    tokens = sum(reward.score.num_tokens for reward in rewards)
    return {
        "id": f"{kind}-{uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": model.name,
        "data": rows,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
    }
