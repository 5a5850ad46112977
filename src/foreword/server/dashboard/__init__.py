"""The dashboard: `GET /dashboard`, one page and the few files that it needs.

The files are the same for everybody and hold no number, so they are open; what the page shows it asks of the routes
that everybody asks, with the admin key that its reader gives it. It may load nothing from anywhere else.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from fastapi import Request
from starlette.responses import Response

from foreword.server.errors import Refusal, Refused

PATH = "/dashboard"
"""Where the page is; its files are below."""

_FILES: Mapping[str, str] = {
    "style.css": "text/css",
    "main.js": "text/javascript",
    "server.js": "text/javascript",
    "charts.js": "text/javascript",
    "tables.js": "text/javascript",
    "tree.js": "text/javascript",
    "show.js": "text/javascript",
    "uPlot.iife.min.js": "text/javascript",
    "uPlot.min.css": "text/css",
}
"""What the page loads, and of which type it is."""

_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def get_page(request: Request) -> Response:
    """The page."""
    del request
    return Response(_read("index.html"), media_type="text/html", headers=dict(_HEADERS))


async def get_file(request: Request, name: str) -> Response:
    """One of its files."""
    if name not in _FILES:
        message = f"{request.url.path[:200]}: the dashboard has no such file; the page is at {PATH}."
        raise Refused(Refusal(status=404, message=message, code="not_found"))
    return Response(_read(name), media_type=_FILES[name], headers=dict(_HEADERS))


@cache
def _read(name: str) -> bytes:
    folder = files(__name__)
    return (folder / "vendor" / name if name.startswith("uPlot") else folder / name).read_bytes()
