"""Routes for whoever runs the server: is it alive, is it ready, what has it counted, which models does it serve."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from treeward.serving.bodies import json_response
from treeward.serving.service import Service

__all__ = ["router"]

router = APIRouter(tags=["operations"])


@router.get("/health", summary="Whether the process answers and its scoring threads run")
async def health(request: Request) -> Response:
    service = _service(request)
    return json_response(
        {"status": "ok" if service.engine.is_alive else "failed"}, 200 if service.engine.is_alive else 503
    )


@router.get("/ready", summary="Whether requests are accepted: the models are loaded, and keep their contracts")
async def ready(request: Request) -> Response:
    service = _service(request)
    status = "shutting down" if service.is_draining else "ready" if service.engine.is_alive else "failed"
    return json_response({"status": status, "models": list(service.engine.models)}, 200 if status == "ready" else 503)


@router.get("/metrics", summary="Counters in Prometheus' text format")
async def metrics(request: Request) -> Response:
    return Response(_service(request).metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models", summary="The models that are served")
async def models(request: Request) -> Response:
    service = _service(request)
    listed = [
        {
            "id": model.name,
            "object": "model",
            "created": int(service.started),
            "owned_by": "treeward",
            "root": model.members[0] if model.members else model.name,
            "max_model_len": model.max_length,
            "contract": model.contract_sha256,
            "members": list(model.members),
            "heads": [head.name for head in model.contracts[0].heads] if len(model.contracts) == 1 else [],
            "temperature": model.temperature,
            "shaped": model.shaper is not None,
            "shaping_sha256": model.shaping_sha256,
            "reference_key": model.reference_key,
            "developer_role": model.developer_role,
        }
        for model in service.engine.models.values()
    ]
    return json_response({"object": "list", "data": listed})


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
