"""`POST /classify`, which vLLM and SGLang both have: told apart by what the body holds.

{"input": ...} or {"messages": ...}      vLLM's, as in `vllm.py`
{"text": ...} or {"input_ids": ...}      SGLang's, as in `sglang.py`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Body as BodyParameter
from pydantic import Discriminator, Tag

from treeward.serving.dialects import sglang, vllm
from treeward.serving.dialects.bodies import JSONRoute, warning_headers
from treeward.serving.dialects.sglang import ClassifiedTexts, SglangBody
from treeward.serving.dialects.vllm import ClassifyResponse, VllmBody
from treeward.serving.limits import JSON
from treeward.serving.operations import Deadline, TheService

__all__ = ["router"]

router = APIRouter(tags=["vllm", "sglang"], route_class=JSONRoute)


def _dialect(body: Any) -> str | None:
    given = {key for key, value in body.items() if value is not None} if isinstance(body, dict) else set()
    spoken = [
        name for name, keys in (("vllm", {"input", "messages"}), ("sglang", {"text", "input_ids"})) if given & keys
    ]
    return spoken[0] if len(spoken) == 1 else None


_Body = Annotated[
    Annotated[VllmBody, Tag("vllm")] | Annotated[SglangBody, Tag("sglang")],
    Discriminator(
        _dialect,
        custom_error_type="invalid_request",
        custom_error_message="the body must have input or messages (vLLM), or text or input_ids (SGLang), not of both",
    ),
]


@router.post(
    "/classify",
    summary="vLLM and SGLang: scores as classes",
    response_model=ClassifyResponse | ClassifiedTexts,
)
async def classify(body: Annotated[_Body, BodyParameter()], service: TheService, deadline: Deadline) -> JSON:
    if isinstance(body, VllmBody):
        model = service.model(body.model)
        asked: Sequence[Any] = vllm.parse(body, model)
        rewards = await service.rewards(model, asked, deadline=deadline)
        content: Any = vllm.classify_json(body, model, rewards)
    else:
        model = sglang.model_of(service, body.model)
        asked = sglang.parse(body)
        rewards = await service.rewards(model, asked, deadline=deadline)
        content = sglang.classify_json(body, rewards)
    return JSON(content, headers=warning_headers(service, model, asked))
