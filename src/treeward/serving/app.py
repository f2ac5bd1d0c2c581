"""`create_app(service, token="...")`: the ASGI application, with the routes of every dialect.

Every request passes `RequestLimits`. All errors have one form, also for unknown routes and
unreadable bodies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_fastapi_instrumentator import Instrumentator
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.staticfiles import StaticFiles
from typing_extensions import TypedDict

from treeward.errors import shown
from treeward.serving import dialects
from treeward.serving.api_error import ERRORS, APIError
from treeward.serving.requests import JSON, RequestLimits, error_response
from treeward.serving.service import Service
from treeward.version import VERSION

_PLAYGROUND = Path(__file__).parent / "playground"
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""The playground calls the same routes as any client, and may talk to this server alone.

`no-cache`: browsers ask each time whether the page has changed, since an upgrade changes it.
"""


class _Pages(StaticFiles):
    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers.update(_PAGE_HEADERS)
        return response


class ErrorResponse(TypedDict):
    """An error: `message`, `type`, `code`, `param`, `request_id`."""

    error: dict[str, str | int | None]


def create_app(service: Service, *, token: str | None = None) -> FastAPI:
    """The application. `token`: the token of `Authorization: Bearer`; None requires none."""
    app = FastAPI(
        title="treeward",
        version=VERSION,
        description=(
            "Scores of reward models, raw unless a model is served with shaping, "
            "in the dialects that RL frameworks speak."
        ),
        # FastAPI's pages of documentation load scripts from a CDN.
        docs_url=None,
        redoc_url=None,
        # A wrong path is an error in our form, not a redirect without a body.
        redirect_slashes=False,
        responses={status: {"model": ErrorResponse} for status in ERRORS},
        exception_handlers={
            APIError: _api_error,
            RequestValidationError: _invalid,
            HTTPException: _not_routed,
            Exception: _failed,
        },
    )
    app.state.service = service
    app.state.error_bodies = dialects.error_bodies
    app.include_router(_operations(service))
    app.include_router(dialects.router)
    app.mount("/playground", _Pages(directory=_PLAYGROUND))
    app.add_middleware(RequestLimits, service=service, token=token)
    # The default registry belongs to the process, which may hold several servers.
    counters = Instrumentator(should_group_status_codes=False, registry=service.metrics.registry)
    counters.instrument(app, metric_namespace="treeward")
    counters.expose(app, tags=["operations"], response_class=PlainTextResponse)
    return app


def _operations(service: Service) -> APIRouter:
    """Routes for the server's operators, and the page for trying the models."""
    router = APIRouter(tags=["operations"])

    @router.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(_PLAYGROUND / "page.html", headers=_PAGE_HEADERS)

    # /ping is SageMaker's name for it, as in vLLM; /ready is for probes of Kubernetes.
    @router.post("/ping", include_in_schema=False)
    @router.get("/ping", include_in_schema=False)
    @router.get("/ready", include_in_schema=False)
    @router.get("/health", summary="Whether the process runs and its models score")
    async def health() -> JSON:
        is_alive = await service.batcher.check_alive()
        names = list(service.models)
        if not is_alive:
            return JSON({"status": "failed", "models": names}, 503)
        return JSON({"status": "ready", "models": names})

    @router.get("/v1/models", summary="The models that are served")
    async def models() -> JSON:
        listed = [model.described(int(service.started)) for model in service.models.values()]
        return JSON({"object": "list", "data": listed})

    return router


async def _api_error(request: Request, error: Exception) -> Response:
    """An error that a route or the service raised."""
    return error_response(cast("APIError", error), request.scope, request.app.state.service)


async def _failed(request: Request, error: Exception) -> Response:
    """An error that nobody foresaw."""
    # Not the error itself, which may name paths of this machine.
    message = "the server failed; its log has the details"
    return await _api_error(request, APIError(500, "internal_error", message))


async def _not_routed(request: Request, error: Exception) -> Response:
    """An unknown path or method."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "error")
    message = f"{request.method} {request.url.path[:100]}: {error.detail}"
    response = await _api_error(request, APIError(error.status_code, code, message))
    response.headers.update(error.headers or {})
    return response


async def _invalid(request: Request, error: Exception) -> Response:
    """A body that is no JSON, or not as the route describes it."""
    assert isinstance(error, RequestValidationError)
    first: dict[str, Any] = error.errors()[0]
    if first["type"] == "json_invalid":
        message = f"the body is no JSON: {first['ctx']['error']}"
        return await _api_error(request, APIError(422, "invalid_json", message))
    field = ""
    # The first part says where the value came, as "body" or "query".
    for part in first["loc"][1:]:
        field += f"[{part}]" if isinstance(part, int) else f".{part}"
    # A key that a client made up may be of any length.
    field = field.lstrip(".")[:100]
    problem = first["msg"]
    if first["type"] == "extra_forbidden":
        problem = "this key is not known; GET /openapi.json has the keys of each body"
    message = f"{field or 'the body'}: {problem}; got {shown(first['input'])}"
    return await _api_error(request, APIError(422, "invalid_request", message, param=field or None))
