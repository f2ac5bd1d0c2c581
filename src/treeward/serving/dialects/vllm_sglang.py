"""vLLM's and SGLang's dialects, which verl and others call: `POST /classify` of both, vLLM's
`/pooling`, and SGLang's `/v1/embeddings`.

    {"model": "rm", "input": "rendered text"}        to vLLM's /classify
    -> {"id": "classify-3f...", "object": "list", "created": 1, "model": "rm",
        "data": [{"index": 0, "label": "LABEL_0", "probs": [1.5], "num_classes": 1}],
        "usage": {"prompt_tokens": 21, ...}}

    {"text": ["rendered text"]}                      to SGLang's /classify
    -> [{"embedding": [1.5], "meta_info": {"id": "3f...", "prompt_tokens": 21}}]

Bodies of vLLM have `input` or `messages`, SGLang's `text` or `input_ids`. Scores are raw whatever
`use_activation` says, as in vLLM for an export, whose `problem_type` is regression. Nothing is cut,
and other options are ignored too. SGLang ignores `model`, as does a server of one model here; a
server of several responds with 404 to an unknown name.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from pydantic import Field

from treeward.data.conversation import AnyConversation, Conversation
from treeward.scoring.score import Reward
from treeward.serving.api_error import APIError
from treeward.serving.models import ServedModel
from treeward.serving.rendered_text import RenderedText
from treeward.serving.requests import (
    JSON,
    Body,
    Chat,
    Items,
    JSONRoute,
    ModelName,
    Server,
    Texts,
    as_list,
    example,
    is_one,
)

router = APIRouter(route_class=JSONRoute)

_CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


class VllmBody(Body):
    """Rendered texts or token ids (`input`), or one conversation (`messages`)."""

    model: ModelName = None
    """Which of the served models, by its name or by the folder that it was loaded from."""
    input: Texts | None = None
    """Texts as the model's chat template renders them, or their token ids. A BOS (or CLS and SEP)
    of a text is neither doubled nor missing, whatever `add_special_tokens` says; token ids are
    taken as they are."""
    messages: Chat | None = Field(default=None, min_length=1)
    """A conversation that ends with an assistant's message."""
    chat_template: str | None = None
    """Must be the model's own; a conversation in another form has another score. Send text for
    that."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the conversation's chat template, as `{"enable_thinking": false}`, beside those
    that the model is served with. `tools` here reach vLLM's template too."""
    tools: Items[dict[str, Any]] | None = None
    """What the assistant could call, as JSON schemas. vLLM itself ignores this key when it scores:
    send the tools in `chat_template_kwargs` to have one score from both."""


class ClassifyBody(VllmBody):
    """`input` or `messages` as vLLM reads them, or `text` or `input_ids` as SGLang does."""

    text: Texts | None = None
    """Texts as the model's chat template renders them. A BOS (or CLS and SEP) is neither doubled
    nor missing."""
    input_ids: Texts | None = None
    """Token ids of a text, or a list of them; they are taken as they are."""


class EmbeddingsBody(Body):
    """Rendered texts or token ids."""

    input: Texts
    """Texts as the model's chat template renders them, or their token ids."""
    model: ModelName = None
    """Which of the served models."""


@router.post(
    "/pooling",
    summary="vLLM: scores as pooled data",
    tags=["vllm"],
    openapi_extra=example({"messages": _CHAT}),
)
async def pooling(body: VllmBody, server: Server) -> JSON:
    model = server.model(body.model)
    rewards = await server.rewards(model, await server.parsed(parse, body, model))
    # vLLM gives a list for each text, of one number here.
    rows = [{"object": "pooling", "data": [reward.value]} for reward in rewards]
    return _list_response(server, "pooling", model, rewards, rows)


@router.post(
    "/classify",
    summary="vLLM and SGLang: scores as classes",
    tags=["vllm", "sglang"],
    openapi_extra=example({"input": ["a"], "use_activation": False, "truncate_prompt_tokens": 9}),
)
async def classify(body: ClassifyBody, server: Server) -> JSON:
    forms = ("input", "messages", "text", "input_ids")
    keys = [key for key in forms if getattr(body, key) is not None]
    if len(keys) != 1:
        message = "the body needs one of input, messages (vLLM), text and input_ids (SGLang)"
        raise APIError(422, "invalid_request", message)
    # Both servers have this route; the body tells whose client asks.
    if keys[0] in ("input", "messages"):
        return await _classes(body, server)
    texts: Any = getattr(body, keys[0])
    model = _any_model(server, body.model)
    inputs = [RenderedText(text) for text in as_list(texts)]
    rows = []
    for reward in await server.rewards(model, inputs):
        information = {"id": server.request_id, "prompt_tokens": reward.score.num_tokens}
        rows.append({"embedding": [reward.value], "meta_info": information})
    # SGLang answers one text with an object, not with a list of one.
    return JSON(rows[0] if is_one(texts) else rows)


async def _classes(body: ClassifyBody, server: Server) -> JSON:
    """The response of vLLM's /classify."""
    model = server.model(body.model)
    rewards = await server.rewards(model, await server.parsed(parse, body, model))
    rows = []
    for reward in rewards:
        rows.append({"label": "LABEL_0", "probs": [reward.value], "num_classes": 1})
    return _list_response(server, "classify", model, rewards, rows)


@router.post(
    "/v1/embeddings",
    summary="SGLang: scores as embeddings of one number",
    tags=["sglang"],
    openapi_extra=example({"input": [[3, 4], [5]], "encoding_format": "float"}),
)
async def embeddings(body: EmbeddingsBody, server: Server) -> JSON:
    model = _any_model(server, body.model)
    rewards = await server.rewards(model, [RenderedText(text) for text in as_list(body.input)])
    rows = [{"object": "embedding", "embedding": [reward.value]} for reward in rewards]
    return _list_response(server, "embd", model, rewards, rows)


def _any_model(server: Server, name: str | None) -> ServedModel:
    """The model of a name; the first for "default", and the only one for any name."""
    # SGLang ignores the name of the model, so its clients send any.
    if name == "default" or len(server.service.models) == 1:
        return server.service.model(None)
    return server.service.model(name)


def parse(body: VllmBody, model: ServedModel) -> list[AnyConversation | RenderedText]:
    """The texts, or the conversation, of a body. Raises `APIError` 422 if its template differs from
    the model's.
    """
    if (body.input is None) == (body.messages is None):
        raise APIError(422, "invalid_request", "give either input or messages")
    if body.messages is None:
        return [RenderedText(text) for text in as_list(body.input or [])]
    renderer = model.renderer
    # The renderer's own may differ from the tokenizer's, and clients send back either.
    if body.chat_template not in (None, renderer.chat_template, renderer.tokenizer.chat_template):
        why = "the model would not read the conversation as in training: leave it out, or send text"
        raise APIError(422, "invalid_request", f"chat_template: {why}", param="chat_template")
    messages: Any = body.messages
    return [
        Conversation(messages, tools=body.tools, chat_template_kwargs=body.chat_template_kwargs),
    ]


def _list_response(
    server: Server,
    kind: str,
    model: ServedModel,
    rewards: Sequence[Reward],
    rows: Any,
) -> JSON:
    """The response with these rows."""
    tokens = sum(reward.score.num_tokens for reward in rewards)
    # A classifier writes no tokens.
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    data = [{"index": i, **row} for i, row in enumerate(rows)]
    return JSON(
        {
            "id": f"{kind}-{server.request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": model.name,
            "data": data,
            "usage": usage,
        },
    )
