"""slime's dialect, `POST /slime`: what `--rm-type remote_rm --rm-url http://host:8000/slime` calls for each sample.

{"prompt": "prompt as text", "response": "4.<|im_end|>", "label": "4"}      -> 1.5

The answer is a bare number. A prompt that is text is continued by the response; with a prompt of messages the response
is the assistant's next. As a policy stops at its end of turn, white space that the model's template writes after it is
added. `label` is ignored. The model is the first, or that of the URL: /slime?model=careful.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Discriminator, Tag
from starlette.requests import Request
from starlette.responses import Response

from treeward.config.server import ServerConfig
from treeward.serving.bodies import Body, Chat, checked, describe, json_response, parse, read_as
from treeward.serving.dialects.texts import MODEL_PARAMETER, WARNING_DOCS, Ending, answer_texts, ask, model_of_url
from treeward.serving.models import ServedModel
from treeward.serving.service import Service

__all__ = ["router"]


_Prompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[Chat, Tag("messages")],
    Discriminator(lambda prompt: "text" if isinstance(prompt, str) else "messages"),
]


class SampleBody(Body):
    """One sample."""

    prompt: _Prompt
    """Text as the chat template renders it, with its generation prompt; or messages."""
    response: str
    """What the policy wrote, with its end of turn."""
    label: Any = None
    """The reference answer, which is not read."""


def router(service: Service) -> APIRouter:
    """The route of this dialect."""
    routes = APIRouter(tags=["slime"])
    ok = {"200": {"description": "The reward.", "headers": WARNING_DOCS}}

    @routes.post(
        "/slime",
        summary="slime: the reward of a sample",
        openapi_extra=describe(SampleBody, answer=float, responses=ok, parameters=[MODEL_PARAMETER]),
    )
    async def slime(request: Request) -> Response:
        model = model_of_url(service, request)
        asked, reply = await read_as(request, lambda content: _asked(content, model, service.config))
        headers: dict[str, str] = {}
        if isinstance(asked, str):
            answers, headers = await answer_texts(service, request, model.name, [asked], replies=[reply])
        else:
            answers = await ask(service, request, model.name, [asked])
        return json_response(answers[0].value, headers=headers)

    return routes


def _asked(content: bytes, model: ServedModel, limits: ServerConfig) -> tuple[str | list[Any], str]:
    """The sample as a whole text, or as a conversation; and the reply."""
    body = checked(parse(content), SampleBody, limits)
    ending = Ending.of(model)
    reply = ending.without(ending.completed(body.response))
    if isinstance(body.prompt, str):
        return ending.completed(body.prompt + body.response), reply
    return [*body.prompt, {"role": "assistant", "content": reply}], reply
