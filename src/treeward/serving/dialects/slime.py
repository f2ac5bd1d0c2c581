"""slime's dialect, `POST /slime`: what `--rm-type remote_rm --rm-url http://host:8000/slime` calls
for each sample.

    {"prompt": "prompt as text", "response": "4.<|im_end|>", "label": "4"}      -> 1.5

The HTTP response is a bare number. `response` continues a prompt that is text, or is the
assistant's next message after a prompt of messages. As a policy stops at its end of turn, the
template's white space after it is added. `label` is ignored. The model is the first, or the URL's:
/slime?model=careful.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter

from treeward.data.conversation import AnyConversation
from treeward.serving.models import ServedModel
from treeward.serving.rendered_text import RenderedText
from treeward.serving.requests import (
    JSON,
    Body,
    Chat,
    JSONRoute,
    ModelName,
    Server,
    described,
    example,
)

router = APIRouter(tags=["slime"], route_class=JSONRoute)


class SampleBody(Body):
    """One sample."""

    prompt: Annotated[str | Chat, described("a text or messages")]
    """Text as the chat template renders it, with its generation prompt; or messages."""
    response: str
    """What the policy wrote, with its end of turn."""


@router.post(
    "/slime",
    summary="slime: the reward of a sample",
    openapi_extra=example(
        {"prompt": [{"role": "user", "content": "a"}], "response": "b", "label": None},
    ),
)
async def slime(body: SampleBody, server: Server, model: ModelName = None) -> JSON:
    served = server.model(model)
    [reward] = await server.rewards(served, [parse(body, served)])
    return JSON(reward.value)


def parse(body: SampleBody, model: ServedModel) -> AnyConversation | RenderedText:
    """The sample as a whole text with its completion, or as a conversation."""
    ending = model.ending
    # Without the end of turn, which is no part of the completion's length.
    completion = ending.without(ending.completed(body.response))
    if isinstance(body.prompt, str):
        return RenderedText(ending.completed(body.prompt + body.response), completion)
    messages: list[Any] = [*body.prompt, {"role": "assistant", "content": completion}]
    return messages
