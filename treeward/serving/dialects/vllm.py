"""vLLM's dialect: `POST /classify` and `POST /pooling` of its pooling servers, which verl and others call.

{"model": "rm", "input": "rendered text", "use_activation": false}
-> {"id": "classify-3f...", "object": "list", "created": 1, "model": "rm",
    "data": [{"index": 0, "label": "LABEL_0", "probs": [1.5], "num_classes": 1}], "usage": {"prompt_tokens": 21, ...}}

Scores are raw unless the request says `use_activation: true` (or `activation` or `softmax`, as older versions call it);
then they are sigmoids, which vLLM itself gives of a classifier with one label unless it is told otherwise. Nothing is
cut here: `truncate_prompt_tokens` is the most tokens that are accepted. `/classify` is in `classify.py`, for SGLang has
one too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from treeward.serving.bodies import Body, Chat, describe, json_response, read
from treeward.serving.dialects.texts import (
    WARNING_DOCS,
    Texts,
    answer_texts,
    as_list,
    ask,
    base64_floats,
    model_or_path,
    renderer_of,
    sigmoid,
)
from treeward.serving.refusals import Refusal
from treeward.serving.service import Answer, Service

__all__ = ["ClassifyAnswer", "VllmBody", "classify", "router"]


class VllmBody(Body):
    """Rendered texts or token ids (`input`), or one conversation (`messages`)."""

    model: str | None = None
    """Which of the served models, by its name or by the folder that it was loaded from; the first where none is named.
    """
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
    add_generation_prompt: bool = False
    """Must be false: a score is read at the end of the answer."""
    continue_final_message: bool = False
    """Must be false: a score is read at the end of the answer."""
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


class Usage(TypedDict):
    """Tokens of the conversations, as plain rows."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int


class ClassifyRow(TypedDict):
    """`probs`: the score."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(TypedDict):
    """One row for each text, in order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassifyRow]
    usage: Usage


class PoolingRow(TypedDict):
    """`data`: the score, or base64 of it."""

    index: int
    object: Literal["pooling"]
    data: list[float] | str


class PoolingAnswer(TypedDict):
    """One row for each text, in order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PoolingRow]
    usage: Usage


def router(service: Service) -> APIRouter:
    """The route of this dialect that it has alone."""
    routes = APIRouter(tags=["vllm"])
    ok = {"200": {"description": "Scores in order.", "headers": WARNING_DOCS}}

    @routes.post(
        "/pooling",
        summary="vLLM: scores as pooled data",
        openapi_extra=describe(PoolingBody, answer=PoolingAnswer, responses=ok),
    )
    async def pooling(request: Request) -> Response:
        body = await read(request, PoolingBody)
        values, answers, headers = await _values(service, request, body)

        def data(value: float) -> list[float] | str:
            if body.encoding_format == "float":
                return [value]
            return base64_floats([value], byte_order=">" if body.endianness == "big" else "<")

        rows = [{"index": i, "object": "pooling", "data": data(value)} for i, value in enumerate(values)]
        return json_response(_list(service, request, body, "pool", rows, answers), headers=headers)

    return routes


async def classify(service: Service, request: Request, body: VllmBody) -> Response:
    """Answer `/classify`."""
    values, answers, headers = await _values(service, request, body)
    rows = [{"index": i, "label": "LABEL_0", "probs": [value], "num_classes": 1} for i, value in enumerate(values)]
    return json_response(_list(service, request, body, "classify", rows, answers), headers=headers)


async def _values(
    service: Service, request: Request, body: VllmBody
) -> tuple[list[float], list[Answer], Mapping[str, str]]:
    if (body.input is None) == (body.messages is None):
        raise Refusal(422, "invalid_request", "give either input or messages")
    headers: Mapping[str, str] = {}
    if body.messages is not None:
        _check_rendering(service, body)
        conversation: list[Any] = list(body.messages)
        answers = await ask(service, request, body.model, [conversation])
    else:
        answers, headers = await answer_texts(
            service, request, body.model, as_list(body.input or []), reply_field="messages"
        )
    _check_lengths(answers, body.truncate_prompt_tokens)
    values = [answer.value for answer in answers if answer.value is not None]
    asked = (body.use_activation, body.activation, body.softmax)
    if next((one for one in asked if one is not None), False):
        values = [sigmoid(value) for value in values]
    return values, answers, headers


def _check_rendering(service: Service, body: VllmBody) -> None:
    """What would render a conversation in another way than the model's own is refused, not ignored."""
    renderer = renderer_of(service.engine.model(model_or_path(service, body.model)))
    own = [None] if renderer is None else [None, renderer.chat_template, renderer.tokenizer.chat_template]
    own_arguments = {} if renderer is None else renderer.chat_template_kwargs
    wrong = {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "chat_template": body.chat_template not in own,
        "chat_template_kwargs": bool(body.chat_template_kwargs) and body.chat_template_kwargs != own_arguments,
    }
    for field, is_wrong in wrong.items():
        if is_wrong:
            what = f"{field}: the conversation would not be scored as in training; leave it out, or send text as input"
            raise Refusal(422, "invalid_request", what, param=field)


def _check_lengths(answers: Sequence[Answer], most: int | None) -> None:
    for i, answer in enumerate(answers):
        if most is not None and 0 <= most < answer.score.num_tokens:
            raise Refusal(
                422,
                "cannot_be_scored",
                f"conversation {i}: {answer.score.num_tokens} tokens, more than truncate_prompt_tokens ({most}); "
                "it is not cut, for that would change its score",
                param="truncate_prompt_tokens",
            )


def _list(
    service: Service, request: Request, body: VllmBody, kind: str, rows: list[dict[str, Any]], answers: list[Answer]
) -> dict[str, Any]:
    tokens = sum(answer.score.num_tokens for answer in answers)
    info = request.scope["treeward"]
    return {
        "id": f"{kind}-{info.id}",
        "object": "list",
        "created": int(time.time()),
        "model": service.engine.model(model_or_path(service, body.model)).name,
        "data": rows,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
    }
