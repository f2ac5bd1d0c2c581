"""The playground: the page at `/` and its files.

    app.include_router(router())
    OPEN_PATHS                  # what a browser may load before a person has typed the bearer token

The page calls the same routes as any client (`/v1/models`, `/v1/rewards`, `/v1/rewards/trace`). Its content security
policy lets it talk to this server alone, and no URL contains the user's text.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import FileResponse

_FOLDER = Path(__file__).parent
_FILES = {f"/playground/{path.name}": path for path in [_FOLDER / "page.css", *_FOLDER.glob("*.js")]}
_FILES["/"] = _FOLDER / "page.html"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
OPEN_PATHS = frozenset(_FILES)
"""Paths that need no bearer token, as they contain nothing of the models."""


def router() -> APIRouter:
    """The routes."""
    routes = APIRouter()
    for path in _FILES:
        routes.add_api_route(path, _give, methods=["GET"], include_in_schema=False)
    return routes


async def _give(request: Request) -> FileResponse:
    return FileResponse(_FILES[request.url.path], headers=_HEADERS)
