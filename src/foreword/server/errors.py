"""Errors on their way out: every one becomes `{"error": {"message", "type", "param", "code"}}` with its status.

RequestError     400 (or the status that the route knows better)
└── NotFound     404
CapacityError    429, with Retry-After
├── TenantLimit  429, with a code of its own
└── Unavailable  503, with Retry-After
StepFailed       500
ValidationError  422 for an unknown field, else 400
                 (both, and RequestError: 422 for a wrong value in `cache` and `tools`)
anything else    500, with nothing of its inside
"""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from foreword.base.errors import (
    CapacityError,
    ForewordError,
    NotFound,
    RequestError,
    StepFailed,
    TenantLimit,
    Unavailable,
)
from foreword.server.wire import ErrorDetail, ErrorReply

_log = logging.getLogger(__name__)

_OWN_WORDS = ("cache", "tools")
"""Fields with a grammar of their own: a wrong value there is a 422."""

MAX_SHOWN = 80
"""Characters of a wrong value that its error message repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One error as the caller will see it."""

    status: int
    message: str
    code: str
    field: str | None = None
    retry_after_s: float | None = None
    headers: Mapping[str, str] | None = None

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = "rate_limit_error" if self.status == HTTPStatus.TOO_MANY_REQUESTS else "invalid_request_error"
        detail = ErrorDetail(
            message=self.message,
            type="server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else kind,
            param=self.field,
            code=self.code,
        )
        return ErrorReply(error=detail).model_dump()

    def response(self) -> JSONResponse:
        """The HTTP response."""
        headers = dict(self.headers or {})
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        return JSONResponse(self.body(), self.status, headers)


class Refused(Exception):
    """Carries a refusal from deep inside a route to its edge."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def refusal_of(error: ForewordError) -> Refusal:
    """How one of our errors looks from outside."""
    if isinstance(error, NotFound):
        return Refusal(status=404, message=error.message, code="not_found", field=error.field)
    if isinstance(error, RequestError):
        return Refusal(status=_status_of(error.field), message=error.message, code="invalid_value", field=error.field)
    if isinstance(error, CapacityError):
        status, code = (503, "unavailable") if isinstance(error, Unavailable) else (429, "queue_full")
        code = "tenant_limit" if isinstance(error, TenantLimit) else code
        return Refusal(status=status, message=str(error), code=code, retry_after_s=error.retry_after_s)
    if isinstance(error, StepFailed):
        return Refusal(status=500, message=str(error), code="step_failed")
    _log.error("a request met a fault of ours", exc_info=error)
    return INTERNAL


def refusal_of_validation(error: ValidationError) -> Refusal:
    """The first of pydantic's complaints, with the field's path, its value and what was expected."""
    first = error.errors(include_url=False)[0]
    context: dict[str, Any] = first.get("ctx", {})
    path = [str(part) for part in first["loc"] if not str(part).startswith("(")]
    kind = first["type"]
    if kind == "unknown_field":
        field = ".".join([*path, context["name"]])
        return Refusal(status=422, message=f"{field}: {first['msg']}", code=kind, field=field)
    if kind == "field_pair":
        field = ".".join([*path, context["name"]])
        return Refusal(status=400, message=f"{field}: {first['msg']}", code="invalid_value", field=field)
    field = ".".join(path) or None
    if kind == "none_given":
        return Refusal(
            status=400, message=": ".join([*filter(None, [".".join(path)]), first["msg"]]), code="missing_field"
        )
    if kind == "missing":
        return Refusal(status=400, message=f"{field} is missing", code="missing_field", field=field)
    code = kind if kind == "unsupported_value" else "invalid_value"
    if kind in ("too_short", "too_long"):
        return Refusal(status=400, message=f"{field} {_wrong_length(context)}", code=code, field=field)
    message = f"{field or 'The body'} is {_shown(first['input'])}: {_lower(first['msg'])}"
    return Refusal(status=_status_of(field), message=message, code=code, field=field)


def _status_of(field: str | None) -> int:
    return 422 if field is not None and field.partition(".")[0] in _OWN_WORDS else 400


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The same error under the name that the field has on this route."""
    if error.field is None or error.field not in names:
        return error
    return type(error)(error.message, field=names[error.field])


async def answer_refused(request: Request, error: Exception) -> JSONResponse:
    """Answer a refusal that a route raised."""
    if not isinstance(error, Refused):
        raise TypeError(f"not a refusal: {error!r}")
    return counted(request, error.refusal)


async def answer_foreword(request: Request, error: Exception) -> JSONResponse:
    """Answer one of our own errors."""
    if not isinstance(error, ForewordError):
        raise TypeError(f"not one of ours: {error!r}")
    return counted(request, refusal_of(error))


async def answer_query(request: Request, error: Exception) -> JSONResponse:
    """Answer a wrong parameter of a URL."""
    if not isinstance(error, RequestValidationError):
        raise TypeError(f"not a validation error: {error!r}")
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"][1:])
    message = f"{field} is {_shown(first['input'])}: {_lower(first['msg'])}"
    return counted(request, Refusal(status=422, message=message, code="invalid_value", field=field))


async def answer_unexpected(request: Request, error: Exception) -> JSONResponse:
    """Answer a fault of ours; what it was stays in the log."""
    del error
    return counted(request, INTERNAL)


INTERNAL = Refusal(status=500, message="The server failed on this request; its log says why.", code="internal_error")


def too_large(limit: int) -> Refusal:
    """A body above the limit."""
    return Refusal(
        status=413, message=f"The body is larger than {limit} bytes (setting max_body_bytes).", code="body_too_large"
    )


def no_such_model(name: str, models: tuple[str, ...]) -> Refusal:
    """A model that is not served here."""
    message = f"The model {_shown(name)} does not exist here; there is: {', '.join(models)}."
    return Refusal(status=404, message=message, code="model_not_found", field="model")


def with_status(refusal: Refusal, status: int) -> Refusal:
    """The same refusal under another status."""
    return replace(refusal, status=status)


def counted(request: Request, refusal: Refusal) -> JSONResponse:
    """The response, once it is in the metrics."""
    request.app.state.service.metrics.count_refusal(refusal.status)
    return refusal.response()


def _shown(value: object) -> str:
    """A value short enough for a message; Python refuses to print integers of thousands of digits."""
    if isinstance(value, str):
        return repr(value if len(value) <= MAX_SHOWN else value[:MAX_SHOWN] + "...")
    if isinstance(value, int) and value.bit_length() > 128:
        return "a very large integer"
    if isinstance(value, (bool, int, float)) or value is None:
        return json.dumps(value)
    return {"dict": "an object", "list": "a list"}.get(type(value).__name__, f"a {type(value).__name__}")


def _wrong_length(context: Mapping[str, Any]) -> str:
    if "max_length" in context:
        return f"has too many items: at most {context['max_length']} may be given"
    least = context["min_length"]
    return f"is empty: give at least {least} item" if least == 1 else f"has too few items: give at least {least}"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
