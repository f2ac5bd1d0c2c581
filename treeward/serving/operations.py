"""Routes for whoever runs the server: is it alive, is it ready, which models does it serve."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.requests import Request

from treeward.serving.limits import JSON
from treeward.serving.models import ServedModel
from treeward.serving.service import Service

__all__ = ["Deadline", "TheService", "description", "router"]


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _deadline(request: Request) -> float:
    deadline: float = request.state.deadline
    return deadline


TheService = Annotated[Service, Depends(_service)]
"""For a route's signature: the service of the application."""
Deadline = Annotated[float, Depends(_deadline)]
"""For a route's signature: until when the request has to be answered, of `time.monotonic`."""

router = APIRouter(tags=["operations"])


@router.get("/health", summary="Whether the process answers and its models score")
async def health(service: TheService) -> JSON:
    is_alive = service.batcher.is_alive
    return JSON({"status": "ok" if is_alive else "failed"}, 200 if is_alive else 503)


@router.get("/ready", summary="Whether requests are accepted")
async def ready(service: TheService) -> JSON:
    is_alive = service.batcher.is_alive
    body = {"status": "ready" if is_alive else "failed", "models": list(service.models)}
    return JSON(body, 200 if is_alive else 503)


@router.get("/v1/models", summary="The models that are served")
async def models(service: TheService) -> JSON:
    listed = [description(model, int(service.started)) for model in service.models.values()]
    return JSON({"object": "list", "data": listed})


def description(model: ServedModel, created: int) -> dict[str, Any]:
    """A model as /v1/models lists it. `created`: seconds of the epoch."""
    return {
        "id": model.name,
        "object": "model",
        "created": created,
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
