"""What a URL may say: the query parameters of a route, and the way on where there is no such path or method."""

from difflib import get_close_matches
from http import HTTPStatus

from fastapi import Request
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.server.errors import Refusal, Refused, counted
from foreword.server.wire import hint

_ALIKE = 0.75
"""How alike an unknown path and a known one must be for the one to be a slip of the other; 1 is the same."""


class HeadAsGet:
    """Answers `HEAD` as `GET` would be, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_head)


def known_query(request: Request) -> None:
    """A dependency of all routes: a parameter that its route does not know is refused. Raises Refused."""
    route = request.scope["route"]
    known = [field.alias for field in route.dependant.query_params] if isinstance(route, APIRoute) else []
    seen: set[str] = set()
    for name, _ in request.query_params.multi_items():
        if name not in known:
            told = hint(name, known) if known else f"{request.url.path} takes none"
            raise _refused(name, f"unknown query parameter; {told}", "unknown_parameter")
        if name in seen:
            raise _refused(name, "it is given more than once; give it once", "invalid_value")
        seen.add(name)


async def answer_http(request: Request, error: Exception) -> JSONResponse:
    """Answer what the web framework refuses by itself: no such path, no such method."""
    if not isinstance(error, HTTPException):
        raise TypeError(f"not an HTTP error: {error!r}")
    if error.status_code == HTTPStatus.NOT_FOUND:
        return counted(request, _lost(request))
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return counted(request, _wrong_method(request))
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_").replace("-", "_")
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = counted(request, Refusal(status=error.status_code, message=message, code=code))
    response.headers.update(error.headers or {})
    return response


def _lost(request: Request) -> Refusal:
    """The answer where there is no such path, with the nearest one."""
    path, known = request.url.path, [route.path for route in routes_of(request) if "{" not in route.path]
    told = ""
    if f"/v1{path}" in known:
        told = f" did you mean /v1{path}? An OpenAI client wants a base_url that ends in /v1."
    elif close := get_close_matches(path[:200], known, n=1, cutoff=_ALIKE):
        told = f" did you mean {close[0]}?"
    message = f"{request.method} {path[:200]}: there is no such path;{told} GET / lists the routes."
    return Refusal(status=404, message=message, code="not_found")


def _wrong_method(request: Request) -> Refusal:
    """The answer where a path is there and takes other methods."""
    scope = request.scope
    fitting = [route for route in routes_of(request) if route.matches(scope)[0] is not Match.NONE]
    methods = sorted({method for route in fitting for method in route.methods or ()})
    message = f"{request.method} {request.url.path[:200]}: this path takes {' and '.join(methods)} only."
    allowed = sorted({*methods, "HEAD"} if "GET" in methods else methods)
    return Refusal(status=405, message=message, code="method_not_allowed", headers={"Allow": ", ".join(allowed)})


def routes_of(request: Request) -> list[APIRoute]:
    """All that can be called."""
    return [route for route in request.app.routes if isinstance(route, APIRoute)]


def _refused(name: str, text: str, code: str) -> Refused:
    name = name[:100]
    return Refused(Refusal(status=422, message=f"{name}: {text}", code=code, field=name))
