"""The playground: the page at `/` and its files. `OPEN_PATHS`: what a browser may load without the bearer token.

The page calls the same routes as any client. Its content security policy lets it talk to this server alone.
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


def router() -> APIRouter:
    """The routes."""
    routes = APIRouter()

    async def give(request: Request) -> FileResponse:
        return FileResponse(_FILES[request.url.path], headers=_HEADERS)

    for path in _FILES:
        routes.add_api_route(path, give, methods=["GET"], include_in_schema=False)
    return routes
