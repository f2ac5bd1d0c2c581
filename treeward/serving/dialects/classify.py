"""`POST /classify`, which vLLM and SGLang both have: told apart by what the body holds.

{"input": ...} or {"messages": ...}      vLLM's, as in `vllm.py`
{"text": ...} or {"input_ids": ...}      SGLang's, as in `sglang.py`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter

from treeward.serving.api_error import APIError
from treeward.serving.dialects import sglang, vllm
from treeward.serving.dialects.bodies import JSONRoute, warning_headers
from treeward.serving.dialects.sglang import ClassifiedTexts, SglangBody
from treeward.serving.dialects.vllm import ClassifyResponse, VllmBody
from treeward.serving.limits import JSON
from treeward.serving.operations import Deadline, TheService

__all__ = ["router"]

router = APIRouter(tags=["vllm", "sglang"], route_class=JSONRoute)


class ClassifyBody(VllmBody, SglangBody):
    """`input` or `messages` as vLLM reads them, or `text` or `input_ids` as SGLang does."""


@router.post(
    "/classify",
    summary="vLLM and SGLang: scores as classes",
    response_model=ClassifyResponse | ClassifiedTexts,
)
async def classify(body: ClassifyBody, service: TheService, deadline: Deadline) -> JSON:
    is_vllm = body.input is not None or body.messages is not None
    is_sglang = body.text is not None or body.input_ids is not None
    if is_vllm == is_sglang:
        message = "the body must have input or messages (vLLM), or text or input_ids (SGLang), not of both"
        raise APIError(422, "invalid_request", message)
    model = service.model(body.model) if is_vllm else sglang.model_of(service, body.model)
    asked: Sequence[Any] = vllm.parse(body, model) if is_vllm else sglang.parse(body)
    rewards = await service.rewards(model, asked, deadline=deadline)
    content: Any = vllm.classify_json(body, model, rewards) if is_vllm else sglang.classify_json(body, rewards)
    return JSON(content, headers=warning_headers(service, model, asked))
