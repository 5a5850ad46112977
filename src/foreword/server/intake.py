"""Bodies on their way in: a size limit that holds before a body is read whole, and strict parsing."""

from typing import Any, TypeVar

import anyio.to_thread
from fastapi import Request
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.server.errors import Refusal, Refused, refusal_of_validation, too_large
from foreword.server.service import service_of
from foreword.server.wire import CacheWish, Wire
from foreword.telemetry import Metrics

WireT = TypeVar("WireT", bound=Wire)

SMALL_BODY_BYTES = 16 * 1024
"""Up to here parsing takes microseconds and a thread would cost more than it spares the event loop."""


class BodyLimit:
    """Refuses a larger body with 413: by its announced length at once, otherwise where it crosses the limit."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, metrics: Metrics) -> None:
        self._app = app
        self._limit = max_body_bytes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if not announced.isascii() or not announced.isdigit() or len(announced) > 18 or int(announced) > self._limit:
            refusal = too_large(self._limit)
            self._metrics.count_refusal(refusal.status)
            await refusal.response()(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                raise Refused(too_large(self._limit))
            return message

        await self._app(scope, counted, send)


async def read(request: Request, form: type[WireT], *, default: bytes = b"") -> WireT:
    """The request's body as a `form`; the request has arrived once it is there. Raises Refused.

    `default` stands for a body that was left out.
    """
    body = await request.body() or default
    request.state.arrived_s = service_of(request).engine.now()
    if len(body) <= SMALL_BODY_BYTES:
        return _parse(body, form)
    return await anyio.to_thread.run_sync(_parse, body, form)


def _parse(body: bytes, form: type[WireT]) -> WireT:
    try:
        data = from_json(body)
    except ValueError as error:
        message = f"The body is not valid JSON: {error}"
        raise Refused(Refusal(status=400, message=message, code="invalid_json")) from None
    try:
        return form.model_validate(data)
    except ValidationError as error:
        raise Refused(refusal_of_validation(error)) from None


def cache_wishes(wish: CacheWish) -> dict[str, Any]:
    """What a request asks of the cache, by the names of an `Ask`."""
    return {name: getattr(wish, name) for name in CacheWish.model_fields}
