"""`create_app`: the ASGI application, every dialect's routes behind one gate.

    app = create_app(Service(engine, config, metrics), token="...")

What is refused has one form: a route that is not there, a method that it does not have, a body that cannot be read.
"""

from __future__ import annotations

from collections.abc import Collection

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from treeward.serving import dialects, operations
from treeward.serving.bodies import describe_app
from treeward.serving.gate import Gate, RequestInfo, refusal_response
from treeward.serving.playground import routes as playground
from treeward.serving.refusals import Refusal
from treeward.serving.service import Service
from treeward.version import VERSION

__all__ = ["RequestInfo", "create_app"]

_CODES = {404: "not_found", 405: "method_not_allowed"}


def create_app(service: Service, *, token: str | None = None, allowed_hosts: Collection[str] | None = None) -> FastAPI:
    """The application. `token`: what `Authorization: Bearer` must carry; None asks for none. `allowed_hosts`: the names
    besides loopback's that a request may call the server by; None allows any.
    """
    app = FastAPI(
        title="treeward",
        version=VERSION,
        description="Scores of reward models, raw unless a model is served with shaping, in the dialects that RL "
        "frameworks speak. Refusals have the form of `Refused`.",
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
    )
    app.state.service = service
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(HTTPException, _not_routed)
    app.include_router(operations.router)
    for router in dialects.routers(service):
        app.include_router(router)
    if service.config.playground:
        app.include_router(playground.router())
    describe_app(app)
    app.add_middleware(Gate, service=service, token=token, allowed_hosts=allowed_hosts)
    if service.config.cors_origins:
        # Around the gate: what is refused there can be read too, and a browser asks first without a token.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id", "x-deadline-seconds"],
            expose_headers=["retry-after", "x-request-id"],
        )
    return app


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    service: Service = request.app.state.service
    return refusal_response(error, request.scope["treeward"], service.metrics)


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    shown = request.url.path if len(request.url.path) <= 100 else f"{request.url.path[:100]}..."
    message = {
        404: f"there is nothing at {shown}",
        405: f"{shown} is not for {request.method}",
    }.get(error.status_code, str(error.detail))
    refusal = Refusal(error.status_code, _CODES.get(error.status_code, "http_error"), message)
    response = await _refused(request, refusal)
    response.headers.update(error.headers or {})
    allowed = {name.strip() for name in response.headers.get("allow", "").split(",")}
    if "GET" in allowed:  # of HEAD the gate makes a GET
        response.headers["allow"] = ", ".join(sorted(allowed | {"HEAD"}))
    return response
