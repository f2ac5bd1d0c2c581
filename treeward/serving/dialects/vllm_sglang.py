"""vLLM's and SGLang's dialects, which verl and others call: `POST /classify` of both, vLLM's `/pooling`, and SGLang's
`/v1/embeddings`; and vLLM's `/tokenize`.

{"model": "rm", "input": "rendered text"}                                   -> /classify, vLLM
-> {"id": "classify-3f...", "object": "list", "created": 1, "model": "rm",
    "data": [{"index": 0, "label": "LABEL_0", "probs": [1.5], "num_classes": 1}], "usage": {"prompt_tokens": 21, ...}}
{"text": ["rendered text"]}                                                 -> /classify, SGLang
-> [{"embedding": [1.5], "meta_info": {"id": "3f...", "prompt_tokens": 21}}]

Bodies of vLLM have `input` or `messages`, SGLang's `text` or `input_ids`. Scores are raw whatever `use_activation`
says, as in vLLM for an export, whose `problem_type` is regression. Nothing is cut: `truncate_prompt_tokens` is a limit.
SGLang ignores `model`, as does a server of one model here; a server of several responds with 404 to an unknown name.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import numpy as np
from fastapi import APIRouter
from pydantic import Field
from typing_extensions import TypedDict

from treeward.errors import TreewardError
from treeward.scoring.score import Conversation, Reward
from treeward.serving.api_error import APIError, in_words
from treeward.serving.dialects import bodies
from treeward.serving.dialects.bodies import Body, Chat, JSONRoute, ModelName, Server, Texts, as_list
from treeward.serving.limits import JSON
from treeward.serving.models import ServedModel
from treeward.serving.rendered_text import RenderedText
from treeward.serving.service import check_length

router = APIRouter(route_class=JSONRoute)


class VllmBody(Body):
    """Rendered texts or token ids (`input`), or one conversation (`messages`)."""

    model: ModelName = None
    """Which of the served models, by its name or by the folder that it was loaded from."""
    request_id: str | None = None
    """What the `id` of the response ends with; None: the id of the request."""
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    """Most tokens; a longer conversation is refused, as cutting it would change its score. -1: the model's limit."""
    normalize: None = None
    """Must be absent: vLLM has removed it."""
    input: Texts | None = None
    """Texts as the model's chat template renders them, or their token ids. A BOS (or CLS and SEP) of a text is neither
    doubled nor missing, whatever `add_special_tokens` says; token ids are taken as they are."""
    messages: Chat | None = Field(default=None, min_length=1)
    """A conversation that ends with an assistant's message."""
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
    encoding_format: Literal["float"] = "float"
    """Numbers; /v1/embeddings writes base64 too."""


class ClassifyBody(VllmBody):
    """`input` or `messages` as vLLM reads them, or `text` or `input_ids` as SGLang does."""

    text: Texts | None = None
    """Texts as the model's chat template renders them. A BOS (or CLS and SEP) is neither doubled nor missing."""
    input_ids: Texts | None = None
    """Token ids of a text, or a list of them; they are taken as they are."""


class EmbeddingsBody(Body):
    """Rendered texts or token ids."""

    input: Texts
    """Texts as the model's chat template renders them, or their token ids."""
    model: ModelName = None
    """Which of the served models."""
    encoding_format: Literal["float", "base64"] = "float"
    """Numbers, or base64 of their float32 values."""


class Scored(TypedDict):
    """`meta_info`: `id`, `prompt_tokens`."""

    embedding: list[float | None]
    meta_info: dict[str, str | int]


class ListResponse(TypedDict):
    """A row for each conversation, in order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[dict[str, Any]]
    usage: dict[str, int]


@router.post("/pooling", summary="vLLM: scores as pooled data", tags=["vllm"], response_model=ListResponse)
async def pooling(body: PoolingBody, server: Server) -> JSON:
    return await _vllm(body, server, "pooling", lambda value: {"object": "pooling", "data": [value]})


@router.post(
    "/classify",
    summary="vLLM and SGLang: scores as classes",
    tags=["vllm", "sglang"],
    response_model=ListResponse | Scored | list[Scored],
)
async def classify(body: ClassifyBody, server: Server) -> JSON:
    keys = [key for key in ("input", "messages", "text", "input_ids") if getattr(body, key) is not None]
    if len(keys) != 1:
        message = "the body must have one of input and messages (vLLM), text and input_ids (SGLang)"
        raise APIError(422, "invalid_request", message)
    if keys[0] in ("input", "messages"):
        return await _vllm(body, server, "classify", lambda x: {"label": "LABEL_0", "probs": [x], "num_classes": 1})
    texts: Any = getattr(body, keys[0])
    name = server.request_id

    def to_json(rewards: Sequence[Reward]) -> Any:
        """A list for a list of texts, one object for one text."""
        rows = [
            Scored(embedding=[reward.value], meta_info={"id": name, "prompt_tokens": reward.score.num_tokens})
            for reward in rewards
        ]
        return rows[0] if bodies.is_one(texts) else rows

    inputs = [RenderedText(text) for text in as_list(texts)]
    return await server.respond(_any_model(server, body.model), inputs, to_json)


@router.post(
    "/v1/embeddings", summary="SGLang: scores as embeddings of one number", tags=["sglang"], response_model=ListResponse
)
async def embeddings(body: EmbeddingsBody, server: Server) -> JSON:
    model = _any_model(server, body.model)

    def to_json(rewards: Sequence[Reward]) -> ListResponse:
        rows = []
        for reward in rewards:
            embedding: list[float | None] | str = [reward.value]
            if body.encoding_format == "base64":
                embedding = base64.b64encode(np.asarray(embedding, dtype="<f4").tobytes()).decode()
            rows.append({"object": "embedding", "embedding": embedding})
        return _list_response(server, "embd", model, rewards, rows)

    return await server.respond(model, [RenderedText(text) for text in as_list(body.input)], to_json)


def _any_model(server: Server, name: str | None) -> ServedModel:
    """The model of a name; the first for "default", and the only one for any name."""
    is_any = name == "default" or len(server.service.models) == 1
    return server.service.model(None if is_any else name)


async def _vllm(body: VllmBody, server: Server, kind: str, row: Callable[[float], dict[str, Any]]) -> JSON:
    """The response to a request of vLLM; `row`: from a number to its row."""
    model = server.model(body.model)

    def to_json(rewards: Sequence[Reward]) -> ListResponse:
        rows = [row(value) for value in _values(body, model, rewards)]
        return _list_response(server, kind, model, rewards, rows, body.request_id)

    return await server.respond(model, parse(body, model), to_json)


def parse(body: VllmBody, model: ServedModel) -> list[Conversation | RenderedText]:
    """The texts, or the conversation, of a body. Raises `APIError` 422 if its template differs from the model's."""
    if (body.input is None) == (body.messages is None):
        raise APIError(422, "invalid_request", "give either input or messages")
    if body.messages is None:
        return [RenderedText(text) for text in as_list(body.input or [])]
    renderer = model.renderer
    is_right = {
        "chat_template": body.chat_template in (None, renderer.chat_template, renderer.tokenizer.chat_template),
        "chat_template_kwargs": body.chat_template_kwargs in (None, {}, renderer.chat_template_kwargs),
    }
    if wrong := next((field for field, right in is_right.items() if not right), None):
        why = "the conversation would not be scored as in training; leave it out, or send text as input"
        raise APIError(422, "invalid_request", f"{wrong}: {why}", param=wrong)
    conversation: list[Any] = list(body.messages)
    return [conversation]


def _values(body: VllmBody, model: ServedModel, rewards: Sequence[Reward]) -> list[float]:
    """The rewards. Raises `APIError` 422 for a conversation beyond the body's limit, or a limit beyond the model's."""
    most, limit = body.truncate_prompt_tokens, model.renderer.max_length
    if most is not None and limit is not None and most > limit:
        message = f"truncate_prompt_tokens: got {most}, need at most {limit}, which is the model's limit"
        raise APIError(422, "invalid_request", message, param="truncate_prompt_tokens")
    for i, reward in enumerate(rewards):
        if most is not None and 0 <= most < reward.score.num_tokens:
            why = f"{reward.score.num_tokens} tokens, and cutting it to truncate_prompt_tokens would change its score"
            raise APIError(422, "cannot_be_scored", f"conversation {i}: {why}", param="truncate_prompt_tokens")
    return [reward.value for reward in rewards if reward.value is not None]


def _list_response(
    server: Server, kind: str, model: ServedModel, rewards: Sequence[Reward], rows: Any, request_id: str | None = None
) -> ListResponse:
    """The response with these rows. `request_id`: the client's own."""
    tokens = sum(reward.score.num_tokens for reward in rewards)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    name, now = f"{kind}-{request_id or server.request_id}", int(time.time())
    data = [{"index": i} | row for i, row in enumerate(rows)]
    return ListResponse(id=name, object="list", created=now, model=model.name, data=data, usage=usage)


class TokenizeBody(Body):
    """A text or messages."""

    model: ModelName = None
    """Which of the served models."""
    prompt: str | None = None
    """A text, whose BOS (or CLS and SEP) is neither doubled nor missing."""
    messages: Chat | None = Field(default=None, min_length=1)
    """A conversation."""
    add_generation_prompt: bool = True
    """Whether the beginning of a completion follows the messages. A conversation that is scored has none."""


@router.post("/tokenize", summary="vLLM: tokens", tags=["vllm"], response_model=dict[str, Any])
def tokenize(body: TokenizeBody, server: Server) -> JSON:  # no coroutine: it takes long, in a thread
    renderer, messages = server.model(body.model).renderer, cast("list[Any]", body.messages or [])
    if (body.prompt is None) == (body.messages is None):
        raise APIError(422, "invalid_request", "give either prompt or messages")
    text = body.prompt
    if too_long := check_length(messages if text is None else RenderedText(text)):
        raise APIError(422, "cannot_be_scored", too_long)
    try:
        if text is None:
            text = renderer.render(messages, generation_prompt=body.add_generation_prompt)
        tokens = renderer.encode_texts([text])[0]
    except TreewardError as error:
        raise APIError(422, "cannot_be_scored", in_words(error)) from error
    return JSON({"count": len(tokens), "max_model_len": renderer.max_length, "tokens": tokens, "token_strs": None})
