"""`POST /classify`, which vLLM and SGLang both have: told apart by what the body holds.

{"input": ...} or {"messages": ...}      vLLM's, answered as in `vllm.py`
{"text": ...} or {"input_ids": ...}      SGLang's, answered as in `sglang.py`
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from treeward.config.server import ServerConfig
from treeward.serving.bodies import checked, describe, parse, read_as
from treeward.serving.dialects import sglang, vllm
from treeward.serving.dialects.sglang import ClassifyAnswers, SglangBody
from treeward.serving.dialects.texts import WARNING_DOCS
from treeward.serving.dialects.vllm import ClassifyAnswer, VllmBody
from treeward.serving.refusals import Refusal
from treeward.serving.service import Service

__all__ = ["router"]

_VLLM, _SGLANG = {"input", "messages"}, {"text", "input_ids"}


def router(service: Service) -> APIRouter:
    """The route that the two dialects share."""
    routes = APIRouter(tags=["vllm", "sglang"])
    ok = {"200": {"description": "Scores in order.", "headers": WARNING_DOCS}}

    @routes.post(
        "/classify",
        summary="vLLM and SGLang: scores as classes",
        openapi_extra=describe(VllmBody | SglangBody, answer=ClassifyAnswer | ClassifyAnswers, responses=ok),
    )
    async def classify(request: Request) -> Response:
        body = await read_as(request, lambda content: _body(content, service.config))
        if isinstance(body, VllmBody):
            return await vllm.classify(service, request, body)
        return await sglang.classify(service, request, body)

    return routes


def _body(content: bytes, limits: ServerConfig) -> VllmBody | SglangBody:
    body = parse(content)
    given = {key for key, value in body.items() if value is not None} if isinstance(body, dict) else set()
    if bool(given & _VLLM) == bool(given & _SGLANG):
        raise Refusal(
            422,
            "invalid_request",
            "the body must have input or messages (vLLM), or text or input_ids (SGLang)"
            + (", not of both" if given & _VLLM else ""),
        )
    return checked(body, VllmBody, limits) if given & _VLLM else checked(body, SglangBody, limits)
