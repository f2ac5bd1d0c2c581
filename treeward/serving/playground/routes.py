"""The playground: the page at `/` and the files that it loads, all of them from here.

    app.include_router(router())
    OPEN_PATHS                  # what a browser may load before a person has typed the bearer token

The page asks the same routes as any client (`/v1/models`, `/v1/rewards`, `/v1/rewards/trace`). Its content security
policy lets it talk to this server alone, and what a person types is in no address that the server sees.
"""

from __future__ import annotations

import hashlib
from importlib import resources

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

__all__ = ["CONTENT_SECURITY_POLICY", "OPEN_PATHS", "router"]

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
_SCRIPTS = ("conversation.js", "editor.js", "elements.js", "page.js", "results.js", "server.js", "trace.js")
_FILES = {"/": "page.html"} | {f"/playground/{name}": name for name in ("page.css", *_SCRIPTS)}
OPEN_PATHS = frozenset(_FILES)
"""Paths that need no bearer token: they hold nothing of the models."""


def router() -> APIRouter:
    """The routes; the files are read once."""
    routes = APIRouter()
    for path, name in _FILES.items():
        _add(routes, path, name)
    return routes


def _add(routes: APIRouter, path: str, name: str) -> None:
    content = resources.files(__package__).joinpath(name).read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
    headers = {
        "Content-Security-Policy": CONTENT_SECURITY_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",  # asked for anew each time, and sent when it has changed
        "ETag": tag,
    }

    async def give(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=_TYPES[name.rpartition(".")[2]])

    routes.add_api_route(path, give, methods=["GET"], include_in_schema=False)
